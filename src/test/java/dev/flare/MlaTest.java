package dev.flare;

import static org.assertj.core.api.Assertions.assertThat;

import dev.flare.reference.AttentionOptions;
import dev.flare.reference.AttentionResult;
import dev.flare.reference.CacheReference;
import dev.flare.reference.MlaReference;
import dev.flare.reference.Tokens;
import dev.flare.reference.Tolerances;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.SplittableRandom;
import java.util.stream.IntStream;
import java.util.stream.Stream;
import org.jspecify.annotations.Nullable;
import org.junit.jupiter.api.Tag;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.MethodSource;

/** Multi-head latent attention on the CPU against the float64 reference. */
@RequiresLibrary
@Tag("device")
class MlaTest {
  private static final int[] LENGTHS = {0, 1, 2, 17, 33, 64, 65, 100};

  static Stream<Long> seeds() {
    return Cases.seeds(0x3AD, 80);
  }

  /** Sizes and inputs of one random case. */
  private static final class Case implements AutoCloseable {
    final SplittableRandom random;
    final DType dtype;
    final int heads;
    final int nope;
    final int rope;
    final int latent;
    final int value;
    final MlaReference.Widths widths;
    final List<Tensor> owned = new ArrayList<>();

    Case(long seed) {
      random = new SplittableRandom(seed);
      dtype = Cases.pick(random, DType.FP32, DType.FP16, DType.BF16);
      heads = Cases.pick(random, 1, 2, 3, 8);
      nope = Cases.pick(random, 8, 16, 40, 64);
      rope = Cases.pick(random, 0, 8, 16, 32);
      latent = Cases.pick(random, 16, 48, 128);
      value = Cases.pick(random, 8, 32, 64);
      widths = new MlaReference.Widths(heads, nope, rope, latent, value);
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

    double[] normals(long... dims) {
      return Cases.normals(random, dtype, dims);
    }

    /** Up-projection weights of a size that keeps keys and values at unit variance. */
    double[] weights(long... dims) {
      double[] w = Cases.normals(random, DType.FP32, dims);
      double scale = 1 / Math.sqrt(latent);
      for (int i = 0; i < w.length; i++) {
        w[i] = Cases.precision(dtype).round(w[i] * scale);
      }
      return w;
    }

    double bound() {
      return Tolerances.relative(Tolerances.Operation.MLA, Cases.precision(dtype));
    }

    void check(AttentionOutput got, AttentionResult want) {
      try (got) {
        Cases.assertRelative("out", got.out(), want.out(), bound());
        Cases.assertAbsolute("lse", got.lse(), want.lse(), Tolerances.lse(Cases.precision(dtype)));
      }
    }

    @Override
    public void close() {
      owned.forEach(Tensor::close);
    }
  }

  @ParameterizedTest(name = "seed {0}")
  @MethodSource("seeds")
  void prefill(long seed) {
    try (Case c = new Case(seed)) {
      int batch = Cases.pick(c.random, 1, 2);
      int nq = Cases.pick(c.random, LENGTHS);
      int nk = c.random.nextBoolean() ? nq : Cases.pick(c.random, LENGTHS);
      boolean causal = c.random.nextBoolean();
      boolean packed = c.random.nextInt(3) == 0;
      Tokens queries = packed ? Tokens.packed(uniform(batch, nq)) : Tokens.dense(batch, nq);
      Tokens keys = packed ? Tokens.packed(uniform(batch, nk)) : Tokens.dense(batch, nk);
      double[] qNope = c.normals(batch, nq, c.heads, c.nope);
      double[] qRope = c.rope == 0 ? null : c.normals(batch, nq, c.heads, c.rope);
      double[] cKv = c.normals(batch, nk, c.latent);
      double[] kRope = c.rope == 0 ? null : c.normals(batch, nk, c.rope);
      double[] wUk = c.weights(c.heads, c.latent, c.nope);
      double[] wUv = c.weights(c.heads, c.latent, c.value);
      AttentionOptions options = AttentionOptions.full(c.widths.defaultScale()).withCausal(causal);
      AttentionResult want =
          MlaReference.upProjecting(
              queries, keys, c.widths, qNope, qRope, cKv, kRope, wUk, wUv, options);
      MultiHeadLatentAttention mla =
          causal ? MultiHeadLatentAttention.causal() : MultiHeadLatentAttention.full();
      if (packed) {
        mla =
            mla.withVarlenQueries(c.keep(TestDevice.of(uniform(batch, nq))), nq)
                .withVarlenLatents(c.keep(TestDevice.of(uniform(batch, nk))), nk);
      }
      long[] lead = packed ? new long[] {(long) batch * nq} : new long[] {batch, nq};
      long[] leadK = packed ? new long[] {(long) batch * nk} : new long[] {batch, nk};
      Tensor wk = c.input(wUk, c.heads, c.latent, c.nope);
      Tensor wv = c.input(wUv, c.heads, c.latent, c.value);
      if (c.random.nextBoolean()) {
        wk = c.keep(wk.transpose(1, 2).copy());
        wv = c.keep(wv.transpose(1, 2).copy());
        mla = mla.withWeightLayout(WeightLayout.LATENT_LAST);
      }
      c.check(
          mla.runWithLse(
              c.input(qNope, append(lead, c.heads, c.nope)),
              qRope == null ? null : c.input(qRope, append(lead, c.heads, c.rope)),
              c.input(cKv, append(leadK, c.latent)),
              kRope == null ? null : c.input(kRope, append(leadK, c.rope)),
              wk,
              wv),
          want);
    }
  }

