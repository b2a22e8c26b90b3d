package dev.flare;

import static org.assertj.core.api.Assertions.assertThat;
import static org.assertj.core.api.Assertions.assertThatThrownBy;

import java.lang.foreign.Arena;
import java.lang.management.ManagementFactory;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicReference;
import java.util.stream.IntStream;
import org.junit.jupiter.api.Tag;
import org.junit.jupiter.api.Test;

/** Launching: what may change between launches, what may not, and that nothing is allocated. */
@RequiresLibrary
@Tag("classpath")
class PlanTest {
  private static Tensor random(long seed, long... dims) {
    return Tensor.randn(seed, DType.BF16, dims);
  }

  @Test
  void launchesRebindTensors() {
    try (Tensor q1 = random(1, 1, 20, 4, 64);
        Tensor q2 = random(2, 1, 20, 4, 64);
        Tensor kv = random(3, 1, 20, 2, 64);
        AttentionPlan plan = FlashAttention.causal().plan(q1, kv, kv);
        Tensor out = plan.emptyOutput();
        Tensor want1 = FlashAttention.causal().run(q1, kv, kv);
        Tensor want2 = FlashAttention.causal().run(q2, kv, kv)) {
      assertThat(plan.device()).isEqualTo(Device.cpu());
      plan.launch(q1, kv, kv, out);
      assertThat(out.toFloatArray()).isEqualTo(want1.toFloatArray());
      plan.launch(q2, kv, kv, out);
      assertThat(out.toFloatArray()).isEqualTo(want2.toFloatArray());
      plan.launch(Stream.cpu(), q1, kv, kv, out, null);
      Stream.cpu().synchronize();
      assertThat(out.toFloatArray()).isEqualTo(want1.toFloatArray());
    }
  }

  @Test
  void launchRefusesOtherTensors() {
    try (Tensor q = random(1, 1, 20, 4, 64);
        Tensor kv = random(3, 1, 20, 2, 64);
        Tensor longer = random(1, 1, 21, 4, 64);
        Tensor half = Tensor.zeros(DType.FP16, 1, 20, 4, 64);
        Tensor lse = Tensor.zeros(DType.FP32, 1, 4, 20);
        AttentionPlan plan = FlashAttention.causal().plan(q, kv, kv);
        Tensor out = plan.emptyOutput()) {
      assertThatThrownBy(() -> plan.launch(longer, kv, kv, out))
          .isInstanceOf(InvalidArgumentException.class)
          .hasMessageStartingWith("q: got BF16 [1, 21, 4, 64], want BF16 [1, 20, 4, 64]");
      assertThatThrownBy(() -> plan.launch(half, kv, kv, out))
          .hasMessageStartingWith("q: got FP16");
      assertThatThrownBy(() -> plan.launch(q, kv, kv, q))
          .isInstanceOf(InvalidArgumentException.class)
          .hasMessageContaining("out overlaps q");
      assertThatThrownBy(() -> plan.launch(q, kv, kv, out, lse))
          .isInstanceOf(InvalidArgumentException.class)
          .hasMessageContaining("made without");
      assertThatThrownBy(() -> plan.launch(null, kv, kv, out))
          .isInstanceOf(InvalidArgumentException.class)
          .hasMessageStartingWith("q: got null");
      assertThatThrownBy(plan::emptyLse).isInstanceOf(InvalidArgumentException.class);
      // A refused launch leaves the plan and the tensors as they were.
      plan.launch(q, kv, kv, out);
    }
  }

  @Test
  void outputsMustBeWritable() {
    try (Tensor q = random(1, 1, 4, 1, 64);
        Arena arena = Arena.ofShared();
        AttentionPlan plan = FlashAttention.full().plan(q, q, q)) {
      Tensor readOnly = Tensor.of(arena.allocate(512, 16).asReadOnly(), DType.BF16, 1, 4, 1, 64);
      assertThatThrownBy(() -> plan.launch(q, q, q, readOnly))
          .isInstanceOf(InvalidArgumentException.class)
          .hasMessageContaining("out: got read-only memory");
      Tensor repeated = q.slice(1, 0, 1).expand(1, 4, 1, 64);
      assertThatThrownBy(() -> FlashAttention.full().plan(q, q, q, repeated, null))
          .isInstanceOf(InvalidArgumentException.class)
          .hasMessageContaining("a place of its own");
    }
  }

