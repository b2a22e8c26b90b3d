package dev.flare;

import static org.assertj.core.api.Assertions.assertThat;
import static org.assertj.core.api.Assertions.assertThatThrownBy;

import dev.flare.reference.CacheReference;
import dev.flare.reference.Precision;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.SplittableRandom;
import org.junit.jupiter.api.Test;

/** Paged and latent caches, and pools of recurrent states. */
@RequiresLibrary
class CacheTest {
  private static final int HEADS = 2;
  private static final int DIM = 64;

  private static PagedKvCache cache(int pageSize, int pages) {
    return PagedKvCache.create(Device.cpu(), DType.FP32, HEADS, DIM, pageSize, pages);
  }

  private static Tensor tokens(long seed, int n) {
    return Tensor.randn(seed, DType.FP32, n, HEADS, DIM);
  }

  /** All tokens of a sequence, read back through its pages. */
  private static float[] contents(PagedKvCache cache, KvCache.Sequence sequence) {
    try (KvCache.Batch batch = cache.batch(sequence)) {
      int n = (int) sequence.length();
      float[] all = new float[n * HEADS * DIM];
      for (int t = 0; t < n; t++) {
        long page = (long) batch.blockTable().get(0, t / cache.pageSize());
        float[] row = cache.keys().select(0, page).select(0, t % cache.pageSize()).toFloatArray();
        System.arraycopy(row, 0, all, t * HEADS * DIM, row.length);
      }
      return all;
    }
  }

  @Test
  void attentionOverPagesEqualsAttentionOverTokens() {
    SplittableRandom random = new SplittableRandom(1);
    try (PagedKvCache cache = cache(16, 40)) {
      int[] lengths = {1, 16, 33, 100};
      KvCache.Sequence[] sequences = new KvCache.Sequence[lengths.length];
      Tensor[] keys = new Tensor[lengths.length];
      Tensor[] values = new Tensor[lengths.length];
      for (int i = 0; i < lengths.length; i++) {
        sequences[i] = cache.open();
        keys[i] = tokens(10 + i, lengths[i]);
        values[i] = tokens(20 + i, lengths[i]);
        // In pieces of any size.
        for (int at = 0; at < lengths[i]; ) {
          int to = Math.min(lengths[i], at + 1 + random.nextInt(20));
          cache.append(sequences[i], keys[i].slice(0, at, to), values[i].slice(0, at, to));
          at = to;
        }
      }
      try (Tensor q = Tensor.randn(5, DType.FP32, lengths.length, 1, 4, DIM);
          KvCache.Batch batch = cache.batch(sequences);
          Tensor got = FlashAttention.causal().run(q, batch)) {
        for (int i = 0; i < lengths.length; i++) {
          try (Tensor want =
              FlashAttention.causal()
                  .run(q.slice(0, i, i + 1), keys[i].unsqueeze(0), values[i].unsqueeze(0))) {
            Cases.assertRelative(
                "sequence " + i, got.slice(0, i, i + 1), want.toDoubleArray(), 2e-6);
          }
        }
      }
      for (int i = 0; i < lengths.length; i++) {
        keys[i].close();
        values[i].close();
        sequences[i].close();
      }
      assertThat(cache.freePages()).isEqualTo(40);
    }
  }

  @Test
  void forksShareUntilTheyWrite() {
    try (PagedKvCache cache = cache(4, 10);
        Tensor first = tokens(1, 6);
        Tensor second = tokens(2, 3);
        KvCache.Sequence parent = cache.open()) {
      cache.append(parent, first, first);
      assertThat(cache.freePages()).isEqualTo(8);
      try (KvCache.Sequence child = parent.fork()) {
        assertThat(cache.freePages()).as("a fork takes no page").isEqualTo(8);
        cache.append(child, second, second);
        // One copy of the shared last page, and one new page.
        assertThat(cache.freePages()).isEqualTo(6);
        assertThat(contents(cache, parent)).isEqualTo(first.toFloatArray());
        float[] both = contents(cache, child);
        assertThat(Arrays.copyOf(both, 6 * HEADS * DIM)).isEqualTo(first.toFloatArray());
        assertThat(Arrays.copyOfRange(both, 6 * HEADS * DIM, both.length))
            .isEqualTo(second.toFloatArray());
        cache.append(parent, second, second);
        assertThat(contents(cache, child)).isEqualTo(both);
      }
      assertThat(cache.freePages()).isEqualTo(7);
    }
  }

