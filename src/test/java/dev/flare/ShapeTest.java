package dev.flare;

import static org.assertj.core.api.Assertions.assertThat;
import static org.assertj.core.api.Assertions.assertThatThrownBy;

import org.junit.jupiter.api.Test;

class ShapeTest {
  @Test
  void countsElementsAndStrides() {
    Shape s = Shape.of(2, 3, 4);
    assertThat(s.elements()).isEqualTo(24);
    assertThat(s.contiguousStrides()).containsExactly(12, 4, 1);
    assertThat(s.dim(-1)).isEqualTo(4);
    assertThat(s).hasToString("[2, 3, 4]").isEqualTo(Shape.of(2, 3, 4));
  }

  @Test
  void scalarHasOneElement() {
    assertThat(Shape.of().elements()).isEqualTo(1);
  }

  @Test
  void refusesOverflowUnlessEmpty() {
    assertThatThrownBy(() -> Shape.of(Long.MAX_VALUE, 2))
        .isInstanceOf(InvalidArgumentException.class)
        .hasMessageContaining("shape: got [9223372036854775807, 2]");
    assertThat(Shape.of(Long.MAX_VALUE, 2, 0).elements()).isZero();
  }

  @Test
  void refusesNegativeExtentsAndUnknownAxes() {
    assertThatThrownBy(() -> Shape.of(2, -1))
        .isInstanceOf(InvalidArgumentException.class)
        .hasMessageContaining("got [2, -1]");
    assertThatThrownBy(() -> Shape.of(2).dim(1))
        .isInstanceOf(InvalidArgumentException.class)
        .hasMessageContaining("axis: got 1");
  }
}