  @Test
  void closedThingsAreRefused() {
    Tensor q = random(1, 1, 4, 1, 64);
    Tensor sink = Tensor.zeros(DType.FP32, 1);
    AttentionPlan plan = FlashAttention.full().withSink(sink).plan(q, q, q);
    Tensor out = plan.emptyOutput();
    plan.launch(q, q, q, out);
    sink.close();
    assertThatThrownBy(() -> plan.launch(q, q, q, out))
        .isInstanceOf(ClosedException.class)
        .hasMessageContaining("sink");
    q.close();
    assertThatThrownBy(() -> plan.launch(q, q, q, out))
        .isInstanceOf(ClosedException.class)
        .hasMessageStartingWith("q:");
    assertThatThrownBy(() -> FlashAttention.full().run(q, q, q))
        .isInstanceOf(ClosedException.class)
        .hasMessageStartingWith("q:");
    plan.close();
    plan.close();
    assertThatThrownBy(() -> plan.launch(q, q, q, out))
        .isInstanceOf(ClosedException.class)
        .hasMessageContaining("plan");
    assertThatThrownBy(plan::fork).isInstanceOf(ClosedException.class);
    assertThatThrownBy(plan::kernelName).isInstanceOf(ClosedException.class);
    // Everything failed before it took anything: the output can be closed.
    out.close();
  }

  @Test
  void overlappingUseThrows() throws InterruptedException {
    // Long enough for a second thread to meet it.
    try (Tensor q = random(1, 1, 2048, 4, 128);
        AttentionPlan plan = FlashAttention.full().withThreads(1).plan(q, q, q);
        AttentionPlan fork = plan.fork();
        Tensor out = plan.emptyOutput();
        Tensor other = fork.emptyOutput()) {
      CountDownLatch started = new CountDownLatch(1);
      AtomicReference<Throwable> failure = new AtomicReference<>();
      Thread launcher =
          Thread.ofPlatform()
              .start(
                  () -> {
                    started.countDown();
                    try {
                      plan.launch(q, q, q, out);
                    } catch (Throwable t) {
                      failure.set(t);
                    }
                  });
      started.await();
      while (launcher.isAlive() && !plan.launcher.isBusy()) {
        Thread.onSpinWait();
      }
      assertThatThrownBy(plan::kernelName)
          .isInstanceOf(InUseException.class)
          .hasMessageContaining("fork()");
      assertThatThrownBy(() -> plan.launch(q, q, q, out)).isInstanceOf(InUseException.class);
      assertThatThrownBy(plan::close).isInstanceOf(InUseException.class);
      assertThatThrownBy(q::close)
          .isInstanceOf(InUseException.class)
          .hasMessageContaining("in use by");
      assertThatThrownBy(out::close).isInstanceOf(InUseException.class);
      fork.launch(q, q, q, other);
      launcher.join();
      assertThat(failure.get()).isNull();
      assertThat(other.toFloatArray()).isEqualTo(out.toFloatArray());
    }
  }

  @Test
  void forksRunAtOnceWithEqualResults() throws InterruptedException {
    try (Tensor q = random(1, 2, 100, 4, 64);
        AttentionPlan plan = FlashAttention.causal().plan(q, q, q);
        Tensor want = FlashAttention.causal().run(q, q, q)) {
      float[] expected = want.toFloatArray();
      AtomicInteger right = new AtomicInteger();
      Thread[] threads =
          IntStream.range(0, 4)
              .mapToObj(
                  i ->
                      Thread.ofPlatform()
                          .start(
                              () -> {
                                try (AttentionPlan mine = plan.fork();
                                    Tensor out = mine.emptyOutput()) {
                                  for (int n = 0; n < 20; n++) {
                                    mine.launch(q, q, q, out);
                                    if (java.util.Arrays.equals(out.toFloatArray(), expected)) {
                                      right.incrementAndGet();
                                    }
                                  }
                                }
                              }))
              .toArray(Thread[]::new);
      for (Thread thread : threads) {
        thread.join();
      }
      assertThat(right).hasValue(80);
    }
  }

