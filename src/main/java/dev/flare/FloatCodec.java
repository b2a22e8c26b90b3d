package dev.flare;

/**
 * The half and 8-bit float formats, bit by bit: round to nearest even, NaN stays NaN (quiet, sign
 * kept). The C side's {@code flare_cast} gives the same bits; a test compares them.
 */
final class FloatCodec {
  private static final float E4M3_MAX = 448;
  private static final float E4M3_MIN_NORMAL = 0x1p-6f;
  private static final byte E4M3_NAN = 0x7f;
  private static final float[] E4M3 = new float[256];

  static {
    for (int code = 0; code < 256; code++) {
      int exponent = code >> 3 & 15;
      int fraction = code & 7;
      float magnitude;
      if ((code & 0x7f) == E4M3_NAN) {
        magnitude = Float.NaN;
      } else if (exponent == 0) {
        magnitude = fraction * 0x1p-9f;
      } else {
        magnitude = Math.scalb(8 + fraction, exponent - 10);
      }
      E4M3[code] = code < 128 ? magnitude : -magnitude;
    }
  }

  private FloatCodec() {}

  static float fromBf16(short bits) {
    int wide = bits << 16;
    // A signalling NaN becomes a quiet one, as arithmetic would make it.
    return Float.intBitsToFloat((wide & 0x7fffffff) > 0x7f800000 ? wide | 0x400000 : wide);
  }

  static short toBf16(float value) {
    int bits = Float.floatToRawIntBits(value);
    if ((bits & 0x7fffffff) > 0x7f800000) {
      return (short) (bits >>> 16 | 0x40);
    }
    return (short) ((bits + 0x7fff + (bits >>> 16 & 1)) >>> 16);
  }

  static float fromE4m3(byte code) {
    return E4M3[code & 0xff];
  }

  /** Values beyond the largest finite one, infinities too, become ±448. */
  static byte toE4m3(float value) {
    int bits = Float.floatToRawIntBits(value);
    int sign = bits >>> 24 & 0x80;
    float magnitude = Math.abs(value);
    int code;
    if (Float.isNaN(magnitude)) {
      code = E4M3_NAN;
    } else if (magnitude >= E4M3_MAX) {
      code = 0x7e;
    } else if (magnitude < E4M3_MIN_NORMAL) {
      // Subnormals are multiples of 2^-9; 8 of them carry over into the first normal, code 8.
      code = (int) Math.rint(magnitude * 0x1p9f);
    } else {
      int rounded = (bits & 0x7fffffff) + 0x7ffff + (bits >>> 20 & 1);
      code = (rounded >>> 20) - ((127 - 7) << 3);
      code = Math.min(code, 0x7e);
    }
    return (byte) (sign | code);
  }
}
