package dev.flare;

import dev.flare.reference.AttentionOptions;
import dev.flare.reference.ErrorMetrics;
import dev.flare.reference.KdaInputs;
import dev.flare.reference.KdaOptions;
import dev.flare.reference.MlaReference;
import dev.flare.reference.Precision;
import dev.flare.reference.Tokens;
import dev.flare.reference.Tolerances;
import dev.flare.reference.Tolerances.Operation;
import dev.flare.testing.Cases.Attention;
import dev.flare.testing.Cases.Kda;
import dev.flare.testing.Cases.KdaDecode;
import dev.flare.testing.Cases.Mla;
import dev.flare.testing.Cases.Side;
import dev.flare.testing.Cases.Storage;
import java.util.ArrayDeque;
import java.util.Arrays;
import java.util.Deque;
import java.util.SplittableRandom;
import org.jspecify.annotations.Nullable;

/**
 * Runs one generated case through the API on a device. Outputs are full of NaN before; what a
 * kernel must not write is neither written nor compared.
 */
final class CaseRun implements AutoCloseable {
  private final Device device;
  private final Precision precision;
  private final Deque<AutoCloseable> opened = new ArrayDeque<>();

  private CaseRun(Device device, Precision precision) {
    this.device = device;
    this.precision = precision;
  }

  /**
   * What a call gave, with how near to the truth it must be.
   *
   * @param kernel the name of the kernel that ran
   * @param second lse, or state
   * @param secondIsAbsolute whether the bound of {@code second} is on the largest difference
   * @param slack what scores far beyond unit variance cost in FP32: their size times its epsilon
   * @param unwritten elements of out and second that no kernel writes
   */
  @SuppressWarnings("ArrayRecordComponent")
  record Result(
      String kernel,
      Operation operation,
      Precision precision,
      double[] out,
      double[] second,
      boolean secondIsAbsolute,
      double slack,
      Unwritten unwritten) {

    /** {@return what is wrong, compared with the reference; empty if nothing is} */
    String misses(double[] wantOut, double[] wantSecond) {
      return misses(wantOut, wantSecond, 1);
    }

    /** The same compared with a result that has errors of its own: in FP32 just as large ones. */
    String misses(Result other) {
      return misses(other.out, other.second, precision == Precision.FP32 ? 2 : 1);
    }

    private String misses(double[] wantOut, double[] wantSecond, double errors) {
      double bound = errors * (Tolerances.relative(operation, precision) + slack);
      ErrorMetrics outError = error(out, wantOut, unwritten.out);
      ErrorMetrics secondError = error(second, wantSecond, unwritten.second);
      String text = "";
      if (!outError.relativeWithin(bound)) {
        text += " out: " + outError + ", want " + bound + ";";
      }
      boolean near =
          secondIsAbsolute
              ? secondError.absoluteWithin(errors * (Tolerances.lse(precision) + slack))
              : secondError.relativeWithin(bound);
      return near ? text : text + " lse or state: " + secondError;
    }

    Result everythingWritten() {
      return new Result(
          kernel, operation, precision, out, second, secondIsAbsolute, slack, Unwritten.NOTHING);
    }

    /** Compares what is written; the rest must still be the NaN that was there before. */
    private static ErrorMetrics error(double[] got, double[] want, boolean[] unwritten) {
      double[] counted = got.clone();
      double[] expected = want.clone();
      for (int i = 0; i < unwritten.length; i++) {
        if (unwritten[i]) {
          counted[i] = Double.isNaN(got[i]) ? 0 : Double.NaN; // NaN shows as a miss
          expected[i] = 0;
        }
      }
      return ErrorMetrics.of(counted, expected);
    }
  }

  /** Elements that no kernel writes; empty arrays where each is written. */
  @SuppressWarnings("ArrayRecordComponent")
  record Unwritten(boolean[] out, boolean[] second) {
    static final Unwritten NOTHING = new Unwritten(new boolean[0], new boolean[0]);
  }

  static Result attention(Device device, Attention c) {
    try (CaseRun run = new CaseRun(device, c.precision())) {
      return run.attention(c);
    }
  }

  static Result mla(Device device, Mla c) {
    try (CaseRun run = new CaseRun(device, c.precision())) {
      return run.mla(c);
    }
  }

  /** The absorbed form over the case's cache, with queries of its own. */
  static Result mlaDecode(Device device, Mla c) {
    try (CaseRun run = new CaseRun(device, c.precision())) {
      return run.mlaDecode(c);
    }
  }

