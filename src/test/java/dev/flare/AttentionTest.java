package dev.flare;

import static org.assertj.core.api.Assertions.assertThat;

import dev.flare.reference.AttentionOptions;
import dev.flare.reference.AttentionReference;
import dev.flare.reference.AttentionResult;
import dev.flare.reference.Heads;
import dev.flare.reference.Tokens;
import dev.flare.reference.Tolerances;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.SplittableRandom;
import java.util.stream.IntStream;
import java.util.stream.Stream;
import org.junit.jupiter.api.Tag;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.MethodSource;

/** Softmax attention against the float64 reference, on the {@link TestDevice}. */
@RequiresLibrary
@Tag("device")
class AttentionTest {
  private static final DType[] FLOATS = {DType.FP32, DType.FP16, DType.BF16};
  private static final int[] LENGTHS = {0, 1, 2, 15, 16, 17, 31, 63, 64, 65, 97, 128, 129, 200};

  static Stream<Long> seeds() {
    return Cases.seeds(0x5EED, 120);
  }

  /** One random case: sizes, strides, mask and options all follow from the seed. */
  private static final class Case implements AutoCloseable {
    final SplittableRandom random;
    final DType dtype;
    final int heads;
    final int kvHeads;
    final int dim;
    final int valueDim;
    final double scale;
    final List<Tensor> owned = new ArrayList<>();

    Case(long seed) {
      random = new SplittableRandom(seed);
      dtype = Cases.pick(random, FLOATS);
      kvHeads = Cases.pick(random, 1, 1, 2, 3);
      heads = kvHeads * Cases.pick(random, 1, 1, 2, 4);
      dim = TestDevice.headDim(Cases.pick(random, 1, 8, 16, 40, 64, 64, 80, 128, 192, 256));
      valueDim =
          random.nextInt(3) == 0 ? TestDevice.headDim(Cases.pick(random, 1, 24, 64, 128)) : dim;
      scale = random.nextBoolean() ? 1 / Math.sqrt(dim) : 0.05 + random.nextDouble() * 0.2;
    }

    Tensor keep(Tensor tensor) {
      owned.add(tensor);
      return tensor;
    }

    Tensor input(double[] values, long... dims) {
      if (random.nextBoolean()) {
        return keep(Cases.dense(dtype, values, dims));
      }
      Tensor[] owner = new Tensor[1];
      Tensor view = Cases.padded(dtype, values, owner, dims);
      keep(owner[0]);
      return view;
    }

    Tensor indices(DType type, int... values) {
      Tensor ints = keep(TestDevice.of(values));
      return type == DType.INT32 ? ints : keep(ints.to(type));
    }

    /** Options of both worlds, drawn together. */
    record Both(FlashAttention flare, AttentionOptions reference) {}

    Both options(int batch) {
      FlashAttention flash;
      AttentionOptions want = AttentionOptions.full(scale);
      switch (random.nextInt(4)) {
        case 0 -> flash = FlashAttention.full();
        case 1 -> {
          flash = FlashAttention.causal();
          want = want.withCausal(true);
        }
        default -> {
          int left = random.nextInt(5) == 0 ? -1 : random.nextInt(80);
          int right = random.nextInt(2) == 0 ? 0 : random.nextInt(-1, 80);
          flash = FlashAttention.window(left, right);
          want = want.withWindow(left, right);
        }
      }
      flash = flash.withScale(scale);
      if (random.nextInt(4) == 0) {
        flash = flash.withSoftcap(5);
        want = want.withSoftcap(5);
      }
      if (random.nextInt(4) == 0) {
        double[] sink = Cases.normals(random, DType.FP32, heads);
        flash = flash.withSink(keep(Cases.dense(DType.FP32, sink, heads)));
        want = want.withSink(sink);
      }
      if (random.nextInt(4) == 0) {
        int rows = random.nextBoolean() ? 1 : batch;
        double[] slopes = new double[rows * heads];
        Arrays.setAll(slopes, i -> (float) (random.nextDouble() * 0.3));
        Tensor tensor = keep(Cases.dense(DType.FP32, slopes, rows * heads));
        flash = flash.withAlibi(rows == 1 ? tensor : tensor.reshape(rows, heads));
        want = want.withAlibiSlopes(slopes);
      }
      flash = flash.withSplits(Cases.pick(random, 0, 0, 1, 2, 5));
      flash = flash.withDeterministic(random.nextBoolean());
      return new Both(flash, want);
    }