  @ParameterizedTest(name = "seed {0}")
  @MethodSource("seeds")
  void absorbedDecode(long seed) {
    try (Case c = new Case(seed)) {
      int batch = Cases.pick(c.random, 1, 2, 4);
      int nq = Cases.pick(c.random, 1, 1, 2, 4);
      int width = c.latent + c.rope;
      boolean paged = c.random.nextBoolean();
      int pageSize = Cases.pick(c.random, 1, 5, 16);
      int[] lengths = new int[batch];
      Arrays.setAll(lengths, b -> Cases.pick(c.random, LENGTHS));
      int longest = Arrays.stream(lengths).max().orElseThrow();
      int perSequence = Math.ceilDiv(longest, pageSize);
      int pages = batch * perSequence + 2;
      int[] table = new int[batch * perSequence];
      Arrays.setAll(table, i -> pages - 1 - i);
      double[] kv = paged ? c.normals(pages, pageSize, width) : c.normals(batch, longest, width);
      double[] q = c.normals(batch, nq, c.heads, width);
      Tokens keys =
          paged
              ? Tokens.paged(pages, pageSize, table, perSequence, lengths)
              : Tokens.dense(batch, longest).used(lengths);
      AttentionOptions options = AttentionOptions.causal(c.widths.defaultScale());
      AttentionResult want =
          MlaReference.absorbed(
              Tokens.dense(batch, nq), keys, c.heads, c.latent, c.rope, q, kv, options);
      MultiHeadLatentAttention mla =
          MultiHeadLatentAttention.causal()
              .withHeadDims(c.nope, c.rope)
              .withSplits(Cases.pick(c.random, 0, 1, 3));
      Tensor lengthTensor = c.keep(TestDevice.of(lengths));
      Tensor rows;
      if (paged) {
        Tensor blockTable = c.keep(TestDevice.of(table)).reshape(batch, perSequence);
        mla = mla.withPages(blockTable, lengthTensor, longest);
        rows = c.input(kv, pages, pageSize, width);
      } else {
        mla = mla.withUsedLengths(null, lengthTensor);
        rows = c.input(kv, batch, longest, width);
      }
      Tensor joined = c.input(q, batch, nq, c.heads, width);
      c.check(mla.decodeWithLse(joined, null, rows, null, null), want);
      if (c.rope > 0) {
        Tensor latentPart = joined.slice(3, 0, c.latent);
        Tensor ropePart = joined.slice(3, c.latent, width);
        c.check(mla.decodeWithLse(latentPart, ropePart, rows, null, null), want);
      }
    }
  }

  @ParameterizedTest(name = "seed {0}")
  @MethodSource("seeds")
  void decodeWithWeights(long seed) {
    try (Case c = new Case(seed)) {
      int batch = 2;
      int nq = Cases.pick(c.random, 1, 3);
      int nk = Cases.pick(c.random, 1, 40, 65);
      int width = c.latent + c.rope;
      double[] qNope = c.normals(batch, nq, c.heads, c.nope);
      double @Nullable [] qRope = c.rope == 0 ? null : c.normals(batch, nq, c.heads, c.rope);
      double[] kv = c.normals(batch, nk, width);
      double[] wUk = c.weights(c.heads, c.latent, c.nope);
      double[] wUv = c.weights(c.heads, c.latent, c.value);
      AttentionOptions options = AttentionOptions.causal(c.widths.defaultScale());
      double[] q = MlaReference.absorbQuery(batch * nq, c.widths, qNope, qRope, wUk);
      AttentionResult latent =
          MlaReference.absorbed(
              Tokens.dense(batch, nq),
              Tokens.dense(batch, nk),
              c.heads,
              c.latent,
              c.rope,
              q,
              kv,
              options);
      AttentionResult want =
          new AttentionResult(
              MlaReference.projectOutput(batch * nq, c.widths, latent.out(), wUv), latent.lse());
      c.check(
          MultiHeadLatentAttention.causal()
              .decodeWithLse(
                  c.input(qNope, batch, nq, c.heads, c.nope),
                  qRope == null ? null : c.input(qRope, batch, nq, c.heads, c.rope),
                  c.input(kv, batch, nk, width),
                  c.input(wUk, c.heads, c.latent, c.nope),
                  c.input(wUv, c.heads, c.latent, c.value)),
          want);
    }
  }

