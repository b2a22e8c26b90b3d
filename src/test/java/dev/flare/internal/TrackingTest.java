package dev.flare.internal;

import static java.nio.charset.StandardCharsets.UTF_8;
import static org.assertj.core.api.Assertions.assertThat;

import dev.flare.ClosedException;
import dev.flare.DType;
import dev.flare.Device;
import dev.flare.Tensor;
import java.nio.file.Path;
import java.util.List;
import org.junit.jupiter.api.Tag;
import org.junit.jupiter.api.Test;

/** {@code -Dflare.track=true}, which is read once in a process. */
@Tag("classpath")
class TrackingTest {
  /** Leaks a tensor, uses a closed one, and prints what flare says. */
  static final class Program {
    private Program() {}

    public static void main(String[] args) {
      Tensor leaked = Tensor.zeros(DType.FP32, 1000);
      Tensor closed = Tensor.zeros(DType.FP32, 10);
      closed.close();
      Device.cpu().liveSites().forEach(System.out::println);
      try {
        closed.copy();
      } catch (ClosedException e) {
        System.out.println(e.getCause() + " " + e.getCause().getStackTrace()[3]);
      }
      System.out.println(leaked.isOpen());
    }
  }

  @Test
  void namesTheGuilty() throws Exception {
    assertThat(outputOf(Program.class.getName()))
        .contains("4000 bytes in 1 from dev.flare.internal.TrackingTest$Program.main")
        .contains("closed here")
        .endsWith("true\n");
  }

  @Test
  void namesWhoHoldsTheMemoryOfAFullGpu() throws Exception {
    assertThat(outputOf("dev.flare.FakeDeviceTest$Greedy"))
        .contains("could not be had; free are 600 of 1000, flare holds 400:\n  ")
        .contains("300 bytes in 1 from dev.flare.FakeDeviceTest$Greedy.main")
        .contains("100 bytes in 1 from dev.flare.FakeDeviceTest$Greedy.main")
        .endsWith("] true\n");
  }

  private static String outputOf(String program) throws Exception {
    List<String> command =
        List.of(
            Path.of(System.getProperty("java.home"), "bin", "java").toString(),
            "-cp",
            LoaderTest.classPath(),
            "--enable-native-access=ALL-UNNAMED",
            "-Dflare.track=true",
            program);
    Process process = new ProcessBuilder(command).redirectErrorStream(true).start();
    String out = new String(process.getInputStream().readAllBytes(), UTF_8);
    assertThat(process.waitFor()).as(out).isZero();
    return out;
  }
}