  @Test
  void randomForksAppendsAndTruncations() {
    SplittableRandom random = new SplittableRandom(0xF0);
    try (PagedKvCache cache = cache(3, 60)) {
      List<KvCache.Sequence> live = new ArrayList<>();
      List<List<float[]>> expected = new ArrayList<>();
      for (int step = 0; step < 600; step++) {
        int what = random.nextInt(10);
        if (live.isEmpty() || what == 0) {
          live.add(cache.open());
          expected.add(new ArrayList<>());
          continue;
        }
        int i = random.nextInt(live.size());
        if (what < 6) {
          int n = 1 + random.nextInt(5);
          try (Tensor t = tokens(step, n)) {
            int free = cache.freePages();
            try {
              cache.append(live.get(i), t, t);
              for (int row = 0; row < n; row++) {
                expected.get(i).add(t.select(0, row).toFloatArray());
              }
            } catch (OutOfMemoryException e) {
              assertThat(cache.freePages()).isEqualTo(free);
            }
          }
        } else if (what == 6) {
          live.add(live.get(i).fork());
          expected.add(new ArrayList<>(expected.get(i)));
        } else if (what == 7) {
          int keep = random.nextInt(expected.get(i).size() + 1);
          live.get(i).truncate(keep);
          expected.set(i, new ArrayList<>(expected.get(i).subList(0, keep)));
        } else {
          live.remove(i).close();
          expected.remove(i);
        }
        for (int s = 0; s < live.size(); s++) {
          assertThat(live.get(s).length()).isEqualTo(expected.get(s).size());
        }
        if (step % 20 == 0) {
          for (int s = 0; s < live.size(); s++) {
            float[] all = contents(cache, live.get(s));
            for (int row = 0; row < expected.get(s).size(); row++) {
              assertThat(Arrays.copyOfRange(all, row * HEADS * DIM, (row + 1) * HEADS * DIM))
                  .as("step %s sequence %s row %s", step, s, row)
                  .isEqualTo(expected.get(s).get(row));
            }
          }
        }
      }
      live.forEach(KvCache.Sequence::close);
      assertThat(cache.freePages()).isEqualTo(60);
    }
  }

  @Test
  void aDecodeStepAppendsToEach() {
    try (PagedKvCache cache = cache(2, 20);
        Tensor step = tokens(1, 3)) {
      List<KvCache.Sequence> sequences = List.of(cache.open(), cache.open(), cache.open());
      for (int n = 0; n < 3; n++) {
        cache.appendEach(sequences, step, step, null);
      }
      for (int b = 0; b < 3; b++) {
        assertThat(sequences.get(b).length()).isEqualTo(3);
        float[] row = step.select(0, b).toFloatArray();
        assertThat(Arrays.copyOf(contents(cache, sequences.get(b)), row.length)).isEqualTo(row);
      }
      assertThatThrownBy(
              () ->
                  cache.appendEach(
                      List.of(sequences.get(0), sequences.get(1), sequences.get(0)),
                      step,
                      step,
                      null))
          .isInstanceOf(InvalidArgumentException.class)
          .hasMessageContaining("each sequence once");
    }
  }

  @Test
  void batchesKeepTheirAddresses() {
    try (PagedKvCache cache = cache(4, 20);
        KvCache.Sequence sequence = cache.open();
        Tensor token = tokens(3, 1);
        Tensor q = Tensor.randn(9, DType.FP32, 1, 1, 4, DIM);
        KvCache.Batch batch = cache.batch(30, sequence);
        AttentionPlan plan =
            FlashAttention.causal()
                .withPages(batch.blockTable(), batch.lengths(), batch.maxLength())
                .plan(q, cache.keys(), cache.values());
        Tensor out = plan.emptyOutput()) {
      for (int n = 1; n <= 30; n++) {
        cache.append(sequence, token, token);
        batch.update();
        plan.launch(q, cache.keys(), cache.values(), out);
        // All values are equal, and so is their mean.
        assertThat(out.select(0, 0).select(0, 0).select(0, 0).toFloatArray())
            .usingComparatorWithPrecision(1e-5f)
            .containsExactly(token.select(0, 0).select(0, 0).toFloatArray());
      }
      cache.append(sequence, token, token);
      assertThatThrownBy(batch::update)
          .isInstanceOf(InvalidArgumentException.class)
          .hasMessageContaining("31 tokens");
    }
  }

