package dev.flare.internal;

import dev.flare.generated.flare.flare_attention_merge_params;
import dev.flare.internal.Struct.I32;
import dev.flare.internal.Struct.I64;
import dev.flare.internal.Struct.Pointer;
import java.lang.foreign.Arena;

/**
 * The fields of {@code flare_attention_merge_params}, which {@code flare_attention_merge} reads;
 * flare.h documents them.
 */
public final class AttentionMergeParams {
  private static final I32 STRUCT_SIZE =
      I32.of(
          flare_attention_merge_params.struct_size$layout(),
          flare_attention_merge_params.struct_size$offset());
  public static final I32 FLAGS =
      I32.of(
          flare_attention_merge_params.flags$layout(), flare_attention_merge_params.flags$offset());
  public static final I32 DEVICE =
      I32.of(
          flare_attention_merge_params.device$layout(),
          flare_attention_merge_params.device$offset());
  public static final I32 KERNEL =
      I32.of(
          flare_attention_merge_params.kernel$layout(),
          flare_attention_merge_params.kernel$offset());
  public static final Pointer STREAM =
      Pointer.of(
          flare_attention_merge_params.stream$layout(),
          flare_attention_merge_params.stream$offset());
  public static final I32 NUM_THREADS =
      I32.of(
          flare_attention_merge_params.num_threads$layout(),
          flare_attention_merge_params.num_threads$offset());
  public static final I32 DTYPE =
      I32.of(
          flare_attention_merge_params.dtype$layout(), flare_attention_merge_params.dtype$offset());
  public static final I32 OUT_DTYPE =
      I32.of(
          flare_attention_merge_params.out_dtype$layout(),
          flare_attention_merge_params.out_dtype$offset());
  public static final I64 NUM_PARTIALS =
      I64.of(
          flare_attention_merge_params.num_partials$layout(),
          flare_attention_merge_params.num_partials$offset());
  public static final I64 BATCH =
      I64.of(
          flare_attention_merge_params.batch$layout(), flare_attention_merge_params.batch$offset());
  public static final I64 SEQLEN =
      I64.of(
          flare_attention_merge_params.seqlen$layout(),
          flare_attention_merge_params.seqlen$offset());
  public static final I64 HEADS =
      I64.of(
          flare_attention_merge_params.heads$layout(), flare_attention_merge_params.heads$offset());
  public static final I64 HEAD_DIM =
      I64.of(
          flare_attention_merge_params.head_dim$layout(),
          flare_attention_merge_params.head_dim$offset());
  public static final Pointer PARTIAL_OUT =
      Pointer.of(
          flare_attention_merge_params.partial_out$layout(),
          flare_attention_merge_params.partial_out$offset());
  public static final Pointer PARTIAL_LSE =
      Pointer.of(
          flare_attention_merge_params.partial_lse$layout(),
          flare_attention_merge_params.partial_lse$offset());
  public static final Pointer OUT =
      Pointer.of(
          flare_attention_merge_params.out$layout(), flare_attention_merge_params.out$offset());
  public static final Pointer LSE =
      Pointer.of(
          flare_attention_merge_params.lse$layout(), flare_attention_merge_params.lse$offset());
  public static final I64 PARTIAL_OUT_STRIDE_P =
      I64.of(
          flare_attention_merge_params.partial_out_stride_p$layout(),
          flare_attention_merge_params.partial_out_stride_p$offset());
  public static final I64 PARTIAL_OUT_STRIDE_B =
      I64.of(
          flare_attention_merge_params.partial_out_stride_b$layout(),
          flare_attention_merge_params.partial_out_stride_b$offset());
  public static final I64 PARTIAL_OUT_STRIDE_S =
      I64.of(
          flare_attention_merge_params.partial_out_stride_s$layout(),
          flare_attention_merge_params.partial_out_stride_s$offset());
  public static final I64 PARTIAL_OUT_STRIDE_H =
      I64.of(
          flare_attention_merge_params.partial_out_stride_h$layout(),
          flare_attention_merge_params.partial_out_stride_h$offset());
  public static final I64 PARTIAL_LSE_STRIDE_P =
      I64.of(
          flare_attention_merge_params.partial_lse_stride_p$layout(),
          flare_attention_merge_params.partial_lse_stride_p$offset());
  public static final I64 PARTIAL_LSE_STRIDE_B =
      I64.of(
          flare_attention_merge_params.partial_lse_stride_b$layout(),
          flare_attention_merge_params.partial_lse_stride_b$offset());
  public static final I64 PARTIAL_LSE_STRIDE_H =
      I64.of(
          flare_attention_merge_params.partial_lse_stride_h$layout(),
          flare_attention_merge_params.partial_lse_stride_h$offset());
  public static final I64 OUT_STRIDE_B =
      I64.of(
          flare_attention_merge_params.out_stride_b$layout(),
          flare_attention_merge_params.out_stride_b$offset());
  public static final I64 OUT_STRIDE_S =
      I64.of(
          flare_attention_merge_params.out_stride_s$layout(),
          flare_attention_merge_params.out_stride_s$offset());
  public static final I64 OUT_STRIDE_H =
      I64.of(
          flare_attention_merge_params.out_stride_h$layout(),
          flare_attention_merge_params.out_stride_h$offset());
  public static final I64 LSE_STRIDE_B =
      I64.of(
          flare_attention_merge_params.lse_stride_b$layout(),
          flare_attention_merge_params.lse_stride_b$offset());
  public static final I64 LSE_STRIDE_H =
      I64.of(
          flare_attention_merge_params.lse_stride_h$layout(),
          flare_attention_merge_params.lse_stride_h$offset());

  private AttentionMergeParams() {}

  /** A zeroed struct of the right size. */
  public static Struct allocate(Arena arena) {
    return Struct.allocate(arena, flare_attention_merge_params.layout(), STRUCT_SIZE);
  }
}
