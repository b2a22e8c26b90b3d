package dev.flare.internal;

import dev.flare.generated.flare.flare_kda_decode_params;
import dev.flare.internal.Struct.F32;
import dev.flare.internal.Struct.I32;
import dev.flare.internal.Struct.I64;
import dev.flare.internal.Struct.Pointer;
import java.lang.foreign.Arena;

/**
 * The fields of {@code flare_kda_decode_params}, which {@code flare_kda_decode} reads; flare.h
 * documents them.
 */
public final class KdaDecodeParams {
  private static final I32 STRUCT_SIZE =
      I32.of(
          flare_kda_decode_params.struct_size$layout(),
          flare_kda_decode_params.struct_size$offset());
  public static final I32 FLAGS =
      I32.of(flare_kda_decode_params.flags$layout(), flare_kda_decode_params.flags$offset());
  public static final I32 DEVICE =
      I32.of(flare_kda_decode_params.device$layout(), flare_kda_decode_params.device$offset());
  public static final I32 KERNEL =
      I32.of(flare_kda_decode_params.kernel$layout(), flare_kda_decode_params.kernel$offset());
  public static final Pointer STREAM =
      Pointer.of(flare_kda_decode_params.stream$layout(), flare_kda_decode_params.stream$offset());
  public static final I32 NUM_THREADS =
      I32.of(
          flare_kda_decode_params.num_threads$layout(),
          flare_kda_decode_params.num_threads$offset());
  public static final I32 DETERMINISTIC =
      I32.of(
          flare_kda_decode_params.deterministic$layout(),
          flare_kda_decode_params.deterministic$offset());
  public static final I32 DTYPE =
      I32.of(flare_kda_decode_params.dtype$layout(), flare_kda_decode_params.dtype$offset());
  public static final I32 GATE_DTYPE =
      I32.of(
          flare_kda_decode_params.gate_dtype$layout(), flare_kda_decode_params.gate_dtype$offset());
  public static final I32 BETA_DTYPE =
      I32.of(
          flare_kda_decode_params.beta_dtype$layout(), flare_kda_decode_params.beta_dtype$offset());
  public static final I32 INDEX_DTYPE =
      I32.of(
          flare_kda_decode_params.index_dtype$layout(),
          flare_kda_decode_params.index_dtype$offset());
  public static final I32 STATE_DTYPE =
      I32.of(
          flare_kda_decode_params.state_dtype$layout(),
          flare_kda_decode_params.state_dtype$offset());
  public static final I32 STATE_LAYOUT =
      I32.of(
          flare_kda_decode_params.state_layout$layout(),
          flare_kda_decode_params.state_layout$offset());
  public static final I32 GATE =
      I32.of(flare_kda_decode_params.gate$layout(), flare_kda_decode_params.gate$offset());
  public static final I32 BETA_ACTIVATION =
      I32.of(
          flare_kda_decode_params.beta_activation$layout(),
          flare_kda_decode_params.beta_activation$offset());
  public static final I32 QK_L2NORM =
      I32.of(
          flare_kda_decode_params.qk_l2norm$layout(), flare_kda_decode_params.qk_l2norm$offset());
  public static final I32 BETA_PER_CHANNEL =
      I32.of(
          flare_kda_decode_params.beta_per_channel$layout(),
          flare_kda_decode_params.beta_per_channel$offset());
  public static final F32 LOWER_BOUND =
      F32.of(
          flare_kda_decode_params.lower_bound$layout(),
          flare_kda_decode_params.lower_bound$offset());
  public static final F32 SCALE =
      F32.of(flare_kda_decode_params.scale$layout(), flare_kda_decode_params.scale$offset());
  public static final I64 BATCH =
      I64.of(flare_kda_decode_params.batch$layout(), flare_kda_decode_params.batch$offset());
  public static final I64 SEQLEN =
      I64.of(flare_kda_decode_params.seqlen$layout(), flare_kda_decode_params.seqlen$offset());
  public static final I64 HEADS_QK =
      I64.of(flare_kda_decode_params.heads_qk$layout(), flare_kda_decode_params.heads_qk$offset());
  public static final I64 HEADS_V =
      I64.of(flare_kda_decode_params.heads_v$layout(), flare_kda_decode_params.heads_v$offset());
  public static final I64 HEAD_DIM_K =
      I64.of(
          flare_kda_decode_params.head_dim_k$layout(), flare_kda_decode_params.head_dim_k$offset());
  public static final I64 HEAD_DIM_V =
      I64.of(
          flare_kda_decode_params.head_dim_v$layout(), flare_kda_decode_params.head_dim_v$offset());
  public static final I64 NUM_SEQUENCES =
      I64.of(
          flare_kda_decode_params.num_sequences$layout(),
          flare_kda_decode_params.num_sequences$offset());
  public static final Pointer Q =
      Pointer.of(flare_kda_decode_params.q$layout(), flare_kda_decode_params.q$offset());
  public static final Pointer K =
      Pointer.of(flare_kda_decode_params.k$layout(), flare_kda_decode_params.k$offset());
  public static final Pointer V =
      Pointer.of(flare_kda_decode_params.v$layout(), flare_kda_decode_params.v$offset());
  public static final Pointer G =
      Pointer.of(flare_kda_decode_params.g$layout(), flare_kda_decode_params.g$offset());
  public static final Pointer BETA =
      Pointer.of(flare_kda_decode_params.beta$layout(), flare_kda_decode_params.beta$offset());
  public static final Pointer A_LOG =
      Pointer.of(flare_kda_decode_params.a_log$layout(), flare_kda_decode_params.a_log$offset());
  public static final Pointer DT_BIAS =
      Pointer.of(
          flare_kda_decode_params.dt_bias$layout(), flare_kda_decode_params.dt_bias$offset());
  public static final Pointer OUT =
      Pointer.of(flare_kda_decode_params.out$layout(), flare_kda_decode_params.out$offset());
  public static final I64 Q_STRIDE_B =
      I64.of(
          flare_kda_decode_params.q_stride_b$layout(), flare_kda_decode_params.q_stride_b$offset());
  public static final I64 Q_STRIDE_T =
      I64.of(
          flare_kda_decode_params.q_stride_t$layout(), flare_kda_decode_params.q_stride_t$offset());
  public static final I64 Q_STRIDE_H =
      I64.of(
          flare_kda_decode_params.q_stride_h$layout(), flare_kda_decode_params.q_stride_h$offset());
  public static final I64 K_STRIDE_B =
      I64.of(
          flare_kda_decode_params.k_stride_b$layout(), flare_kda_decode_params.k_stride_b$offset());
  public static final I64 K_STRIDE_T =
      I64.of(
          flare_kda_decode_params.k_stride_t$layout(), flare_kda_decode_params.k_stride_t$offset());
  public static final I64 K_STRIDE_H =
      I64.of(
          flare_kda_decode_params.k_stride_h$layout(), flare_kda_decode_params.k_stride_h$offset());
  public static final I64 V_STRIDE_B =
      I64.of(
          flare_kda_decode_params.v_stride_b$layout(), flare_kda_decode_params.v_stride_b$offset());
  public static final I64 V_STRIDE_T =
      I64.of(
          flare_kda_decode_params.v_stride_t$layout(), flare_kda_decode_params.v_stride_t$offset());
  public static final I64 V_STRIDE_H =
      I64.of(
          flare_kda_decode_params.v_stride_h$layout(), flare_kda_decode_params.v_stride_h$offset());
  public static final I64 G_STRIDE_B =
      I64.of(
          flare_kda_decode_params.g_stride_b$layout(), flare_kda_decode_params.g_stride_b$offset());
  public static final I64 G_STRIDE_T =
      I64.of(
          flare_kda_decode_params.g_stride_t$layout(), flare_kda_decode_params.g_stride_t$offset());
  public static final I64 G_STRIDE_H =
      I64.of(
          flare_kda_decode_params.g_stride_h$layout(), flare_kda_decode_params.g_stride_h$offset());
  public static final I64 BETA_STRIDE_B =
      I64.of(
          flare_kda_decode_params.beta_stride_b$layout(),
          flare_kda_decode_params.beta_stride_b$offset());
  public static final I64 BETA_STRIDE_T =
      I64.of(
          flare_kda_decode_params.beta_stride_t$layout(),
          flare_kda_decode_params.beta_stride_t$offset());
  public static final I64 BETA_STRIDE_H =
      I64.of(
          flare_kda_decode_params.beta_stride_h$layout(),
          flare_kda_decode_params.beta_stride_h$offset());
  public static final I64 OUT_STRIDE_B =
      I64.of(
          flare_kda_decode_params.out_stride_b$layout(),
          flare_kda_decode_params.out_stride_b$offset());
  public static final I64 OUT_STRIDE_T =
      I64.of(
          flare_kda_decode_params.out_stride_t$layout(),
          flare_kda_decode_params.out_stride_t$offset());
  public static final I64 OUT_STRIDE_H =
      I64.of(
          flare_kda_decode_params.out_stride_h$layout(),
          flare_kda_decode_params.out_stride_h$offset());
  public static final Pointer STATE =
      Pointer.of(flare_kda_decode_params.state$layout(), flare_kda_decode_params.state$offset());
  public static final Pointer STATE_OUT =
      Pointer.of(
          flare_kda_decode_params.state_out$layout(), flare_kda_decode_params.state_out$offset());
  public static final I64 STATE_STRIDE_N =
      I64.of(
          flare_kda_decode_params.state_stride_n$layout(),
          flare_kda_decode_params.state_stride_n$offset());
  public static final I64 STATE_STRIDE_H =
      I64.of(
          flare_kda_decode_params.state_stride_h$layout(),
          flare_kda_decode_params.state_stride_h$offset());
  public static final I64 NUM_SLOTS =
      I64.of(
          flare_kda_decode_params.num_slots$layout(), flare_kda_decode_params.num_slots$offset());
  public static final Pointer SLOTS =
      Pointer.of(flare_kda_decode_params.slots$layout(), flare_kda_decode_params.slots$offset());
  public static final I64 SLOTS_STRIDE_N =
      I64.of(
          flare_kda_decode_params.slots_stride_n$layout(),
          flare_kda_decode_params.slots_stride_n$offset());
  public static final I64 SLOTS_PER_SEQUENCE =
      I64.of(
          flare_kda_decode_params.slots_per_sequence$layout(),
          flare_kda_decode_params.slots_per_sequence$offset());
  public static final I64 PADDING_SLOT =
      I64.of(
          flare_kda_decode_params.padding_slot$layout(),
          flare_kda_decode_params.padding_slot$offset());
  public static final Pointer NUM_ACCEPTED =
      Pointer.of(
          flare_kda_decode_params.num_accepted$layout(),
          flare_kda_decode_params.num_accepted$offset());
  public static final Pointer CU_SEQLENS =
      Pointer.of(
          flare_kda_decode_params.cu_seqlens$layout(), flare_kda_decode_params.cu_seqlens$offset());
  public static final Pointer WORKSPACE =
      Pointer.of(
          flare_kda_decode_params.workspace$layout(), flare_kda_decode_params.workspace$offset());
  public static final I64 WORKSPACE_BYTES =
      I64.of(
          flare_kda_decode_params.workspace_bytes$layout(),
          flare_kda_decode_params.workspace_bytes$offset());

  private KdaDecodeParams() {}

  /** A zeroed struct of the right size. */
  public static Struct allocate(Arena arena) {
    return Struct.allocate(arena, flare_kda_decode_params.layout(), STRUCT_SIZE);
  }
}
