package dev.flare.cli;

import static org.assertj.core.api.Assertions.assertThat;

import dev.flare.reference.Precision;
import java.util.Arrays;
import java.util.Map;
import org.junit.jupiter.api.Test;

class CaseGridTest {
  @Test
  void coversEachKernelInEachFormat() {
    for (CaseGrid.Group group : CaseGrid.Group.values()) {
      for (Precision precision : new Precision[] {Precision.FP32, Precision.FP16, Precision.BF16}) {
        assertThat(CaseGrid.entries())
            .as("%s in %s", group, precision)
            .filteredOn(e -> e.group() == group && e.precision() == precision)
            .hasSizeGreaterThan(5);
      }
    }
  }

  @Test
  void theReferenceOfEachCaseIsFinite() {
    for (CaseGrid.Entry entry : CaseGrid.entries()) {
      KernelCase c = entry.maker().get();
      Map<String, double[]> expected = CaseReference.of(c);
      assertThat(Arrays.stream(expected.get("out")).allMatch(Double::isFinite))
          .as(c.name())
          .isTrue();
      assertThat(c.shape()).isNotEmpty();
    }
  }

  @Test
  void aCaseIsTheSameEachTime() {
    CaseGrid.Entry entry = CaseGrid.entries().getFirst();
    assertThat(entry.maker().get().tensor("q").values())
        .isEqualTo(entry.maker().get().tensor("q").values());
  }
}
