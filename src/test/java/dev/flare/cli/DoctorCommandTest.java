package dev.flare.cli;

import static org.assertj.core.api.Assertions.assertThat;

import dev.flare.Flare;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;

class DoctorCommandTest {
  @Test
  void tellsWhatItFoundAndWhetherTheLibraryWorks() {
    Cli cli = Cli.run("doctor", "--device", "cpu");

    assertThat(cli.out())
        .containsPattern("(?m)^ok    Java +\\d+")
        .containsPattern("(?m)^ok    native access +given to ")
        .containsPattern("(?m)^ok    glibc +\\d+\\.\\d+, libflare needs 2\\.34$")
        .containsPattern("(?m)^(ok|FAIL)  +libflare.so ");
    assertThat(cli.status()).isEqualTo(Flare.status().library().isReady() ? 0 : 1);
  }

  @Test
  void aGpuThatIsAskedForAndNotThereHasARemedy() {
    Cli cli = Cli.run("doctor", "--device", "cuda:999");

    assertThat(cli.status()).isEqualTo(1);
    assertThat(cli.out()).containsPattern("(?m)^FAIL  device ").contains("what to do: ");
  }

  @Test
  void refusesADeviceThatDoesNotExist() {
    Cli cli = Cli.run("doctor", "--device", "tpu");

    assertThat(cli.status()).isEqualTo(2);
    assertThat(cli.err()).contains("'tpu'").contains("cpu").contains("cuda:0");
  }

  @ParameterizedTest
  @CsvSource({
    "2.34, 2.34, true",
    "2.36, 2.34, true",
    "3.0, 2.34, true",
    "2.31, 2.34, false",
    "2.4, 2.34, false",
    "1.99, 2.34, false"
  })
  void comparesVersionsByNumber(String have, String want, boolean enough) {
    assertThat(Host.atLeast(have, want)).isEqualTo(enough);
  }
}
