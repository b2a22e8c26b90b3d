package dev.flare.internal;

import dev.flare.generated.flare.flare_attention_params;
import dev.flare.internal.Struct.F32;
import dev.flare.internal.Struct.I32;
import dev.flare.internal.Struct.I64;
import dev.flare.internal.Struct.Pointer;
import java.lang.foreign.Arena;

/**
 * The fields of {@code flare_attention_params}, which {@code flare_attention_forward} reads;
 * flare.h documents them.
 */
public final class AttentionParams {
  private static final I32 STRUCT_SIZE =
      I32.of(
          flare_attention_params.struct_size$layout(), flare_attention_params.struct_size$offset());
  public static final I32 FLAGS =
      I32.of(flare_attention_params.flags$layout(), flare_attention_params.flags$offset());
  public static final I32 DEVICE =
      I32.of(flare_attention_params.device$layout(), flare_attention_params.device$offset());
  public static final I32 KERNEL =
      I32.of(flare_attention_params.kernel$layout(), flare_attention_params.kernel$offset());
  public static final Pointer STREAM =
      Pointer.of(flare_attention_params.stream$layout(), flare_attention_params.stream$offset());
  public static final I32 NUM_THREADS =
      I32.of(
          flare_attention_params.num_threads$layout(), flare_attention_params.num_threads$offset());
  public static final I32 DETERMINISTIC =
      I32.of(
          flare_attention_params.deterministic$layout(),
          flare_attention_params.deterministic$offset());
  public static final I32 DTYPE =
      I32.of(flare_attention_params.dtype$layout(), flare_attention_params.dtype$offset());
  public static final I32 OUT_DTYPE =
      I32.of(flare_attention_params.out_dtype$layout(), flare_attention_params.out_dtype$offset());
  public static final I32 INDEX_DTYPE =
      I32.of(
          flare_attention_params.index_dtype$layout(), flare_attention_params.index_dtype$offset());
  public static final I32 NUM_SPLITS =
      I32.of(
          flare_attention_params.num_splits$layout(), flare_attention_params.num_splits$offset());
  public static final I64 BATCH =
      I64.of(flare_attention_params.batch$layout(), flare_attention_params.batch$offset());
  public static final I64 SEQLEN_Q =
      I64.of(flare_attention_params.seqlen_q$layout(), flare_attention_params.seqlen_q$offset());
  public static final I64 SEQLEN_K =
      I64.of(flare_attention_params.seqlen_k$layout(), flare_attention_params.seqlen_k$offset());
  public static final I64 HEADS_Q =
      I64.of(flare_attention_params.heads_q$layout(), flare_attention_params.heads_q$offset());
  public static final I64 HEADS_KV =
      I64.of(flare_attention_params.heads_kv$layout(), flare_attention_params.heads_kv$offset());
  public static final I64 HEAD_DIM_QK =
      I64.of(
          flare_attention_params.head_dim_qk$layout(), flare_attention_params.head_dim_qk$offset());
  public static final I64 HEAD_DIM_V =
      I64.of(
          flare_attention_params.head_dim_v$layout(), flare_attention_params.head_dim_v$offset());
  public static final I64 TOTAL_Q =
      I64.of(flare_attention_params.total_q$layout(), flare_attention_params.total_q$offset());
  public static final I64 TOTAL_K =
      I64.of(flare_attention_params.total_k$layout(), flare_attention_params.total_k$offset());
  public static final Pointer Q =
      Pointer.of(flare_attention_params.q$layout(), flare_attention_params.q$offset());
  public static final Pointer K =
      Pointer.of(flare_attention_params.k$layout(), flare_attention_params.k$offset());
  public static final Pointer V =
      Pointer.of(flare_attention_params.v$layout(), flare_attention_params.v$offset());
  public static final Pointer OUT =
      Pointer.of(flare_attention_params.out$layout(), flare_attention_params.out$offset());
  public static final Pointer LSE =
      Pointer.of(flare_attention_params.lse$layout(), flare_attention_params.lse$offset());
  public static final I64 Q_STRIDE_B =
      I64.of(
          flare_attention_params.q_stride_b$layout(), flare_attention_params.q_stride_b$offset());
  public static final I64 Q_STRIDE_S =
      I64.of(
          flare_attention_params.q_stride_s$layout(), flare_attention_params.q_stride_s$offset());
  public static final I64 Q_STRIDE_H =
      I64.of(
          flare_attention_params.q_stride_h$layout(), flare_attention_params.q_stride_h$offset());
  public static final I64 K_STRIDE_B =
      I64.of(
          flare_attention_params.k_stride_b$layout(), flare_attention_params.k_stride_b$offset());
  public static final I64 K_STRIDE_S =
      I64.of(
          flare_attention_params.k_stride_s$layout(), flare_attention_params.k_stride_s$offset());
  public static final I64 K_STRIDE_H =
      I64.of(
          flare_attention_params.k_stride_h$layout(), flare_attention_params.k_stride_h$offset());
  public static final I64 V_STRIDE_B =
      I64.of(
          flare_attention_params.v_stride_b$layout(), flare_attention_params.v_stride_b$offset());
  public static final I64 V_STRIDE_S =
      I64.of(
          flare_attention_params.v_stride_s$layout(), flare_attention_params.v_stride_s$offset());
  public static final I64 V_STRIDE_H =
      I64.of(
          flare_attention_params.v_stride_h$layout(), flare_attention_params.v_stride_h$offset());
  public static final I64 OUT_STRIDE_B =
      I64.of(
          flare_attention_params.out_stride_b$layout(),
          flare_attention_params.out_stride_b$offset());
  public static final I64 OUT_STRIDE_S =
      I64.of(
          flare_attention_params.out_stride_s$layout(),
          flare_attention_params.out_stride_s$offset());
  public static final I64 OUT_STRIDE_H =
      I64.of(
          flare_attention_params.out_stride_h$layout(),
          flare_attention_params.out_stride_h$offset());
  public static final I64 LSE_STRIDE_B =
      I64.of(
          flare_attention_params.lse_stride_b$layout(),
          flare_attention_params.lse_stride_b$offset());
  public static final I64 LSE_STRIDE_H =
      I64.of(
          flare_attention_params.lse_stride_h$layout(),
          flare_attention_params.lse_stride_h$offset());
  public static final F32 SCALE =
      F32.of(flare_attention_params.scale$layout(), flare_attention_params.scale$offset());
  public static final F32 SOFTCAP =
      F32.of(flare_attention_params.softcap$layout(), flare_attention_params.softcap$offset());
  public static final I32 MASK =
      I32.of(flare_attention_params.mask$layout(), flare_attention_params.mask$offset());
  public static final I64 WINDOW_LEFT =
      I64.of(
          flare_attention_params.window_left$layout(), flare_attention_params.window_left$offset());
  public static final I64 WINDOW_RIGHT =
      I64.of(
          flare_attention_params.window_right$layout(),
          flare_attention_params.window_right$offset());
  public static final Pointer CU_SEQLENS_Q =
      Pointer.of(
          flare_attention_params.cu_seqlens_q$layout(),
          flare_attention_params.cu_seqlens_q$offset());
  public static final Pointer CU_SEQLENS_K =
      Pointer.of(
          flare_attention_params.cu_seqlens_k$layout(),
          flare_attention_params.cu_seqlens_k$offset());
  public static final Pointer SEQUSED_Q =
      Pointer.of(
          flare_attention_params.seqused_q$layout(), flare_attention_params.seqused_q$offset());
  public static final Pointer SEQUSED_K =
      Pointer.of(
          flare_attention_params.seqused_k$layout(), flare_attention_params.seqused_k$offset());
  public static final Pointer BLOCK_TABLE =
      Pointer.of(
          flare_attention_params.block_table$layout(), flare_attention_params.block_table$offset());
  public static final I64 BLOCK_TABLE_STRIDE_B =
      I64.of(
          flare_attention_params.block_table_stride_b$layout(),
          flare_attention_params.block_table_stride_b$offset());
  public static final I64 PAGE_SIZE =
      I64.of(flare_attention_params.page_size$layout(), flare_attention_params.page_size$offset());
  public static final I64 NUM_PAGES =
      I64.of(flare_attention_params.num_pages$layout(), flare_attention_params.num_pages$offset());
  public static final Pointer ALIBI_SLOPES =
      Pointer.of(
          flare_attention_params.alibi_slopes$layout(),
          flare_attention_params.alibi_slopes$offset());
  public static final I64 ALIBI_STRIDE_B =
      I64.of(
          flare_attention_params.alibi_stride_b$layout(),
          flare_attention_params.alibi_stride_b$offset());
  public static final Pointer SINK =
      Pointer.of(flare_attention_params.sink$layout(), flare_attention_params.sink$offset());
  public static final Pointer Q_DESCALE =
      Pointer.of(
          flare_attention_params.q_descale$layout(), flare_attention_params.q_descale$offset());
  public static final Pointer K_DESCALE =
      Pointer.of(
          flare_attention_params.k_descale$layout(), flare_attention_params.k_descale$offset());
  public static final Pointer V_DESCALE =
      Pointer.of(
          flare_attention_params.v_descale$layout(), flare_attention_params.v_descale$offset());
  public static final I64 DESCALE_STRIDE_B =
      I64.of(
          flare_attention_params.descale_stride_b$layout(),
          flare_attention_params.descale_stride_b$offset());
  public static final I64 DESCALE_STRIDE_H =
      I64.of(
          flare_attention_params.descale_stride_h$layout(),
          flare_attention_params.descale_stride_h$offset());
  public static final Pointer WORKSPACE =
      Pointer.of(
          flare_attention_params.workspace$layout(), flare_attention_params.workspace$offset());
  public static final I64 WORKSPACE_BYTES =
      I64.of(
          flare_attention_params.workspace_bytes$layout(),
          flare_attention_params.workspace_bytes$offset());

  private AttentionParams() {}

  /** A zeroed struct of the right size. */
  public static Struct allocate(Arena arena) {
    return Struct.allocate(arena, flare_attention_params.layout(), STRUCT_SIZE);
  }
}
