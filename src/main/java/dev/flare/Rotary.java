package dev.flare;

/**
 * Rotary position embedding, applied to keys on their way into a cache.
 *
 * @param cos FP32 {@code [positions, rotary_dim / 2]}: turns the first rotary_dim channels
 * @param sin FP32, same shape
 * @param interleaved true if channels turn in pairs (0, 1), (2, 3) ...; false for pairs (i, i +
 *     rotary_dim / 2)
 */
public record Rotary(Tensor cos, Tensor sin, boolean interleaved) {
  /**
   * Checks the tables.
   *
   * @throws InvalidArgumentException if they are not two dense FP32 tables of one shape
   */
  public Rotary {
    Checks.present("cos", cos);
    Checks.present("sin", sin);
    Checks.form("cos", cos, "[positions, rotary_dim / 2]");
    Checks.dtype("cos", cos, DType.FP32);
    Checks.dtype("sin", sin, DType.FP32);
    Checks.shape("sin", sin, "the shape of cos", cos.shape().dims());
    if (!cos.isContiguous() || !sin.isContiguous()) {
      throw new InvalidArgumentException("cos, sin", cos.layout(), "dense tables");
    }
  }
}
