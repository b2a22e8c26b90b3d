package dev.flare.internal;

import dev.flare.generated.flare.flare_cache_append_params;
import dev.flare.internal.Struct.I32;
import dev.flare.internal.Struct.I64;
import dev.flare.internal.Struct.Pointer;
import java.lang.foreign.Arena;

/**
 * The fields of {@code flare_cache_append_params}, which {@code flare_cache_append} reads; flare.h
 * documents them.
 */
public final class CacheAppendParams {
  private static final I32 STRUCT_SIZE =
      I32.of(
          flare_cache_append_params.struct_size$layout(),
          flare_cache_append_params.struct_size$offset());
  public static final I32 FLAGS =
      I32.of(flare_cache_append_params.flags$layout(), flare_cache_append_params.flags$offset());
  public static final I32 DEVICE =
      I32.of(flare_cache_append_params.device$layout(), flare_cache_append_params.device$offset());
  public static final I32 KERNEL =
      I32.of(flare_cache_append_params.kernel$layout(), flare_cache_append_params.kernel$offset());
  public static final Pointer STREAM =
      Pointer.of(
          flare_cache_append_params.stream$layout(), flare_cache_append_params.stream$offset());
  public static final I32 NUM_THREADS =
      I32.of(
          flare_cache_append_params.num_threads$layout(),
          flare_cache_append_params.num_threads$offset());
  public static final I32 LAYOUT =
      I32.of(flare_cache_append_params.layout$layout(), flare_cache_append_params.layout$offset());
  public static final I32 DTYPE =
      I32.of(flare_cache_append_params.dtype$layout(), flare_cache_append_params.dtype$offset());
  public static final I32 CACHE_DTYPE =
      I32.of(
          flare_cache_append_params.cache_dtype$layout(),
          flare_cache_append_params.cache_dtype$offset());
  public static final I32 INDEX_DTYPE =
      I32.of(
          flare_cache_append_params.index_dtype$layout(),
          flare_cache_append_params.index_dtype$offset());
  public static final I32 ROTARY_INTERLEAVED =
      I32.of(
          flare_cache_append_params.rotary_interleaved$layout(),
          flare_cache_append_params.rotary_interleaved$offset());
  public static final I64 NUM_TOKENS =
      I64.of(
          flare_cache_append_params.num_tokens$layout(),
          flare_cache_append_params.num_tokens$offset());
  public static final I64 HEADS =
      I64.of(flare_cache_append_params.heads$layout(), flare_cache_append_params.heads$offset());
  public static final I64 HEAD_DIM_K =
      I64.of(
          flare_cache_append_params.head_dim_k$layout(),
          flare_cache_append_params.head_dim_k$offset());
  public static final I64 HEAD_DIM_V =
      I64.of(
          flare_cache_append_params.head_dim_v$layout(),
          flare_cache_append_params.head_dim_v$offset());
  public static final I64 NUM_PAGES =
      I64.of(
          flare_cache_append_params.num_pages$layout(),
          flare_cache_append_params.num_pages$offset());
  public static final I64 PAGE_SIZE =
      I64.of(
          flare_cache_append_params.page_size$layout(),
          flare_cache_append_params.page_size$offset());
  public static final Pointer K =
      Pointer.of(flare_cache_append_params.k$layout(), flare_cache_append_params.k$offset());
  public static final Pointer V =
      Pointer.of(flare_cache_append_params.v$layout(), flare_cache_append_params.v$offset());
  public static final I64 K_STRIDE_T =
      I64.of(
          flare_cache_append_params.k_stride_t$layout(),
          flare_cache_append_params.k_stride_t$offset());
  public static final I64 K_STRIDE_H =
      I64.of(
          flare_cache_append_params.k_stride_h$layout(),
          flare_cache_append_params.k_stride_h$offset());
  public static final I64 V_STRIDE_T =
      I64.of(
          flare_cache_append_params.v_stride_t$layout(),
          flare_cache_append_params.v_stride_t$offset());
  public static final I64 V_STRIDE_H =
      I64.of(
          flare_cache_append_params.v_stride_h$layout(),
          flare_cache_append_params.v_stride_h$offset());
  public static final Pointer K_CACHE =
      Pointer.of(
          flare_cache_append_params.k_cache$layout(), flare_cache_append_params.k_cache$offset());
  public static final Pointer V_CACHE =
      Pointer.of(
          flare_cache_append_params.v_cache$layout(), flare_cache_append_params.v_cache$offset());
  public static final I64 K_CACHE_STRIDE_B =
      I64.of(
          flare_cache_append_params.k_cache_stride_b$layout(),
          flare_cache_append_params.k_cache_stride_b$offset());
  public static final I64 K_CACHE_STRIDE_S =
      I64.of(
          flare_cache_append_params.k_cache_stride_s$layout(),
          flare_cache_append_params.k_cache_stride_s$offset());
  public static final I64 K_CACHE_STRIDE_H =
      I64.of(
          flare_cache_append_params.k_cache_stride_h$layout(),
          flare_cache_append_params.k_cache_stride_h$offset());
  public static final I64 V_CACHE_STRIDE_B =
      I64.of(
          flare_cache_append_params.v_cache_stride_b$layout(),
          flare_cache_append_params.v_cache_stride_b$offset());
  public static final I64 V_CACHE_STRIDE_S =
      I64.of(
          flare_cache_append_params.v_cache_stride_s$layout(),
          flare_cache_append_params.v_cache_stride_s$offset());
  public static final I64 V_CACHE_STRIDE_H =
      I64.of(
          flare_cache_append_params.v_cache_stride_h$layout(),
          flare_cache_append_params.v_cache_stride_h$offset());
  public static final Pointer SLOTS =
      Pointer.of(
          flare_cache_append_params.slots$layout(), flare_cache_append_params.slots$offset());
  public static final Pointer K_DESCALE =
      Pointer.of(
          flare_cache_append_params.k_descale$layout(),
          flare_cache_append_params.k_descale$offset());
  public static final Pointer V_DESCALE =
      Pointer.of(
          flare_cache_append_params.v_descale$layout(),
          flare_cache_append_params.v_descale$offset());
  public static final Pointer ROTARY_COS =
      Pointer.of(
          flare_cache_append_params.rotary_cos$layout(),
          flare_cache_append_params.rotary_cos$offset());
  public static final Pointer ROTARY_SIN =
      Pointer.of(
          flare_cache_append_params.rotary_sin$layout(),
          flare_cache_append_params.rotary_sin$offset());
  public static final Pointer POSITIONS =
      Pointer.of(
          flare_cache_append_params.positions$layout(),
          flare_cache_append_params.positions$offset());
  public static final I64 ROTARY_DIM =
      I64.of(
          flare_cache_append_params.rotary_dim$layout(),
          flare_cache_append_params.rotary_dim$offset());
  public static final I64 MAX_POSITION =
      I64.of(
          flare_cache_append_params.max_position$layout(),
          flare_cache_append_params.max_position$offset());

  private CacheAppendParams() {}

  /** A zeroed struct of the right size. */
  public static Struct allocate(Arena arena) {
    return Struct.allocate(arena, flare_cache_append_params.layout(), STRUCT_SIZE);
  }
}
