package dev.flare;

import static org.assertj.core.api.Assertions.assertThat;

import java.util.SplittableRandom;
import org.junit.jupiter.api.Test;

/** Every bit pattern, and rounding against exact nearest-value searches. */
class FloatCodecTest {
  @Test
  void bf16RoundTripsEveryPattern() {
    for (int bits = 0; bits < 1 << 16; bits++) {
      float value = FloatCodec.fromBf16((short) bits);
      int back = FloatCodec.toBf16(value) & 0xffff;
      if (Float.isNaN(value)) {
        assertThat(back & 0x7fc0).as("%04x stays a quiet NaN", bits).isEqualTo(0x7fc0);
        assertThat(back & 0x8000).as("%04x keeps its sign", bits).isEqualTo(bits & 0x8000);
      } else {
        assertThat(back).isEqualTo(bits);
      }
    }
  }

  @Test
  void bf16RoundsToNearestEven() {
    SplittableRandom random = new SplittableRandom(0x5EED);
    for (int i = 0; i < 1_000_000; i++) {
      float x = Float.intBitsToFloat(random.nextInt());
      if (!Float.isFinite(x)) {
        continue;
      }
      int down = Float.floatToRawIntBits(x) >>> 16;
      double below = Math.abs((double) x - Float.intBitsToFloat(down << 16));
      // The next pattern away from zero; past the largest finite one lies 2^128, not infinity.
      int up = down + 1;
      double upper =
          (up & 0x7fff) == 0x7f80 ? Math.copySign(0x1p128, x) : Float.intBitsToFloat(up << 16);
      double above = Math.abs(x - upper);
      int want = below < above || (below == above && (down & 1) == 0) ? down : up;
      assertThat(FloatCodec.toBf16(x) & 0xffff).as("%s", x).isEqualTo(want & 0xffff);
    }
  }

  @Test
  void bf16TiesGoToEven() {
    assertThat(FloatCodec.toBf16(Float.intBitsToFloat(0x3f808000))).isEqualTo((short) 0x3f80);
    assertThat(FloatCodec.toBf16(Float.intBitsToFloat(0x3f818000))).isEqualTo((short) 0x3f82);
    assertThat(FloatCodec.toBf16(Float.MAX_VALUE)).isEqualTo((short) 0x7f80);
  }

  @Test
  void e4m3RoundTripsEveryPattern() {
    for (int bits = 0; bits < 256; bits++) {
      float value = FloatCodec.fromE4m3((byte) bits);
      assertThat(FloatCodec.toE4m3(value)).as("%02x is %s", bits, value).isEqualTo((byte) bits);
    }
    assertThat(FloatCodec.fromE4m3((byte) 0x7e)).isEqualTo(448);
    assertThat(FloatCodec.fromE4m3((byte) 0x01)).isEqualTo(0x1p-9f);
    assertThat(FloatCodec.fromE4m3((byte) 0x08)).isEqualTo(0x1p-6f);
  }

  @Test
  void e4m3RoundsToNearestEvenAndSaturates() {
    SplittableRandom random = new SplittableRandom(0x5EED);
    for (int i = 0; i < 200_000; i++) {
      float x = (float) Math.scalb(random.nextDouble() + 1, random.nextInt(-13, 10));
      int want = 0;
      double best = Double.MAX_VALUE;
      for (int code = 0; code < 0x7f; code++) {
        double distance = Math.abs((double) x - FloatCodec.fromE4m3((byte) code));
        if (distance < best || (distance == best && (code & 1) == 0)) {
          best = distance;
          want = code;
        }
      }
      assertThat(FloatCodec.toE4m3(x)).as("%s", x).isEqualTo((byte) want);
      assertThat(FloatCodec.toE4m3(-x)).as("-%s", x).isEqualTo((byte) (want | 0x80));
    }
    assertThat(FloatCodec.toE4m3(Float.POSITIVE_INFINITY)).isEqualTo((byte) 0x7e);
    assertThat(FloatCodec.toE4m3(-1e9f)).isEqualTo((byte) 0xfe);
    assertThat(FloatCodec.toE4m3(Float.NaN)).isEqualTo((byte) 0x7f);
    assertThat(FloatCodec.toE4m3(-0f)).isEqualTo((byte) 0x80);
  }
}
