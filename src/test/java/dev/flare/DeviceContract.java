package dev.flare;

import static org.assertj.core.api.Assertions.assertThat;
import static org.assertj.core.api.Assertions.assertThatThrownBy;

import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicReference;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

/**
 * What every GPU must do: with the real driver in {@link GpuDeviceTest}, with one made up in {@link
 * FakeDeviceTest}.
 */
abstract class DeviceContract {
  private long before;

  /** The GPU. */
  abstract Device gpu();

  @BeforeEach
  void countBytes() {
    before = gpu().liveBytes();
  }

  @AfterEach
  void nothingIsLeft() {
    assertThat(gpu().liveBytes()).as("device bytes left").isEqualTo(before);
  }

  private static Shape shape(long... dims) {
    return Shape.of(dims);
  }

  private Tensor random(long seed, DType dtype, long... dims) {
    return Tensor.randn(gpu(), seed, dtype, shape(dims));
  }

  /** The absolute error that two ways to compute in 16 bits may have. */
  private static void assertNear(String what, Tensor got, Tensor want) {
    Cases.assertRelative(what, got, want.toDoubleArray(), 2e-2);
  }

  // ---- copies ---------------------------------------------------------------------------------

  @Test
  void copiesBothWays() {
    for (int n : new int[] {0, 1, 7, 4096, 1_000_003}) {
      for (DType dtype : new DType[] {DType.FP32, DType.BF16, DType.FP8_E4M3}) {
        try (Tensor host = Tensor.randn(n, dtype, n);
            Tensor there = host.to(gpu());
            Tensor back = there.to(Device.cpu())) {
          assertThat(there.device()).isEqualTo(gpu());
          assertThat(there.isContiguous()).isTrue();
          assertThat(back.toFloatArray()).isEqualTo(host.toFloatArray());
          assertThat(there.toFloatArray()).isEqualTo(host.toFloatArray());
          assertThat(there.toDoubleArray()).isEqualTo(host.toDoubleArray());
        }
      }
    }
    long[] longs = {1, -2, 1L << 40, Long.MIN_VALUE};
    try (Tensor there = Tensor.of(longs).to(gpu())) {
      assertThat(there.toLongArray()).isEqualTo(longs);
    }
  }

  @Test
  void pinnedMemoryIsCopiedOnAStream() {
    try (Stream stream = Stream.create(gpu());
        Tensor source = Tensor.pinned(gpu(), DType.FP32, shape(1000, 100));
        Tensor target = Tensor.pinned(gpu(), DType.FP32, shape(1000, 100));
        Tensor random = Tensor.randn(1, DType.FP32, 1000, 100)) {
      assertThat(source.isPinned()).isTrue();
      assertThat(random.isPinned()).isFalse();
      assertThat(source.device()).isEqualTo(Device.cpu());
      source.copyFrom(random);
      try (Tensor there = Tensor.empty(stream, DType.FP32, shape(1000, 100))) {
        there.copyFrom(source, stream);
        target.copyFrom(there, stream);
        stream.synchronize();
        assertThat(target.toFloatArray()).isEqualTo(random.toFloatArray());
      }
      // Closed while a copy may be under way: close() waits for it.
      Tensor another = Tensor.pinned(gpu(), DType.FP32, shape(1000, 100));
      another.copyFrom(random);
      try (Tensor there = another.to(gpu(), stream)) {
        another.close();
        stream.synchronize();
        assertThat(there.toFloatArray()).isEqualTo(random.toFloatArray());
      }
    }
  }

  @Test
  void mappedFilesAreCopied(@TempDir Path folder) throws Exception {
    Path file = folder.resolve("weights");
    byte[] bytes = new byte[4_000_000];
    new java.util.Random(1).nextBytes(bytes);
    Files.write(file, bytes);
    try (Tensor mapped = Tensor.map(file, 256, DType.UINT8, shape(3_000_001));
        Tensor there = mapped.to(gpu());
        Tensor back = there.to(Device.cpu())) {
      assertThat(back.segment().mismatch(mapped.segment())).isEqualTo(-1);
    }
  }

  @Test
  void largeCopiesAreStaged(@TempDir Path folder) throws Exception {
    int n = 20_000_003;
    byte[] bytes = new byte[n];
    new java.util.Random(2).nextBytes(bytes);
    Path file = Files.write(folder.resolve("large"), bytes);
    try (Stream stream = Stream.create(gpu());
        Tensor mapped = Tensor.map(file, 0, DType.UINT8, shape(n));
        Tensor there = mapped.to(gpu(), stream);
        Tensor twice = there.copy(); // on another stream, after the first one
        Tensor back = Tensor.zeros(DType.UINT8, n)) {
      assertThat(back.copyFrom(twice).segment().mismatch(mapped.segment())).isEqualTo(-1);
      back.fill(0).copyFrom(there, stream);
      assertThat(back.segment().mismatch(mapped.segment())).isEqualTo(-1);
      try (java.lang.foreign.Arena arena = java.lang.foreign.Arena.ofConfined()) {
        Tensor confined = Tensor.of(arena.allocate(n), DType.UINT8, n);
        assertThat(confined.copyFrom(there).segment().mismatch(mapped.segment())).isEqualTo(-1);
        there.fill(0).copyFrom(confined);
        assertThat(back.fill(0).copyFrom(there).segment().mismatch(mapped.segment())).isEqualTo(-1);
      }
    }
  }

