package dev.flare.internal;

import dev.flare.generated.flare.flare_mla_prefill_params;
import dev.flare.internal.Struct.F32;
import dev.flare.internal.Struct.I32;
import dev.flare.internal.Struct.I64;
import dev.flare.internal.Struct.Pointer;
import java.lang.foreign.Arena;

/**
 * The fields of {@code flare_mla_prefill_params}, which {@code flare_mla_prefill} reads; flare.h
 * documents them.
 */
public final class MlaPrefillParams {
  private static final I32 STRUCT_SIZE =
      I32.of(
          flare_mla_prefill_params.struct_size$layout(),
          flare_mla_prefill_params.struct_size$offset());
  public static final I32 FLAGS =
      I32.of(flare_mla_prefill_params.flags$layout(), flare_mla_prefill_params.flags$offset());
  public static final I32 DEVICE =
      I32.of(flare_mla_prefill_params.device$layout(), flare_mla_prefill_params.device$offset());
  public static final I32 KERNEL =
      I32.of(flare_mla_prefill_params.kernel$layout(), flare_mla_prefill_params.kernel$offset());
  public static final Pointer STREAM =
      Pointer.of(
          flare_mla_prefill_params.stream$layout(), flare_mla_prefill_params.stream$offset());
  public static final I32 NUM_THREADS =
      I32.of(
          flare_mla_prefill_params.num_threads$layout(),
          flare_mla_prefill_params.num_threads$offset());
  public static final I32 DETERMINISTIC =
      I32.of(
          flare_mla_prefill_params.deterministic$layout(),
          flare_mla_prefill_params.deterministic$offset());
  public static final I32 DTYPE =
      I32.of(flare_mla_prefill_params.dtype$layout(), flare_mla_prefill_params.dtype$offset());
  public static final I32 OUT_DTYPE =
      I32.of(
          flare_mla_prefill_params.out_dtype$layout(), flare_mla_prefill_params.out_dtype$offset());
  public static final I32 LATENT_DTYPE =
      I32.of(
          flare_mla_prefill_params.latent_dtype$layout(),
          flare_mla_prefill_params.latent_dtype$offset());
  public static final I32 INDEX_DTYPE =
      I32.of(
          flare_mla_prefill_params.index_dtype$layout(),
          flare_mla_prefill_params.index_dtype$offset());
  public static final I32 WEIGHT_LAYOUT =
      I32.of(
          flare_mla_prefill_params.weight_layout$layout(),
          flare_mla_prefill_params.weight_layout$offset());
  public static final I32 MASK =
      I32.of(flare_mla_prefill_params.mask$layout(), flare_mla_prefill_params.mask$offset());
  public static final I64 BATCH =
      I64.of(flare_mla_prefill_params.batch$layout(), flare_mla_prefill_params.batch$offset());
  public static final I64 SEQLEN_Q =
      I64.of(
          flare_mla_prefill_params.seqlen_q$layout(), flare_mla_prefill_params.seqlen_q$offset());
  public static final I64 SEQLEN_K =
      I64.of(
          flare_mla_prefill_params.seqlen_k$layout(), flare_mla_prefill_params.seqlen_k$offset());
  public static final I64 HEADS =
      I64.of(flare_mla_prefill_params.heads$layout(), flare_mla_prefill_params.heads$offset());
  public static final I64 D_NOPE =
      I64.of(flare_mla_prefill_params.d_nope$layout(), flare_mla_prefill_params.d_nope$offset());
  public static final I64 D_ROPE =
      I64.of(flare_mla_prefill_params.d_rope$layout(), flare_mla_prefill_params.d_rope$offset());
  public static final I64 D_C =
      I64.of(flare_mla_prefill_params.d_c$layout(), flare_mla_prefill_params.d_c$offset());
  public static final I64 D_V =
      I64.of(flare_mla_prefill_params.d_v$layout(), flare_mla_prefill_params.d_v$offset());
  public static final I64 TOTAL_Q =
      I64.of(flare_mla_prefill_params.total_q$layout(), flare_mla_prefill_params.total_q$offset());
  public static final I64 TOTAL_K =
      I64.of(flare_mla_prefill_params.total_k$layout(), flare_mla_prefill_params.total_k$offset());
  public static final Pointer Q_NOPE =
      Pointer.of(
          flare_mla_prefill_params.q_nope$layout(), flare_mla_prefill_params.q_nope$offset());
  public static final Pointer Q_ROPE =
      Pointer.of(
          flare_mla_prefill_params.q_rope$layout(), flare_mla_prefill_params.q_rope$offset());
  public static final Pointer C_KV =
      Pointer.of(flare_mla_prefill_params.c_kv$layout(), flare_mla_prefill_params.c_kv$offset());
  public static final Pointer K_ROPE =
      Pointer.of(
          flare_mla_prefill_params.k_rope$layout(), flare_mla_prefill_params.k_rope$offset());
  public static final Pointer W_UK =
      Pointer.of(flare_mla_prefill_params.w_uk$layout(), flare_mla_prefill_params.w_uk$offset());
  public static final Pointer W_UV =
      Pointer.of(flare_mla_prefill_params.w_uv$layout(), flare_mla_prefill_params.w_uv$offset());
  public static final Pointer OUT =
      Pointer.of(flare_mla_prefill_params.out$layout(), flare_mla_prefill_params.out$offset());
  public static final Pointer LSE =
      Pointer.of(flare_mla_prefill_params.lse$layout(), flare_mla_prefill_params.lse$offset());
  public static final I64 Q_NOPE_STRIDE_B =
      I64.of(
          flare_mla_prefill_params.q_nope_stride_b$layout(),
          flare_mla_prefill_params.q_nope_stride_b$offset());
  public static final I64 Q_NOPE_STRIDE_S =
      I64.of(
          flare_mla_prefill_params.q_nope_stride_s$layout(),
          flare_mla_prefill_params.q_nope_stride_s$offset());
  public static final I64 Q_NOPE_STRIDE_H =
      I64.of(
          flare_mla_prefill_params.q_nope_stride_h$layout(),
          flare_mla_prefill_params.q_nope_stride_h$offset());
  public static final I64 Q_ROPE_STRIDE_B =
      I64.of(
          flare_mla_prefill_params.q_rope_stride_b$layout(),
          flare_mla_prefill_params.q_rope_stride_b$offset());
  public static final I64 Q_ROPE_STRIDE_S =
      I64.of(
          flare_mla_prefill_params.q_rope_stride_s$layout(),
          flare_mla_prefill_params.q_rope_stride_s$offset());
  public static final I64 Q_ROPE_STRIDE_H =
      I64.of(
          flare_mla_prefill_params.q_rope_stride_h$layout(),
          flare_mla_prefill_params.q_rope_stride_h$offset());
  public static final I64 C_KV_STRIDE_B =
      I64.of(
          flare_mla_prefill_params.c_kv_stride_b$layout(),
          flare_mla_prefill_params.c_kv_stride_b$offset());
  public static final I64 C_KV_STRIDE_S =
      I64.of(
          flare_mla_prefill_params.c_kv_stride_s$layout(),
          flare_mla_prefill_params.c_kv_stride_s$offset());
  public static final I64 K_ROPE_STRIDE_B =
      I64.of(
          flare_mla_prefill_params.k_rope_stride_b$layout(),
          flare_mla_prefill_params.k_rope_stride_b$offset());
  public static final I64 K_ROPE_STRIDE_S =
      I64.of(
          flare_mla_prefill_params.k_rope_stride_s$layout(),
          flare_mla_prefill_params.k_rope_stride_s$offset());
  public static final I64 W_UK_STRIDE_H =
      I64.of(
          flare_mla_prefill_params.w_uk_stride_h$layout(),
          flare_mla_prefill_params.w_uk_stride_h$offset());
  public static final I64 W_UK_STRIDE_R =
      I64.of(
          flare_mla_prefill_params.w_uk_stride_r$layout(),
          flare_mla_prefill_params.w_uk_stride_r$offset());
  public static final I64 W_UV_STRIDE_H =
      I64.of(
          flare_mla_prefill_params.w_uv_stride_h$layout(),
          flare_mla_prefill_params.w_uv_stride_h$offset());
  public static final I64 W_UV_STRIDE_R =
      I64.of(
          flare_mla_prefill_params.w_uv_stride_r$layout(),
          flare_mla_prefill_params.w_uv_stride_r$offset());
  public static final I64 OUT_STRIDE_B =
      I64.of(
          flare_mla_prefill_params.out_stride_b$layout(),
          flare_mla_prefill_params.out_stride_b$offset());
  public static final I64 OUT_STRIDE_S =
      I64.of(
          flare_mla_prefill_params.out_stride_s$layout(),
          flare_mla_prefill_params.out_stride_s$offset());
  public static final I64 OUT_STRIDE_H =
      I64.of(
          flare_mla_prefill_params.out_stride_h$layout(),
          flare_mla_prefill_params.out_stride_h$offset());
  public static final I64 LSE_STRIDE_B =
      I64.of(
          flare_mla_prefill_params.lse_stride_b$layout(),
          flare_mla_prefill_params.lse_stride_b$offset());
  public static final I64 LSE_STRIDE_H =
      I64.of(
          flare_mla_prefill_params.lse_stride_h$layout(),
          flare_mla_prefill_params.lse_stride_h$offset());
  public static final F32 SCALE =
      F32.of(flare_mla_prefill_params.scale$layout(), flare_mla_prefill_params.scale$offset());
  public static final Pointer CU_SEQLENS_Q =
      Pointer.of(
          flare_mla_prefill_params.cu_seqlens_q$layout(),
          flare_mla_prefill_params.cu_seqlens_q$offset());
  public static final Pointer CU_SEQLENS_K =
      Pointer.of(
          flare_mla_prefill_params.cu_seqlens_k$layout(),
          flare_mla_prefill_params.cu_seqlens_k$offset());
  public static final Pointer SEQUSED_Q =
      Pointer.of(
          flare_mla_prefill_params.seqused_q$layout(), flare_mla_prefill_params.seqused_q$offset());
  public static final Pointer SEQUSED_K =
      Pointer.of(
          flare_mla_prefill_params.seqused_k$layout(), flare_mla_prefill_params.seqused_k$offset());
  public static final Pointer BLOCK_TABLE =
      Pointer.of(
          flare_mla_prefill_params.block_table$layout(),
          flare_mla_prefill_params.block_table$offset());
  public static final I64 BLOCK_TABLE_STRIDE_B =
      I64.of(
          flare_mla_prefill_params.block_table_stride_b$layout(),
          flare_mla_prefill_params.block_table_stride_b$offset());
  public static final I64 PAGE_SIZE =
      I64.of(
          flare_mla_prefill_params.page_size$layout(), flare_mla_prefill_params.page_size$offset());
  public static final I64 NUM_PAGES =
      I64.of(
          flare_mla_prefill_params.num_pages$layout(), flare_mla_prefill_params.num_pages$offset());
  public static final Pointer WORKSPACE =
      Pointer.of(
          flare_mla_prefill_params.workspace$layout(), flare_mla_prefill_params.workspace$offset());
  public static final I64 WORKSPACE_BYTES =
      I64.of(
          flare_mla_prefill_params.workspace_bytes$layout(),
          flare_mla_prefill_params.workspace_bytes$offset());

  private MlaPrefillParams() {}

  /** A zeroed struct of the right size. */
  public static Struct allocate(Arena arena) {
    return Struct.allocate(arena, flare_mla_prefill_params.layout(), STRUCT_SIZE);
  }
}