    /** Launches into poisoned memory, with and without strides, and compares. */
    void check(FlashAttention flash, Tensor q, Tensor k, Tensor v, AttentionResult want) {
      long[] outDims = q.shape().dims();
      outDims[outDims.length - 1] = valueDim;
      long[] lseDims =
          q.rank() == 3 ? new long[] {heads, q.dim(0)} : new long[] {q.dim(0), heads, q.dim(1)};
      Tensor[] owner = new Tensor[1];
      double[] poison = new double[want.out().length];
      Arrays.fill(poison, Double.NaN);
      Tensor out = Cases.padded(dtype, poison, owner, outDims);
      keep(owner[0]);
      Tensor lse = keep(TestDevice.full(Double.NaN, DType.FP32, lseDims));
      double bound = Tolerances.relative(Tolerances.Operation.ATTENTION, Cases.precision(dtype));
      try (AttentionPlan plan = flash.plan(q, k, v, out, lse)) {
        TestDevice.assertRanOn(plan.kernelName());
        plan.launch(q, k, v, out, lse);
        Cases.assertRelative("out", out, want.out(), bound);
        Cases.assertAbsolute("lse", lse, want.lse(), Tolerances.lse(Cases.precision(dtype)));
        double[] first = out.toDoubleArray();
        plan.launch(q, k, v, out, lse);
        assertThat(out.toDoubleArray()).as("second launch").isEqualTo(first);
      }
      try (Tensor once = flash.run(q, k, v)) {
        assertThat(once.toDoubleArray()).as("run() without lse").isEqualTo(out.toDoubleArray());
      }
      // Nothing beside the output has been written.
      Tensor around = owner[0];
      if (around.rank() > 0 && around.dim(-1) > valueDim) {
        assertThat(around.slice(-1, valueDim, around.dim(-1)).toFloatArray())
            .containsOnly(Float.NaN);
      }
    }

    @Override
    public void close() {
      owned.forEach(Tensor::close);
    }
  }

  @ParameterizedTest(name = "seed {0}")
  @MethodSource("seeds")
  void dense(long seed) {
    try (Case c = new Case(seed)) {
      int batch = Cases.pick(c.random, 0, 1, 2, 3);
      int nq = Cases.pick(c.random, LENGTHS);
      int nk = c.random.nextInt(3) == 0 ? nq : Cases.pick(c.random, LENGTHS);
      double[] q = Cases.normals(c.random, c.dtype, batch, nq, c.heads, c.dim);
      double[] k = Cases.normals(c.random, c.dtype, batch, nk, c.kvHeads, c.dim);
      double[] v = Cases.normals(c.random, c.dtype, batch, nk, c.kvHeads, c.valueDim);
      Case.Both options = c.options(batch);
      AttentionResult want =
          AttentionReference.attention(
              Tokens.dense(batch, nq),
              Tokens.dense(batch, nk),
              new Heads(c.heads, c.kvHeads, c.dim, c.valueDim),
              q,
              k,
              v,
              options.reference());
      c.check(
          options.flare(),
          c.input(q, batch, nq, c.heads, c.dim),
          c.input(k, batch, nk, c.kvHeads, c.dim),
          c.input(v, batch, nk, c.kvHeads, c.valueDim),
          want);
    }
  }

