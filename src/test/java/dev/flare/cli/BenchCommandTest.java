package dev.flare.cli;

import static org.assertj.core.api.Assertions.assertThat;
import static org.junit.jupiter.api.Assumptions.assumeTrue;

import com.fasterxml.jackson.jr.ob.JSON;
import dev.flare.Flare;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import java.util.Map;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

class BenchCommandTest {
  @TempDir private Path folder;

  @Test
  void timesEachKernelAndWritesThreeReports() throws IOException {
    assumeTrue(Flare.status().library().isReady(), () -> Flare.status().toString());
    Path page = folder.resolve("bench.md");
    Path figures = folder.resolve("bench.json");
    Path chart = folder.resolve("bench.svg");
    Cli cli =
        Cli.run(
            "bench",
            "--quick",
            "--device",
            "cpu",
            "--seconds",
            "0.01",
            "--markdown",
            page.toString(),
            "--json",
            figures.toString(),
            "--svg",
            chart.toString());

    assertThat(cli.status()).as(cli.out() + cli.err()).isZero();
    assertThat(cli.out())
        .contains("sliding window", "MLA prefill", "MLA decode", "KDA decode", "GFLOP/s", "GB/s");
    assertThat(Files.readString(page))
        .contains("scripts/bench --quick --device cpu")
        .containsPattern("(?m)^\\| attention +\\| fp32 +\\| causal");
    Map<String, Object> report = JSON.std.mapFrom(Files.readString(figures));
    assertThat((List<?>) report.get("results")).hasSize(11);
    assertThat(Files.readString(chart)).startsWith("<svg ").endsWith("</svg>\n");
  }

  @Test
  void refusesTimesThatAreNone() {
    assertThat(Cli.run("bench", "--seconds", "0").err()).contains("--seconds must be more than 0");
    assertThat(Cli.run("bench", "--seconds", "NaN").status()).isEqualTo(2);
  }

  @Test
  void chartsEscapeTheirText() {
    BenchReport.Row row =
        new BenchReport.Row("a<b", "fp32", "m&m", "N1", 1, 0, 2, "GB/s", 1e-7, "k");
    assertThat(new BenchReport(Map.of(), List.of(row)).svg("t"))
        .contains("a&lt;b fp32 m&amp;m N1")
        .doesNotContain("a<b");
  }
}