  @Test
  void stridedCopies() {
    try (Tensor host = Tensor.randn(1, DType.FP32, 5, 6, 7, 8);
        Tensor there = host.to(gpu())) {
      List<Tensor> onHost = views(host);
      List<Tensor> onGpu = views(there);
      for (int i = 0; i < onHost.size(); i++) {
        Tensor h = onHost.get(i);
        Tensor g = onGpu.get(i);
        // Out of strides on the device, into strides on the device, and within it.
        assertThat(g.toFloatArray()).as("view %d", i).isEqualTo(h.toFloatArray());
        try (Tensor dense = g.copy();
            Tensor moved = h.to(gpu());
            Tensor half = g.to(DType.BF16);
            Tensor wantHalf = h.to(DType.BF16)) {
          assertThat(dense.isContiguous()).isTrue();
          assertThat(dense.toFloatArray()).as("view %d", i).isEqualTo(h.toFloatArray());
          assertThat(moved.toFloatArray()).as("view %d", i).isEqualTo(h.toFloatArray());
          assertThat(half.toFloatArray()).as("view %d", i).isEqualTo(wantHalf.toFloatArray());
        }
      }
    }
  }

  private static List<Tensor> views(Tensor t) {
    return List.of(
        t,
        t.transpose(1, 2),
        t.transpose(2, 3),
        t.permute(3, 2, 1, 0),
        t.slice(3, 2, 5),
        t.slice(1, 1, 4).slice(0, 2, 5),
        t.select(2, 3),
        t.select(3, 3),
        t.select(0, 4),
        t.slice(0, 1, 1),
        t.slice(0, 0, 1).expand(4, 6, 7, 8));
  }

  @Test
  void stridedTargets() {
    try (Tensor there = Tensor.zeros(gpu(), DType.FP32, shape(5, 6, 7, 8));
        Tensor host = Tensor.zeros(DType.FP32, 5, 6, 7, 8)) {
      List<Tensor> onHost = views(host);
      List<Tensor> onGpu = views(there);
      for (int i = 0; i < onHost.size() - 1; i++) { // the last one can't be written to
        Tensor h = onHost.get(i);
        try (Tensor source = Tensor.randn(i, DType.FP32, h.shape().dims());
            Tensor sourceThere = source.to(gpu())) {
          h.copyFrom(source);
          onGpu.get(i).copyFrom(source);
          assertThat(there.toFloatArray()).as("from the host %d", i).isEqualTo(host.toFloatArray());
          h.fill(i);
          onGpu.get(i).fill(i);
          assertThat(there.toFloatArray()).as("fill %d", i).isEqualTo(host.toFloatArray());
          h.copyFrom(source);
          onGpu.get(i).copyFrom(sourceThere);
          assertThat(there.toFloatArray()).as("within %d", i).isEqualTo(host.toFloatArray());
          h.fill(-1);
          h.copyFrom(onGpu.get(i));
          assertThat(host.toFloatArray()).as("to the host %d", i).isEqualTo(there.toFloatArray());
        }
      }
    }
  }

  @Test
  void scatteredElementsAreGatheredOnTheHost() {
    // A transposed matrix would take a copy for every element.
    try (Tensor host = Tensor.randn(1, DType.FP32, 300, 200, 3);
        Tensor there = host.to(gpu());
        Tensor moved = host.permute(2, 1, 0).to(gpu())) {
      assertThat(moved.toFloatArray()).isEqualTo(host.permute(2, 1, 0).toFloatArray());
      assertThat(there.permute(2, 1, 0).toFloatArray())
          .isEqualTo(host.permute(2, 1, 0).toFloatArray());
      try (Tensor integers = Tensor.zeros(gpu(), DType.INT32, shape(300, 200, 100))) {
        assertThatThrownBy(() -> integers.permute(2, 1, 0).copy())
            .isInstanceOf(UnsupportedException.class)
            .hasMessageContaining("contiguous()");
      }
    }
  }

  @Test
  void casts() {
    DType[] types = {DType.FP32, DType.FP16, DType.BF16, DType.FP8_E4M3};
    for (DType from : types) {
      try (Tensor host = Tensor.randn(3, from, 33, 70);
          Tensor there = host.to(gpu())) {
        for (DType to : types) {
          try (Tensor want = host.to(to);
              Tensor got = there.to(to)) {
            assertThat(got.dtype()).isEqualTo(to);
            assertThat(got.toFloatArray()).as("%s to %s", from, to).isEqualTo(want.toFloatArray());
          }
        }
      }
    }
    try (Tensor there = Tensor.of(new int[] {1, -5, 1 << 30}).to(gpu());
        Tensor wide = there.to(DType.INT64)) {
      assertThat(wide.device()).isEqualTo(gpu());
      assertThat(wide.toLongArray()).containsExactly(1, -5, 1 << 30);
      assertThatThrownBy(() -> there.to(DType.FP32)).isInstanceOf(UnsupportedException.class);
    }
  }

  @Test
  void fills() {
    for (DType dtype : DType.values()) {
      try (Tensor there = Tensor.full(gpu(), 3, dtype, shape(5, 9));
          Tensor zeros = Tensor.zeros(gpu(), dtype, shape(1001))) {
        assertThat(there.toFloatArray()).containsOnly(3);
        assertThat(zeros.toFloatArray()).hasSize(1001).containsOnly(0);
        there.slice(1, 2, 4).fill(5);
        assertThat(there.get(0, 2)).isEqualTo(5);
        assertThat(there.get(4, 1)).isEqualTo(3);
        there.set(7, 4, 8);
        assertThat(there.get(4, 8)).isEqualTo(7);
        if (!dtype.isFloating() && dtype != DType.UINT8) {
          assertThat(there.fill(-1).toLongArray()).containsOnly(-1);
        }
      }
    }
  }

  @Test
  void randomNumbersAreTheSameEverywhere() {
    try (Tensor there = random(5, DType.BF16, 3, 1001);
        Tensor here = Tensor.randn(5, DType.BF16, 3, 1001)) {
      assertThat(there.toFloatArray()).isEqualTo(here.toFloatArray());
      assertThat(there.toString()).isEqualTo(here.toString().replace("cpu", gpu().toString()));
    }
  }

