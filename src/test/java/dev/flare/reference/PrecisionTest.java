package dev.flare.reference;

import static org.assertj.core.api.Assertions.assertThat;

import java.util.SplittableRandom;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.EnumSource;

class PrecisionTest {
  @ParameterizedTest
  @EnumSource(
      value = Precision.class,
      names = {"FP16", "BF16", "FP8_E4M3"})
  void everyPatternSurvivesARoundTrip(Precision precision) {
    int patterns = 1 << (8 * precision.byteSize());
    for (int bits = 0; bits < patterns; bits++) {
      double value = precision.decode(bits);
      int back = precision.encode(value);
      if (Double.isNaN(value)) {
        assertThat(precision.decode(back)).isNaN();
        assertThat(back >>> (8 * precision.byteSize() - 1))
            .as("sign of NaN %x", bits)
            .isEqualTo(bits >>> (8 * precision.byteSize() - 1));
      } else {
        assertThat(back).as("%s", value).isEqualTo(bits);
        assertThat(precision.round(value)).isEqualTo(value);
      }
    }
  }

  /** The JDK's own conversion, for every binary16. */
  @Test
  void halvesDecodeAsTheJdkDoes() {
    for (int bits = 0; bits < 1 << 16; bits++) {
      Double want = (double) Float.float16ToFloat((short) bits); // boxed: NaN equals NaN
      assertThat(Precision.FP16.decode(bits)).isEqualTo(want);
    }
  }

  @Test
  void floatsRoundAsTheJdkDoes() {
    SplittableRandom random = new SplittableRandom(0x5EED);
    for (int i = 0; i < 200_000; i++) {
      float x = Float.intBitsToFloat(random.nextInt());
      if (!Float.isNaN(x)) {
        assertThat((short) Precision.FP16.encode(x)).isEqualTo(Float.floatToFloat16(x));
        assertThat(Precision.FP32.encode(x)).isEqualTo(Float.floatToRawIntBits(x));
        assertThat((short) Precision.BF16.encode(x)).as("%a", x).isEqualTo(nearestEven(x));
      }
      double d = Double.longBitsToDouble(random.nextLong());
      if (!Double.isNaN(d)) {
        assertThat(Precision.FP32.round(d)).isEqualTo((float) d);
      }
    }
  }

  /** The usual integer form of rounding a float to bfloat16. */
  private static short nearestEven(float x) {
    int bits = Float.floatToRawIntBits(x);
    return (short) ((bits + 0x7fff + (bits >>> 16 & 1)) >>> 16);
  }

  @ParameterizedTest
  @CsvSource({
    // halfway: to the even neighbour
    "BF16, 1.00390625, 0x3f80",
    "BF16, 1.01171875, 0x3f82",
    "FP16, 1.00048828125, 0x3c00",
    "FP16, 1.00146484375, 0x3c02",
    // a double just above a float's halfway point must not be rounded twice
    "FP16, 1.000488281250001, 0x3c01",
    "FP16, 65519.99, 0x7bff",
    "FP16, 65520, 0x7c00",
    "FP16, -1e300, 0xfc00",
    "FP16, 5.9604644775390625e-8, 0x0001",
    "FP16, 2.98023223876953125e-8, 0x0000",
    "BF16, 3.4e38, 0x7f80",
    "BF16, -0.0, 0x8000",
    "FP8_E4M3, 448, 0x7e",
    "FP8_E4M3, 464, 0x7e",
    "FP8_E4M3, 1e9, 0x7e",
    "FP8_E4M3, -Infinity, 0xfe",
    "FP8_E4M3, 0.001953125, 0x01",
    "FP8_E4M3, 0.0009765625, 0x00",
    "FP8_E4M3, 0.00097656251, 0x01",
    "FP8_E4M3, 17, 0x58",
    "FP8_E4M3, 19, 0x5a",
    "FP8_E4M3, NaN, 0x7f",
    "FP16, NaN, 0x7e00",
    "BF16, NaN, 0x7fc0",
    "FP32, NaN, 0x7fc00000"
  })
  void roundsToNearestEven(Precision precision, double value, String bits) {
    assertThat(precision.encode(value)).isEqualTo(Integer.decode(bits));
  }

  @Test
  void knowsItsEpsilonAndMaximum() {
    assertThat(Precision.FP16.epsilon()).isEqualTo(0x1p-10);
    assertThat(Precision.BF16.max()).isEqualTo(Precision.BF16.decode(0x7f7f));
    assertThat(Precision.FP16.max()).isEqualTo(Precision.FP16.decode(0x7bff));
    assertThat(Precision.FP8_E4M3.max()).isEqualTo(Precision.FP8_E4M3.decode(0x7e));
  }
}