  @Test
  void rotaryTurnsKeysByTheirPositions() {
    int rotaryDim = 32;
    double[] cos = new double[10 * rotaryDim / 2];
    double[] sin = new double[cos.length];
    for (int p = 0; p < 10; p++) {
      for (int i = 0; i < rotaryDim / 2; i++) {
        cos[p * rotaryDim / 2 + i] = (float) Math.cos(p * Math.pow(10000, -2.0 * i / rotaryDim));
        sin[p * rotaryDim / 2 + i] = (float) Math.sin(p * Math.pow(10000, -2.0 * i / rotaryDim));
      }
    }
    for (boolean interleaved : new boolean[] {false, true}) {
      try (PagedKvCache cache = cache(4, 5);
          KvCache.Sequence sequence = cache.open();
          Tensor k = tokens(1, 7);
          Tensor cosT = Cases.dense(DType.FP32, cos, 10, rotaryDim / 2);
          Tensor sinT = Cases.dense(DType.FP32, sin, 10, rotaryDim / 2)) {
        Rotary rotary = new Rotary(cosT, sinT, interleaved);
        cache.append(sequence, k.slice(0, 0, 3), k.slice(0, 0, 3), rotary);
        cache.append(sequence, k.slice(0, 3, 7), k.slice(0, 3, 7), rotary);
        double[] want =
            CacheReference.rotate(
                k.toDoubleArray(),
                HEADS,
                DIM,
                rotaryDim,
                interleaved,
                cos,
                sin,
                new int[] {0, 1, 2, 3, 4, 5, 6});
        float[] got = contents(cache, sequence);
        try (Tensor t = Tensor.of(got)) {
          Cases.assertRelative("rotated", t, want, 1e-6);
        }
        try (Tensor beyond = tokens(2, 4)) {
          int free = cache.freePages();
          assertThatThrownBy(() -> cache.append(sequence, beyond, beyond, rotary))
              .as("position 10 is beyond the tables")
              .isInstanceOf(InvalidArgumentException.class)
              .hasMessageContaining("positions");
          assertThat(cache.freePages()).isEqualTo(free);
          assertThat(sequence.length()).isEqualTo(7);
        }
      }
    }
  }

  @Test
  void fp8CachesStoreDescaled() {
    try (Tensor descale = Tensor.of(new float[] {0.25f, 2});
        PagedKvCache cache =
            PagedKvCache.create(
                Device.cpu(), DType.FP8_E4M3, HEADS, DIM, DIM, 8, 2, descale, descale);
        KvCache.Sequence sequence = cache.open();
        Tensor k = tokens(1, 5)) {
      cache.append(sequence, k, k);
      double[] want =
          CacheReference.append(
              new double[5 * HEADS * DIM],
              HEADS,
              DIM,
              k.toDoubleArray(),
              new int[] {0, 1, 2, 3, 4},
              Precision.FP8_E4M3,
              new double[] {0.25, 2});
      float[] got = contents(cache, sequence);
      for (int i = 0; i < got.length; i++) {
        assertThat((double) got[i]).isEqualTo(want[i]);
      }
    }
  }

  @Test
  void latentRowsOf656Bytes() {
    try (LatentKvCache cache = LatentKvCache.create(Device.cpu(), DType.UINT8, 512, 64, 16, 4);
        KvCache.Sequence sequence = cache.open();
        Tensor cKv = Tensor.randn(1, DType.BF16, 20, 512);
        Tensor kRope = Tensor.randn(2, DType.BF16, 20, 64);
        Tensor q = Tensor.randn(3, DType.BF16, 1, 1, 4, 576)) {
      cache.append(sequence, cKv, kRope);
      double[] row = new double[576];
      System.arraycopy(cKv.select(0, 17).toDoubleArray(), 0, row, 0, 512);
      System.arraycopy(kRope.select(0, 17).toDoubleArray(), 0, row, 512, 64);
      byte[] want = CacheReference.encodeLatentRow(row);
      byte[] got =
          cache
              .rows()
              .segment()
              .asSlice(17 * 656, 656)
              .toArray(java.lang.foreign.ValueLayout.JAVA_BYTE);
      assertThat(got).isEqualTo(want);
      MultiHeadLatentAttention mla = MultiHeadLatentAttention.causal().withHeadDims(128, 64);
      try (KvCache.Batch batch = cache.batch(sequence);
          Tensor out = mla.decode(q, batch)) {
        assertThat(out.shape()).isEqualTo(Shape.of(1, 1, 4, 512));
        assertThat(out.toFloatArray()).doesNotContain(Float.NaN);
      }
    }
  }