  @Test
  void deviceMemoryIsOutOfReach() {
    try (Tensor there = Tensor.zeros(gpu(), DType.FP32, shape(10))) {
      assertThatThrownBy(there::segment)
          .isInstanceOf(UnsupportedException.class)
          .hasMessageContaining("to(Device.cpu())");
      assertThat(there.devicePointer()).isNotZero();
      assertThat(there.slice(0, 2, 3).devicePointer()).isEqualTo(there.devicePointer() + 8);
    }
    try (Tensor here = Tensor.zeros(DType.FP32, 10)) {
      assertThatThrownBy(here::devicePointer).isInstanceOf(UnsupportedException.class);
    }
  }

  @Test
  void memoryOfOthers() {
    AtomicInteger released = new AtomicInteger();
    try (Tensor owner = random(1, DType.FP32, 10, 10)) {
      long pointer = owner.devicePointer();
      try (Tensor borrowed =
          Tensor.foreign(
              gpu(), pointer, released::incrementAndGet, DType.FP32, shape(10, 2), 10, 1)) {
        assertThat(borrowed.toFloatArray()).isEqualTo(owner.slice(1, 0, 2).toFloatArray());
        borrowed.fill(9);
        assertThat(released).hasValue(0);
      }
      assertThat(released).hasValue(1);
      assertThat(owner.get(3, 1)).isEqualTo(9);
      Tensor.foreign(gpu(), pointer, null, DType.FP32, shape(10)).close();
      assertThatThrownBy(() -> Tensor.foreign(gpu(), pointer + 4, null, DType.FP32, shape(10)))
          .hasMessageContaining("aligned to 16");
      try (Tensor here = Tensor.zeros(DType.FP32, 100)) {
        assertThatThrownBy(
                () -> Tensor.foreign(gpu(), here.segment().address(), null, DType.FP32, shape(10)))
            .isInstanceOf(InvalidArgumentException.class)
            .hasMessageContaining("device memory");
      }
    }
  }

  // ---- operations -------------------------------------------------------------------------------

  @Test
  void attention() {
    try (Tensor q = random(1, DType.BF16, 2, 300, 8, 128);
        Tensor k = random(2, DType.BF16, 2, 300, 2, 128);
        Tensor v = random(3, DType.BF16, 2, 300, 2, 128);
        AttentionOutput got = FlashAttention.causal().runWithLse(q, k, v);
        Tensor hq = q.to(Device.cpu());
        Tensor hk = k.to(Device.cpu());
        Tensor hv = v.to(Device.cpu());
        AttentionOutput want = FlashAttention.causal().runWithLse(hq, hk, hv)) {
      assertThat(got.out().device()).isEqualTo(gpu());
      assertNear("out", got.out(), want.out());
      assertNear("lse", got.lse(), want.lse());
    }
  }

  @Test
  void mla() {
    try (Tensor qNope = random(1, DType.BF16, 1, 200, 4, 128);
        Tensor qRope = random(2, DType.BF16, 1, 200, 4, 64);
        Tensor cKv = random(3, DType.BF16, 1, 200, 512);
        Tensor kRope = random(4, DType.BF16, 1, 200, 64);
        Tensor wUk = scaled(5, 4, 512, 128);
        Tensor wUv = scaled(6, 4, 512, 128);
        Tensor got = MultiHeadLatentAttention.causal().run(qNope, qRope, cKv, kRope, wUk, wUv);
        Tensor hqNope = qNope.to(Device.cpu());
        Tensor hqRope = qRope.to(Device.cpu());
        Tensor hcKv = cKv.to(Device.cpu());
        Tensor hkRope = kRope.to(Device.cpu());
        Tensor hwUk = wUk.to(Device.cpu());
        Tensor hwUv = wUv.to(Device.cpu());
        Tensor want =
            MultiHeadLatentAttention.causal().run(hqNope, hqRope, hcKv, hkRope, hwUk, hwUv)) {
      assertNear("out", got, want);
    }
  }

  private Tensor scaled(long seed, long... dims) {
    try (Tensor wide = Tensor.randn(seed, DType.FP32, dims)) {
      float[] values = wide.toFloatArray();
      for (int i = 0; i < values.length; i++) {
        values[i] *= 0.05f;
      }
      try (Tensor host = Tensor.of(DType.BF16, values, dims)) {
        return host.to(gpu());
      }
    }
  }

  @Test
  void mlaDecode() {
    MultiHeadLatentAttention mla = MultiHeadLatentAttention.causal().withHeadDims(128, 64);
    try (Tensor q = random(1, DType.BF16, 3, 1, 16, 576);
        Tensor kv = random(2, DType.BF16, 3, 500, 576);
        Tensor got = mla.decode(q, kv);
        Tensor hq = q.to(Device.cpu());
        Tensor hkv = kv.to(Device.cpu());
        Tensor want = mla.decode(hq, hkv)) {
      assertNear("out", got, want);
    }
  }

  @Test
  void kda() {
    KimiDeltaAttention kda = KimiDeltaAttention.bounded(-5).withStateLayout(StateLayout.KV);
    try (Tensor q = random(1, DType.BF16, 1, 200, 4, 128);
        Tensor k = random(2, DType.BF16, 1, 200, 4, 128);
        Tensor v = random(3, DType.BF16, 1, 200, 4, 128);
        Tensor g = random(4, DType.BF16, 1, 200, 4, 128);
        Tensor beta = random(5, DType.BF16, 1, 200, 4);
        DeltaOutput got = kda.runWithState(q, k, v, g, beta, null, null, null);
        Tensor hq = q.to(Device.cpu());
        Tensor hk = k.to(Device.cpu());
        Tensor hv = v.to(Device.cpu());
        Tensor hg = g.to(Device.cpu());
        Tensor hbeta = beta.to(Device.cpu());
        DeltaOutput want = kda.runWithState(hq, hk, hv, hg, hbeta, null, null, null)) {
      assertNear("out", got.out(), want.out());
      assertNear("state", got.state(), want.state());
      try (Tensor step =
              kda.decode(
                  q.slice(1, 0, 1),
                  k.slice(1, 0, 1),
                  v.slice(1, 0, 1),
                  g.slice(1, 0, 1),
                  beta.slice(1, 0, 1),
                  null,
                  null,
                  got.state());
          Tensor wantStep =
              kda.decode(
                  hq.slice(1, 0, 1),
                  hk.slice(1, 0, 1),
                  hv.slice(1, 0, 1),
                  hg.slice(1, 0, 1),
                  hbeta.slice(1, 0, 1),
                  null,
                  null,
                  want.state())) {
        assertNear("step", step, wantStep);
        assertNear("state after", got.state(), want.state());
      }
    }
  }

