package dev.flare.reference;

import static org.assertj.core.api.Assertions.assertThat;

import dev.flare.io.CaseFile;
import dev.flare.testing.Golden;
import java.io.IOException;
import java.nio.file.Path;
import java.util.List;
import java.util.Map;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.MethodSource;

/** The references reproduce every golden file. */
class GoldenTest {
  /**
   * Results are stored in float32, which rounds each by at most 2^-24 = 6e-8 of its size; two
   * float64 evaluations differ by far less. A wrong formula is off by far more.
   */
  private static final double RELATIVE = 1e-7;

  /** The largest stored LSE is below 64, where float32 rounds by at most 2^-19 = 2e-6. */
  private static final double LSE = 2e-6;

  static List<Path> files() {
    return Golden.files();
  }

  @Test
  void theFilesAreThere() {
    assertThat(files()).hasSizeGreaterThanOrEqualTo(18);
  }

  @ParameterizedTest
  @MethodSource("files")
  void isReproduced(Path file) throws IOException {
    try (CaseFile c = CaseFile.open(file)) {
      Map<String, double[]> results = Golden.reference(c);
      assertThat(results).containsKey("out");
      results.forEach(
          (name, values) -> {
            ErrorMetrics errors = ErrorMetrics.of(c.tensor(name).toDoubles(), values);
            assertThat(
                    name.equals("lse")
                        ? errors.absoluteWithin(LSE)
                        : errors.relativeWithin(RELATIVE))
                .as("%s of %s: %s", name, file.getFileName(), errors)
                .isTrue();
          });
    }
  }
}