  private static int[] cumulative(SplittableRandom random, int batch) {
    int[] sums = new int[batch + 1];
    for (int b = 0; b < batch; b++) {
      sums[b + 1] = sums[b] + Cases.pick(random, LENGTHS);
    }
    return sums;
  }

  private static int longest(int... sums) {
    return IntStream.range(1, sums.length).map(i -> sums[i] - sums[i - 1]).max().orElse(0);
  }

  @ParameterizedTest(name = "seed {0}")
  @MethodSource("seeds")
  void varlen(long seed) {
    try (Case c = new Case(seed)) {
      int batch = Cases.pick(c.random, 0, 1, 3, 5);
      int[] cuQ = cumulative(c.random, batch);
      int[] cuK = cumulative(c.random, batch);
      double[] q = Cases.normals(c.random, c.dtype, cuQ[batch], c.heads, c.dim);
      double[] k = Cases.normals(c.random, c.dtype, cuK[batch], c.kvHeads, c.dim);
      double[] v = Cases.normals(c.random, c.dtype, cuK[batch], c.kvHeads, c.valueDim);
      Case.Both options = c.options(batch);
      AttentionResult want =
          AttentionReference.attention(
              Tokens.packed(cuQ),
              Tokens.packed(cuK),
              new Heads(c.heads, c.kvHeads, c.dim, c.valueDim),
              q,
              k,
              v,
              options.reference());
      DType index = Cases.pick(c.random, DType.INT32, DType.INT64);
      int slack = c.random.nextInt(2) * 30;
      c.check(
          options
              .flare()
              .withVarlen(
                  c.indices(index, cuQ),
                  longest(cuQ) + slack,
                  c.indices(index, cuK),
                  longest(cuK) + slack),
          c.input(q, cuQ[batch], c.heads, c.dim),
          c.input(k, cuK[batch], c.kvHeads, c.dim),
          c.input(v, cuK[batch], c.kvHeads, c.valueDim),
          want);
    }
  }

  @ParameterizedTest(name = "seed {0}")
  @MethodSource("seeds")
  void paged(long seed) {
    try (Case c = new Case(seed)) {
      int batch = Cases.pick(c.random, 1, 2, 4);
      int nq = Cases.pick(c.random, 1, 1, 2, 5, 33);
      int pageSize = Cases.pick(c.random, 1, 3, 16, 64);
      int[] lengths = new int[batch];
      Arrays.setAll(lengths, b -> Cases.pick(c.random, LENGTHS));
      int longest = Arrays.stream(lengths).max().orElseThrow();
      int width = Math.ceilDiv(longest, pageSize) + c.random.nextInt(2);
      int pages = batch * width + 3;
      // Pages in random order, so that neighbours in a sequence are not neighbours in memory.
      int[] order = IntStream.range(0, pages).toArray();
      for (int i = pages - 1; i > 0; i--) {
        int j = c.random.nextInt(i + 1);
        int swap = order[i];
        order[i] = order[j];
        order[j] = swap;
      }
      int[] table = new int[batch * width];
      double[] k = Cases.normals(c.random, c.dtype, pages, pageSize, c.kvHeads, c.dim);
      double[] v = Cases.normals(c.random, c.dtype, pages, pageSize, c.kvHeads, c.valueDim);
      boolean[] live = new boolean[pages * pageSize];
      for (int b = 0; b < batch; b++) {
        for (int p = 0; p < width; p++) {
          boolean used = p < Math.ceilDiv(lengths[b], pageSize);
          table[b * width + p] = used ? order[b * width + p] : Integer.MIN_VALUE;
        }
        for (int t = 0; t < lengths[b]; t++) {
          live[table[b * width + t / pageSize] * pageSize + t % pageSize] = true;
        }
      }
      for (int row = 0; row < live.length; row++) {
        if (!live[row]) {
          int kWidth = c.kvHeads * c.dim;
          int vWidth = c.kvHeads * c.valueDim;
          Arrays.fill(k, row * kWidth, (row + 1) * kWidth, Double.NaN);
          Arrays.fill(v, row * vWidth, (row + 1) * vWidth, Double.NaN);
        }
      }
      double[] q = Cases.normals(c.random, c.dtype, batch, nq, c.heads, c.dim);
      Case.Both options = c.options(batch);
      AttentionResult want =
          AttentionReference.attention(
              Tokens.dense(batch, nq),
              Tokens.paged(pages, pageSize, table, width, lengths),
              new Heads(c.heads, c.kvHeads, c.dim, c.valueDim),
              q,
              k,
              v,
              options.reference());
      DType index = Cases.pick(c.random, DType.INT32, DType.INT64);
      Tensor blockTable = c.indices(index, table).reshape(batch, width);
      c.check(
          options.flare().withPages(blockTable, c.indices(index, lengths), longest),
          c.input(q, batch, nq, c.heads, c.dim),
          c.input(k, pages, pageSize, c.kvHeads, c.dim),
          c.input(v, pages, pageSize, c.kvHeads, c.valueDim),
          want);
    }
  }

