package dev.flare.internal;

import dev.flare.generated.flare.flare_dlpack_tensor;
import dev.flare.internal.Struct.I32;
import dev.flare.internal.Struct.I64Array;
import dev.flare.internal.Struct.Pointer;
import java.lang.foreign.Arena;

/**
 * The fields of {@code flare_dlpack_tensor}, one tensor that changes hands; flare.h documents them.
 */
public final class DlpackTensor {
  private static final I32 STRUCT_SIZE =
      I32.of(flare_dlpack_tensor.struct_size$layout(), flare_dlpack_tensor.struct_size$offset());
  public static final I32 FLAGS =
      I32.of(flare_dlpack_tensor.flags$layout(), flare_dlpack_tensor.flags$offset());
  public static final I32 DEVICE =
      I32.of(flare_dlpack_tensor.device$layout(), flare_dlpack_tensor.device$offset());
  public static final I32 DTYPE =
      I32.of(flare_dlpack_tensor.dtype$layout(), flare_dlpack_tensor.dtype$offset());
  public static final I32 RANK =
      I32.of(flare_dlpack_tensor.rank$layout(), flare_dlpack_tensor.rank$offset());
  public static final Pointer DATA =
      Pointer.of(flare_dlpack_tensor.data$layout(), flare_dlpack_tensor.data$offset());
  public static final I64Array SHAPE =
      I64Array.of(flare_dlpack_tensor.shape$layout(), flare_dlpack_tensor.shape$offset());
  public static final I64Array STRIDE =
      I64Array.of(flare_dlpack_tensor.stride$layout(), flare_dlpack_tensor.stride$offset());

  private DlpackTensor() {}

  /** A zeroed struct of the right size. */
  public static Struct allocate(Arena arena) {
    return Struct.allocate(arena, flare_dlpack_tensor.layout(), STRUCT_SIZE);
  }
}