  static Result kda(Device device, Kda c) {
    try (CaseRun run = new CaseRun(device, c.precision())) {
      return run.kda(c);
    }
  }

  static Result kdaDecode(Device device, KdaDecode c) {
    try (CaseRun run = new CaseRun(device, c.precision())) {
      return run.kdaDecode(c);
    }
  }

  private Result attention(Attention c) {
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
      flash = flash.withSink(floats(sink, heads));
    }
    double[] slopes = options.alibiSlopes();
    if (slopes != null) {
      boolean shared = slopes.length == heads;
      long batch = c.queries().tokens().batch();
      flash = flash.withAlibi(shared ? floats(slopes, heads) : floats(slopes, batch, heads));
    }
    int[] cuQ = c.queries().cuSeqlens();
    if (cuQ != null) {
      flash = flash.withVarlenQueries(ints(cuQ, cuQ.length), c.queries().length());
    }
    int[] cuK = c.keys().cuSeqlens();
    if (cuK != null) {
      flash = flash.withVarlenKeys(ints(cuK, cuK.length), c.keys().length());
    }
    Tensor usedQ = used(c.queries());
    Tensor usedK = used(c.keys());
    if (usedQ != null || usedK != null) {
      flash = flash.withUsedLengths(usedQ, usedK);
    }
    if (c.keys().storage() == Storage.PAGED) {
      flash = flash.withPages(blockTable(c.keys()), usedK, c.keys().length());
    }
    Tensor q = rows(c.queries(), c.q(), heads, c.heads().dim());
    Tensor k = rows(c.keys(), c.k(), c.heads().kv(), c.heads().dim());
    Tensor v = rows(c.keys(), c.v(), c.heads().kv(), c.heads().valueDim());
    Tensor out = poisoned(q.dtype(), c.queries().dims(heads, c.heads().valueDim()));
    Tensor lse = poisoned(DType.FP32, c.queries().lseDims(heads));
    AttentionPlan plan = keep(flash.plan(q, k, v, out, lse));
    plan.launch(q, k, v, out, lse);
    double farthest = 0;
    if (slopes != null) {
      double steepest = Arrays.stream(slopes).max().orElse(0);
      farthest = steepest * Math.max(c.queries().length(), c.keys().length());
    }
    return softmax(
        plan, Operation.ATTENTION, c.queries(), heads, c.heads().valueDim(), out, lse, farthest);
  }

  private Result mla(Mla c) {
    MlaReference.Widths w = c.widths();
    MultiHeadLatentAttention mla = latentOptions(c);
    int[] cuK = c.keys().cuSeqlens();
    if (cuK != null) {
      mla = mla.withVarlenLatents(ints(cuK, cuK.length), c.keys().length());
    }
    double[] qRope = c.qRope();
    double[] kRope = c.kRope();
    Tensor qNopeRows = rows(c.queries(), c.qNope(), w.heads(), w.nope());
    Tensor qRopeRows = qRope == null ? null : rows(c.queries(), qRope, w.heads(), w.rope());
    Tensor latents = rows(c.keys(), c.latents(), w.latent());
    Tensor kRopeRows = kRope == null ? null : rows(c.keys(), kRope, w.rope());
    Tensor wUk = input(c.wUk(), w.heads(), w.latent(), w.nope());
    Tensor wUv = input(c.wUv(), w.heads(), w.latent(), w.value());
    Tensor out = poisoned(latents.dtype(), c.queries().dims(w.heads(), w.value()));
    Tensor lse = poisoned(DType.FP32, c.queries().lseDims(w.heads()));
    MlaPrefillPlan plan =
        keep(mla.plan(qNopeRows, qRopeRows, latents, kRopeRows, wUk, wUv, out, lse));
    plan.launch(null, qNopeRows, qRopeRows, latents, kRopeRows, wUk, wUv, out, lse);
    return softmax(plan, Operation.MLA, c.queries(), w.heads(), w.value(), out, lse, 0);
  }

  private Result mlaDecode(Mla c) {
    MlaReference.Widths w = c.widths();
    int width = w.latent() + w.rope();
    MultiHeadLatentAttention mla = latentOptions(c).withHeadDims(w.nope(), w.rope());
    SplittableRandom random = new SplittableRandom(c.name().hashCode());
    Tensor q =
        rows(
            c.queries(),
            dev.flare.testing.Cases.normals(
                random, precision, c.queries().tokens().rows() * w.heads() * width, 0.5),
            w.heads(),
            width);
    Tensor kv = rows(c.keys(), c.cache(), width);
    Tensor out = poisoned(q.dtype(), c.queries().dims(w.heads(), w.latent()));
    Tensor lse = poisoned(DType.FP32, c.queries().lseDims(w.heads()));
    MlaDecodePlan plan = keep(mla.planDecode(q, null, kv, null, null, out, lse));
    plan.launch(null, q, null, kv, null, null, out, lse);
    // Used lengths of queries are no part of decode.
    return softmax(plan, Operation.MLA, c.queries(), w.heads(), w.latent(), out, lse, 0)
        .everythingWritten();
  }

  private MultiHeadLatentAttention latentOptions(Mla c) {
    MultiHeadLatentAttention mla =
        (c.options().causal() ? MultiHeadLatentAttention.causal() : MultiHeadLatentAttention.full())
            .withScale(c.options().scale());
    int[] cuQ = c.queries().cuSeqlens();
    if (cuQ != null) {
      mla = mla.withVarlenQueries(ints(cuQ, cuQ.length), c.queries().length());
    }
    Tensor usedQ = used(c.queries());
    Tensor usedK = used(c.keys());
    if (usedQ != null || usedK != null) {
      mla = mla.withUsedLengths(usedQ, usedK);
    }
    if (c.keys().storage() == Storage.PAGED) {
      mla = mla.withPages(blockTable(c.keys()), usedK, c.keys().length());
    }
    return mla;
  }

  private Result kda(Kda c) {
    KimiDeltaAttention kda = deltaOptions(c.options());
    int[] cu = c.tokens().cuSeqlens();
    if (cu != null) {
      kda = kda.withVarlen(ints(cu, cu.length));
    }
    long sequences = c.tokens().tokens().batch();
    DeltaInputs x = new DeltaInputs(c.inputs(), c.tokens());
    double[] initial = c.initialState();
    Tensor initialState =
        initial == null ? null : floats(initial, stateDims(c.options(), c.inputs(), sequences));
    Tensor out = poisoned(x.q.dtype(), x.outDims);
    Tensor state = poisoned(DType.FP32, stateDims(c.options(), c.inputs(), sequences));
    KdaPlan plan =
        keep(
            kda.plan(x.q, x.k, x.v, x.g, x.beta, x.aLog, x.dtBias, out, initialState, state, null));
    plan.launch(x.q, x.k, x.v, x.g, x.beta, x.aLog, x.dtBias, out, initialState, state);
    return delta(plan, out, state);
  }

  private Result kdaDecode(KdaDecode c) {
    KimiDeltaAttention kda = deltaOptions(c.options());
    int[] cu = c.tokens().cuSeqlens();
    if (cu != null) {
      kda = kda.withVarlen(ints(cu, cu.length));
    }
    int perSequence = c.slots().perSequence();
    int[] slots = c.slots().slots();
    long[] slotDims =
        perSequence == 1
            ? new long[] {slots.length}
            : new long[] {slots.length / perSequence, perSequence};
    kda = kda.withSlots(ints(slots, slotDims), c.slots().paddingSlot());
    int[] accepted = c.slots().accepted();
    if (accepted != null) {
      kda = kda.withAccepted(ints(accepted, accepted.length));
    }
    DeltaInputs x = new DeltaInputs(c.inputs(), c.tokens());
    Tensor out = poisoned(x.q.dtype(), x.outDims);
    Tensor pool = floats(c.pool(), stateDims(c.options(), c.inputs(), c.poolSlots()));
    KdaDecodePlan plan =
        keep(kda.planDecode(x.q, x.k, x.v, x.g, x.beta, x.aLog, x.dtBias, out, pool, null));
    plan.launch(null, x.q, x.k, x.v, x.g, x.beta, x.aLog, x.dtBias, out, pool, null);
    return delta(plan, out, pool);
  }

  private KimiDeltaAttention deltaOptions(KdaOptions options) {
    KimiDeltaAttention kda =
        switch (options.gate()) {
          case LOG -> KimiDeltaAttention.logGate();
          case SOFTPLUS -> KimiDeltaAttention.softplus();
          case BOUNDED -> KimiDeltaAttention.bounded(options.lowerBound());
        };
    return kda.withScale(options.scale())
        .withQkL2Norm(options.l2norm())
        .withBeta(Beta.valueOf(options.beta().name()))
        .withStateLayout(StateLayout.valueOf(options.stateLayout().name()));
  }

  private static long[] stateDims(KdaOptions options, KdaInputs x, long sequences) {
    boolean kv = options.stateLayout() == KdaOptions.StateLayout.KV;
    long rows = kv ? x.keyDim() : x.valueDim();
    long columns = kv ? x.valueDim() : x.keyDim();
    return new long[] {sequences, x.valueHeads(), rows, columns};
  }

  /** The token data of a delta-rule case. */
  private final class DeltaInputs {
    private final Tensor q;
    private final Tensor k;
    private final Tensor v;
    private final Tensor g;
    private final Tensor beta;
    private final @Nullable Tensor aLog;
    private final @Nullable Tensor dtBias;
    private final long[] outDims;

    DeltaInputs(KdaInputs x, Side tokens) {
      boolean packed = tokens.cuSeqlens() != null;
      long batch = packed ? 1 : tokens.tokens().batch();
      long length = packed ? tokens.tokens().rows() : tokens.length();
      q = input(x.q(), batch, length, x.heads(), x.keyDim());
      k = input(x.k(), batch, length, x.heads(), x.keyDim());
      v = input(x.v(), batch, length, x.valueHeads(), x.valueDim());
      g = input(x.g(), batch, length, x.valueHeads(), x.keyDim());
      beta = input(x.beta(), batch, length, x.valueHeads());
      double[] rates = x.aLog();
      double[] bias = x.dtBias();
      aLog = rates == null ? null : floats(rates, x.valueHeads());
      dtBias = bias == null ? null : floats(bias, x.valueHeads(), x.keyDim());
      outDims = new long[] {batch, length, x.valueHeads(), x.valueDim()};
    }
  }

  // ---- results --------------------------------------------------------------------------------

  /** {@code largestScore}: where scores are far beyond what unit variance gives; else 0. */
  private Result softmax(
      Plan plan,
      Operation operation,
      Side side,
      int heads,
      int width,
      Tensor out,
      Tensor lse,
      double largestScore) {
    Tokens tokens = side.tokens();
    boolean[] written = new boolean[tokens.rows()];
    for (int b = 0; b < tokens.batch(); b++) {
      for (int t = 0; t < tokens.length(b); t++) {
        written[tokens.row(b, t)] = true;
      }
    }
    double[] outValues = values(out);
    double[] lseValues = values(lse);
    boolean[] noOut = new boolean[outValues.length];
    boolean[] noLse = new boolean[lseValues.length];
    int length = side.storage() == Storage.PACKED ? tokens.rows() : side.length();
    for (int i = 0; i < noLse.length; i++) {
      noLse[i] = !written[i / (heads * length) * length + i % length];
    }
    for (int i = 0; i < noOut.length; i++) {
      noOut[i] = !written[i / (heads * width)];
    }
    Unwritten unwritten = new Unwritten(noOut, noLse);
    double slack = Math.ulp(1f) * largestScore;
    return new Result(
        plan.kernelName(), operation, precision, outValues, lseValues, true, slack, unwritten);
  }

  private Result delta(Plan plan, Tensor out, Tensor state) {
    return new Result(
        plan.kernelName(),
        Operation.KDA,
        precision,
        values(out),
        values(state),
        false,
        0,
        Unwritten.NOTHING);
  }

  // ---- tensors --------------------------------------------------------------------------------

  private <T extends AutoCloseable> T keep(T resource) {
    opened.push(resource);
    return resource;
  }

  private Tensor move(Tensor host) {
    keep(host);
    return device.isCpu() ? host : keep(host.to(device));
  }

  private static Tensor dense(DType dtype, double[] values, long... dims) {
    return Tensor.of(dtype, Cases.floats(values), dims);
  }

  private Tensor input(double[] values, long... dims) {
    return move(dense(DType.valueOf(precision.name()), values, dims));
  }

  private Tensor floats(double[] values, long... dims) {
    return move(dense(DType.FP32, values, dims));
  }

  private Tensor ints(int[] values, long... dims) {
    return move(Tensor.of(values, dims));
  }

  /** Token data in the form in which the side is stored. */
  private Tensor rows(Side side, double[] values, long... perToken) {
    return input(values, side.dims(perToken));
  }

  private @Nullable Tensor used(Side side) {
    int[] used = side.used();
    return used == null ? null : ints(used, used.length);
  }

  private Tensor blockTable(Side side) {
    return ints(side.blockTable(), side.tokens().batch(), side.pagesPerSequence());
  }

  private Tensor poisoned(DType dtype, long... dims) {
    return move(Tensor.full(Double.NaN, dtype, dims));
  }

  private double[] values(Tensor tensor) {
    return tensor.toDoubleArray();
  }

  @Override
  public void close() {
    while (!opened.isEmpty()) {
      try {
        opened.pop().close();
      } catch (Exception e) {
        throw new AssertionError(e);
      }
    }
  }
}
