package dev.flare;

/** What {@link KimiDeltaAttention} makes of its beta input. */
public enum Beta {
  /** It is taken as it is. */
  RAW(0),
  /** Logits: {@code sigmoid(beta)}, within (0, 1). */
  SIGMOID(1),
  /** Logits: {@code 2 * sigmoid(beta)}, within (0, 2), which allows negative eigenvalues. */
  TWICE_SIGMOID(2);

  private final int code;

  Beta(int code) {
    this.code = code;
  }

  /** The FLARE_BETA_ constant. */
  int code() {
    return code;
  }
}
