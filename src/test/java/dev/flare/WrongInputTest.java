package dev.flare;

import static org.assertj.core.api.Assertions.assertThat;
import static org.assertj.core.api.Assertions.catchThrowable;
import static org.junit.jupiter.api.Assumptions.assumeTrue;

import java.util.List;
import java.util.stream.Stream;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Tag;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.MethodSource;
import org.opentest4j.TestAbortedException;

/**
 * Wrong input: each case ends in a typed exception that names the argument, what was found and what
 * is wanted, and never in a crash.
 */
@RequiresLibrary
@Tag("classpath")
@Tag("device")
class WrongInputTest {
  private static Tensor q;
  private static Tensor kv;
  private static Tensor fp16;
  private static Tensor closed;
  private static Tensor sink;
  private static Tensor cu;
  private static Tensor table;
  private static Tensor lengths;
  private static Tensor pages;
  private static Tensor lse;
  private static Tensor g;
  private static Tensor beta;
  private static Tensor latent;
  private static Tensor weight;

  @BeforeAll
  static void open() {
    q = TestDevice.randn(1, DType.BF16, 2, 10, 4, 64);
    kv = TestDevice.randn(2, DType.BF16, 2, 12, 2, 64);
    fp16 = TestDevice.randn(3, DType.FP16, 2, 12, 2, 64);
    closed = TestDevice.zeros(DType.BF16, 2, 12, 2, 64);
    closed.close();
    sink = TestDevice.zeros(DType.FP32, 4);
    cu = TestDevice.of(new int[] {0, 5, 10});
    table = TestDevice.of(new int[] {0, 1, 2, 3}, 2, 2);
    lengths = TestDevice.of(new int[] {7, 8});
    pages = TestDevice.randn(4, DType.BF16, 4, 4, 2, 64);
    lse = TestDevice.zeros(DType.FP32, 2, 4, 10);
    g = TestDevice.zeros(DType.BF16, 2, 10, 4, 64);
    beta = TestDevice.zeros(DType.BF16, 2, 10, 4);
    latent = TestDevice.randn(5, DType.BF16, 2, 10, 32);
    weight = TestDevice.randn(6, DType.BF16, 4, 32, 64);
  }

  @AfterAll
  static void close() {
    Stream.of(q, kv, fp16, sink, cu, table, lengths, pages, lse, g, beta, latent, weight)
        .forEach(Tensor::close);
  }

  /** A call that must fail, with the kind of failure and words of its message. */
  record Case(
      String name, Class<? extends FlareException> kind, Runnable call, List<String> words) {
    @Override
    public String toString() {
      return name;
    }
  }

  /** A wrong number in an index tensor: a GPU's are the caller's responsibility. */
  private static Case badIndex(String name, Runnable call, String... words) {
    return new Case(
        name,
        InvalidArgumentException.class,
        () -> {
          assumeTrue(TestDevice.chosen().isCpu(), "a GPU's indices are not checked");
          call.run();
        },
        List.of(words));
  }

  private static Case bad(String name, Runnable call, String... words) {
    return new Case(name, InvalidArgumentException.class, call, List.of(words));
  }

  private static Case unsupported(String name, Runnable call, String... words) {
    return new Case(name, UnsupportedException.class, call, List.of(words));
  }

  private static Case gone(String name, Runnable call, String... words) {
    return new Case(name, ClosedException.class, call, List.of(words));
  }

  private static FlashAttention flash() {
    return FlashAttention.causal();
  }

  private static Tensor ints(int... values) {
    return TestDevice.of(values);
  }

