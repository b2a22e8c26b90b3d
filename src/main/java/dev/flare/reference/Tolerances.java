package dev.flare.reference;

/**
 * The acceptance table: the largest error that a correct kernel may have, by operation and input
 * format. Bounds of fp32 inputs assume inputs of unit variance.
 */
public final class Tolerances {
  private Tolerances() {}

  /** What is compared. */
  public enum Operation {
    /** Attention in all its forms, sliding windows included. */
    ATTENTION,
    /** Latent attention, either form. */
    MLA,
    /** Output and state of the delta rule. */
    KDA,
    /**
     * The delta rule over nearly equal keys with slow decay, where errors of the triangular solve
     * grow. An fp32 solve is what makes it pass.
     */
    KDA_COLLINEAR
  }

  /**
   * Returns the bound of the relative Frobenius error of an output or state.
   *
   * @param operation what was computed
   * @param inputs format of the inputs; FP8_E4M3 compares with the reference of the dequantised
   *     inputs
   * @return the bound
   */
  public static double relative(Operation operation, Precision inputs) {
    if (inputs == Precision.FP8_E4M3) {
      return 4e-2;
    }
    return switch (operation) {
      case ATTENTION -> byPrecision(inputs, 2e-6, 1e-3, 5e-3);
      case MLA -> byPrecision(inputs, 5e-6, 1.5e-3, 6e-3);
      case KDA -> byPrecision(inputs, 1e-5, 2e-3, 6e-3);
      case KDA_COLLINEAR -> {
        if (inputs != Precision.BF16) {
          throw new IllegalArgumentException(
              "collinear keys have a bound for BF16 inputs only, asked for " + inputs);
        }
        yield 1.2e-2;
      }
    };
  }

  /**
   * {@return the bound of the absolute error of an LSE; that of FP8_E4M3 inputs is BF16's}
   *
   * @param inputs format of the inputs
   */
  public static double lse(Precision inputs) {
    return byPrecision(inputs, 1e-5, 1e-3, 2e-3);
  }

  private static double byPrecision(Precision inputs, double fp32, double fp16, double bf16) {
    return switch (inputs) {
      case FP32 -> fp32;
      case FP16 -> fp16;
      case BF16, FP8_E4M3 -> bf16;
    };
  }
}
