package dev.flare;

import dev.flare.internal.CommonParams;
import dev.flare.internal.KdaDecodeParams;
import dev.flare.internal.Kernels.Operation;
import dev.flare.internal.Struct;
import org.jspecify.annotations.Nullable;

/** A plan of {@link KimiDeltaAttention} for new tokens on states in place; see {@link Plan}. */
public final class KdaDecodePlan extends Plan {
  private static final int Q = 0;
  private static final int K = 1;
  private static final int V = 2;
  private static final int G = 3;
  private static final int BETA = 4;
  private static final int A_LOG = 5;
  private static final int DT_BIAS = 6;
  private static final int OUT = 7;
  private static final int STATE = 8;
  private static final int STATE_OUT = 9;

  private KdaDecodePlan(Launcher launcher) {
    super(launcher);
  }

  static KdaDecodePlan of(
      KdaSettings settings,
      Tensor q,
      Tensor k,
      Tensor v,
      Tensor g,
      Tensor beta,
      @Nullable Tensor aLog,
      @Nullable Tensor dtBias,
      @Nullable Tensor out,
      Tensor state,
      @Nullable Tensor stateOut,
      boolean confined) {
    Flare.require();
    KdaSettings.Sizes sizes = settings.check(q, k, v, g, beta, aLog, dtBias);
    Device device = q.device();
    Checks.present("state", state, device);
    Checks.form("state", state, settings.requireLayout().form("slots"));
    long rows = settings.slots == null ? sizes.sequences() : state.dim(0);
    settings.checkState("state", state, device, sizes, Math.max(rows, state.dim(0)));
    settings.checkState("stateOut", stateOut, device, sizes, state.dim(0));
    if (stateOut != null && !stateOut.layout().equals(state.layout())) {
      throw new InvalidArgumentException(
          "stateOut", stateOut.layout(), state.layout() + ", as state has");
    }
    Layout dense = Layout.dense(q.dtype(), v.shape());
    Layout outLayout = out == null ? dense : AttentionPlan.outputLike("out", out, device, dense);
    return Launcher.inArena(
        confined,
        arena -> {
          Launcher.Builder plan =
              new Launcher.Builder(
                  Operation.KDA_DECODE, device, arena, KdaDecodeParams.allocate(arena));
          plan.input("q", KdaDecodeParams.Q, q);
          plan.input("k", KdaDecodeParams.K, k);
          plan.input("v", KdaDecodeParams.V, v);
          plan.input("g", KdaDecodeParams.G, g);
          plan.input("beta", KdaDecodeParams.BETA, beta);
          plan.input("aLog", KdaDecodeParams.A_LOG, aLog);
          plan.input("dtBias", KdaDecodeParams.DT_BIAS, dtBias);
          plan.output("out", KdaDecodeParams.OUT, outLayout, out);
          plan.output("state", KdaDecodeParams.STATE, state);
          plan.output("stateOut", KdaDecodeParams.STATE_OUT, stateOut);
          fill(plan, settings, sizes, q, k, v, g, beta, outLayout);
          fillStates(plan, settings, sizes, state);
          return new KdaDecodePlan(plan.build());
        });
  }

  private static void fill(
      Launcher.Builder plan,
      KdaSettings settings,
      KdaSettings.Sizes sizes,
      Tensor q,
      Tensor k,
      Tensor v,
      Tensor g,
      Tensor beta,
      Layout out) {
    Struct p = plan.params();
    p.set(CommonParams.KERNEL, settings.kernel.code())
        .set(CommonParams.NUM_THREADS, settings.threads)
        .set(KdaDecodeParams.DETERMINISTIC, settings.deterministic ? 1 : 0)
        .set(KdaDecodeParams.DTYPE, q.dtype().code())
        .set(KdaDecodeParams.GATE_DTYPE, g.dtype().code())
        .set(KdaDecodeParams.BETA_DTYPE, beta.dtype().code())
        .set(KdaDecodeParams.GATE, settings.gate)
        .set(KdaDecodeParams.LOWER_BOUND, settings.lowerBound)
        .set(KdaDecodeParams.BETA_ACTIVATION, settings.beta.code())
        .set(KdaDecodeParams.QK_L2NORM, settings.l2norm ? 1 : 0)
        .set(KdaDecodeParams.BETA_PER_CHANNEL, sizes.perChannelBeta() ? 1 : 0)
        .set(KdaDecodeParams.BATCH, sizes.batch())
        .set(KdaDecodeParams.SEQLEN, sizes.tokens())
        .set(KdaDecodeParams.HEADS_QK, sizes.heads())
        .set(KdaDecodeParams.HEADS_V, sizes.valueHeads())
        .set(KdaDecodeParams.HEAD_DIM_K, sizes.keyDim())
        .set(KdaDecodeParams.HEAD_DIM_V, sizes.valueDim())
        .set(KdaDecodeParams.NUM_SEQUENCES, sizes.sequences())
        .set(KdaDecodeParams.Q_STRIDE_B, q.layout().stride(0))
        .set(KdaDecodeParams.Q_STRIDE_T, q.layout().stride(1))
        .set(KdaDecodeParams.Q_STRIDE_H, q.layout().stride(2))
        .set(KdaDecodeParams.K_STRIDE_B, k.layout().stride(0))
        .set(KdaDecodeParams.K_STRIDE_T, k.layout().stride(1))
        .set(KdaDecodeParams.K_STRIDE_H, k.layout().stride(2))
        .set(KdaDecodeParams.V_STRIDE_B, v.layout().stride(0))
        .set(KdaDecodeParams.V_STRIDE_T, v.layout().stride(1))
        .set(KdaDecodeParams.V_STRIDE_H, v.layout().stride(2))
        .set(KdaDecodeParams.G_STRIDE_B, g.layout().stride(0))
        .set(KdaDecodeParams.G_STRIDE_T, g.layout().stride(1))
        .set(KdaDecodeParams.G_STRIDE_H, g.layout().stride(2))
        .set(KdaDecodeParams.BETA_STRIDE_B, beta.layout().stride(0))
        .set(KdaDecodeParams.BETA_STRIDE_T, beta.layout().stride(1))
        .set(KdaDecodeParams.BETA_STRIDE_H, beta.layout().stride(2))
        .set(KdaDecodeParams.OUT_STRIDE_B, out.stride(0))
        .set(KdaDecodeParams.OUT_STRIDE_T, out.stride(1))
        .set(KdaDecodeParams.OUT_STRIDE_H, out.stride(2));
    if (settings.scale != null) {
      p.set(CommonParams.FLAGS, KdaSettings.FLAG_SCALE).set(KdaDecodeParams.SCALE, settings.scale);
    }
    if (settings.stateLayout != null) {
      p.set(KdaDecodeParams.STATE_LAYOUT, settings.stateLayout.code());
    }
  }

