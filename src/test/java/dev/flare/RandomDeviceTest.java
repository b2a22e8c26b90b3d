package dev.flare;

import static org.assertj.core.api.Assertions.assertThat;

import dev.flare.testing.Cases.Attention;
import dev.flare.testing.Cases.Kda;
import dev.flare.testing.Cases.KdaDecode;
import dev.flare.testing.Cases.Mla;
import dev.flare.testing.Cases.Sizes;
import dev.flare.testing.Cases.Storage;
import java.util.Map;
import java.util.Queue;
import java.util.TreeMap;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.function.BiFunction;
import java.util.function.LongFunction;
import org.junit.jupiter.api.Test;

/**
 * Random cases with sequences of 0 to 5000 tokens and every option: a GPU's results against the CPU
 * backend's, several threads at once.
 *
 * <p>{@code -Dflare.test.cases=N} sets how many, {@code -Dflare.test.seconds=S} after how long to
 * stop, {@code -Dflare.test.seed=0x...} the first seed; a case's operation follows from its seed.
 */
@GpuTest
class RandomDeviceTest {
  private static final int CASES = Integer.getInteger("flare.test.cases", 200);
  private static final int SECONDS = Integer.getInteger("flare.test.seconds", 600);
  private static final int THREADS = Math.clamp(Runtime.getRuntime().availableProcessors(), 1, 12);
  private static final long FIRST_SEED =
      Long.decode(System.getProperty("flare.test.seed", "0xF1A0000"));

  private final Device gpu = TestDevice.gpu();
  private final AtomicInteger passed = new AtomicInteger();
  private final Map<String, Integer> kernels = new TreeMap<>();
  private final Map<String, Integer> unsupported = new TreeMap<>();
  private final Queue<String> misses = new ConcurrentLinkedQueue<>();

  @Test
  void agreesWithTheCpu() throws InterruptedException {
    long end = System.nanoTime() + TimeUnit.SECONDS.toNanos(SECONDS);
    AtomicInteger next = new AtomicInteger();
    try (ExecutorService threads = Executors.newFixedThreadPool(THREADS)) {
      for (int t = 0; t < THREADS; t++) {
        threads.execute(
            () -> {
              int i = next.getAndIncrement();
              while (i < CASES && System.nanoTime() < end) {
                run(FIRST_SEED + i);
                i = next.getAndIncrement();
              }
            });
      }
    }
    System.out.printf(
        "random cases on %s: seeds 0x%X to 0x%X, %d passed, %d missed, unsupported %s%n",
        gpu,
        FIRST_SEED,
        FIRST_SEED + Math.min(CASES, next.get()) - 1,
        passed.get(),
        misses.size(),
        unsupported);
    kernels.forEach((kernel, count) -> System.out.printf("  %5d  %s%n", count, kernel));
    assertThat(misses).isEmpty();
    assertThat(passed.get() + unsupported.values().stream().mapToInt(n -> n).sum())
        .as("cases run in %d s", SECONDS)
        .isEqualTo(CASES);
  }

  private void run(long seed) {
    switch ((int) (seed & 7)) {
      case 0, 1, 2, 3 ->
          compare(
              seed,
              s -> dev.flare.testing.Cases.attention(s, Sizes.LARGE),
              CaseRun::attention,
              (Attention c) -> eights(c.heads().dim(), c.heads().valueDim()));
      case 4, 5 ->
          compare(
              seed,
              s -> dev.flare.testing.Cases.mla(s, Sizes.LARGE),
              (seed & 1) == 0 ? CaseRun::mla : RandomDeviceTest::mlaDecode,
              c -> true);
      case 6 ->
          compare(
              seed,
              s -> dev.flare.testing.Cases.kda(s, Sizes.LARGE),
              CaseRun::kda,
              (Kda c) -> eights(c.inputs().keyDim(), c.inputs().valueDim()));
      default ->
          compare(
              seed,
              dev.flare.testing.Cases::kdaDecode,
              CaseRun::kdaDecode,
              (KdaDecode c) -> eights(c.inputs().keyDim(), c.inputs().valueDim()));
    }
  }

  /** Decode has no packed caches: those are prefilled. */
  private static CaseRun.Result mlaDecode(Device device, Mla c) {
    return c.keys().storage() == Storage.PACKED
        ? CaseRun.mla(device, c)
        : CaseRun.mlaDecode(device, c);
  }

  private static boolean eights(int a, int b) {
    return a % 8 == 0 && b % 8 == 0;
  }

  private interface Required<C> {
    boolean test(C generated);
  }

  /** {@code required}: whether every GPU must have a kernel for the case. */
  private <C> void compare(
      long seed,
      LongFunction<C> generator,
      BiFunction<Device, C, CaseRun.Result> runner,
      Required<C> required) {
    C c = generator.apply(seed);
    try {
      CaseRun.Result got = runner.apply(gpu, c);
      CaseRun.Result want = runner.apply(Device.cpu(), c);
      String miss = got.misses(want);
      if (miss.isEmpty()) {
        passed.incrementAndGet();
        count(kernels, got.kernel());
      } else {
        misses.add(c + ": " + got.kernel() + miss);
      }
    } catch (UnsupportedException e) {
      if (required.test(c)) {
        misses.add(c + ": " + e.getMessage());
      } else {
        count(unsupported, String.valueOf(e.getMessage()));
      }
    } catch (RuntimeException | Error e) {
      misses.add(c + ": " + e);
    }
  }

  private static void count(Map<String, Integer> counts, String key) {
    synchronized (counts) {
      counts.merge(key, 1, Integer::sum);
    }
  }
}
