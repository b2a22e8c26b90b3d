package dev.flare;

import static org.assertj.core.api.Assertions.assertThat;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import org.junit.jupiter.api.Test;

/**
 * Resident memory stays flat. {@code -Dflare.soak=true} runs the full counts: 10 million launches
 * and 100,000 tensors.
 */
@RequiresLibrary
class SoakTest {
  private static final boolean FULL = Boolean.getBoolean("flare.soak");

  /** What the collector, the compiler and the C heap may keep of their own accord. */
  private static final long SLACK_BYTES = 48L << 20;

  private static long residentBytes() throws IOException {
    System.gc();
    long pages = Long.parseLong(Files.readString(Path.of("/proc/self/statm")).split(" ", -1)[1]);
    return pages * 4096;
  }

  private interface Step {
    void run(int i);
  }

  /** Runs all steps; what the process holds must not grow over the last nine tenths of them. */
  private static void assertFlat(int steps, long bytesThroughOneStep, Step step)
      throws IOException {
    int warm = steps / 10;
    for (int i = 0; i < warm; i++) {
      step.run(i);
    }
    long before = residentBytes();
    for (int i = warm; i < steps; i++) {
      step.run(i);
    }
    long grown = residentBytes() - before;
    assertThat(bytesThroughOneStep * steps)
        .as("a leak of every step would show")
        .isGreaterThan(4 * SLACK_BYTES);
    assertThat(grown).as("bytes that the process grew by").isLessThan(SLACK_BYTES);
  }

  @Test
  void launches() throws IOException {
    try (Tensor q = Tensor.randn(1, DType.BF16, 1, 1, 1, 64);
        AttentionPlan plan = FlashAttention.causal().withThreads(1).plan(q, q, q);
        Tensor out = plan.emptyOutput()) {
      // 64 bytes stand for anything a launch might leave behind.
      assertFlat(FULL ? 10_000_000 : 4_000_000, 64, i -> plan.launch(q, q, q, out));
    }
  }

  @Test
  void tensors() throws IOException {
    assertFlat(
        FULL ? 100_000 : 20_000,
        1 << 16,
        i -> {
          try (Tensor t = Tensor.empty(DType.FP32, 1 << 14)) {
            t.fill(i);
          }
        });
  }

  @Test
  void plansAndCaches() throws IOException {
    try (Tensor q = Tensor.randn(1, DType.BF16, 1, 4, 2, 64);
        Tensor token = Tensor.randn(1, DType.FP32, 1, 2, 64);
        PagedKvCache cache = PagedKvCache.create(Device.cpu(), DType.BF16, 2, 64, 16, 32)) {
      assertFlat(
          FULL ? 100_000 : 10_000,
          1 << 15,
          i -> {
            try (KvCache.Sequence sequence = cache.open();
                Tensor once = FlashAttention.causal().run(q, q, q);
                AttentionPlan plan = FlashAttention.full().plan(q, q, q);
                AttentionPlan fork = plan.fork()) {
              cache.append(sequence, token, token);
              sequence.fork().close();
              fork.launch(q, q, q, once);
            }
          });
      assertThat(cache.freePages()).isEqualTo(32);
    }
  }
}