  @Test
  void pagedCache() {
    try (PagedKvCache there = PagedKvCache.create(gpu(), DType.BF16, 2, 128, 16, 40);
        PagedKvCache here = PagedKvCache.create(Device.cpu(), DType.BF16, 2, 128, 16, 40);
        Tensor k = random(1, DType.BF16, 70, 2, 128);
        Tensor v = random(2, DType.BF16, 70, 2, 128);
        Tensor hk = k.to(Device.cpu());
        Tensor hv = v.to(Device.cpu());
        Tensor q = random(3, DType.BF16, 2, 1, 8, 128);
        Tensor hq = q.to(Device.cpu())) {
      for (PagedKvCache cache : List.of(there, here)) {
        boolean gpu = !cache.device().isCpu();
        KvCache.Sequence first = cache.open();
        cache.append(first, gpu ? k : hk, gpu ? v : hv);
        KvCache.Sequence second = first.fork();
        cache.append(
            second, (gpu ? k : hk).slice(0, 3, 4), (gpu ? v : hv).slice(0, 3, 4)); // copies a page
        first.truncate(50);
      }
      assertThat(there.freePages()).isEqualTo(here.freePages());
      assertThat(there.keys().select(0, 3).toFloatArray())
          .isEqualTo(here.keys().select(0, 3).toFloatArray());
      try (KvCache.Sequence a = there.open();
          KvCache.Sequence b = here.open()) {
        there.append(a, k, v);
        here.append(b, hk, hv);
        try (KvCache.Sequence a2 = a.fork();
            KvCache.Sequence b2 = b.fork()) {
          a2.truncate(17);
          b2.truncate(17);
          try (KvCache.Batch batch = there.batch(a, a2);
              KvCache.Batch wantBatch = here.batch(b, b2);
              Tensor got = FlashAttention.causal().run(q, batch);
              Tensor want = FlashAttention.causal().run(hq, wantBatch)) {
            assertThat(batch.lengths().toLongArray()).containsExactly(70, 17);
            assertNear("out", got, want);
          }
        }
      }
    }
  }

  /** A serving loop: everything on a stream of its own, one plan, addresses that stay. */
  @Test
  void decodingOnAStream() {
    int steps = 40;
    try (Stream stream = Stream.create(gpu());
        PagedKvCache there = PagedKvCache.create(gpu(), DType.BF16, 2, 128, 16, 10);
        PagedKvCache here = PagedKvCache.create(Device.cpu(), DType.BF16, 2, 128, 16, 10);
        Tensor q = random(1, DType.BF16, 2, 1, 8, 128);
        Tensor tokens = random(2, DType.BF16, steps, 2, 2, 128);
        Tensor hq = q.to(Device.cpu());
        Tensor htokens = tokens.to(Device.cpu());
        Tensor results = Tensor.empty(gpu(), DType.BF16, shape(steps, 2, 1, 8, 128))) {
      List<KvCache.Sequence> sequences = List.of(there.open(), there.open());
      List<KvCache.Sequence> wantSequences = List.of(here.open(), here.open());
      try (KvCache.Batch batch = there.batch(steps, sequences.get(0), sequences.get(1));
          AttentionPlan plan =
              FlashAttention.causal()
                  .withPages(batch.blockTable(), batch.lengths(), batch.maxLength())
                  .plan(q, there.keys(), there.values());
          Tensor out = plan.emptyOutput()) {
        for (int step = 0; step < steps; step++) {
          Tensor token = tokens.select(0, step);
          there.appendEach(sequences, token, token, null, stream);
          batch.update(stream);
          plan.launch(stream, q, there.keys(), there.values(), out, null);
          results.select(0, step).copyFrom(out, stream);
        }
        stream.synchronize();
        for (int step = 0; step < steps; step++) {
          Tensor token = htokens.select(0, step);
          here.appendEach(wantSequences, token, token, null);
          try (KvCache.Batch wantBatch = here.batch(wantSequences.get(0), wantSequences.get(1));
              Tensor want = FlashAttention.causal().run(hq, wantBatch)) {
            assertNear("step " + step, results.select(0, step), want);
          }
        }
      }
    }
  }

  @Test
  void latentCache() {
    MultiHeadLatentAttention mla = MultiHeadLatentAttention.causal().withHeadDims(128, 64);
    try (LatentKvCache there = LatentKvCache.create(gpu(), DType.BF16, 512, 64, 64, 10);
        LatentKvCache here = LatentKvCache.create(Device.cpu(), DType.BF16, 512, 64, 64, 10);
        Tensor c = random(1, DType.BF16, 130, 512);
        Tensor rope = random(2, DType.BF16, 130, 64);
        Tensor hc = c.to(Device.cpu());
        Tensor hrope = rope.to(Device.cpu());
        Tensor q = random(3, DType.BF16, 1, 1, 16, 576);
        Tensor hq = q.to(Device.cpu());
        KvCache.Sequence a = there.open();
        KvCache.Sequence b = here.open()) {
      there.append(a, c, rope);
      here.append(b, hc, hrope);
      try (KvCache.Batch batch = there.batch(a);
          KvCache.Batch wantBatch = here.batch(b);
          Tensor got = mla.decode(q, batch);
          Tensor want = mla.decode(hq, wantBatch)) {
        assertNear("out", got, want);
      }
    }
  }

