package dev.flare;

import static org.assertj.core.api.Assertions.assertThat;

import dev.flare.reference.AttentionOptions;
import dev.flare.reference.AttentionResult;
import dev.flare.reference.ErrorMetrics;
import dev.flare.reference.KdaInputs;
import dev.flare.reference.KdaOptions;
import dev.flare.reference.KdaResult;
import dev.flare.reference.MlaReference;
import dev.flare.reference.Precision;
import dev.flare.reference.Tokens;
import dev.flare.reference.Tolerances;
import dev.flare.reference.Tolerances.Operation;
import dev.flare.testing.Cases.Attention;
import dev.flare.testing.Cases.Kda;
import dev.flare.testing.Cases.Mla;
import dev.flare.testing.Cases.Side;
import dev.flare.testing.Cases.Storage;
import java.util.ArrayList;
import java.util.List;
import java.util.stream.Stream;
import org.jspecify.annotations.Nullable;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.MethodSource;

/**
 * Random cases through the API against the references, on the CPU or on the device that {@code
 * -Dflare.test.device=cuda:N} names; {@code -Dflare.test.cases=N} runs more of them.
 */
@RequiresLibrary
class RandomCasesTest {
  private static final int CASES = Integer.getInteger("flare.test.cases", 60);
  private static final Device DEVICE = device(System.getProperty("flare.test.device", "cpu"));

  private static Device device(String name) {
    return name.equals("cpu")
        ? Device.cpu()
        : Device.cuda(Integer.parseInt(name.substring("cuda:".length())));
  }

  static Stream<Attention> attention() {
    return dev.flare.testing.Cases.stream(0xA77, CASES, dev.flare.testing.Cases::attention);
  }

  static Stream<Mla> mla() {
    return dev.flare.testing.Cases.stream(0x31A, CASES / 2, dev.flare.testing.Cases::mla);
  }

  static Stream<Kda> kda() {
    return dev.flare.testing.Cases.stream(0xDA, CASES / 2, dev.flare.testing.Cases::kda);
  }

  @ParameterizedTest(name = "{0}")
  @MethodSource("attention")
  void softmaxAttention(Attention c) {
    try (Run run = new Run(c.precision())) {
      int heads = c.heads().query();
      AttentionOptions options = c.options();
      FlashAttention flash =
          FlashAttention.window(options.windowLeft(), options.causal() ? 0 : options.windowRight())
              .withScale(options.scale());
      if (options.softcap() > 0) {
        flash = flash.withSoftcap(options.softcap());
      }
      double[] sink = options.sink();
      if (sink != null) {
        flash = flash.withSink(run.floats(sink, heads));
      }
      double[] slopes = options.alibiSlopes();
      if (slopes != null) {
        boolean shared = slopes.length == heads;
        long batch = c.queries().tokens().batch();
        flash =
            flash.withAlibi(shared ? run.floats(slopes, heads) : run.floats(slopes, batch, heads));
      }
      int[] cuQ = c.queries().cuSeqlens();
      if (cuQ != null) {
        flash = flash.withVarlenQueries(run.ints(cuQ, cuQ.length), c.queries().length());
      }
      int[] cuK = c.keys().cuSeqlens();
      if (cuK != null) {
        flash = flash.withVarlenKeys(run.ints(cuK, cuK.length), c.keys().length());
      }
      Tensor usedQ = run.used(c.queries());
      Tensor usedK = run.used(c.keys());
      if (usedQ != null || usedK != null) {
        flash = flash.withUsedLengths(usedQ, usedK);
      }
      if (c.keys().storage() == Storage.PAGED) {
        flash = flash.withPages(run.blockTable(c.keys()), usedK, c.keys().length());
      }
      Tensor q = run.rows(c.queries(), c.q(), heads, c.heads().dim());
      Tensor k = run.rows(c.keys(), c.k(), c.heads().kv(), c.heads().dim());
      Tensor v = run.rows(c.keys(), c.v(), c.heads().kv(), c.heads().valueDim());
      Tensor out = run.poisoned(q.dtype(), c.queries().dims(heads, c.heads().valueDim()));
      Tensor lse = run.poisoned(DType.FP32, c.queries().lseDims(heads));
      try (AttentionPlan plan = flash.plan(q, k, v, out, lse)) {
        plan.launch(q, k, v, out, lse);
        run.check(Operation.ATTENTION, c.queries(), heads, out, lse, c.reference());
      }
    }
  }