  @ParameterizedTest(name = "seed {0}")
  @MethodSource("seeds")
  void usedLengths(long seed) {
    try (Case c = new Case(seed)) {
      int batch = Cases.pick(c.random, 1, 3);
      int nq = Cases.pick(c.random, 1, 20, 65);
      int nk = Cases.pick(c.random, 1, 70, 130);
      int[] usedQ = new int[batch];
      int[] usedK = new int[batch];
      Arrays.setAll(usedQ, b -> c.random.nextInt(nq + 1));
      Arrays.setAll(usedK, b -> c.random.nextInt(nk + 1));
      double[] q = Cases.normals(c.random, c.dtype, batch, nq, c.heads, c.dim);
      double[] k = Cases.normals(c.random, c.dtype, batch, nk, c.kvHeads, c.dim);
      double[] v = Cases.normals(c.random, c.dtype, batch, nk, c.kvHeads, c.valueDim);
      Case.Both options = c.options(batch);
      AttentionResult want =
          AttentionReference.attention(
              Tokens.dense(batch, nq).used(usedQ),
              Tokens.dense(batch, nk).used(usedK),
              new Heads(c.heads, c.kvHeads, c.dim, c.valueDim),
              q,
              k,
              v,
              options.reference());
      Tensor qt = c.input(q, batch, nq, c.heads, c.dim);
      Tensor kt = c.input(k, batch, nk, c.kvHeads, c.dim);
      Tensor vt = c.input(v, batch, nk, c.kvHeads, c.valueDim);
      FlashAttention flash =
          options
              .flare()
              .withUsedLengths(c.indices(DType.INT32, usedQ), c.indices(DType.INT32, usedK));
      try (AttentionPlan plan = flash.plan(qt, kt, vt);
          Tensor out = plan.emptyOutput()) {
        out.fill(-77);
        plan.launch(qt, kt, vt, out);
        int width = c.heads * c.valueDim;
        double[] got = out.toDoubleArray();
        double[] expected = want.out().clone();
        for (int b = 0; b < batch; b++) {
          for (int i = usedQ[b]; i < nq; i++) {
            int at = (b * nq + i) * width;
            assertThat(Arrays.copyOfRange(got, at, at + width)).containsOnly(-77.0);
            Arrays.fill(got, at, at + width, 0);
            Arrays.fill(expected, at, at + width, 0);
          }
        }
        try (Tensor masked = Cases.dense(DType.FP32, got, got.length)) {
          Cases.assertRelative(
              "out",
              masked,
              expected,
              Tolerances.relative(Tolerances.Operation.ATTENTION, Cases.precision(c.dtype)));
        }
      }
    }
  }