  @Test
  void latentCacheEqualsContiguousRows() {
    try (LatentKvCache cache = LatentKvCache.create(Device.cpu(), DType.FP32, 32, 8, 4, 10);
        KvCache.Sequence sequence = cache.open();
        Tensor rows = Tensor.randn(1, DType.FP32, 1, 13, 40);
        Tensor q = Tensor.randn(2, DType.FP32, 1, 2, 3, 40)) {
      Tensor flat = rows.reshape(13, 40);
      cache.append(sequence, flat.slice(1, 0, 32), flat.slice(1, 32, 40));
      MultiHeadLatentAttention mla = MultiHeadLatentAttention.causal().withHeadDims(16, 8);
      try (KvCache.Batch batch = cache.batch(sequence);
          Tensor paged = mla.decode(q, batch);
          Tensor contiguous = mla.decode(q, rows)) {
        Cases.assertRelative("paged", paged, contiguous.toDoubleArray(), 5e-6);
        assertThatThrownBy(() -> FlashAttention.causal().run(q, batch))
            .isInstanceOf(InvalidArgumentException.class)
            .hasMessageContaining("latent cache");
      }
    }
  }

  @Test
  void wrongUseOfCaches() {
    try (PagedKvCache cache = cache(4, 3);
        PagedKvCache other = cache(4, 3);
        Tensor k = tokens(1, 2);
        Tensor long13 = tokens(2, 13);
        Tensor wide = Tensor.zeros(DType.FP32, 2, HEADS, 32)) {
      KvCache.Sequence sequence = cache.open();
      cache.append(sequence, k, k);
      assertThatThrownBy(() -> cache.append(sequence, long13, long13))
          .isInstanceOf(OutOfMemoryException.class)
          .hasMessageContaining("need 3 page(s), and 2 of 3 are free");
      assertThat(sequence.length()).isEqualTo(2);
      assertThatThrownBy(() -> other.append(sequence, k, k))
          .isInstanceOf(InvalidArgumentException.class)
          .hasMessageContaining("another cache");
      assertThatThrownBy(() -> cache.append(sequence, wide, k))
          .isInstanceOf(InvalidArgumentException.class)
          .hasMessageContaining("k: got [2, 2, 32]");
      assertThatThrownBy(() -> sequence.truncate(3)).isInstanceOf(InvalidArgumentException.class);
      try (Tensor slots = Tensor.of(new int[] {0, 12})) {
        assertThatThrownBy(() -> cache.write(k, k, slots, null, null))
            .isInstanceOf(InvalidArgumentException.class)
            .hasMessageContaining("slots");
      }
      sequence.close();
      sequence.close();
      assertThat(cache.freePages()).isEqualTo(3);
      assertThatThrownBy(() -> cache.append(sequence, k, k)).isInstanceOf(ClosedException.class);
      assertThatThrownBy(sequence::fork).isInstanceOf(ClosedException.class);
      assertThatThrownBy(() -> cache.batch(sequence)).isInstanceOf(ClosedException.class);
      cache.close();
      cache.close();
      assertThatThrownBy(cache::open).isInstanceOf(ClosedException.class);
    }
    assertThatThrownBy(() -> PagedKvCache.create(Device.cpu(), DType.INT32, 1, 64, 16, 1))
        .hasMessageContaining("dtype: got INT32");
    assertThatThrownBy(() -> PagedKvCache.create(Device.cpu(), DType.BF16, 1, 64, 0, 1))
        .hasMessageContaining("pageSize: got 0");
    assertThatThrownBy(() -> LatentKvCache.create(Device.cpu(), DType.UINT8, 256, 64, 16, 1))
        .hasMessageContaining("512, 64");
  }

  @Test
  void statesAreForkedByCopy() {
    try (DeltaState states =
        DeltaState.create(Device.cpu(), DType.FP32, StateLayout.KV, 3, 2, 8, 8)) {
      DeltaState.Sequence first = states.open();
      first.state().fill(3);
      DeltaState.Sequence second = first.fork();
      second.state().fill(4);
      assertThat(first.state().toFloatArray()).containsOnly(3);
      assertThat(second.state().toFloatArray()).containsOnly(4);
      try (DeltaState.Batch batch = states.batch(second, null, first)) {
        assertThat(batch.slots().toLongArray()).containsExactly(1, -1, 0);
      }
      DeltaState.Sequence third = states.open();
      assertThatThrownBy(states::open)
          .isInstanceOf(OutOfMemoryException.class)
          .hasMessageContaining("all 3 slots");
      second.close();
      second.close();
      assertThat(states.freeSlots()).isEqualTo(1);
      assertThatThrownBy(second::state).isInstanceOf(ClosedException.class);
      try (DeltaState.Sequence again = states.open()) {
        assertThat(again.state().toFloatArray()).as("a new sequence starts at 0").containsOnly(0);
      }
      third.close();
      first.close();
      assertThat(states.freeSlots()).isEqualTo(3);
    }
  }
}