  @SuppressWarnings({"NullAway", "DataFlowIssue"}) // null is one of the wrong inputs
  static Stream<Case> attention() {
    return Stream.of(
        bad("null q", () -> flash().run(null, kv, kv), "q: got null"),
        bad("null v", () -> flash().run(q, kv, null), "v: got null"),
        gone("closed k", () -> flash().run(q, closed, kv), "k:"),
        bad(
            "rank of q",
            () -> flash().run(q.select(0, 0), kv, kv),
            "q: got [10, 4, 64]",
            "[B, Sq, H, D]"),
        bad("rank of k", () -> flash().run(q, kv.unsqueeze(0), kv), "k: got [1, 2, 12, 2, 64]"),
        bad("dtype of k", () -> flash().run(q, fp16, kv), "k: got FP16", "want BF16"),
        bad("dtype of v", () -> flash().run(q, kv, fp16), "v: got FP16", "want BF16"),
        bad(
            "integers",
            () -> flash().run(TestDevice.zeros(DType.INT32, 1, 1, 1, 1), kv, kv),
            "q: got INT32"),
        bad(
            "batch of k",
            () -> flash().run(q, kv.slice(0, 0, 1), kv),
            "k: got [1, 12, 2, 64]",
            "[2, 12, 2, 64]"),
        bad("dim of k", () -> flash().run(q, kv.slice(3, 0, 32), kv), "k: got", "64"),
        bad("length of v", () -> flash().run(q, kv, kv.slice(1, 0, 11)), "v: got [2, 11, 2, 64]"),
        bad(
            "heads",
            () -> flash().run(q.slice(2, 0, 3), kv, kv),
            "k: got 2 heads",
            "divisor of the 3"),
        bad("no key heads", () -> flash().run(q, kv.slice(2, 0, 0), kv.slice(2, 0, 0)), "heads"),
        bad(
            "strided last dim",
            () -> flash().run(q.transpose(2, 3), kv, kv),
            "q: got",
            "stride 1 along the last"),
        bad(
            "head dim too large",
            () -> {
              try (Tensor wide = TestDevice.zeros(DType.FP32, 1, 1, 1, 513)) {
                flash().run(wide, wide, wide);
              }
            },
            "head_dim_qk is 513"),
        bad("scale", () -> flash().withScale(Double.NaN), "scale: got NaN"),
        bad("scale overflows float", () -> flash().withScale(1e300), "scale: got 1.0E300"),
        bad("softcap", () -> flash().withSoftcap(-1), "softcap: got -1.0"),
        bad("splits", () -> flash().withSplits(-1), "splits: got -1"),
        bad(
            "too many splits",
            () -> flash().withSplits(100_000).run(q, kv, kv),
            "num_splits is 100000"),
        bad("threads", () -> flash().withThreads(-2), "threads: got -2"),
        bad("window", () -> SlidingWindowAttention.of(0), "window: got 0"),
        bad("output type", () -> flash().withOutputType(DType.INT32).run(q, kv, kv), "out_dtype"),
        bad(
            "sink length",
            () -> flash().withSink(sink.slice(0, 0, 3)).run(q, kv, kv),
            "sink: got [3]",
            "[4]"),
        bad("sink dtype", () -> flash().withSink(lengths).run(q, kv, kv), "sink: got INT32"),
        bad(
            "alibi length",
            () -> flash().withAlibi(sink.slice(0, 1, 4)).run(q, kv, kv),
            "alibi: got [3]"),
        bad(
            "descale without fp8",
            () -> flash().withDescale(sink.reshape(2, 2), null, null).run(q, kv, kv),
            "descale"),
        bad(
            "descale shape",
            () -> flash().withDescale(null, sink.reshape(4, 1), null).run(q, kv, kv),
            "keyDescale: got [4, 1]"),
        bad("lse dtype", () -> flash().plan(q, kv, kv, q.copy(), fp16).close(), "lse: got FP16"),
        bad(
            "lse shape",
            () -> flash().plan(q, kv, kv, q.copy(), lse.slice(2, 0, 9)).close(),
            "lse: got [2, 4, 9]"),
        bad(
            "out shape",
            () -> flash().plan(q, kv, kv, kv, null).close(),
            "out: got [2, 12, 2, 64]"),
        bad("out is an input", () -> flash().plan(q, kv, kv, q, null).close(), "out overlaps q"),
        bad(
            "cuSeqlens rank",
            () ->
                flash()
                    .withVarlen(table, 5, cu, 5)
                    .run(q.select(0, 0), kv.select(0, 0), kv.select(0, 0)),
            "cuSeqlensQ: got [2, 2]"),
        bad(
            "cuSeqlens dtype",
            () ->
                flash()
                    .withVarlen(sink, 5, cu, 5)
                    .run(q.select(0, 0), kv.select(0, 0), kv.select(0, 0)),
            "cuSeqlens"),
        bad(
            "cuSeqlens counts differ",
            () ->
                flash()
                    .withVarlen(cu, 5, cu.slice(0, 0, 2), 5)
                    .run(q.select(0, 0), kv.select(0, 0), kv.select(0, 0)),
            "cuSeqlensK: got 1 sequences"),
        bad("negative maximum", () -> flash().withVarlen(cu, -5, cu, 5), "maxSeqlenQ: got -5"),
        badIndex(
            "cuSeqlens beyond the rows",
            () ->
                flash()
                    .withVarlen(ints(0, 5, 11), 6, cu, 6)
                    .run(q.select(0, 0), kv.select(0, 0), kv.select(0, 0)),
            "cu_seqlens_q"),
        badIndex(
            "cuSeqlens falling",
            () ->
                flash()
                    .withVarlen(ints(0, 7, 5), 9, cu, 6)
                    .run(q.select(0, 0), kv.select(0, 0), kv.select(0, 0)),
            "cu_seqlens_q"),
        badIndex(
            "sequence beyond the maximum",
            () ->
                flash()
                    .withVarlen(cu, 4, cu, 6)
                    .run(q.select(0, 0), kv.select(0, 0), kv.select(0, 0)),
            "cu_seqlens_q"),
        bad(
            "mixed index dtypes",
            () ->
                flash()
                    .withVarlen(cu, 5, TestDevice.of(new long[] {0, 5, 10}), 5)
                    .run(q.select(0, 0), kv.select(0, 0), kv.select(0, 0)),
            "cuSeqlensK: got INT64",
            "want INT32"),
        bad(
            "used lengths too many",
            () -> flash().withUsedLengths(null, cu).run(q, kv, kv),
            "usedK: got [3]"),
        badIndex(
            "used length beyond",
            () -> flash().withUsedLengths(null, ints(13, 1)).run(q, kv, kv),
            "seqused_k"),
        badIndex(
            "used length negative",
            () -> flash().withUsedLengths(ints(-1, 1), null).run(q, kv, kv),
            "seqused_q"),
        badIndex(
            "page out of range",
            () ->
                flash()
                    .withPages(TestDevice.of(new int[] {0, 4, 2, 3}, 2, 2), lengths, 8)
                    .run(q, pages, pages),
            "block_table"),
        badIndex(
            "page negative",
            () ->
                flash()
                    .withPages(TestDevice.of(new int[] {0, -1, 2, 3}, 2, 2), lengths, 8)
                    .run(q, pages, pages),
            "block_table"),
        badIndex(
            "length beyond the cache",
            () -> flash().withPages(table, ints(7, 9), 8).run(q, pages, pages),
            "seqused_k"),
        bad(
            "table too narrow",
            () -> flash().withPages(table, lengths, 9).run(q, pages, pages),
            "blockTable: got [2, 2]",
            "at least 3"),
        bad(
            "table of another batch",
            () -> flash().withPages(table.slice(0, 0, 1), lengths, 8).run(q, pages, pages),
            "blockTable: got 1 sequences"),
        bad(
            "lengths of another batch",
            () -> flash().withPages(table, ints(1), 8).run(q, pages, pages),
            "lengths: got [1]"),
        bad(
            "absurd maximum",
            () -> flash().withPages(table, lengths, Long.MAX_VALUE).run(q, pages, pages),
            "blockTable"),
        bad(
            "merge shapes",
            () -> FlashAttention.merge(q.unsqueeze(0), lse),
            "partialLse: got [2, 4, 10]"),
        bad(
            "merge lse",
            () -> FlashAttention.merge(q.unsqueeze(0), lse.slice(2, 0, 9).unsqueeze(0)),
            "partialLse"));
  }

