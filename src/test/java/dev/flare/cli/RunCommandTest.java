package dev.flare.cli;

import static org.assertj.core.api.Assertions.assertThat;

import dev.flare.Shape;
import dev.flare.io.ElementType;
import dev.flare.io.Safetensors;
import dev.flare.io.TensorEntry;
import java.io.IOException;
import java.net.URISyntaxException;
import java.net.URL;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.stream.Stream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

class RunCommandTest {
  @TempDir private Path folder;

  private static Path golden(String name) {
    URL url =
        Objects.requireNonNull(
            RunCommandTest.class.getResource("/golden/" + name + ".safetensors"), name);
    try {
      return Path.of(url.toURI());
    } catch (URISyntaxException e) {
      throw new AssertionError(e);
    }
  }

  private static Cli run(CaseRunner runner, Object... args) {
    RunCommand command = new RunCommand();
    String[] words = Stream.of(args).map(Object::toString).toArray(String[]::new);
    return Cli.run(command, () -> command.run(runner), words);
  }

  @Test
  void everyGoldenFilePassesWithTheReference() throws IOException {
    List<Object> args = new ArrayList<>(List.of("--check"));
    try (Stream<Path> files = Files.list(golden("att_sink").getParent())) {
      files.filter(file -> file.toString().endsWith(".safetensors")).sorted().forEach(args::add);
    }
    Cli cli = run(FakeRunner.exact(), args.toArray());

    assertThat(cli.out().lines().filter(line -> line.startsWith("PASS "))).hasSize(18);
    assertThat(cli.out()).contains("18 passed, 0 failed");
    assertThat(cli.status()).isZero();
  }

  @Test
  void aResultThatIsOffFails() {
    Cli cli = run(FakeRunner.scaled(1.02), "--check", golden("att_sink"));

    assertThat(cli.status()).isEqualTo(1);
    assertThat(cli.out()).startsWith("FAIL  att_sink").contains("out 2.0e-02 > 5.0e-03");
  }

  @Test
  void writesItsResults() throws IOException {
    Path out = folder.resolve("out.safetensors");
    Cli cli = run(FakeRunner.exact(), "-o", out, golden("att_sink"));

    assertThat(cli.status()).isZero();
    assertThat(cli.out()).startsWith("RAN ");
    try (Safetensors written = Safetensors.open(out);
        Safetensors file = Safetensors.open(golden("att_sink"))) {
      assertThat(written.get("out").shape()).isEqualTo(file.get("out").shape());
      assertThat(written.get("lse").shape()).isEqualTo(file.get("lse").shape());
      assertThat(written.get("out").type()).isEqualTo(ElementType.F32);
    }
  }

  @Test
  void writesTheResultsOfSeveralFilesIntoAFolder() {
    Path out = folder.resolve("results");
    Cli cli = run(FakeRunner.exact(), "-o", out, golden("att_sink"), golden("kda_loggate_fp32"));

    assertThat(cli.status()).isZero();
    assertThat(out).isDirectoryContaining("glob:**/att_sink.safetensors");
    assertThat(out).isDirectoryContaining("glob:**/kda_loggate_fp32.safetensors");
  }

  @Test
  void aFileThatCannotBeUsedDoesNotStopTheOthers() {
    Cli cli = run(FakeRunner.exact(), "--check", folder.resolve("none"), golden("att_sink"));

    assertThat(cli.status()).isEqualTo(2);
    assertThat(cli.out())
        .contains("ERROR none", "no such file")
        .containsPattern("(?m)^PASS  att_sink")
        .contains("1 passed, 0 failed, 1 unusable");
  }

  @Test
  void hostileFilesAreErrorsOnOneLine() throws IOException {
    byte[] whole = Files.readAllBytes(golden("att_sink"));
    Path cut = Files.write(folder.resolve("cut"), Arrays.copyOf(whole, 3000));
    Path empty = Files.write(folder.resolve("empty"), new byte[0]);
    Path huge = Files.write(folder.resolve("huge"), header("{}", Long.MAX_VALUE));
    Path negative = Files.write(folder.resolve("negative"), header("{}", -1));
    Path noJson = Files.write(folder.resolve("noJson"), header("{\"q\":", 5));
    Path plain =
        Files.write(folder.resolve("plain"), header("{\"__metadata__\":{\"a\":\"b\"}}", 26));
    Cli cli = run(FakeRunner.exact(), "--check", cut, empty, huge, negative, noJson, plain);

    assertThat(cli.status()).isEqualTo(2);
    assertThat(cli.out().lines().filter(line -> line.startsWith("ERROR "))).hasSize(6);
    assertThat(cli.out().lines()).hasSize(7);
    assertThat(cli.out())
        .contains("0 passed, 0 failed, 6 unusable")
        .contains("__metadata__ has no params");
  }

  @ParameterizedTest
  @ValueSource(
      strings = {
        "{\"kernel\": \"conv\"}",
        "{\"kernel\": 7}",
        "{}",
        "[1, 2]",
        "not json",
        "{\"kernel\": \"attention\", \"window\": [1]}",
        "{\"kernel\": \"attention\", \"causal\": \"yes\"}",
        "{\"kernel\": \"attention\", \"softcap\": \"high\"}",
        "{\"kernel\": \"attention_paged\"}",
        "{\"kernel\": \"kda\"}"
      })
  void wrongParamsAreErrorsOnOneLine(String params) throws IOException {
    TensorEntry q = TensorEntry.ofValues("q", ElementType.F32, Shape.of(1, 1, 1, 1), 1);
    TensorEntry k = TensorEntry.ofValues("k", ElementType.F32, Shape.of(1, 1, 1, 1), 1);
    TensorEntry v = TensorEntry.ofValues("v", ElementType.F32, Shape.of(1, 1, 1, 1), 1);
    TensorEntry out = TensorEntry.ofValues("out", ElementType.F32, Shape.of(1, 1, 1, 1), 1);
    Path file = folder.resolve("case.safetensors");
    Safetensors.write(file, List.of(q, k, v, out), Map.of("params", params));
    Cli cli = run(FakeRunner.exact(), "--check", file);

    assertThat(cli.status()).isEqualTo(2);
    assertThat(cli.out().lines()).hasSize(2);
    assertThat(cli.out()).startsWith("ERROR case.safetensors");
  }

  @Test
  void aFileWithoutResultsCannotBeChecked() throws IOException {
    TensorEntry q = TensorEntry.ofValues("q", ElementType.F32, Shape.of(1, 1, 1, 1), 1);
    TensorEntry k = TensorEntry.ofValues("k", ElementType.F32, Shape.of(1, 1, 1, 1), 1);
    TensorEntry v = TensorEntry.ofValues("v", ElementType.F32, Shape.of(1, 1, 1, 1), 1);
    Path file = folder.resolve("case.safetensors");
    Safetensors.write(file, List.of(q, k, v), Map.of("params", "{\"kernel\": \"attention\"}"));
    Cli cli = run(FakeRunner.exact(), "--check", file);

    assertThat(cli.status()).isEqualTo(2);
    assertThat(cli.out()).contains("no results to check");
  }

  @Test
  void wantsAFile() {
    Cli cli = Cli.run("run", "--check");

    assertThat(cli.status()).isEqualTo(2);
    assertThat(cli.err()).contains("FILE");
  }

  private static byte[] header(String json, long length) {
    byte[] text = json.getBytes(StandardCharsets.UTF_8);
    return ByteBuffer.allocate(8 + text.length)
        .order(ByteOrder.LITTLE_ENDIAN)
        .putLong(length)
        .put(text)
        .array();
  }
}