  @Test
  void pooledStates() {
    try (DeltaState there = DeltaState.create(gpu(), DType.FP32, StateLayout.VK, 5, 2, 128, 128);
        DeltaState here =
            DeltaState.create(Device.cpu(), DType.FP32, StateLayout.VK, 5, 2, 128, 128);
        Tensor x = random(1, DType.BF16, 2, 1, 2, 128);
        Tensor g = random(2, DType.BF16, 2, 1, 2, 128);
        Tensor beta = random(3, DType.BF16, 2, 1, 2);
        Tensor hx = x.to(Device.cpu());
        Tensor hg = g.to(Device.cpu());
        Tensor hbeta = beta.to(Device.cpu())) {
      KimiDeltaAttention kda = KimiDeltaAttention.bounded(-5);
      DeltaState.Sequence a = there.open();
      DeltaState.Sequence b = here.open();
      try (DeltaState.Batch batch = there.batch(a, there.open());
          DeltaState.Batch wantBatch = here.batch(b, here.open())) {
        for (int step = 0; step < 3; step++) {
          try (Tensor got = kda.decode(x, x, x, g, beta, null, null, batch);
              Tensor want = kda.decode(hx, hx, hx, hg, hbeta, null, null, wantBatch)) {
            assertNear("step " + step, got, want);
          }
        }
      }
      try (DeltaState.Sequence fork = a.fork()) {
        assertThat(fork.state().toFloatArray()).isEqualTo(a.state().toFloatArray());
        assertNear("state", fork.state(), b.state());
      }
    }
  }

  @Test
  void launchesAllocateNothing() {
    try (Tensor q = Tensor.empty(gpu(), DType.BF16, shape(0, 128, 8, 64));
        Tensor sink = Tensor.zeros(gpu(), DType.FP32, shape(8));
        AttentionPlan plan = FlashAttention.causal().withSink(sink).plan(q, q, q);
        Tensor out = plan.emptyOutput();
        Tensor view = q.slice(1, 0, 128)) {
      PlanTest.assertLaunchesAllocateNothing(plan, q, view, out);
    }
  }

  // ---- streams, events, threads ---------------------------------------------------------------

  @Test
  void eventsMeasureAndOrder() {
    try (Stream stream = Stream.create(gpu());
        Stream other = Stream.create(gpu());
        Event start = Event.create(gpu());
        Event end = Event.create(gpu());
        Tensor a = Tensor.empty(stream, DType.FP32, shape(1 << 20));
        Tensor b = Tensor.empty(stream, DType.FP32, shape(1 << 20))) {
      assertThatThrownBy(() -> end.millisSince(start)).hasMessageContaining("record()");
      start.record(stream);
      a.fill(1, stream);
      for (int i = 0; i < 20; i++) {
        b.copyFrom(a, stream);
        a.copyFrom(b, stream);
      }
      end.record(stream);
      other.waitFor(end);
      b.fill(2, other);
      other.synchronize();
      assertThat(end.isDone()).isTrue();
      assertThat(stream.isIdle()).isTrue();
      end.synchronize();
      assertThat(end.millisSince(start)).isBetween(1e-3, 1e4);
      stream.waitFor(other);
      b.copyFrom(a, stream);
      assertThat(b.toFloatArray()).containsOnly(1);
      assertThat(stream.toString()).startsWith("Stream[" + gpu());
      assertThat(gpu().stream().toString()).isEqualTo("Stream[" + gpu() + " default]");
      assertThatThrownBy(() -> start.record(Stream.cpu()))
          .isInstanceOf(InvalidArgumentException.class);
    }
  }

  @Test
  void streamsOfOthers() {
    try (Stream owner = Stream.create(gpu());
        Stream borrowed = Stream.foreign(gpu(), owner.handle());
        Tensor t = Tensor.zeros(gpu(), DType.FP32, shape(1000))) {
      t.fill(4, borrowed);
      borrowed.synchronize();
      assertThat(t.toFloatArray()).containsOnly(4);
      assertThatThrownBy(() -> Stream.foreign(Device.cpu(), 0))
          .isInstanceOf(InvalidArgumentException.class);
    }
  }

  @Test
  void closedStreamsAndEventsAreRefused() {
    Stream stream = Stream.create(gpu());
    Event event = Event.create(gpu());
    try (Tensor t = Tensor.empty(stream, DType.FP32, shape(10))) {
      stream.close();
      stream.close();
      event.close();
      event.close();
      assertThatThrownBy(stream::synchronize).isInstanceOf(ClosedException.class);
      assertThatThrownBy(stream::handle).isInstanceOf(ClosedException.class);
      assertThatThrownBy(() -> t.fill(1, stream)).isInstanceOf(ClosedException.class);
      assertThatThrownBy(() -> event.record(gpu().stream())).isInstanceOf(ClosedException.class);
      assertThatThrownBy(event::synchronize).isInstanceOf(ClosedException.class);
      // The tensor does not mind where it was made.
      assertThat(t.fill(2).toFloatArray()).containsOnly(2);
    }
    gpu().stream().close();
    gpu().stream().synchronize();
  }