  @ParameterizedTest(name = "{0}")
  @MethodSource("mla")
  void latentAttention(Mla c) {
    try (Run run = new Run(c.precision())) {
      MlaReference.Widths w = c.widths();
      MultiHeadLatentAttention mla =
          (c.options().causal()
                  ? MultiHeadLatentAttention.causal()
                  : MultiHeadLatentAttention.full())
              .withScale(c.options().scale());
      int[] cuQ = c.queries().cuSeqlens();
      if (cuQ != null) {
        mla = mla.withVarlenQueries(run.ints(cuQ, cuQ.length), c.queries().length());
      }
      int[] cuK = c.keys().cuSeqlens();
      if (cuK != null) {
        mla = mla.withVarlenLatents(run.ints(cuK, cuK.length), c.keys().length());
      }
      Tensor usedQ = run.used(c.queries());
      Tensor usedK = run.used(c.keys());
      if (usedQ != null || usedK != null) {
        mla = mla.withUsedLengths(usedQ, usedK);
      }
      if (c.keys().storage() == Storage.PAGED) {
        mla = mla.withPages(run.blockTable(c.keys()), usedK, c.keys().length());
      }
      double[] qRope = c.qRope();
      double[] kRope = c.kRope();
      AttentionOutput got =
          run.keep(
              mla.runWithLse(
                  run.rows(c.queries(), c.qNope(), w.heads(), w.nope()),
                  qRope == null ? null : run.rows(c.queries(), qRope, w.heads(), w.rope()),
                  run.rows(c.keys(), c.latents(), w.latent()),
                  kRope == null ? null : run.rows(c.keys(), kRope, w.rope()),
                  run.input(c.wUk(), w.heads(), w.latent(), w.nope()),
                  run.input(c.wUv(), w.heads(), w.latent(), w.value())));
      run.check(Operation.MLA, c.queries(), w.heads(), got.out(), got.lse(), c.reference());
    }
  }

  @ParameterizedTest(name = "{0}")
  @MethodSource("kda")
  void deltaAttention(Kda c) {
    try (Run run = new Run(c.precision())) {
      KdaInputs x = c.inputs();
      KdaOptions options = c.options();
      KimiDeltaAttention kda =
          switch (options.gate()) {
            case LOG -> KimiDeltaAttention.logGate();
            case SOFTPLUS -> KimiDeltaAttention.softplus();
            case BOUNDED -> KimiDeltaAttention.bounded(options.lowerBound());
          };
      kda =
          kda.withScale(options.scale())
              .withQkL2Norm(options.l2norm())
              .withBeta(Beta.valueOf(options.beta().name()))
              .withStateLayout(StateLayout.valueOf(options.stateLayout().name()));
      int[] cu = c.tokens().cuSeqlens();
      if (cu != null) {
        kda = kda.withVarlen(run.ints(cu, cu.length));
      }
      long batch = cu == null ? c.tokens().tokens().batch() : 1;
      long length = cu == null ? c.tokens().length() : c.tokens().tokens().rows();
      boolean kv = options.stateLayout() == KdaOptions.StateLayout.KV;
      long rows = kv ? x.keyDim() : x.valueDim();
      long columns = kv ? x.valueDim() : x.keyDim();
      double[] initial = c.initialState();
      double[] aLog = x.aLog();
      double[] dtBias = x.dtBias();
      DeltaOutput got =
          run.keep(
              kda.runWithState(
                  run.input(x.q(), batch, length, x.heads(), x.keyDim()),
                  run.input(x.k(), batch, length, x.heads(), x.keyDim()),
                  run.input(x.v(), batch, length, x.valueHeads(), x.valueDim()),
                  run.input(x.g(), batch, length, x.valueHeads(), x.keyDim()),
                  run.input(x.beta(), batch, length, x.valueHeads()),
                  aLog == null ? null : run.floats(aLog, x.valueHeads()),
                  dtBias == null ? null : run.floats(dtBias, x.valueHeads(), x.keyDim()),
                  initial == null
                      ? null
                      : run.floats(
                          initial, c.tokens().tokens().batch(), x.valueHeads(), rows, columns)));
      KdaResult want = c.reference();
      double bound = Tolerances.relative(Operation.KDA, c.precision());
      run.relative("out", run.values(got.out()), want.out(), bound);
      run.relative("state", run.values(got.state()), want.finalState(), bound);
    }
  }

