package dev.flare.reference;

import static org.assertj.core.api.Assertions.assertThat;
import static org.assertj.core.api.Assertions.assertThatThrownBy;
import static org.assertj.core.api.Assertions.within;

import dev.flare.reference.Tolerances.Operation;
import org.junit.jupiter.api.Test;

class ErrorMetricsTest {
  private static final double INFINITY = Double.POSITIVE_INFINITY;

  @Test
  void measuresTheFrobeniusNorm() {
    ErrorMetrics errors = ErrorMetrics.of(new double[] {3, 4.5, 0}, new double[] {3, 4, 0});
    assertThat(errors.relative()).isCloseTo(0.1, within(1e-15));
    assertThat(errors.maxAbsolute()).isEqualTo(0.5);
    assertThat(errors.worst()).isEqualTo(1);
    assertThat(errors.relativeWithin(0.11)).isTrue();
    assertThat(errors.relativeWithin(0.09)).isFalse();
    assertThat(errors.absoluteWithin(0.5)).isTrue();
    assertThat(ErrorMetrics.of(new float[] {3, 4.5f, 0}, new double[] {3, 4, 0})).isEqualTo(errors);
  }

  @Test
  void equalInfinitiesAgree() {
    ErrorMetrics errors = ErrorMetrics.of(new double[] {-INFINITY, 2}, new double[] {-INFINITY, 2});
    assertThat(errors.relative()).isZero();
    assertThat(errors.absoluteWithin(0)).isTrue();
  }

  @Test
  void anythingElseNotFiniteFails() {
    double[][] pairs = {
      {Double.NaN, 1},
      {1, Double.NaN},
      {Double.NaN, Double.NaN},
      {INFINITY, 1},
      {1, -INFINITY},
      {INFINITY, -INFINITY}
    };
    for (double[] pair : pairs) {
      ErrorMetrics errors = ErrorMetrics.of(new double[] {5, pair[0]}, new double[] {1, pair[1]});
      assertThat(errors.notFinite()).isEqualTo(1);
      assertThat(errors.worst()).isEqualTo(1);
      assertThat(errors.relativeWithin(INFINITY)).isFalse();
      assertThat(errors.absoluteWithin(INFINITY)).isFalse();
    }
  }

  @Test
  void aZeroReferenceWantsZeros() {
    assertThat(ErrorMetrics.of(new double[2], new double[2]).relative()).isZero();
    assertThat(ErrorMetrics.of(new double[] {0, 1e-30}, new double[2]).relative())
        .isEqualTo(INFINITY);
    assertThat(ErrorMetrics.of(new double[0], new double[0]).worst()).isEqualTo(-1);
    assertThatThrownBy(() -> ErrorMetrics.of(new double[1], new double[2]))
        .hasMessageContaining("out has 1 elements");
  }

  @Test
  void tolerancesAreTheAcceptanceTable() {
    assertThat(Tolerances.relative(Operation.ATTENTION, Precision.FP32)).isEqualTo(2e-6);
    assertThat(Tolerances.relative(Operation.MLA, Precision.FP16)).isEqualTo(1.5e-3);
    assertThat(Tolerances.relative(Operation.KDA, Precision.BF16)).isEqualTo(6e-3);
    assertThat(Tolerances.relative(Operation.KDA_COLLINEAR, Precision.BF16)).isEqualTo(1.2e-2);
    assertThat(Tolerances.relative(Operation.MLA, Precision.FP8_E4M3)).isEqualTo(4e-2);
    assertThat(Tolerances.lse(Precision.FP16)).isEqualTo(1e-3);
    assertThatThrownBy(() -> Tolerances.relative(Operation.KDA_COLLINEAR, Precision.FP32))
        .hasMessageContaining("BF16 inputs only");
  }
}