  @Test
  void twoStreamsAndFourThreadsGiveTheSameBits() throws InterruptedException {
    int threads = 4;
    int rounds = 25;
    try (Tensor q = random(1, DType.BF16, 2, 257, 8, 128);
        Tensor kv = random(2, DType.BF16, 2, 257, 2, 128);
        AttentionPlan plan = FlashAttention.causal().plan(q, kv, kv);
        Tensor expected = plan.emptyOutput();
        Stream one = Stream.create(gpu());
        Stream two = Stream.create(gpu())) {
      plan.launch(q, kv, kv, expected);
      float[] want = expected.toFloatArray();
      AtomicInteger right = new AtomicInteger();
      AtomicReference<Throwable> failure = new AtomicReference<>();
      List<Thread> running = new ArrayList<>();
      for (int i = 0; i < threads; i++) {
        Stream stream = i % 2 == 0 ? one : two;
        running.add(
            Thread.ofPlatform()
                .start(
                    () -> {
                      try (AttentionPlan mine = plan.fork();
                          Tensor out = mine.emptyOutput()) {
                        for (int n = 0; n < rounds; n++) {
                          out.fill(Double.NaN, stream);
                          mine.launch(stream, q, kv, kv, out, null);
                          try (Tensor copy = out.copy()) { // after all work on out
                            if (java.util.Arrays.equals(copy.toFloatArray(), want)) {
                              right.incrementAndGet();
                            }
                          }
                        }
                      } catch (Throwable t) {
                        failure.set(t);
                      }
                    }));
      }
      for (Thread thread : running) {
        thread.join();
      }
      assertThat(failure.get()).isNull();
      assertThat(right).hasValue(threads * rounds);
    }
  }

  @Test
  void aPlanOnTwoStreamsDoesNotMeetItself() {
    // Split keys need a workspace: the second stream waits for the first.
    try (Tensor q = random(1, DType.BF16, 1, 1, 8, 128);
        Tensor kv = random(2, DType.BF16, 1, 4000, 1, 128);
        AttentionPlan plan = FlashAttention.causal().withSplits(8).plan(q, kv, kv);
        Tensor a = plan.emptyOutput();
        Tensor b = plan.emptyOutput();
        Stream one = Stream.create(gpu());
        Stream two = Stream.create(gpu())) {
      for (int i = 0; i < 50; i++) {
        plan.launch(one, q, kv, kv, a, null);
        plan.launch(two, q, kv, kv, b, null);
      }
      assertThat(a.toFloatArray()).isEqualTo(b.toFloatArray());
    }
  }

  @Test
  void virtualThreads() throws InterruptedException {
    try (Tensor q = random(1, DType.BF16, 1, 64, 4, 64);
        Tensor expected = FlashAttention.causal().run(q, q, q)) {
      float[] want = expected.toFloatArray();
      AtomicInteger right = new AtomicInteger();
      AtomicReference<Throwable> failure = new AtomicReference<>();
      List<Thread> running = new ArrayList<>();
      for (int i = 0; i < 50; i++) {
        running.add(
            Thread.ofVirtual()
                .start(
                    () -> {
                      try (Stream stream = Stream.create(gpu());
                          AttentionPlan plan = FlashAttention.causal().plan(q, q, q);
                          Tensor out = plan.emptyOutput()) {
                        Thread.sleep(1);
                        plan.launch(stream, q, q, q, out, null);
                        stream.synchronize();
                        if (java.util.Arrays.equals(out.toFloatArray(), want)) {
                          right.incrementAndGet();
                        }
                      } catch (Throwable t) {
                        failure.set(t);
                      }
                    }));
      }
      for (Thread thread : running) {
        thread.join();
      }
      assertThat(failure.get()).isNull();
      assertThat(right).hasValue(50);
    }
  }

  // ---- graphs ---------------------------------------------------------------------------------

  @Test
  void aGraphOfAHundredLaunchesReplays() {
    try (Stream stream = Stream.create(gpu());
        Tensor q = random(1, DType.BF16, 1, 100, 4, 64);
        Tensor kv = random(2, DType.BF16, 1, 100, 4, 64);
        AttentionPlan plan = FlashAttention.causal().plan(q, kv, kv);
        Tensor x = plan.emptyOutput();
        Tensor y = plan.emptyOutput()) {
      Runnable work =
          () -> {
            plan.launch(stream, q, kv, kv, x, null);
            for (int i = 0; i < 49; i++) {
              plan.launch(stream, x, kv, kv, y, null);
              plan.launch(stream, y, kv, kv, x, null);
            }
            plan.launch(stream, x, kv, kv, y, null);
          };
      work.run();
      stream.synchronize();
      float[] want = y.toFloatArray();
      try (Graph graph = Graph.capture(stream, work)) {
        assertThat(graph.size()).isEqualTo(100);
        assertThat(graph.toString()).isEqualTo("Graph[" + gpu() + ", 100 launches]");
        for (int i = 0; i < 3; i++) {
          replayable(x, y);
          graph.launch(stream);
          stream.synchronize();
          replayed(y, want);
        }
        replayable(x, y);
        graph.launch();
        gpu().synchronize();
        replayed(y, want);
        updates(graph, stream, plan, q, kv, x);
      }
    }
  }

  /** What the outputs are before a replay; only a real driver replays. */
  void replayable(Tensor... outputs) {
    for (Tensor output : outputs) {
      output.fill(Double.NaN);
    }
  }

  void replayed(Tensor output, float[] want) {
    assertThat(output.toFloatArray()).isEqualTo(want);
  }

  private void updates(
      Graph graph, Stream stream, AttentionPlan plan, Tensor q, Tensor kv, Tensor x) {
    try (Tensor z = plan.emptyOutput();
        Tensor expected = FlashAttention.causal().run(q, kv, kv)) {
      // Another shape of graph, then the same shape with other tensors.
      graph.update(stream, () -> plan.launch(stream, q, kv, kv, x, null));
      assertThat(graph.size()).isEqualTo(1);
      assertThat(graph.update(stream, () -> plan.launch(stream, q, kv, kv, z, null))).isTrue();
      replayable(z);
      graph.launch(stream);
      stream.synchronize();
      replayed(z, expected.toFloatArray());
      assertThatThrownBy(z::close).isInstanceOf(InUseException.class);
      x.slice(0, 0, 1).fill(0); // not of the graph any more
      graph.update(stream, () -> plan.launch(stream, q, kv, kv, x, null));
    }
  }

