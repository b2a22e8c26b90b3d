package dev.flare;

/**
 * Element types of a tensor.
 *
 * <p>Immutable; any thread may use it.
 */
public enum DType {
  /** IEEE 754 binary32. */
  FP32(1, 4, true),
  /** IEEE 754 binary16: 5 exponent bits, 10 fraction bits, largest finite value 65504. */
  FP16(2, 2, true),
  /** bfloat16: the upper half of an FP32 value. */
  BF16(3, 2, true),
  /** OCP 8-bit float, 4 exponent and 3 fraction bits: no infinity, largest finite value 448. */
  FP8_E4M3(4, 1, true),
  /** 32-bit signed integer: indices, lengths and block tables. */
  INT32(6, 4, false),
  /** 64-bit signed integer: indices and lengths. */
  INT64(7, 8, false),
  /** Raw bytes: cache rows of a packed layout, such as the 656-byte latent row. */
  UINT8(5, 1, false);

  private final int code; // the constant of flare.h; a test compares them
  private final int bytes;
  private final boolean floating;

  DType(int code, int bytes, boolean floating) {
    this.code = code;
    this.bytes = bytes;
    this.floating = floating;
  }

  /**
   * Returns the size of one element.
   *
   * @return bytes per element
   */
  public int bytes() {
    return bytes;
  }

  /**
   * Tells whether elements are floating-point numbers.
   *
   * @return true for FP32, FP16, BF16 and FP8_E4M3
   */
  public boolean isFloating() {
    return floating;
  }

  /** The type of a FLARE_ constant. */
  static DType of(int code) {
    for (DType dtype : values()) {
      if (dtype.code == code) {
        return dtype;
      }
    }
    throw new InternalException("the C library answered with dtype " + code);
  }

  /** The FLARE_ constant of the C ABI. */
  int code() {
    return code;
  }
}