  private static void fillStates(
      Launcher.Builder plan, KdaSettings settings, KdaSettings.Sizes sizes, Tensor state) {
    Struct p = plan.params();
    p.set(KdaDecodeParams.STATE_DTYPE, state.dtype().code())
        .set(KdaDecodeParams.STATE_STRIDE_N, state.layout().stride(0))
        .set(KdaDecodeParams.STATE_STRIDE_H, state.layout().stride(1))
        .set(KdaDecodeParams.NUM_SLOTS, state.dim(0));
    IndexTensors index = new IndexTensors(plan);
    index.add("cuSeqlens", KdaDecodeParams.CU_SEQLENS, settings.cuSeqlens);
    Tensor slots = settings.slots;
    if (slots != null) {
      if (slots.rank() == 2) {
        Checks.form("slots", slots, "[N, T]");
        Checks.shape("slots", slots, "[N, T]", sizes.sequences(), slots.dim(1));
        index.add("slots", KdaDecodeParams.SLOTS, slots);
        p.set(KdaDecodeParams.SLOTS_STRIDE_N, slots.layout().stride(0))
            .set(KdaDecodeParams.SLOTS_PER_SEQUENCE, slots.dim(1));
      } else {
        index.lengths("slots", KdaDecodeParams.SLOTS, slots, sizes.sequences());
        p.set(KdaDecodeParams.SLOTS_STRIDE_N, 1).set(KdaDecodeParams.SLOTS_PER_SEQUENCE, 1);
      }
      p.set(KdaDecodeParams.PADDING_SLOT, settings.paddingSlot);
    }
    index.lengths("accepted", KdaDecodeParams.NUM_ACCEPTED, settings.accepted, sizes.sequences());
    index.dtype(KdaDecodeParams.INDEX_DTYPE);
  }

  /**
   * Computes the new tokens and moves the states on, in place.
   *
   * @param q queries
   * @param k keys
   * @param v values
   * @param g gate input
   * @param beta beta
   * @param aLog logarithm of the gate's rate; null if the plan was made without
   * @param dtBias added to g; null if the plan was made without
   * @param out is overwritten; must not overlap the inputs
   * @param state is overwritten
   * @throws InvalidArgumentException if a tensor does not look like the plan's, or outputs overlap
   * @throws ClosedException if a tensor or the plan is closed
   * @throws InUseException if another launch of this plan is under way
   */
  public void launch(
      Tensor q,
      Tensor k,
      Tensor v,
      Tensor g,
      Tensor beta,
      @Nullable Tensor aLog,
      @Nullable Tensor dtBias,
      Tensor out,
      Tensor state) {
    launch(null, q, k, v, g, beta, aLog, dtBias, out, state, null);
  }

  /**
   * Queues the new tokens on a stream.
   *
   * @param stream of the plan's device; null for its default stream
   * @param q queries
   * @param k keys
   * @param v values
   * @param g gate input
   * @param beta beta
   * @param aLog logarithm of the gate's rate; null if the plan was made without
   * @param dtBias added to g; null if the plan was made without
   * @param out is overwritten; must not overlap the inputs
   * @param state where sequences start; overwritten unless stateOut is given
   * @param stateOut is overwritten; null if the plan was made without
   * @throws InvalidArgumentException if a tensor does not look like the plan's, or outputs overlap
   * @throws ClosedException if a tensor or the plan is closed
   * @throws InUseException if another launch of this plan is under way
   */
  public void launch(
      @Nullable Stream stream,
      Tensor q,
      Tensor k,
      Tensor v,
      Tensor g,
      Tensor beta,
      @Nullable Tensor aLog,
      @Nullable Tensor dtBias,
      Tensor out,
      Tensor state,
      @Nullable Tensor stateOut) {
    launcher.begin(stream);
    try {
      launcher.bind(Q, q);
      launcher.bind(K, k);
      launcher.bind(V, v);
      launcher.bind(G, g);
      launcher.bind(BETA, beta);
      launcher.bind(A_LOG, aLog);
      launcher.bind(DT_BIAS, dtBias);
      launcher.bind(OUT, out);
      launcher.bind(STATE, state);
      launcher.bind(STATE_OUT, stateOut);
      launcher.run();
    } finally {
      launcher.end();
    }
  }

  /**
   * Allocates an output for a launch.
   *
   * @return a dense tensor that the caller closes
   */
  public Tensor emptyOutput() {
    return launcher.empty(OUT);
  }

  @Override
  public KdaDecodePlan fork() {
    return new KdaDecodePlan(launcher.fork());
  }
}
