package dev.flare;

import static java.nio.charset.StandardCharsets.UTF_8;
import static org.assertj.core.api.Assertions.assertThat;
import static org.assertj.core.api.Assertions.assertThatThrownBy;

import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.Test;

/** The device layer on a real GPU. */
@GpuTest
@RequiresLibrary
class GpuDeviceTest extends DeviceContract {
  @Override
  Device gpu() {
    return Device.cuda(0);
  }

  @Test
  void theGpuIsTheBestDevice() {
    assertThat(Device.all()).contains(gpu());
    assertThat(Device.best()).isEqualTo(gpu());
    assertThat(Device.cuda(0)).isSameAs(gpu());
    assertThatThrownBy(() -> Device.cuda(1000))
        .isInstanceOf(DeviceException.class)
        .hasMessageContaining("cuda(1000): there are ");
  }

  @Test
  void kernelsRunOnTheGpu() {
    try (Tensor q = Tensor.randn(gpu(), 1, DType.BF16, Shape.of(1, 128, 2, 128));
        AttentionPlan plan = FlashAttention.causal().plan(q, q, q);
        AttentionPlan portable =
            FlashAttention.causal().withKernel(Kernel.PORTABLE).plan(q, q, q)) {
      assertThat(plan.kernelName()).doesNotContain("cpu");
      assertThat(portable.kernelName()).contains("sm80");
      boolean forced = !System.getProperty("flare.kernel", "").isEmpty();
      if (gpu().properties().capability() == 90 && !forced) {
        assertThat(plan.kernelName()).contains("sm90");
      }
    }
  }

  @Test
  void launchesAreQueuedNotWaitedFor() {
    try (Tensor q = Tensor.randn(gpu(), 1, DType.BF16, Shape.of(4, 8192, 16, 128));
        AttentionPlan plan = FlashAttention.causal().plan(q, q, q);
        Tensor out = plan.emptyOutput();
        Event start = Event.create(gpu());
        Event end = Event.create(gpu())) {
      plan.launch(q, q, q, out);
      gpu().synchronize();
      start.record(gpu().stream());
      long before = System.nanoTime();
      for (int i = 0; i < 20; i++) {
        plan.launch(q, q, q, out);
      }
      long queued = System.nanoTime() - before;
      end.record(gpu().stream()).synchronize();
      assertThat(queued / 1e6).as("ms to queue").isLessThan(end.millisSince(start) / 2);
    }
  }

  /** Writes far beyond its pages, which loses the context of its process. */
  static final class Fault {
    private Fault() {}

    public static void main(String[] args) {
      Device gpu = Device.cuda(0);
      PagedKvCache cache = PagedKvCache.create(gpu, DType.BF16, 1, 128, 64, 2);
      Tensor k = Tensor.zeros(gpu, DType.BF16, Shape.of(1, 1, 128));
      Tensor slots = Tensor.of(new long[] {1L << 36}).to(gpu);
      for (int i = 0; i < 2; i++) {
        try {
          cache.write(k, k, slots, null, null);
          gpu.synchronize();
          System.out.println("no fault");
        } catch (DeviceException e) {
          System.out.println(e.getMessage());
        }
      }
      cache.close();
      System.out.println("closed, " + k);
    }
  }

  @Test
  void aFaultIsToldOnEveryLaterCall() throws Exception {
    List<String> command = new ArrayList<>();
    command.add(Path.of(System.getProperty("java.home"), "bin", "java").toString());
    command.addAll(List.of("-cp", System.getProperty("java.class.path")));
    command.add("--enable-native-access=ALL-UNNAMED");
    System.getProperties()
        .stringPropertyNames()
        .forEach(
            name -> {
              if (name.startsWith("flare.")) { // where the library is
                command.add("-D" + name + "=" + System.getProperty(name));
              }
            });
    command.add(Fault.class.getName());
    Process process = new ProcessBuilder(command).redirectErrorStream(true).start();
    String out = new String(process.getInputStream().readAllBytes(), UTF_8);
    assertThat(process.waitFor(60, TimeUnit.SECONDS)).isTrue();
    assertThat(out.lines().filter(line -> line.contains("cuda:0 is lost")))
        .as(out)
        .hasSizeGreaterThan(1);
    assertThat(out).contains("Restart the process").contains("closed, Tensor[");
    assertThat(process.exitValue()).as(out).isZero();
  }
}
