package dev.flare;

import static org.assertj.core.api.Assertions.assertThat;
import static org.assertj.core.api.Assertions.assertThatThrownBy;
import static org.junit.jupiter.api.Assumptions.assumeTrue;

import java.util.List;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;

/** Copies between two GPUs, and operations on both; skipped where there is one. */
@GpuTest
class TwoGpusTest {
  private static final Shape SHAPE = Shape.of(1, 3000, 4, 128);

  private Device first;
  private Device second;

  @BeforeEach
  void needsTwo() {
    List<Device> gpus = Device.all().stream().filter(device -> !device.isCpu()).toList();
    assumeTrue(gpus.size() > 1, () -> "one GPU: " + gpus);
    first = gpus.get(0);
    second = gpus.get(1);
  }

  @Test
  void copiesGoBothWays() {
    long before = first.liveBytes() + second.liveBytes();
    try (Tensor here = Tensor.randn(first, 1, DType.BF16, SHAPE);
        Tensor there = here.to(second);
        Tensor back = there.to(first)) {
      assertThat(there.device()).isEqualTo(second);
      assertThat(there.toFloatArray()).isEqualTo(here.toFloatArray());
      assertThat(back.toFloatArray()).isEqualTo(here.toFloatArray());
    }
    assertThat(first.liveBytes() + second.liveBytes()).isEqualTo(before);
  }

  @Test
  void stridedCopies() {
    try (Tensor here = Tensor.randn(first, 2, DType.FP16, SHAPE);
        Tensor there = Tensor.full(second, -1, DType.FP16, SHAPE);
        Tensor want = here.slice(1, 10, 500).slice(2, 1, 3).to(Device.cpu())) {
      there.slice(1, 10, 500).slice(2, 1, 3).copyFrom(here.slice(1, 10, 500).slice(2, 1, 3));
      assertThat(there.slice(1, 10, 500).slice(2, 1, 3).toFloatArray())
          .isEqualTo(want.toFloatArray());
      assertThat(there.slice(1, 0, 10).toFloatArray()).containsOnly(-1);
      assertThat(there.slice(2, 3, 4).toFloatArray()).containsOnly(-1);
    }
  }

  @Test
  void aCopyWaitsForWhatWritesItsSource() {
    try (Stream a = Stream.create(first);
        Stream b = Stream.create(second);
        Event written = Event.create(first);
        Tensor here = Tensor.empty(first, DType.FP32, Shape.of(1 << 24));
        Tensor there = Tensor.empty(second, DType.FP32, Shape.of(1 << 24))) {
      for (int round = 1; round <= 20; round++) {
        here.fill(round, a);
        written.record(a);
        b.waitFor(written);
        there.copyFrom(here, b);
        a.waitFor(b); // the next fill must not overtake the copy
        b.synchronize();
        assertThat(there.get(0)).isEqualTo(round);
        assertThat(there.get((1 << 24) - 1)).isEqualTo(round);
      }
    }
  }

  @Test
  void operationsGiveTheSameBitsOnBoth() {
    try (Tensor q = Tensor.randn(first, 3, DType.BF16, SHAPE);
        Tensor same = q.to(second);
        Tensor here = FlashAttention.flash(q, q, q);
        Tensor there = FlashAttention.flash(same, same, same)) {
      assertThat(there.device()).isEqualTo(second);
      assertThat(there.toFloatArray()).isEqualTo(here.toFloatArray());
      assertThatThrownBy(() -> FlashAttention.flash(q, same, same))
          .isInstanceOf(InvalidArgumentException.class)
          .hasMessageContaining("cuda:1");
    }
  }

  @Test
  void peerAccessIsTheSameBothWays() {
    assertThat(first.canAccess(second)).isEqualTo(second.canAccess(first));
  }
}
