package dev.flare.internal;

import dev.flare.generated.flare.flare_mla_decode_params;
import dev.flare.internal.Struct.F32;
import dev.flare.internal.Struct.I32;
import dev.flare.internal.Struct.I64;
import dev.flare.internal.Struct.Pointer;
import java.lang.foreign.Arena;

/**
 * The fields of {@code flare_mla_decode_params}, which {@code flare_mla_decode} reads; flare.h
 * documents them.
 */
public final class MlaDecodeParams {
  private static final I32 STRUCT_SIZE =
      I32.of(
          flare_mla_decode_params.struct_size$layout(),
          flare_mla_decode_params.struct_size$offset());
  public static final I32 FLAGS =
      I32.of(flare_mla_decode_params.flags$layout(), flare_mla_decode_params.flags$offset());
  public static final I32 DEVICE =
      I32.of(flare_mla_decode_params.device$layout(), flare_mla_decode_params.device$offset());
  public static final I32 KERNEL =
      I32.of(flare_mla_decode_params.kernel$layout(), flare_mla_decode_params.kernel$offset());
  public static final Pointer STREAM =
      Pointer.of(flare_mla_decode_params.stream$layout(), flare_mla_decode_params.stream$offset());
  public static final I32 NUM_THREADS =
      I32.of(
          flare_mla_decode_params.num_threads$layout(),
          flare_mla_decode_params.num_threads$offset());
  public static final I32 DETERMINISTIC =
      I32.of(
          flare_mla_decode_params.deterministic$layout(),
          flare_mla_decode_params.deterministic$offset());
  public static final I32 DTYPE =
      I32.of(flare_mla_decode_params.dtype$layout(), flare_mla_decode_params.dtype$offset());
  public static final I32 OUT_DTYPE =
      I32.of(
          flare_mla_decode_params.out_dtype$layout(), flare_mla_decode_params.out_dtype$offset());
  public static final I32 KV_DTYPE =
      I32.of(flare_mla_decode_params.kv_dtype$layout(), flare_mla_decode_params.kv_dtype$offset());
  public static final I32 INDEX_DTYPE =
      I32.of(
          flare_mla_decode_params.index_dtype$layout(),
          flare_mla_decode_params.index_dtype$offset());
  public static final I32 WEIGHT_LAYOUT =
      I32.of(
          flare_mla_decode_params.weight_layout$layout(),
          flare_mla_decode_params.weight_layout$offset());
  public static final I32 MASK =
      I32.of(flare_mla_decode_params.mask$layout(), flare_mla_decode_params.mask$offset());
  public static final I32 NUM_SPLITS =
      I32.of(
          flare_mla_decode_params.num_splits$layout(), flare_mla_decode_params.num_splits$offset());
  public static final I64 BATCH =
      I64.of(flare_mla_decode_params.batch$layout(), flare_mla_decode_params.batch$offset());
  public static final I64 SEQLEN_Q =
      I64.of(flare_mla_decode_params.seqlen_q$layout(), flare_mla_decode_params.seqlen_q$offset());
  public static final I64 SEQLEN_K =
      I64.of(flare_mla_decode_params.seqlen_k$layout(), flare_mla_decode_params.seqlen_k$offset());
  public static final I64 HEADS =
      I64.of(flare_mla_decode_params.heads$layout(), flare_mla_decode_params.heads$offset());
  public static final I64 D_C =
      I64.of(flare_mla_decode_params.d_c$layout(), flare_mla_decode_params.d_c$offset());
  public static final I64 D_ROPE =
      I64.of(flare_mla_decode_params.d_rope$layout(), flare_mla_decode_params.d_rope$offset());
  public static final I64 D_NOPE =
      I64.of(flare_mla_decode_params.d_nope$layout(), flare_mla_decode_params.d_nope$offset());
  public static final I64 D_V =
      I64.of(flare_mla_decode_params.d_v$layout(), flare_mla_decode_params.d_v$offset());
  public static final I64 TOTAL_Q =
      I64.of(flare_mla_decode_params.total_q$layout(), flare_mla_decode_params.total_q$offset());
  public static final Pointer Q =
      Pointer.of(flare_mla_decode_params.q$layout(), flare_mla_decode_params.q$offset());
  public static final Pointer Q_ROPE =
      Pointer.of(flare_mla_decode_params.q_rope$layout(), flare_mla_decode_params.q_rope$offset());
  public static final Pointer KV =
      Pointer.of(flare_mla_decode_params.kv$layout(), flare_mla_decode_params.kv$offset());
  public static final Pointer W_UK =
      Pointer.of(flare_mla_decode_params.w_uk$layout(), flare_mla_decode_params.w_uk$offset());
  public static final Pointer W_UV =
      Pointer.of(flare_mla_decode_params.w_uv$layout(), flare_mla_decode_params.w_uv$offset());
  public static final Pointer OUT =
      Pointer.of(flare_mla_decode_params.out$layout(), flare_mla_decode_params.out$offset());
  public static final Pointer LSE =
      Pointer.of(flare_mla_decode_params.lse$layout(), flare_mla_decode_params.lse$offset());
  public static final I64 Q_STRIDE_B =
      I64.of(
          flare_mla_decode_params.q_stride_b$layout(), flare_mla_decode_params.q_stride_b$offset());
  public static final I64 Q_STRIDE_S =
      I64.of(
          flare_mla_decode_params.q_stride_s$layout(), flare_mla_decode_params.q_stride_s$offset());
  public static final I64 Q_STRIDE_H =
      I64.of(
          flare_mla_decode_params.q_stride_h$layout(), flare_mla_decode_params.q_stride_h$offset());
  public static final I64 Q_ROPE_STRIDE_B =
      I64.of(
          flare_mla_decode_params.q_rope_stride_b$layout(),
          flare_mla_decode_params.q_rope_stride_b$offset());
  public static final I64 Q_ROPE_STRIDE_S =
      I64.of(
          flare_mla_decode_params.q_rope_stride_s$layout(),
          flare_mla_decode_params.q_rope_stride_s$offset());
  public static final I64 Q_ROPE_STRIDE_H =
      I64.of(
          flare_mla_decode_params.q_rope_stride_h$layout(),
          flare_mla_decode_params.q_rope_stride_h$offset());
  public static final I64 KV_STRIDE_B =
      I64.of(
          flare_mla_decode_params.kv_stride_b$layout(),
          flare_mla_decode_params.kv_stride_b$offset());
  public static final I64 KV_STRIDE_S =
      I64.of(
          flare_mla_decode_params.kv_stride_s$layout(),
          flare_mla_decode_params.kv_stride_s$offset());
  public static final I64 W_UK_STRIDE_H =
      I64.of(
          flare_mla_decode_params.w_uk_stride_h$layout(),
          flare_mla_decode_params.w_uk_stride_h$offset());
  public static final I64 W_UK_STRIDE_R =
      I64.of(
          flare_mla_decode_params.w_uk_stride_r$layout(),
          flare_mla_decode_params.w_uk_stride_r$offset());
  public static final I64 W_UV_STRIDE_H =
      I64.of(
          flare_mla_decode_params.w_uv_stride_h$layout(),
          flare_mla_decode_params.w_uv_stride_h$offset());
  public static final I64 W_UV_STRIDE_R =
      I64.of(
          flare_mla_decode_params.w_uv_stride_r$layout(),
          flare_mla_decode_params.w_uv_stride_r$offset());
  public static final I64 OUT_STRIDE_B =
      I64.of(
          flare_mla_decode_params.out_stride_b$layout(),
          flare_mla_decode_params.out_stride_b$offset());
  public static final I64 OUT_STRIDE_S =
      I64.of(
          flare_mla_decode_params.out_stride_s$layout(),
          flare_mla_decode_params.out_stride_s$offset());
  public static final I64 OUT_STRIDE_H =
      I64.of(
          flare_mla_decode_params.out_stride_h$layout(),
          flare_mla_decode_params.out_stride_h$offset());
  public static final I64 LSE_STRIDE_B =
      I64.of(
          flare_mla_decode_params.lse_stride_b$layout(),
          flare_mla_decode_params.lse_stride_b$offset());
  public static final I64 LSE_STRIDE_H =
      I64.of(
          flare_mla_decode_params.lse_stride_h$layout(),
          flare_mla_decode_params.lse_stride_h$offset());
  public static final F32 SCALE =
      F32.of(flare_mla_decode_params.scale$layout(), flare_mla_decode_params.scale$offset());
  public static final Pointer CU_SEQLENS_Q =
      Pointer.of(
          flare_mla_decode_params.cu_seqlens_q$layout(),
          flare_mla_decode_params.cu_seqlens_q$offset());
  public static final Pointer SEQLENS_K =
      Pointer.of(
          flare_mla_decode_params.seqlens_k$layout(), flare_mla_decode_params.seqlens_k$offset());
  public static final Pointer BLOCK_TABLE =
      Pointer.of(
          flare_mla_decode_params.block_table$layout(),
          flare_mla_decode_params.block_table$offset());
  public static final I64 BLOCK_TABLE_STRIDE_B =
      I64.of(
          flare_mla_decode_params.block_table_stride_b$layout(),
          flare_mla_decode_params.block_table_stride_b$offset());
  public static final I64 PAGE_SIZE =
      I64.of(
          flare_mla_decode_params.page_size$layout(), flare_mla_decode_params.page_size$offset());
  public static final I64 NUM_PAGES =
      I64.of(
          flare_mla_decode_params.num_pages$layout(), flare_mla_decode_params.num_pages$offset());
  public static final Pointer INDICES =
      Pointer.of(
          flare_mla_decode_params.indices$layout(), flare_mla_decode_params.indices$offset());
  public static final I64 INDICES_STRIDE_B =
      I64.of(
          flare_mla_decode_params.indices_stride_b$layout(),
          flare_mla_decode_params.indices_stride_b$offset());
  public static final I64 INDICES_STRIDE_S =
      I64.of(
          flare_mla_decode_params.indices_stride_s$layout(),
          flare_mla_decode_params.indices_stride_s$offset());
  public static final I64 TOPK =
      I64.of(flare_mla_decode_params.topk$layout(), flare_mla_decode_params.topk$offset());
  public static final Pointer TOPK_LENGTH =
      Pointer.of(
          flare_mla_decode_params.topk_length$layout(),
          flare_mla_decode_params.topk_length$offset());
  public static final I64 TOPK_LENGTH_STRIDE_B =
      I64.of(
          flare_mla_decode_params.topk_length_stride_b$layout(),
          flare_mla_decode_params.topk_length_stride_b$offset());
  public static final I64 TOPK_LENGTH_STRIDE_S =
      I64.of(
          flare_mla_decode_params.topk_length_stride_s$layout(),
          flare_mla_decode_params.topk_length_stride_s$offset());
  public static final Pointer SINK =
      Pointer.of(flare_mla_decode_params.sink$layout(), flare_mla_decode_params.sink$offset());
  public static final Pointer WORKSPACE =
      Pointer.of(
          flare_mla_decode_params.workspace$layout(), flare_mla_decode_params.workspace$offset());
  public static final I64 WORKSPACE_BYTES =
      I64.of(
          flare_mla_decode_params.workspace_bytes$layout(),
          flare_mla_decode_params.workspace_bytes$offset());

  private MlaDecodeParams() {}

  /** A zeroed struct of the right size. */
  public static Struct allocate(Arena arena) {
    return Struct.allocate(arena, flare_mla_decode_params.layout(), STRUCT_SIZE);
  }
}
