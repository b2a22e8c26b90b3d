package dev.flare.reference;

/**
 * The number formats of tensors and their conversions: round to nearest, ties to even. NaN stays a
 * quiet NaN and keeps its sign.
 *
 * <p>FP16 and BF16 overflow to infinity. FP8_E4M3 has no infinity and saturates at 448, infinities
 * included; its only NaN is 0x7f, with either sign.
 */
public enum Precision {
  /** IEEE binary32. */
  FP32(4, 23, -126, Float.MAX_VALUE),
  /** IEEE binary16: 10 bits of mantissa. */
  FP16(2, 10, -14, 65504),
  /** The upper half of a binary32: 7 bits of mantissa. */
  BF16(2, 7, -126, 0x1.FEp127),
  /** OCP E4M3 ("fn"): 3 bits of mantissa. */
  FP8_E4M3(1, 3, -6, 448);

  private final int byteSize;
  private final int mantissaBits;
  private final int minExponent;
  private final double max;

  Precision(int byteSize, int mantissaBits, int minExponent, double max) {
    this.byteSize = byteSize;
    this.mantissaBits = mantissaBits;
    this.minExponent = minExponent;
    this.max = max;
  }

  /** {@return the bytes of one number} */
  public int byteSize() {
    return byteSize;
  }

  /** {@return the largest finite number} */
  public double max() {
    return max;
  }

  /** {@return the distance of 1 to the next larger number} */
  public double epsilon() {
    return Math.scalb(1.0, -mantissaBits);
  }

  /**
   * {@return the number of this format nearest to {@code x}}
   *
   * @param x any number
   */
  public double round(double x) {
    if (Double.isNaN(x) || x == 0) {
      return x;
    }
    if (Double.isInfinite(x)) {
      return this == FP8_E4M3 ? Math.copySign(max, x) : x;
    }
    // Numbers near x lie one quantum apart. Dividing by a power of two and rint are exact.
    int exponent = Math.max(Math.getExponent(x), minExponent);
    double quantum = Math.scalb(1.0, exponent - mantissaBits);
    double rounded = Math.rint(x / quantum) * quantum;
    if (Math.abs(rounded) <= max) {
      return rounded;
    }
    return Math.copySign(this == FP8_E4M3 ? max : Double.POSITIVE_INFINITY, x);
  }

  /**
   * {@return a copy with every element rounded to this format}
   *
   * @param x any numbers
   */
  public double[] round(double[] x) {
    double[] y = new double[x.length];
    for (int i = 0; i < x.length; i++) {
      y[i] = round(x[i]);
    }
    return y;
  }

  /**
   * {@return the bits of the nearest number of this format, in the low {@code 8 * byteSize()} bits}
   *
   * @param x any number
   */
  public int encode(double x) {
    int exponentBits = 8 * byteSize - 1 - mantissaBits;
    int allOnes = (1 << exponentBits) - 1;
    int sign = (int) (Double.doubleToRawLongBits(x) >>> 63) << (8 * byteSize - 1);
    if (Double.isNaN(x)) {
      int mantissa = this == FP8_E4M3 ? (1 << mantissaBits) - 1 : 1 << (mantissaBits - 1);
      return sign | allOnes << mantissaBits | mantissa;
    }
    double magnitude = Math.abs(round(x));
    if (Double.isInfinite(magnitude)) {
      return sign | allOnes << mantissaBits;
    }
    int exponent = Math.getExponent(magnitude);
    if (exponent < minExponent) { // zero or subnormal: a multiple of the smallest quantum
      return sign | (int) Math.scalb(magnitude, mantissaBits - minExponent);
    }
    int mantissa = (int) Math.scalb(magnitude, mantissaBits - exponent) - (1 << mantissaBits);
    return sign | (exponent - minExponent + 1) << mantissaBits | mantissa;
  }

  /**
   * {@return the number that bits of this format stand for}
   *
   * @param bits of which the low {@code 8 * byteSize()} count
   */
  public double decode(int bits) {
    int exponentBits = 8 * byteSize - 1 - mantissaBits;
    int allOnes = (1 << exponentBits) - 1;
    int mantissa = bits & ((1 << mantissaBits) - 1);
    int exponent = bits >>> mantissaBits & allOnes;
    boolean negative = (bits >>> (8 * byteSize - 1) & 1) != 0;
    double magnitude;
    if (this == FP8_E4M3 && exponent == allOnes && mantissa == 7) {
      magnitude = Double.NaN;
    } else if (this != FP8_E4M3 && exponent == allOnes) {
      magnitude = mantissa == 0 ? Double.POSITIVE_INFINITY : Double.NaN;
    } else if (exponent == 0) {
      magnitude = Math.scalb((double) mantissa, minExponent - mantissaBits);
    } else {
      int significand = mantissa | 1 << mantissaBits;
      magnitude = Math.scalb((double) significand, exponent - 1 + minExponent - mantissaBits);
    }
    return withSign(magnitude, negative);
  }

  /** As negation, but for NaN too: Java leaves the sign of a negated NaN open. */
  private static double withSign(double magnitude, boolean negative) {
    long bits = Double.doubleToRawLongBits(magnitude) & Long.MAX_VALUE;
    return Double.longBitsToDouble(negative ? bits | Long.MIN_VALUE : bits);
  }
}