  @Test
  void layoutsAreStrides() {
    // [B, H, N, D] memory seen as [B, N, H, D], in and out.
    SplittableRandom random = new SplittableRandom(1);
    double[] x = Cases.normals(random, DType.BF16, 2, 4, 33, 64);
    try (Tensor bhnd = Cases.dense(DType.BF16, x, 2, 4, 33, 64);
        Tensor bnhd = bhnd.transpose(1, 2).copy();
        Tensor want = FlashAttention.causal().run(bnhd, bnhd, bnhd);
        Tensor outBhnd = TestDevice.empty(DType.BF16, 2, 4, 33, 64)) {
      Tensor view = bhnd.transpose(1, 2);
      Tensor out = outBhnd.transpose(1, 2);
      try (AttentionPlan plan = FlashAttention.causal().plan(view, view, view, out, null)) {
        plan.launch(view, view, view, out);
      }
      assertThat(out.toFloatArray()).isEqualTo(want.toFloatArray());
    }
  }

  @Test
  void broadcastInputs() {
    SplittableRandom random = new SplittableRandom(2);
    double[] x = Cases.normals(random, DType.FP32, 1, 20, 1, 32);
    try (Tensor one = Cases.dense(DType.FP32, x, 1, 20, 1, 32);
        Tensor want = FlashAttention.full().run(one, one, one);
        Tensor got =
            FlashAttention.full()
                .run(
                    one.expand(3, 20, 4, 32), one.expand(3, 20, 2, 32), one.expand(3, 20, 2, 32))) {
      assertThat(got.select(2, 3).select(0, 2).toFloatArray())
          .isEqualTo(want.reshape(20, 32).toFloatArray());
    }
  }

  @Test
  void slidingWindowCountsTheOwnKey() {
    SplittableRandom random = new SplittableRandom(3);
    double[] x = Cases.normals(random, DType.FP16, 1, 100, 2, 64);
    try (Tensor t = Cases.dense(DType.FP16, x, 1, 100, 2, 64);
        Tensor window = SlidingWindowAttention.of(1).run(t, t, t);
        Tensor wide = SlidingWindowAttention.of(100).run(t, t, t);
        Tensor causal = FlashAttention.causal().run(t, t, t)) {
      assertThat(window.toFloatArray())
          .as("window 1 is the value itself")
          .isEqualTo(t.toFloatArray());
      assertThat(wide.toFloatArray()).isEqualTo(causal.toFloatArray());
    }
  }

  @Test
  void fp8WithDescales() {
    SplittableRandom random = new SplittableRandom(4);
    int batch = 2;
    int n = 50;
    int heads = 4;
    int kvHeads = 2;
    int dim = 64;
    double[] q = Cases.normals(random, DType.FP8_E4M3, batch, n, heads, dim);
    double[] k = Cases.normals(random, DType.FP8_E4M3, batch, n, kvHeads, dim);
    double[] v = Cases.normals(random, DType.FP8_E4M3, batch, n, kvHeads, dim);
    double[] factors = {0.5, 2, 1.5, 0.25};
    AttentionResult want =
        AttentionReference.attention(
            Tokens.dense(batch, n),
            Tokens.dense(batch, n),
            new Heads(heads, kvHeads, dim, dim),
            AttentionReference.descale(Tokens.dense(batch, n), heads, dim, q, factors, kvHeads),
            AttentionReference.descale(Tokens.dense(batch, n), kvHeads, dim, k, factors, kvHeads),
            AttentionReference.descale(Tokens.dense(batch, n), kvHeads, dim, v, factors, kvHeads),
            AttentionOptions.causal(1 / Math.sqrt(dim)));
    try (Tensor qt = Cases.dense(DType.FP8_E4M3, q, batch, n, heads, dim);
        Tensor kt = Cases.dense(DType.FP8_E4M3, k, batch, n, kvHeads, dim);
        Tensor vt = Cases.dense(DType.FP8_E4M3, v, batch, n, kvHeads, dim);
        Tensor descale = Cases.dense(DType.FP32, factors, batch, kvHeads);
        Tensor out =
            FlashAttention.causal().withDescale(descale, descale, descale).run(qt, kt, vt);
        Tensor wide =
            FlashAttention.causal()
                .withDescale(descale, descale, descale)
                .withOutputType(DType.FP32)
                .run(qt, kt, vt)) {
      assertThat(out.dtype()).isEqualTo(DType.BF16);
      assertThat(wide.dtype()).isEqualTo(DType.FP32);
      Cases.assertRelative("out", out, want.out(), 4e-2);
      Cases.assertRelative("wide", wide, want.out(), 4e-2);
    }
  }