  /** The tensors of one case. */
  private static final class Run implements AutoCloseable {
    private final Precision precision;
    private final List<AutoCloseable> opened = new ArrayList<>();

    Run(Precision precision) {
      this.precision = precision;
    }

    <T extends AutoCloseable> T keep(T resource) {
      opened.add(resource);
      return resource;
    }

    private Tensor move(Tensor host) {
      keep(host);
      return DEVICE.isCpu() ? host : keep(host.to(DEVICE));
    }

    Tensor input(double[] values, long... dims) {
      return move(Cases.dense(DType.valueOf(precision.name()), values, dims));
    }

    Tensor floats(double[] values, long... dims) {
      return move(Cases.dense(DType.FP32, values, dims));
    }

    Tensor ints(int[] values, long... dims) {
      return move(Tensor.of(values, dims));
    }

    /** Token data in the form in which the side is stored. */
    Tensor rows(Side side, double[] values, long... perToken) {
      return input(values, side.dims(perToken));
    }

    @Nullable Tensor used(Side side) {
      int[] used = side.used();
      return used == null ? null : ints(used, used.length);
    }

    Tensor blockTable(Side side) {
      return ints(side.blockTable(), side.tokens().batch(), side.pagesPerSequence());
    }

    Tensor poisoned(DType dtype, long... dims) {
      return move(Tensor.full(Double.NaN, dtype, dims));
    }

    double[] values(Tensor tensor) {
      return DEVICE.isCpu()
          ? tensor.toDoubleArray()
          : keep(tensor.to(Device.cpu())).toDoubleArray();
    }

    /** Compares the rows that count; those beyond a used length are not written. */
    void check(
        Operation operation, Side side, int heads, Tensor out, Tensor lse, AttentionResult want) {
      double[] gotOut = values(out);
      double[] gotLse = values(lse);
      Tokens tokens = side.tokens();
      int width = want.out().length / Math.max(1, tokens.rows());
      boolean[] counts = new boolean[tokens.rows()];
      for (int b = 0; b < tokens.batch(); b++) {
        for (int t = 0; t < tokens.length(b); t++) {
          counts[tokens.row(b, t)] = true;
        }
      }
      int length = side.storage() == Storage.PACKED ? tokens.rows() : side.length();
      for (int i = 0; i < gotLse.length; i++) {
        int row = i / (heads * length) * length + i % length;
        gotLse[i] = counts[row] ? gotLse[i] : want.lse()[i];
      }
      for (int i = 0; i < gotOut.length; i++) {
        gotOut[i] = counts[i / width] ? gotOut[i] : want.out()[i];
      }
      relative("out", gotOut, want.out(), Tolerances.relative(operation, precision));
      ErrorMetrics error = ErrorMetrics.of(gotLse, want.lse());
      assertThat(error.absoluteWithin(Tolerances.lse(precision))).as("lse: %s", error).isTrue();
    }

    void relative(String name, double[] got, double[] want, double bound) {
      ErrorMetrics error = ErrorMetrics.of(got, want);
      assertThat(error.relativeWithin(bound)).as("%s: %s, want %s", name, error, bound).isTrue();
    }

    @Override
    public void close() {
      for (AutoCloseable resource : opened) {
        try {
          resource.close();
        } catch (Exception e) {
          throw new AssertionError(e);
        }
      }
    }
  }
}
