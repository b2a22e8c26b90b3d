package dev.flare.cli;

import static org.assertj.core.api.Assertions.assertThat;

import java.nio.file.NoSuchFileException;
import org.junit.jupiter.api.Test;

class MainTest {
  @Test
  void helpOfTheCommandAndOfEachSubcommandWorks() {
    Cli help = Cli.run("--help");
    assertThat(help.status()).isZero();
    assertThat(help.out()).contains("Usage: flare", "kv-cache");

    Cli sub = Cli.run("kv-cache", "--help");
    assertThat(sub.status()).isZero();
    assertThat(sub.out()).contains("Usage: flare kv-cache", "--latent");
  }

  @Test
  void tellsItsVersion() {
    Cli cli = Cli.run("--version");
    assertThat(cli.status()).isZero();
    assertThat(cli.out()).startsWith("flare ");
  }

  @Test
  void saysWhatThereIsWhenNothingOrSomethingUnknownIsAsked() {
    Cli nothing = Cli.run();
    assertThat(nothing.status()).isEqualTo(2);
    assertThat(nothing.err()).contains("no command given");

    Cli unknown = Cli.run("atention");
    assertThat(unknown.status()).isEqualTo(2);
    assertThat(unknown.err()).contains("atention");
  }

  @Test
  void errorTextsFitOnOneLine() {
    assertThat(Main.oneLine(new IllegalStateException("a\n  b\r\nc"))).isEqualTo("a; b; c");
    assertThat(Main.oneLine(new IllegalStateException())).isEqualTo("IllegalStateException");
    assertThat(Main.oneLine(new NoSuchFileException("x.safetensors")))
        .isEqualTo("no such file: x.safetensors");
  }
}