  @Test
  void virtualThreadsMayLaunch() throws InterruptedException {
    try (Tensor q = random(1, 1, 16, 2, 64);
        AttentionPlan plan = FlashAttention.causal().plan(q, q, q);
        Tensor out = plan.emptyOutput()) {
      AtomicReference<Throwable> failure = new AtomicReference<>();
      Thread.ofVirtual()
          .start(
              () -> {
                try {
                  plan.launch(q, q, q, out);
                } catch (Throwable t) {
                  failure.set(t);
                }
              })
          .join();
      assertThat(failure.get()).isNull();
    }
  }

  @Test
  void launchesAllocateNothing() {
    try (Tensor q = Tensor.empty(DType.BF16, 0, 128, 8, 64);
        Tensor sink = Tensor.zeros(DType.FP32, 8);
        AttentionPlan plan = FlashAttention.causal().withSink(sink).plan(q, q, q);
        Tensor out = plan.emptyOutput();
        Tensor view = q.slice(1, 0, 128)) {
      assertLaunchesAllocateNothing(plan, q, view, out);
    }
  }

  /** Launches with q and its view as keys, 10^6 times. */
  static void assertLaunchesAllocateNothing(AttentionPlan plan, Tensor q, Tensor view, Tensor out) {
    // Until the compiler has seen it: interpreted method handles make objects.
    for (int i = 0; i < 200_000; i++) {
      plan.launch(q, q, q, out);
      plan.launch(q, view, q, out);
    }
    // When the JVM recompiles a method in between, it may make an object of its own, once: then
    // another stretch decides. A launch that allocates fails every stretch.
    long least = Long.MAX_VALUE;
    for (int stretch = 0; stretch < 5 && least != 0; stretch++) {
      least = Math.min(least, bytesOverAMillionLaunches(plan, q, view, out));
    }
    assertThat(least).as("bytes over 10^6 launches").isZero();
  }

  private static long bytesOverAMillionLaunches(
      AttentionPlan plan, Tensor q, Tensor view, Tensor out) {
    var threads = (com.sun.management.ThreadMXBean) ManagementFactory.getThreadMXBean();
    long before = threads.getCurrentThreadAllocatedBytes();
    long asking = threads.getCurrentThreadAllocatedBytes() - before;
    before = threads.getCurrentThreadAllocatedBytes();
    for (int i = 0; i < 500_000; i++) {
      plan.launch(q, q, q, out);
      plan.launch(q, view, q, out);
    }
    return threads.getCurrentThreadAllocatedBytes() - before - asking;
  }

  @Test
  void forcedKernels() {
    try (Tensor q = random(1, 1, 4, 1, 64)) {
      assertThatThrownBy(() -> FlashAttention.full().withKernel(Kernel.SM90).run(q, q, q))
          .isInstanceOf(UnsupportedException.class)
          .hasMessageContaining("SM90");
      FlashAttention.full().withKernel(Kernel.PORTABLE).run(q, q, q).close();
      String before = System.getProperty("flare.kernel");
      try {
        System.setProperty("flare.kernel", "sm90");
        assertThatThrownBy(() -> FlashAttention.full().run(q, q, q))
            .isInstanceOf(UnsupportedException.class);
        // What the program asks for in so many words stands above the property.
        FlashAttention.full().withKernel(Kernel.PORTABLE).run(q, q, q).close();
        System.setProperty("flare.kernel", "fastest");
        assertThatThrownBy(() -> FlashAttention.full().run(q, q, q))
            .isInstanceOf(InvalidArgumentException.class)
            .hasMessageContaining("-Dflare.kernel: got \"fastest\"");
        System.setProperty("flare.kernel", "portable");
        FlashAttention.full().run(q, q, q).close();
      } finally {
        if (before == null) {
          System.clearProperty("flare.kernel");
        } else {
          System.setProperty("flare.kernel", before);
        }
      }
    }
  }

  @Test
  void optionsAreImmutable() {
    FlashAttention plain = FlashAttention.causal();
    FlashAttention scaled = plain.withScale(0.5).withSoftcap(3);
    assertThat(scaled).isNotSameAs(plain);
    try (Tensor q = random(1, 1, 40, 2, 64);
        Tensor a = plain.run(q, q, q);
        Tensor b = scaled.run(q, q, q);
        Tensor again = FlashAttention.causal().run(q, q, q)) {
      assertThat(a.toFloatArray()).isEqualTo(again.toFloatArray());
      assertThat(b.toFloatArray()).isNotEqualTo(a.toFloatArray());
    }
  }
}
