package dev.flare;

import java.util.function.Consumer;
import org.jspecify.annotations.Nullable;

/** The options of multi-head latent attention. Changed only while {@link #with} makes it. */
final class MlaSettings implements Cloneable {
  static final int FLAG_SCALE = 1;

  /** Bytes, latent channels and rope channels of a packed FP8 row. */
  static final int PACKED_ROW = 656;

  static final int PACKED_LATENT = 512;
  static final int PACKED_ROPE = 64;

  boolean causal;
  @Nullable Float scale;
  @Nullable DType outputType;
  WeightLayout weightLayout = WeightLayout.LATENT_FIRST;
  long nopeDim;
  long ropeDim;
  int splits;
  int threads;
  boolean deterministic;
  Kernel kernel = Kernel.AUTO;
  @Nullable Tensor cuSeqlensQ;
  @Nullable Tensor cuSeqlensK;
  long maxSeqlenQ;
  long maxSeqlenK;
  @Nullable Tensor usedQ;
  @Nullable Tensor usedK;
  @Nullable Tensor blockTable;
  @Nullable Tensor sink;
  @Nullable Tensor indices;
  @Nullable Tensor topkLength;

  MlaSettings with(Consumer<MlaSettings> change) {
    try {
      MlaSettings copy = (MlaSettings) clone();
      change.accept(copy);
      return copy;
    } catch (CloneNotSupportedException e) {
      throw new AssertionError(e);
    }
  }

  DType outputType(DType inputs) {
    return outputType != null ? outputType : inputs;
  }

  /** The dtypes that activations and weights can have. */
  static void activation(String name, Tensor tensor) {
    DType dtype = tensor.dtype();
    if (dtype != DType.FP32 && dtype != DType.FP16 && dtype != DType.BF16) {
      throw new InvalidArgumentException(name, dtype, "FP32, FP16 or BF16");
    }
  }

  /** Latent rows: of the activations' dtype, or packed bytes. */
  static boolean packed(String name, Tensor latent, DType activations) {
    if (latent.dtype() != DType.UINT8) {
      Checks.dtype(name, latent, activations);
      return false;
    }
    if (latent.dim(-1) != PACKED_ROW) {
      throw new InvalidArgumentException(
          name, latent.shape(), "rows of " + PACKED_ROW + " bytes, as UINT8 latents have");
    }
    return true;
  }
}
