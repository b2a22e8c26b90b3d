package dev.flare.testing;

import static org.assertj.core.api.Assertions.assertThat;

import dev.flare.reference.KdaResult;
import java.util.Arrays;
import java.util.stream.Stream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.MethodSource;

/** Random cases are what they promise: repeatable, and with results that are numbers. */
class CasesTest {
  static Stream<Cases.Attention> attention() {
    return Cases.stream(0x5EED, 60, Cases::attention);
  }

  static Stream<Cases.Mla> mla() {
    return Cases.stream(0x5EED, 25, Cases::mla);
  }

  static Stream<Cases.Kda> kda() {
    return Cases.stream(0x5EED, 40, Cases::kda);
  }

  static Stream<Cases.KdaDecode> kdaDecode() {
    return Cases.stream(0x5EED, 40, Cases::kdaDecode);
  }

  @ParameterizedTest(name = "{0}")
  @MethodSource("attention")
  void attentionSeesNoPoison(Cases.Attention c) {
    assertThat(c.reference().out()).doesNotContain(Double.NaN);
    assertThat(c.reference().lse()).doesNotContain(Double.NaN);
  }

  @ParameterizedTest(name = "{0}")
  @MethodSource("mla")
  void latentAttentionSeesNoPoison(Cases.Mla c) {
    assertThat(c.reference().out()).doesNotContain(Double.NaN);
    assertThat(c.reference().lse()).doesNotContain(Double.NaN);
  }

  @ParameterizedTest(name = "{0}")
  @MethodSource("kda")
  void theDeltaRuleStaysFinite(Cases.Kda c) {
    KdaResult result = c.reference();
    assertThat(Arrays.stream(result.out()).allMatch(x -> Math.abs(x) < 1e6)).isTrue();
    assertThat(Arrays.stream(result.finalState()).allMatch(x -> Math.abs(x) < 1e6)).isTrue();
  }

  @ParameterizedTest(name = "{0}")
  @MethodSource("kdaDecode")
  void decodeStaysFinite(Cases.KdaDecode c) {
    KdaResult result = c.reference();
    assertThat(Arrays.stream(result.out()).allMatch(x -> Math.abs(x) < 1e6)).isTrue();
    assertThat(Arrays.stream(result.finalState()).allMatch(x -> Math.abs(x) < 1e6)).isTrue();
  }

  @Test
  void aSeedIsACase() {
    Cases.Attention once = Cases.attention(7);
    Cases.Attention again = Cases.attention(7);
    assertThat(again.name()).isEqualTo(once.name()).endsWith("seed=0x7");
    assertThat(again.q()).containsExactly(once.q());
    assertThat(Cases.attention(8).name()).isNotEqualTo(once.name());
  }

  @Test
  void inputsAreNumbersOfTheirPrecision() {
    Cases.stream(0, 20, Cases::kda)
        .forEach(
            c -> {
              assertThat(c.precision().round(c.inputs().k())).containsExactly(c.inputs().k());
              assertThat(c.precision().round(c.inputs().g())).containsExactly(c.inputs().g());
              assertThat(c.precision().round(c.inputs().beta())).containsExactly(c.inputs().beta());
            });
  }
}
