package dev.flare.internal;

import dev.flare.generated.flare.flare_cast_params;
import dev.flare.internal.Struct.F32;
import dev.flare.internal.Struct.I32;
import dev.flare.internal.Struct.I64Array;
import dev.flare.internal.Struct.Pointer;
import java.lang.foreign.Arena;

/**
 * The fields of {@code flare_cast_params}, which {@code flare_cast} reads; flare.h documents them.
 */
public final class CastParams {
  private static final I32 STRUCT_SIZE =
      I32.of(flare_cast_params.struct_size$layout(), flare_cast_params.struct_size$offset());
  public static final I32 FLAGS =
      I32.of(flare_cast_params.flags$layout(), flare_cast_params.flags$offset());
  public static final I32 DEVICE =
      I32.of(flare_cast_params.device$layout(), flare_cast_params.device$offset());
  public static final I32 KERNEL =
      I32.of(flare_cast_params.kernel$layout(), flare_cast_params.kernel$offset());
  public static final Pointer STREAM =
      Pointer.of(flare_cast_params.stream$layout(), flare_cast_params.stream$offset());
  public static final I32 NUM_THREADS =
      I32.of(flare_cast_params.num_threads$layout(), flare_cast_params.num_threads$offset());
  public static final I32 SRC_DTYPE =
      I32.of(flare_cast_params.src_dtype$layout(), flare_cast_params.src_dtype$offset());
  public static final I32 DST_DTYPE =
      I32.of(flare_cast_params.dst_dtype$layout(), flare_cast_params.dst_dtype$offset());
  public static final I32 RANK =
      I32.of(flare_cast_params.rank$layout(), flare_cast_params.rank$offset());
  public static final F32 SCALE =
      F32.of(flare_cast_params.scale$layout(), flare_cast_params.scale$offset());
  public static final Pointer SRC =
      Pointer.of(flare_cast_params.src$layout(), flare_cast_params.src$offset());
  public static final Pointer DST =
      Pointer.of(flare_cast_params.dst$layout(), flare_cast_params.dst$offset());
  public static final I64Array SHAPE =
      I64Array.of(flare_cast_params.shape$layout(), flare_cast_params.shape$offset());
  public static final I64Array SRC_STRIDE =
      I64Array.of(flare_cast_params.src_stride$layout(), flare_cast_params.src_stride$offset());
  public static final I64Array DST_STRIDE =
      I64Array.of(flare_cast_params.dst_stride$layout(), flare_cast_params.dst_stride$offset());

  private CastParams() {}

  /** A zeroed struct of the right size. */
  public static Struct allocate(Arena arena) {
    return Struct.allocate(arena, flare_cast_params.layout(), STRUCT_SIZE);
  }
}
