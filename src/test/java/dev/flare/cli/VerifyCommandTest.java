package dev.flare.cli;

import static org.assertj.core.api.Assertions.assertThat;

import dev.flare.UnsupportedException;
import java.util.function.UnaryOperator;
import org.junit.jupiter.api.Test;

class VerifyCommandTest {
  private static Cli verify(CaseRunner runner, String... args) {
    VerifyCommand command = new VerifyCommand();
    return Cli.run(command, () -> command.verify(runner, "a fake"), args);
  }

  @Test
  void exactResultsPassInEachKernelAndFormat() {
    FakeRunner runner = FakeRunner.exact();
    Cli cli = verify(runner);

    assertThat(cli.status()).isZero();
    assertThat(runner.cases).isEqualTo(CaseGrid.entries().size());
    assertThat(cli.out())
        .contains(runner.cases + " passed, 0 failed")
        .containsPattern("attention +fp32 +causal ")
        .containsPattern("window +fp16 ")
        .containsPattern("mla +bf16 ")
        .containsPattern("kda +fp32 +softplus ")
        .doesNotContain("MISS");
  }

  /** One per cent off is beyond every tolerance of the format. */
  @Test
  void resultsThatAreOffMissAndSaySo() {
    Cli cli = verify(FakeRunner.scaled(1.01), "--kernel", "mla", "--dtype", "fp32");

    assertThat(cli.status()).isEqualTo(1);
    assertThat(cli.out()).contains("0 passed").containsPattern("(?m)^MISS mla fp32 .*relative 1");
  }

  @Test
  void aNanIsAMiss() {
    UnaryOperator<double[]> poison =
        values -> {
          double[] changed = values.clone();
          if (changed.length > 3) {
            changed[3] = Double.NaN;
          }
          return changed;
        };
    Cli cli = verify(new FakeRunner(poison, true), "--kernel", "kda", "--dtype", "bf16");

    assertThat(cli.status()).isEqualTo(1);
    assertThat(cli.out()).contains("MISS kda bf16").contains("NaN");
  }

  @Test
  void aKernelThatDoesNotRunIsAMissAndDoesNotHideTheOthers() {
    UnaryOperator<double[]> refusal =
        values -> {
          throw new UnsupportedException("no kernel for this");
        };
    Cli cli = verify(new FakeRunner(refusal, true), "--kernel", "kda", "--dtype", "bf16");

    assertThat(cli.status()).isEqualTo(1);
    assertThat(cli.out().lines().filter(line -> line.endsWith("no kernel for this")))
        .hasSizeGreaterThan(5);
  }

  @Test
  void bitsThatChangeFromCallToCallAreAMiss() {
    Cli cli =
        verify(
            new FakeRunner(UnaryOperator.identity(), false),
            "--kernel",
            "window",
            "--dtype",
            "fp16");

    assertThat(cli.status()).isEqualTo(1);
    assertThat(cli.out()).contains("two calls gave different bits");
  }

  @Test
  void keepsToTheKernelsAndFormatsAskedFor() {
    FakeRunner runner = FakeRunner.exact();
    Cli cli = verify(runner, "--kernel", "kda,window", "--dtype", "FP32");

    assertThat(cli.status()).isZero();
    assertThat(cli.out()).contains("kda", "window").doesNotContain("mla", "bf16");
  }

  @Test
  void refusesKernelsAndDevicesThatDoNotExist() {
    Cli kernel = Cli.run("verify", "--kernel", "kdb");
    assertThat(kernel.status()).isEqualTo(2);
    assertThat(kernel.err()).contains("'kdb'").contains("KDA");

    Cli device = Cli.run("verify", "--device", "tpu");
    assertThat(device.status()).isEqualTo(2);
    assertThat(device.err()).contains("'tpu'").contains("cpu").contains("cuda:0");
  }
}