  @Test
  void aGraphKeepsWhatItUses() {
    try (Stream stream = Stream.create(gpu());
        Tensor q = random(1, DType.BF16, 1, 100, 4, 64);
        Tensor sink = Tensor.zeros(gpu(), DType.FP32, shape(4));
        AttentionPlan plan = FlashAttention.causal().withSink(sink).plan(q, q, q);
        Tensor out = plan.emptyOutput()) {
      Graph graph = Graph.capture(stream, () -> plan.launch(stream, q, q, q, out, null));
      assertThatThrownBy(q::close).isInstanceOf(InUseException.class).hasMessageContaining("graph");
      assertThatThrownBy(sink::close).isInstanceOf(InUseException.class);
      assertThatThrownBy(out::close).isInstanceOf(InUseException.class);
      assertThatThrownBy(plan::close)
          .isInstanceOf(InUseException.class)
          .hasMessageContaining("graph");
      graph.launch(stream);
      graph.close();
      graph.close();
      assertThatThrownBy(() -> graph.launch(stream)).isInstanceOf(ClosedException.class);
      assertThatThrownBy(() -> graph.update(stream, () -> {})).isInstanceOf(ClosedException.class);
    }
  }

  @Test
  void whatACaptureRefuses() {
    try (Stream stream = Stream.create(gpu());
        Stream other = Stream.create(gpu());
        Event event = Event.create(gpu());
        Tensor q = random(1, DType.BF16, 1, 16, 2, 64);
        AttentionPlan plan = FlashAttention.causal().plan(q, q, q);
        Tensor out = plan.emptyOutput();
        Tensor pinned = Tensor.pinned(gpu(), DType.FP32, shape(16))) {
      List<Runnable> refused =
          List.of(
              () -> Tensor.empty(gpu(), DType.FP32, shape(1)),
              () -> Tensor.empty(stream, DType.FP32, shape(1)),
              () -> Tensor.pinned(gpu(), DType.FP32, shape(1)),
              out::close,
              pinned::close,
              out::toFloatArray,
              () -> out.fill(0),
              () -> plan.launch(q, q, q, out),
              () -> FlashAttention.causal().run(q, q, q),
              stream::synchronize,
              stream::isIdle,
              stream::close,
              () -> gpu().synchronize(),
              () -> Graph.capture(other, () -> {}));
      for (int i = 0; i < refused.size(); i++) {
        Runnable call = refused.get(i);
        AtomicReference<Throwable> thrown = new AtomicReference<>();
        try (Graph graph =
            Graph.capture(
                stream,
                () -> {
                  plan.launch(stream, q, q, q, out, null);
                  try {
                    call.run();
                  } catch (RuntimeException e) {
                    thrown.set(e);
                  }
                })) {
          assertThat(thrown.get()).as("call %d", i).isInstanceOf(InUseException.class);
          assertThat(graph.size()).isEqualTo(1);
          graph.launch(stream);
        }
      }
      // What fails in the capture comes out, and the stream is as it was.
      assertThatThrownBy(
              () ->
                  Graph.capture(
                      stream,
                      () -> {
                        plan.launch(stream, q, q, q, out, null);
                        throw new IllegalStateException("enough");
                      }))
          .hasMessage("enough");
      plan.launch(stream, q, q, q, out, null);
      stream.synchronize();
      assertThatThrownBy(() -> Graph.capture(gpu().stream(), () -> {}))
          .isInstanceOf(InvalidArgumentException.class)
          .hasMessageContaining("Stream.create");
      assertThatThrownBy(() -> Graph.capture(Stream.cpu(), () -> {}))
          .isInstanceOf(UnsupportedException.class);
      // A second stream takes part through an event, and has to come back.
      try (Tensor out2 = plan.emptyOutput();
          AttentionPlan fork = plan.fork();
          Graph graph =
              Graph.capture(
                  stream,
                  () -> {
                    event.record(stream);
                    other.waitFor(event);
                    plan.launch(stream, q, q, q, out, null);
                    fork.launch(other, q, q, q, out2, null);
                    event.record(other);
                    stream.waitFor(event);
                  })) {
        assertThat(graph.size()).isEqualTo(2);
        graph.launch(stream);
        stream.synchronize();
        assertThatThrownBy(event::synchronize).isInstanceOf(InUseException.class);
      }
    }
  }

  @Test
  void otherThreadsGoOnDuringACapture() {
    try (Stream stream = Stream.create(gpu());
        Tensor q = random(1, DType.BF16, 1, 16, 2, 64);
        AttentionPlan plan = FlashAttention.causal().plan(q, q, q);
        Tensor out = plan.emptyOutput()) {
      AtomicReference<Throwable> failure = new AtomicReference<>();
      AtomicReference<Throwable> refused = new AtomicReference<>();
      try (Graph graph =
          Graph.capture(
              stream,
              () -> {
                plan.launch(stream, q, q, q, out, null);
                Thread thread =
                    Thread.ofPlatform()
                        .start(
                            () -> {
                              try (Tensor fresh = Tensor.zeros(gpu(), DType.BF16, q.shape());
                                  Tensor result = FlashAttention.causal().run(q, q, fresh)) {
                                assertThat(result.toFloatArray()).containsOnly(0);
                              } catch (Throwable t) {
                                failure.set(t);
                              }
                              try {
                                out.fill(0, stream);
                              } catch (Throwable t) {
                                refused.set(t);
                              }
                            });
                try {
                  thread.join();
                } catch (InterruptedException e) {
                  throw new IllegalStateException(e);
                }
              })) {
        assertThat(failure.get()).isNull();
        assertThat(refused.get())
            .isInstanceOf(InUseException.class)
            .hasMessageContaining("another thread");
        assertThat(graph.size()).isEqualTo(1);
      }
    }
  }

  // ---- lifetimes and errors ---------------------------------------------------------------------

