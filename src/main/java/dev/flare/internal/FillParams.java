package dev.flare.internal;

import dev.flare.generated.flare.flare_fill_params;
import dev.flare.internal.Struct.F64;
import dev.flare.internal.Struct.I32;
import dev.flare.internal.Struct.I64Array;
import dev.flare.internal.Struct.Pointer;
import java.lang.foreign.Arena;

/**
 * The fields of {@code flare_fill_params}, which {@code flare_fill} reads; flare.h documents them.
 */
public final class FillParams {
  private static final I32 STRUCT_SIZE =
      I32.of(flare_fill_params.struct_size$layout(), flare_fill_params.struct_size$offset());
  public static final I32 FLAGS =
      I32.of(flare_fill_params.flags$layout(), flare_fill_params.flags$offset());
  public static final I32 DEVICE =
      I32.of(flare_fill_params.device$layout(), flare_fill_params.device$offset());
  public static final I32 KERNEL =
      I32.of(flare_fill_params.kernel$layout(), flare_fill_params.kernel$offset());
  public static final Pointer STREAM =
      Pointer.of(flare_fill_params.stream$layout(), flare_fill_params.stream$offset());
  public static final I32 NUM_THREADS =
      I32.of(flare_fill_params.num_threads$layout(), flare_fill_params.num_threads$offset());
  public static final I32 DTYPE =
      I32.of(flare_fill_params.dtype$layout(), flare_fill_params.dtype$offset());
  public static final I32 RANK =
      I32.of(flare_fill_params.rank$layout(), flare_fill_params.rank$offset());
  public static final F64 VALUE =
      F64.of(flare_fill_params.value$layout(), flare_fill_params.value$offset());
  public static final Pointer DST =
      Pointer.of(flare_fill_params.dst$layout(), flare_fill_params.dst$offset());
  public static final I64Array SHAPE =
      I64Array.of(flare_fill_params.shape$layout(), flare_fill_params.shape$offset());
  public static final I64Array DST_STRIDE =
      I64Array.of(flare_fill_params.dst_stride$layout(), flare_fill_params.dst_stride$offset());

  private FillParams() {}

  /** A zeroed struct of the right size. */
  public static Struct allocate(Arena arena) {
    return Struct.allocate(arena, flare_fill_params.layout(), STRUCT_SIZE);
  }
}
