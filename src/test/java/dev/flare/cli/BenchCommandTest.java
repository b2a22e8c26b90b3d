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
  void groupedTablesJoinPeersAndCheckEachRow() throws IOException {
    Flare.Status status = Flare.status();
    assumeTrue(status.toString().startsWith("library: ready"), status::toString);
    Path peers = folder.resolve("peers.json");
    Files.writeString(
        peers,
        """
        {"environment": {"gpu": "H200"}, "results": [
          {"row": "mla-prefill bf16 b1 n4096 h16",
           "peer": "cuBLAS up-projection alone", "median_us": 1e6},
          {"row": "kda-decode bf16 b64 h32", "peer": "fla", "median_us": 3e6}]}
        """);
    Path stored = folder.resolve("stored.json");
    Files.writeString(
        stored,
        """
        {"stored": "run of May", "results": [
          {"row": "mla-prefill bf16 b1 n4096 h16", "peer": "cuBLAS + cuDNN", "median_us": 2e6}]}
        """);
    Path page = folder.resolve("groups.md");
    Path figures = folder.resolve("groups.json");
    Path chart = folder.resolve("groups.svg");
    Cli cli =
        Cli.run(
            "bench",
            "--quick",
            "--device",
            "cpu",
            "--seconds",
            "0.001",
            "--group",
            "mla-prefill,kda-decode,varlen,copies,host",
            "--peers",
            peers + "," + stored,
            "--markdown",
            page.toString(),
            "--json",
            figures.toString(),
            "--svg",
            chart.toString());

    assertThat(cli.status()).as(cli.out() + cli.err()).isZero();
    assertThat(cli.out())
        .contains("peers' gpu: H200")
        .containsPattern("13 rows timed, 1 not, 0 wrong");
    assertThat(Files.readString(page))
        .contains("## kda-decode: Kimi Delta Attention, one token")
        .containsPattern("mla-prefill bf16 b1 n4096 h16 .*cuBLAS \\+ cuDNN \\d+\\.\\d\\d\\*")
        .contains("cuBLAS + flare's attention")
        .doesNotContain("up-projection alone")
        .contains("Ratios with *: run of May.")
        .contains("--group mla-prefill,kda-decode,varlen,copies,host --quick --peers FILE");
    Map<String, Object> report = JSON.std.mapFrom(Files.readString(figures));
    assertThat((List<?>) report.get("results"))
        .hasSize(14)
        .allSatisfy(
            row -> {
              if (row instanceof Map<?, ?> fields && fields.containsKey("relative_error")) {
                assertThat(fields.get("within_tolerance")).isEqualTo(true);
              }
            });
    assertThat(Files.readString(chart)).startsWith("<svg ").contains("kda-decode bf16 b64 h32");
  }

  @Test
  void quotesGroupsThatItDoesNotKnow() {
    Cli cli = Cli.run("bench", "--group", "decode,nonsense");

    assertThat(cli.status()).isEqualTo(2);
    assertThat(cli.err()).contains("nonsense").contains("mla-prefill");
  }

  @Test
  void refusesPeersThatAreNone() throws IOException {
    Path file = Files.writeString(folder.resolve("x.json"), "{\"results\": [{\"row\": 3}]}");
    Cli cli = Cli.run("bench", "--device", "cpu", "--group", "host", "--peers", file.toString());

    assertThat(cli.status()).isEqualTo(2);
    assertThat(cli.err()).contains("is no file of peers");
  }

  @Test
  void aRowWithoutATimeSaysWhy() {
    GroupReport.Row row =
        GroupReport.Row.without(BenchGroup.DECODE, "decode x", "unsupported: no kernel");

    assertThat(GroupReport.cells(row)).contains("decode x", "unsupported: no kernel");
    assertThat(new GroupReport("c", Map.of(), List.of(row)).markdown())
        .contains("unsupported: no kernel");
  }

  @Test
  void mediansAndQuartiles() {
    BenchTimer.Timing timing = BenchTimer.timing(new double[] {9, 1, 5, 2, 8, 3, 7, 4, 6});

    assertThat(timing.micros()).isEqualTo(5);
    assertThat(timing.spread()).isEqualTo(0.8);
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
