package dev.flare.reference;

import static org.assertj.core.api.Assertions.assertThat;
import static org.assertj.core.api.Assertions.assertThatThrownBy;
import static org.assertj.core.api.Assertions.within;

import dev.flare.testing.Cases;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.Arrays;
import java.util.SplittableRandom;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;

class CacheReferenceTest {
  @Test
  void rowsGoToTheirSlotsAndNegativeOnesNowhere() {
    double[] cache = new double[4 * 2];
    Arrays.fill(cache, 9);
    double[] rows = {1, 2, 3, 4, 5, 6};
    assertThat(CacheReference.append(cache, 2, 1, rows, new int[] {3, -1, 0}, Precision.FP32, null))
        .containsExactly(5, 6, 9, 9, 9, 9, 1, 2);
    assertThat(cache).containsOnly(9);
    assertThatThrownBy(
            () ->
                CacheReference.append(cache, 2, 1, rows, new int[] {4, 0, 0}, Precision.FP32, null))
        .hasMessageContaining("slots[0] is 4");
  }

  @Test
  void quantisesAfterDividingByTheDescale() {
    double[] stored =
        CacheReference.append(
            new double[2],
            2,
            1,
            new double[] {17, 1000},
            new int[] {0},
            Precision.FP8_E4M3,
            new double[] {0.5, 2});
    assertThat(stored).containsExactly(32, 448); // 34 -> 32 or 36, to even; 500 saturates
  }

  @ParameterizedTest
  @CsvSource({"true", "false"})
  void rotationTurnsPairsAndLeavesTheRest(boolean interleaved) {
    int dim = 6;
    double[] rows = {1, 2, 3, 4, 5, 6};
    double[] cos = {9, 9, Math.cos(0.3), Math.cos(1.1)};
    double[] sin = {9, 9, Math.sin(0.3), Math.sin(1.1)};
    double[] turned = CacheReference.rotate(rows, 1, dim, 4, interleaved, cos, sin, new int[] {1});
    int[][] pairs = interleaved ? new int[][] {{0, 1}, {2, 3}} : new int[][] {{0, 2}, {1, 3}};
    for (int i = 0; i < 2; i++) {
      double a = rows[pairs[i][0]];
      double b = rows[pairs[i][1]];
      double angle = Math.atan2(b, a) + (i == 0 ? 0.3 : 1.1);
      assertThat(turned[pairs[i][0]]).isCloseTo(Math.hypot(a, b) * Math.cos(angle), within(1e-12));
      assertThat(turned[pairs[i][1]]).isCloseTo(Math.hypot(a, b) * Math.sin(angle), within(1e-12));
    }
    assertThat(turned[4]).isEqualTo(5);
    assertThat(turned[5]).isEqualTo(6);
  }

  @ParameterizedTest
  @CsvSource({
    "0, -13", // floor of 1e-4: 2^-13
    "0.0448, -13",
    "448, 0",
    "448.0001, 1",
    "224, -1",
    "225, 0",
    "57344, 7",
  })
  void latentScalesArePowersOfTwo(double amax, int exponent) {
    assertThat(CacheReference.latentScale(amax)).isEqualTo(Math.scalb(1.0, exponent));
  }

  @Test
  void latentRowsLieAsTheFormatSays() {
    double[] row = new double[CacheReference.LATENT + CacheReference.ROPE];
    row[0] = 448 * 4;
    row[1] = -4;
    row[130] = Double.NaN;
    row[131] = 3;
    row[512] = 1.5;
    row[575] = -2;
    byte[] bytes = CacheReference.encodeLatentRow(row);
    assertThat(bytes).hasSize(656);
    ByteBuffer b = ByteBuffer.wrap(bytes).order(ByteOrder.LITTLE_ENDIAN);
    assertThat(b.get(0)).isEqualTo((byte) 0x7e);
    assertThat(b.get(1)).isEqualTo((byte) 0xb8); // -1
    assertThat(b.get(130)).isEqualTo((byte) 0x7f);
    assertThat(b.getFloat(512)).isEqualTo(4f);
    assertThat(b.getFloat(516)).isEqualTo(0x1p-7f); // 3 / 448 = 0.0067
    assertThat(b.getFloat(520)).isEqualTo(0x1p-13f);
    assertThat(b.getShort(528)).isEqualTo((short) 0x3fc0);
    assertThat(b.getShort(654)).isEqualTo((short) 0xc000);
    double[] back = CacheReference.decodeLatentRows(bytes);
    assertThat(back[130]).isNaN();
    back[130] = row[130] = 0;
    assertThat(back).containsExactly(row);
  }

  @Test
  void quantisationErrsByItsPrecision() {
    double[] row = Cases.normals(new SplittableRandom(3), Precision.FP32, 576, 1);
    double[] back = CacheReference.decodeLatentRows(CacheReference.encodeLatentRow(row));
    for (int c = 0; c < 576; c++) {
      double half = c < 512 ? 0x1p-4 : 0x1p-8; // half of epsilon, relative
      double tiny = c < 512 ? 0x1p-16 : 0; // subnormals of a group with scale 2^-6
      assertThat(back[c]).isCloseTo(row[c], within(Math.abs(row[c]) * half + tiny));
    }
  }
}