  @SuppressWarnings({"NullAway", "DataFlowIssue"}) // null is one of the wrong inputs
  static Stream<Case> latent() {
    MultiHeadLatentAttention mla = MultiHeadLatentAttention.causal();
    return Stream.of(
        bad("null latents", () -> mla.run(q, null, weight, weight), "cKv: got null"),
        gone("closed latents", () -> mla.run(q, closed, weight, weight), "cKv:"),
        bad(
            "weight heads",
            () -> mla.run(q, latent, weight.slice(0, 0, 3), weight),
            "wUk: got [3, 32, 64]"),
        bad(
            "weight order",
            () -> mla.withWeightLayout(WeightLayout.LATENT_LAST).run(q, latent, weight, weight),
            "wUk"),
        bad(
            "weight dtype",
            () -> mla.run(q, latent, weight.to(DType.FP32), weight),
            "wUk: got FP32"),
        bad(
            "latent dtype",
            () -> mla.run(q, latent.to(DType.FP32), weight, weight),
            "cKv: got FP32"),
        bad(
            "rope on one side",
            () -> mla.run(q, q, latent, null, weight, weight),
            "kRope: got null"),
        bad(
            "rope widths",
            () -> mla.run(q, q, latent, latent, weight, weight),
            "kRope: got [2, 10, 32]"),
        bad(
            "batch",
            () -> mla.run(q, latent.slice(0, 0, 1), weight, weight),
            "cKv: got [1, 10, 32]"),
        bad(
            "decode width",
            () -> mla.withHeadDims(64, 8).decode(q, latent),
            "q: got [2, 10, 4, 64]",
            "withHeadDims()"),
        bad(
            "all rope",
            () -> mla.withHeadDims(64, 32).decode(q, latent),
            "kv: got",
            "more than the 32 rope"),
        bad("no scale", () -> mla.decode(q.slice(3, 0, 32), latent), "scale"),
        bad(
            "bytes of another width",
            () -> mla.decode(q, TestDevice.zeros(DType.UINT8, 2, 10, 640)),
            "kv: got",
            "656"),
        bad(
            "sparse shape",
            () -> mla.withHeadDims(64, 0).withSparse(table, null).decode(q.slice(3, 0, 32), latent),
            "indices: got [2, 2]"),
        badIndex(
            "lengths beyond the cache",
            () ->
                mla.withHeadDims(64, 0)
                    .withUsedLengths(null, ints(1, 11))
                    .decode(q.slice(3, 0, 32), latent),
            "seqlens_k"));
  }