  @Test
  void mergeJoinsDisjointKeys() {
    SplittableRandom random = new SplittableRandom(5);
    try (Tensor q =
            Cases.dense(DType.FP32, Cases.normals(random, DType.FP32, 2, 9, 4, 32), 2, 9, 4, 32);
        Tensor k =
            Cases.dense(DType.FP32, Cases.normals(random, DType.FP32, 2, 60, 2, 32), 2, 60, 2, 32);
        Tensor v =
            Cases.dense(DType.FP32, Cases.normals(random, DType.FP32, 2, 60, 2, 32), 2, 60, 2, 32);
        AttentionOutput all = FlashAttention.full().runWithLse(q, k, v);
        Tensor outs = TestDevice.empty(DType.FP32, 3, 2, 9, 4, 32);
        Tensor lses = TestDevice.empty(DType.FP32, 3, 2, 4, 9)) {
      int[] bounds = {0, 25, 60, 60}; // the last part has no keys at all
      for (int p = 0; p < 3; p++) {
        try (AttentionOutput part =
            FlashAttention.full()
                .runWithLse(
                    q,
                    k.slice(1, bounds[p], bounds[p + 1]),
                    v.slice(1, bounds[p], bounds[p + 1]))) {
          outs.select(0, p).copyFrom(part.out());
          lses.select(0, p).copyFrom(part.lse());
        }
      }
      outs.select(0, 2).fill(Double.NaN); // weight 0: must not be looked at
      try (AttentionOutput merged = FlashAttention.merge(outs, lses)) {
        Cases.assertRelative("out", merged.out(), all.out().toDoubleArray(), 2e-6);
        Cases.assertAbsolute("lse", merged.lse(), all.lse().toDoubleArray(), 1e-5);
      }
    }
  }

  @Test
  void threadsGiveTheSameBits() {
    SplittableRandom random = new SplittableRandom(6);
    double[] x = Cases.normals(random, DType.BF16, 1, 200, 3, 64);
    try (Tensor t = Cases.dense(DType.BF16, x, 1, 200, 3, 64);
        Tensor one = FlashAttention.causal().withThreads(1).run(t, t, t);
        Tensor two = FlashAttention.causal().withThreads(2).run(t, t, t)) {
      assertThat(two.toFloatArray()).isEqualTo(one.toFloatArray());
    }
  }

  @Test
  void offsetsBeyond32Bits() {
    // Two sequences 2^31 elements apart; the memory between them is never touched.
    SplittableRandom random = new SplittableRandom(7);
    double[] x = Cases.normals(random, DType.BF16, 2, 40, 2, 64);
    try (Tensor near = Cases.dense(DType.BF16, x, 2, 40, 2, 64);
        Tensor far = TestDevice.zeros(DType.BF16, 2, (1L << 31) / 128 + 1, 2, 64);
        Tensor want = FlashAttention.causal().run(near, near, near)) {
      Tensor view = far.slice(1, 0, 40);
      view.copyFrom(near);
      Tensor out = far.slice(1, 100, 140);
      try (AttentionPlan plan = FlashAttention.causal().plan(view, view, view, out, null)) {
        plan.launch(view, view, view, out);
      }
      assertThat(out.toFloatArray()).isEqualTo(want.toFloatArray());
    }
  }
}