  @Test
  void bytesComeAndGo() {
    long at = gpu().liveBytes();
    Tensor t = Tensor.zeros(gpu(), DType.FP32, shape(1000));
    assertThat(gpu().liveBytes() - at).isEqualTo(4000);
    t.slice(0, 0, 10).close();
    assertThat(t.isOpen()).isTrue();
    t.close();
    t.close();
    assertThat(gpu().liveBytes()).isEqualTo(at);
    assertThatThrownBy(t::toFloatArray).isInstanceOf(ClosedException.class);
    assertThatThrownBy(() -> t.fill(1)).isInstanceOf(ClosedException.class);
    assertThatThrownBy(t::devicePointer).isInstanceOf(ClosedException.class);
    assertThat(t.toString()).contains("closed");
    gpu().synchronize();
    gpu().trim();
    assertThat(gpu().pool().usedBytes()).isGreaterThanOrEqualTo(0);
    assertThat(gpu().memory().freeBytes()).isBetween(1L, gpu().memory().totalBytes());
  }

  @Test
  void closingFreesAfterWorkOnSeveralStreams() {
    try (Stream one = Stream.create(gpu());
        Stream two = Stream.create(gpu());
        Tensor sum = Tensor.zeros(gpu(), DType.FP32, shape(1 << 20))) {
      for (int i = 1; i <= 20; i++) {
        Tensor t = Tensor.empty(one, DType.FP32, shape(1 << 20));
        t.fill(i, one);
        two.waitFor(one);
        sum.copyFrom(t, two);
        t.close(); // the copy is still to come
        Tensor next = Tensor.empty(one, DType.FP32, shape(1 << 20));
        next.fill(-1, one);
        next.close();
      }
      two.synchronize();
      assertThat(sum.toFloatArray()).containsOnly(20);
    }
  }

  @Test
  void closingInUseIsRefused() throws InterruptedException {
    CountDownLatch inside = new CountDownLatch(1);
    CountDownLatch leave = new CountDownLatch(1);
    try (Tensor t = Tensor.zeros(gpu(), DType.FP32, shape(10))) {
      t.acquire("t"); // as a call on another thread does
      Thread holder =
          Thread.ofPlatform()
              .start(
                  () -> {
                    inside.countDown();
                    try {
                      leave.await();
                    } catch (InterruptedException e) {
                      Thread.currentThread().interrupt();
                    }
                    t.release();
                  });
      inside.await();
      assertThatThrownBy(t::close)
          .isInstanceOf(InUseException.class)
          .hasMessageContaining("in use by 1 call");
      leave.countDown();
      holder.join();
    }
  }

  @Test
  void wrongDevices() {
    try (Tensor here = Tensor.zeros(DType.BF16, 1, 4, 1, 64);
        Tensor there = Tensor.zeros(gpu(), DType.BF16, shape(1, 4, 1, 64));
        AttentionPlan plan = FlashAttention.full().plan(there, there, there);
        Tensor out = plan.emptyOutput()) {
      assertThatThrownBy(() -> FlashAttention.full().run(there, here, there))
          .isInstanceOf(InvalidArgumentException.class)
          .hasMessageContaining("k: got a tensor on cpu, want one on " + gpu());
      assertThatThrownBy(() -> plan.launch(there, there, here, out))
          .isInstanceOf(InvalidArgumentException.class)
          .hasMessageContaining("v: got a tensor on cpu");
      assertThatThrownBy(() -> plan.launch(Stream.cpu(), there, there, there, out, null))
          .isInstanceOf(InvalidArgumentException.class)
          .hasMessageContaining("stream: got Stream[cpu]");
      assertThatThrownBy(() -> here.copyFrom(there, Stream.cpu()))
          .isInstanceOf(InvalidArgumentException.class);
      plan.launch(there, there, there, out);
      assertThat(out.toFloatArray()).containsOnly(0);
      assertThatThrownBy(() -> FlashAttention.full().withSink(here).run(there, there, there))
          .isInstanceOf(InvalidArgumentException.class);
    }
    try (PagedKvCache cache = PagedKvCache.create(gpu(), DType.BF16, 1, 64, 16, 2);
        Tensor k = random(1, DType.BF16, 3, 1, 64);
        Tensor hk = k.to(Device.cpu());
        Tensor slots = Tensor.of(new int[] {0, 1, 2})) {
      assertThatThrownBy(() -> cache.write(hk, hk, slots, null, null))
          .isInstanceOf(InvalidArgumentException.class)
          .hasMessageContaining("k: got a tensor on cpu, want one on " + gpu());
      assertThatThrownBy(() -> cache.write(k, k, slots, null, null))
          .isInstanceOf(InvalidArgumentException.class)
          .hasMessageContaining("slots: got a tensor on cpu, want one on " + gpu());
    }
  }

  @Test
  void tooMuchMemoryIsAnErrorWithNumbers() {
    assertThatThrownBy(() -> Tensor.empty(gpu(), DType.FP32, shape(1L << 45)))
        .isInstanceOf(OutOfMemoryException.class)
        .hasMessageContaining((1L << 47) + " bytes of memory on " + gpu())
        .hasMessageContaining("free are ")
        .hasMessageContaining("flare holds ");
    Tensor.zeros(gpu(), DType.FP32, shape(10)).close();
  }

  @Test
  void properties() {
    Device.Properties properties = gpu().properties();
    assertThat(properties.capability()).isGreaterThanOrEqualTo(80);
    assertThat(properties.multiprocessors()).isPositive();
    assertThat(properties.totalBytes()).isPositive();
    assertThat(gpu().name()).isNotBlank();
    assertThat(gpu().isCpu()).isFalse();
    assertThat(gpu().toString()).isEqualTo("cuda:" + gpu().index());
    assertThatThrownBy(() -> Device.cpu().properties()).isInstanceOf(UnsupportedException.class);
  }
}