  @SuppressWarnings({"NullAway", "DataFlowIssue"}) // null is one of the wrong inputs
  static Stream<Case> delta() {
    KimiDeltaAttention kda = KimiDeltaAttention.bounded(-5);
    Tensor state = TestDevice.zeros(DType.FP32, 2, 4, 64, 64);
    return Stream.of(
        bad("bound", () -> KimiDeltaAttention.bounded(0), "lowerBound: got 0.0"),
        bad("bound NaN", () -> KimiDeltaAttention.bounded(Double.NaN), "lowerBound: got NaN"),
        bad("null g", () -> kda.run(q, q, q, null, beta), "g: got null"),
        bad("k of another shape", () -> kda.run(q, kv, q, g, beta), "k: got [2, 12, 2, 64]"),
        bad(
            "g of another shape",
            () -> kda.run(q, q, q, g.slice(1, 0, 9), beta),
            "g: got [2, 9, 4, 64]"),
        bad(
            "beta of another shape",
            () -> kda.run(q, q, q, g, beta.slice(2, 0, 3)),
            "beta: got [2, 10, 3]"),
        bad(
            "heads",
            () -> kda.run(q.slice(2, 0, 3), q.slice(2, 0, 3), q, g, beta),
            "v: got 4 heads"),
        bad(
            "aLog with the log gate",
            () -> KimiDeltaAttention.logGate().run(q, q, q, g, beta, sink, null),
            "aLog"),
        bad(
            "aLog length",
            () -> kda.run(q, q, q, g, beta, sink.slice(0, 0, 3), null),
            "aLog: got [3]"),
        bad("dtBias shape", () -> kda.run(q, q, q, g, beta, null, sink), "dtBias: got [4]"),
        bad(
            "state without layout",
            () -> kda.decode(q, q, q, g, beta, null, null, state),
            "stateLayout"),
        bad(
            "state of another shape",
            () ->
                kda.withStateLayout(StateLayout.KV)
                    .runWithState(q, q, q, g, beta, null, null, state.slice(0, 0, 1)),
            "initialState: got [1, 4, 64, 64]"),
        bad(
            "state dtype",
            () ->
                kda.withStateLayout(StateLayout.KV)
                    .decode(q, q, q, g, beta, null, null, state.to(DType.FP16)),
            "state: got FP16"),
        bad(
            "too few states",
            () ->
                kda.withStateLayout(StateLayout.KV)
                    .decode(q, q, q, g, beta, null, null, state.slice(0, 0, 1)),
            "state: got [1, 4, 64, 64]"),
        bad(
            "varlen batch",
            () -> kda.withVarlen(cu).run(q, q, q, g, beta),
            "q: got [2, 10, 4, 64]",
            "B = 1"),
        bad("state type", () -> kda.withStateType(DType.FP16), "dtype: got FP16"),
        bad("checkpoint interval", () -> kda.withCheckpoints(0), "interval: got 0"),
        bad(
            "interval of 65",
            () ->
                kda.withStateLayout(StateLayout.KV)
                    .withCheckpoints(65)
                    .runWithState(q, q, q, g, beta, null, null, null),
            "checkpoint_interval is 65"),
        bad(
            "expanded state",
            () ->
                kda.withStateLayout(StateLayout.KV)
                    .decode(
                        q, q, q, g, beta, null, null, state.slice(0, 0, 1).expand(2, 4, 64, 64)),
            "state"),
        badIndex(
            "slot out of range",
            () ->
                kda.withStateLayout(StateLayout.KV)
                    .withSlots(ints(0, 2), -1)
                    .decode(q, q, q, g, beta, null, null, state),
            "slots"),
        badIndex(
            "slot negative",
            () ->
                kda.withStateLayout(StateLayout.KV)
                    .withSlots(ints(0, -2), -1)
                    .decode(q, q, q, g, beta, null, null, state),
            "slots"),
        bad(
            "slots too few",
            () ->
                kda.withStateLayout(StateLayout.KV)
                    .withSlots(ints(1), -1)
                    .decode(q, q, q, g, beta, null, null, state),
            "slots: got [1]"),
        bad(
            "accepted without tokens' slots",
            () ->
                kda.withStateLayout(StateLayout.KV)
                    .withSlots(ints(0, 1), -1)
                    .withAccepted(ints(1, 1))
                    .decode(q, q, q, g, beta, null, null, state),
            "num_accepted"),
        badIndex(
            "cuSeqlens beyond T",
            () ->
                kda.withVarlen(ints(0, 11))
                    .run(
                        q.slice(0, 0, 1),
                        q.slice(0, 0, 1),
                        q.slice(0, 0, 1),
                        g.slice(0, 0, 1),
                        beta.slice(0, 0, 1)),
            "cu_seqlens"),
        badIndex(
            "cuSeqlens falling",
            () ->
                kda.withVarlen(ints(0, 8, 4, 10))
                    .run(
                        q.slice(0, 0, 1),
                        q.slice(0, 0, 1),
                        q.slice(0, 0, 1),
                        g.slice(0, 0, 1),
                        beta.slice(0, 0, 1)),
            "cu_seqlens"),
        unsupported("cuda tensors", () -> q.to(Device.cpu()).to(DType.INT32), "no conversion"));
  }

  @ParameterizedTest(name = "{0}")
  @MethodSource({"attention", "latent", "delta"})
  void isRefused(Case wrong) {
    Throwable thrown = catchThrowable(wrong.call::run);
    if (thrown instanceof TestAbortedException skipped) {
      throw skipped;
    }
    assertThat(thrown).as(wrong.name).isInstanceOf(wrong.kind);
    for (String word : wrong.words) {
      assertThat(thrown).hasMessageContaining(word);
    }
  }
}
