package dev.flare.cli;

import static org.assertj.core.api.Assertions.assertThat;
import static org.junit.jupiter.api.Assumptions.assumeTrue;

import dev.flare.Flare;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.stream.Stream;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Tag;
import org.junit.jupiter.api.Test;

/** The commands on a GPU. */
@Tag("gpu")
class GpuCommandsTest {
  private static final String DEVICE = System.getProperty("flare.test.device", "cuda:0");

  @BeforeEach
  void needsGpu() {
    assumeTrue(Flare.status().cuda().isReady(), () -> "no GPU: " + Flare.status().cuda());
  }

  @Test
  void verifyFindsNoMiss() {
    Cli cli = Cli.run("verify", "--device", DEVICE);

    assertThat(cli.out()).contains("attention", "window", "mla", "kda").doesNotContain("MISS");
    assertThat(cli.status()).as(cli.out() + cli.err()).isZero();
  }

  @Test
  void goldenFilesPass() throws Exception {
    Path folder = Path.of(System.getProperty("flare.golden", "src/test/resources/golden"));
    List<String> words = new ArrayList<>(List.of("run", "--check", "--device", DEVICE));
    try (Stream<Path> files = Files.list(folder)) {
      files
          .filter(file -> file.toString().endsWith(".safetensors"))
          .sorted()
          .forEach(file -> words.add(file.toString()));
    }
    Cli cli = Cli.run(words.toArray(String[]::new));

    assertThat(cli.status()).as(cli.out() + cli.err()).isZero();
    assertThat(cli.out()).contains((words.size() - 4) + " passed, 0 failed");
    assertThat(words).hasSizeGreaterThan(10);
  }

  @Test
  void doctorFindsTheGpuHealthy() {
    Cli cli = Cli.run("doctor", "--device", DEVICE);

    assertThat(cli.status()).as(cli.out()).isZero();
    assertThat(cli.out()).contains("ran a kernel").containsPattern("compute capability \\d+\\.\\d");
  }

  @Test
  void benchTimesSmallRows() {
    Cli cli =
        Cli.run(
            "bench",
            "--quick",
            "--device",
            DEVICE,
            "--seconds",
            "0.001",
            "--group",
            "portable,kda-decode,mla,decode,copies,host");

    assertThat(cli.status()).as(cli.out() + cli.err()).isZero();
    assertThat(cli.out()).doesNotContain("FAILED").doesNotContain("unsupported");
  }
}