  @ParameterizedTest(name = "seed {0}")
  @MethodSource("seeds")
  void sparseDecode(long seed) {
    try (Case c = new Case(seed)) {
      int batch = 2;
      int nq = Cases.pick(c.random, 1, 2);
      int pageSize = Cases.pick(c.random, 1, 8);
      int pages = Cases.pick(c.random, 3, 12);
      int topk = Cases.pick(c.random, 1, 7, 20);
      int width = c.latent + c.rope;
      int rows = pages * pageSize;
      double[] kv = c.normals(pages, pageSize, width);
      double[] q = c.normals(batch, nq, c.heads, width);
      int[] indices = new int[batch * nq * topk];
      Arrays.setAll(indices, i -> c.random.nextInt(-2, rows + 2));
      int[] counts = new int[batch * nq];
      Arrays.setAll(counts, i -> c.random.nextInt(topk + 1));
      boolean counted = c.random.nextBoolean();
      AttentionResult want =
          MlaReference.absorbedSparse(
              Tokens.dense(batch, nq),
              rows,
              c.heads,
              c.latent,
              c.rope,
              q,
              kv,
              indices,
              topk,
              counted ? counts : null,
              AttentionOptions.full(c.widths.defaultScale()));
      MultiHeadLatentAttention mla =
          MultiHeadLatentAttention.full()
              .withHeadDims(c.nope, c.rope)
              .withSparse(
                  c.keep(TestDevice.of(indices)).reshape(batch, nq, topk),
                  counted ? c.keep(TestDevice.of(counts)).reshape(batch, nq) : null);
      c.check(
          mla.decodeWithLse(
              c.input(q, batch, nq, c.heads, width),
              null,
              c.input(kv, pages, pageSize, width),
              null,
              null),
          want);
    }
  }

  @ParameterizedTest(name = "seed {0}")
  @MethodSource("packedSeeds")
  void packedRows(long seed) {
    SplittableRandom random = new SplittableRandom(seed);
    int nk = Cases.pick(random, 1, 30);
    int heads = 2;
    int latent = CacheReference.LATENT;
    int rope = CacheReference.ROPE;
    byte[] bytes = new byte[nk * CacheReference.ROW_BYTES];
    for (int r = 0; r < nk; r++) {
      double[] row = Cases.normals(random, DType.FP32, latent + rope);
      System.arraycopy(
          CacheReference.encodeLatentRow(row),
          0,
          bytes,
          r * CacheReference.ROW_BYTES,
          CacheReference.ROW_BYTES);
    }
    double[] rows = CacheReference.decodeLatentRows(bytes);
    double[] q = Cases.normals(random, DType.BF16, 1, 1, heads, latent + rope);
    AttentionResult want =
        MlaReference.absorbed(
            Tokens.dense(1, 1),
            Tokens.dense(1, nk),
            heads,
            latent,
            rope,
            q,
            rows,
            AttentionOptions.causal(1 / Math.sqrt(128 + rope)));
    try (Tensor onHost = Tensor.empty(DType.UINT8, 1, nk, CacheReference.ROW_BYTES);
        Tensor kv = TestDevice.empty(DType.UINT8, 1, nk, CacheReference.ROW_BYTES);
        Tensor queries = Cases.dense(DType.BF16, q, 1, 1, heads, latent + rope)) {
      onHost.segment().copyFrom(java.lang.foreign.MemorySegment.ofArray(bytes));
      kv.copyFrom(onHost);
      try (Tensor out =
          MultiHeadLatentAttention.causal().withHeadDims(128, rope).decode(queries, kv)) {
        assertThat(out.shape()).isEqualTo(Shape.of(1, 1, heads, latent));
        Cases.assertRelative("out", out, want.out(), 6e-3);
      }
    }
  }

  static Stream<Long> packedSeeds() {
    return Cases.seeds(7, 6);
  }

  private static int[] uniform(int batch, int length) {
    return IntStream.rangeClosed(0, batch).map(b -> b * length).toArray();
  }

  private static long[] append(long[] lead, long... rest) {
    long[] dims = Arrays.copyOf(lead, lead.length + rest.length);
    System.arraycopy(rest, 0, dims, lead.length, rest.length);
    return dims;
  }
}
