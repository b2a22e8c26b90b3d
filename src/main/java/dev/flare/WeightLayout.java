package dev.flare;

/** The order of dimensions in the up-projection weights of {@link MultiHeadLatentAttention}. */
public enum WeightLayout {
  /** w_uk {@code [H, d_c, d_nope]}, w_uv {@code [H, d_c, d_v]}: {@code k = c_kv w_uk}. */
  LATENT_FIRST(0),
  /**
   * w_uk {@code [H, d_nope, d_c]}, w_uv {@code [H, d_v, d_c]}: the order of a checkpoint's {@code
   * kv_b} weight.
   */
  LATENT_LAST(1);

  private final int code;

  WeightLayout(int code) {
    this.code = code;
  }

  /** The FLARE_WEIGHT_ constant. */
  int code() {
    return code;
  }
}
