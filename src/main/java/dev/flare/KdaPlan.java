package dev.flare;

import dev.flare.internal.CommonParams;
import dev.flare.internal.KdaForwardParams;
import dev.flare.internal.Kernels.Operation;
import dev.flare.internal.Struct;
import org.jspecify.annotations.Nullable;

/** A plan of {@link KimiDeltaAttention} over whole sequences; see {@link Plan}. */
public final class KdaPlan extends Plan {
  static final States NO_STATES = new States(null, null, null);

  private static final int Q = 0;
  private static final int K = 1;
  private static final int V = 2;
  private static final int G = 3;
  private static final int BETA = 4;
  private static final int A_LOG = 5;
  private static final int DT_BIAS = 6;
  private static final int OUT = 7;
  private static final int INITIAL = 8;
  private static final int FINAL = 9;
  private static final int CHECKPOINTS = 10;

  private final @Nullable PackedCheckpoints packed;

  private KdaPlan(Launcher launcher, @Nullable PackedCheckpoints packed) {
    super(launcher);
    this.packed = packed;
  }

  /** The optional state tensors of a call. */
  record States(@Nullable Tensor initial, @Nullable Tensor last, @Nullable Tensor checkpoints) {}

  /**
   * Where packed sequences put their checkpoints: what the C library can't check, not knowing rows.
   */
  private record PackedCheckpoints(
      Tensor cuSeqlens, Tensor cuCheckpoints, long interval, long rows) {
    static @Nullable PackedCheckpoints of(KdaSettings settings, @Nullable Tensor checkpoints) {
      Tensor sequences = settings.cuSeqlens;
      Tensor starts = settings.cuCheckpoints;
      return checkpoints == null || sequences == null || starts == null
          ? null
          : new PackedCheckpoints(
              sequences, starts, settings.checkpointInterval, checkpoints.dim(0));
    }

    /** Host memory only: indices on a device stay the caller's responsibility. */
    void check() {
      for (long n = 0; n + 1 < cuSeqlens.elements(); n++) {
        long length = (long) (cuSeqlens.get(n + 1) - cuSeqlens.get(n));
        long end = (long) cuCheckpoints.get(n) + length / interval;
        if (end > rows) {
          throw new InvalidArgumentException(
              "cuCheckpoints",
              "rows up to " + end + " for sequence " + n,
              "rows within the " + rows + " of checkpoints");
        }
      }
    }
  }

  static KdaPlan of(
      KdaSettings settings,
      Tensor q,
      Tensor k,
      Tensor v,
      Tensor g,
      Tensor beta,
      @Nullable Tensor aLog,
      @Nullable Tensor dtBias,
      @Nullable Tensor out,
      States states,
      boolean confined) {
    Flare.require();
    KdaSettings.Sizes sizes = settings.check(q, k, v, g, beta, aLog, dtBias);
    Device device = q.device();
    long rows = stateRows(settings, states, sizes);
    settings.checkState("initialState", states.initial, device, sizes, rows);
    settings.checkState("finalState", states.last, device, sizes, rows);
    checkCheckpoints(settings, states.checkpoints, device, sizes);
    Layout dense = Layout.dense(q.dtype(), v.shape());
    Layout outLayout = out == null ? dense : AttentionPlan.outputLike("out", out, device, dense);
    return Launcher.inArena(
        confined,
        arena -> {
          Launcher.Builder plan =
              new Launcher.Builder(
                  Operation.KDA_FORWARD, device, arena, KdaForwardParams.allocate(arena));
          plan.input("q", KdaForwardParams.Q, q);
          plan.input("k", KdaForwardParams.K, k);
          plan.input("v", KdaForwardParams.V, v);
          plan.input("g", KdaForwardParams.G, g);
          plan.input("beta", KdaForwardParams.BETA, beta);
          plan.input("aLog", KdaForwardParams.A_LOG, aLog);
          plan.input("dtBias", KdaForwardParams.DT_BIAS, dtBias);
          plan.output("out", KdaForwardParams.OUT, outLayout, out);
          plan.input("initialState", KdaForwardParams.INITIAL_STATE, states.initial);
          plan.output("finalState", KdaForwardParams.FINAL_STATE, states.last);
          plan.output("checkpoints", KdaForwardParams.CHECKPOINTS, states.checkpoints);
          fill(plan, settings, sizes, q, k, v, g, beta, outLayout);
          fillStates(plan, settings, sizes, states, rows);
          return new KdaPlan(plan.build(), PackedCheckpoints.of(settings, states.checkpoints));
        });
  }

  /** How many states the state tensors hold: one a sequence, or as many as the pool has. */
  private static long stateRows(KdaSettings settings, States states, KdaSettings.Sizes sizes) {
    Tensor pool = states.initial != null ? states.initial : states.last;
    if (settings.slots == null || pool == null) {
      return sizes.sequences();
    }
    return Checks.present("state", pool).rank() == 0 ? 0 : pool.dim(0);
  }

  private static void checkCheckpoints(
      KdaSettings settings, @Nullable Tensor checkpoints, Device device, KdaSettings.Sizes sizes) {
    if (checkpoints == null) {
      return;
    }
    long interval = settings.checkpointInterval;
    if (interval == 0) {
      throw new InvalidArgumentException(
          "checkpoints", "a tensor", "withCheckpoints(), which says how often");
    }
    Checks.present("checkpoints", checkpoints, device);
    settings.checkState("checkpoints", checkpoints, device, sizes, checkpoints.dim(0));
    if (!checkpoints.isContiguous()) {
      throw new InvalidArgumentException("checkpoints", checkpoints.layout(), "a dense tensor");
    }
    // Sequences of a packed batch have at most as many whole intervals as all tokens together.
    long rows = sizes.batch() * (sizes.tokens() / interval);
    if (checkpoints.dim(0) < rows) {
      throw new InvalidArgumentException(
          "checkpoints", checkpoints.shape(), "at least " + rows + " rows");
    }
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
        .set(KdaForwardParams.DETERMINISTIC, settings.deterministic ? 1 : 0)
        .set(KdaForwardParams.DTYPE, q.dtype().code())
        .set(KdaForwardParams.GATE_DTYPE, g.dtype().code())
        .set(KdaForwardParams.BETA_DTYPE, beta.dtype().code())
        .set(KdaForwardParams.GATE, settings.gate)
        .set(KdaForwardParams.LOWER_BOUND, settings.lowerBound)
        .set(KdaForwardParams.BETA_ACTIVATION, settings.beta.code())
        .set(KdaForwardParams.QK_L2NORM, settings.l2norm ? 1 : 0)
        .set(KdaForwardParams.BETA_PER_CHANNEL, sizes.perChannelBeta() ? 1 : 0)
        .set(KdaForwardParams.BATCH, sizes.batch())
        .set(KdaForwardParams.SEQLEN, sizes.tokens())
        .set(KdaForwardParams.HEADS_QK, sizes.heads())
        .set(KdaForwardParams.HEADS_V, sizes.valueHeads())
        .set(KdaForwardParams.HEAD_DIM_K, sizes.keyDim())
        .set(KdaForwardParams.HEAD_DIM_V, sizes.valueDim())
        .set(KdaForwardParams.NUM_SEQUENCES, sizes.sequences())
        .set(KdaForwardParams.Q_STRIDE_B, q.layout().stride(0))
        .set(KdaForwardParams.Q_STRIDE_T, q.layout().stride(1))
        .set(KdaForwardParams.Q_STRIDE_H, q.layout().stride(2))
        .set(KdaForwardParams.K_STRIDE_B, k.layout().stride(0))
        .set(KdaForwardParams.K_STRIDE_T, k.layout().stride(1))
        .set(KdaForwardParams.K_STRIDE_H, k.layout().stride(2))
        .set(KdaForwardParams.V_STRIDE_B, v.layout().stride(0))
        .set(KdaForwardParams.V_STRIDE_T, v.layout().stride(1))
        .set(KdaForwardParams.V_STRIDE_H, v.layout().stride(2))
        .set(KdaForwardParams.G_STRIDE_B, g.layout().stride(0))
        .set(KdaForwardParams.G_STRIDE_T, g.layout().stride(1))
        .set(KdaForwardParams.G_STRIDE_H, g.layout().stride(2))
        .set(KdaForwardParams.BETA_STRIDE_B, beta.layout().stride(0))
        .set(KdaForwardParams.BETA_STRIDE_T, beta.layout().stride(1))
        .set(KdaForwardParams.BETA_STRIDE_H, beta.layout().stride(2))
        .set(KdaForwardParams.OUT_STRIDE_B, out.stride(0))
        .set(KdaForwardParams.OUT_STRIDE_T, out.stride(1))
        .set(KdaForwardParams.OUT_STRIDE_H, out.stride(2));
    if (settings.scale != null) {
      p.set(CommonParams.FLAGS, KdaSettings.FLAG_SCALE).set(KdaForwardParams.SCALE, settings.scale);
    }
    if (settings.stateLayout != null) {
      p.set(KdaForwardParams.STATE_LAYOUT, settings.stateLayout.code());
    }
  }

  private static void fillStates(
      Launcher.Builder plan,
      KdaSettings settings,
      KdaSettings.Sizes sizes,
      States states,
      long rows) {
    Struct p = plan.params();
    IndexTensors index = new IndexTensors(plan);
    index.add("cuSeqlens", KdaForwardParams.CU_SEQLENS, settings.cuSeqlens);
    if (settings.slots != null) {
      index.lengths("slots", KdaForwardParams.STATE_SLOTS, settings.slots, sizes.sequences());
      p.set(KdaForwardParams.NUM_SLOTS, rows)
          .set(KdaForwardParams.PADDING_SLOT, settings.paddingSlot);
    }
    if (states.initial != null) {
      p.set(KdaForwardParams.INITIAL_STATE_DTYPE, states.initial.dtype().code())
          .set(KdaForwardParams.INITIAL_STATE_STRIDE_N, states.initial.layout().stride(0))
          .set(KdaForwardParams.INITIAL_STATE_STRIDE_H, states.initial.layout().stride(1));
    }
    if (states.last != null) {
      p.set(KdaForwardParams.FINAL_STATE_DTYPE, states.last.dtype().code())
          .set(KdaForwardParams.FINAL_STATE_STRIDE_N, states.last.layout().stride(0))
          .set(KdaForwardParams.FINAL_STATE_STRIDE_H, states.last.layout().stride(1));
    }
    if (states.checkpoints != null) {
      p.set(KdaForwardParams.CHECKPOINT_DTYPE, states.checkpoints.dtype().code())
          .set(KdaForwardParams.CHECKPOINT_INTERVAL, settings.checkpointInterval);
      index.lengths(
          "cuCheckpoints",
          KdaForwardParams.CU_CHECKPOINTS,
          settings.cuCheckpoints,
          sizes.sequences() + 1);
    }
    index.dtype(KdaForwardParams.INDEX_DTYPE);
  }

  /** One call with states that flare allocates. */
  static DeltaOutput runWithState(
      KdaSettings settings,
      Tensor q,
      Tensor k,
      Tensor v,
      Tensor g,
      Tensor beta,
      @Nullable Tensor aLog,
      @Nullable Tensor dtBias,
      @Nullable Tensor initialState) {
    Flare.require();
    StateLayout order = settings.requireLayout();
    KdaSettings.Sizes sizes = settings.check(q, k, v, g, beta, aLog, dtBias);
    if (settings.slots != null) {
      throw new InvalidArgumentException(
          "slots", "a pool", "plan(...) or decode(...), which work on a pool in place");
    }
    Device device = q.device();
    Shape one = order.shape(1, sizes.valueHeads(), sizes.keyDim(), sizes.valueDim());
    Tensor out = Tensor.empty(device, q.dtype(), v.shape());
    Tensor last = null;
    Tensor checkpoints = null;
    try {
      last = Tensor.empty(device, settings.stateType, rows(one, sizes.sequences()));
      if (settings.checkpointInterval > 0) {
        long count =
            settings.cuCheckpoints != null
                ? lastOf(settings.cuCheckpoints)
                : sizes.batch() * (sizes.tokens() / settings.checkpointInterval);
        // Room for every whole interval, whatever the lengths are.
        long room = sizes.batch() * (sizes.tokens() / settings.checkpointInterval);
        checkpoints = Tensor.empty(device, settings.stateType, rows(one, Math.max(count, room)));
      }
      try (KdaPlan plan =
          of(
              settings,
              q,
              k,
              v,
              g,
              beta,
              aLog,
              dtBias,
              out,
              new States(initialState, last, checkpoints),
              true)) {
        plan.launch(null, q, k, v, g, beta, aLog, dtBias, out, initialState, last, checkpoints);
      }
      return new DeltaOutput(out, last, checkpoints);
    } catch (RuntimeException | Error e) {
      out.close();
      if (last != null) {
        last.close();
      }
      if (checkpoints != null) {
        checkpoints.close();
      }
      throw e;
    }
  }

  private static Shape rows(Shape one, long n) {
    long[] dims = one.dims();
    dims[0] = n;
    return Shape.of(dims);
  }

  private static long lastOf(Tensor cumulative) {
    Checks.sequences("cuCheckpoints", cumulative);
    long last = (long) cumulative.get(cumulative.elements() - 1);
    return Checks.notNegative("cuCheckpoints[N]", last);
  }

  /**
   * Computes attention from a state of zeros.
   *
   * @param q queries
   * @param k keys
   * @param v values
   * @param g gate input
   * @param beta beta
   * @param aLog logarithm of the gate's rate; null if the plan was made without
   * @param dtBias added to g; null if the plan was made without
   * @param out is overwritten; must not overlap the inputs
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
      Tensor out) {
    launch(null, q, k, v, g, beta, aLog, dtBias, out, null, null, null);
  }

  /**
   * Computes attention and moves states on.
   *
   * @param q queries
   * @param k keys
   * @param v values
   * @param g gate input
   * @param beta beta
   * @param aLog logarithm of the gate's rate; null if the plan was made without
   * @param dtBias added to g; null if the plan was made without
   * @param out is overwritten; must not overlap the inputs
   * @param initialState where sequences start; null if the plan was made without
   * @param finalState is overwritten; null if the plan was made without
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
      @Nullable Tensor initialState,
      @Nullable Tensor finalState) {
    launch(null, q, k, v, g, beta, aLog, dtBias, out, initialState, finalState, null);
  }

  /**
   * Queues attention on a stream.
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
   * @param initialState where sequences start; null if the plan was made without
   * @param finalState is overwritten; null if the plan was made without
   * @param checkpoints are overwritten; null if the plan was made without
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
      @Nullable Tensor initialState,
      @Nullable Tensor finalState,
      @Nullable Tensor checkpoints) {
    launcher.begin(stream);
    try {
      if (packed != null && device().isCpu()) {
        packed.check();
      }
      launcher.bind(Q, q);
      launcher.bind(K, k);
      launcher.bind(V, v);
      launcher.bind(G, g);
      launcher.bind(BETA, beta);
      launcher.bind(A_LOG, aLog);
      launcher.bind(DT_BIAS, dtBias);
      launcher.bind(OUT, out);
      launcher.bind(INITIAL, initialState);
      launcher.bind(FINAL, finalState);
      launcher.bind(CHECKPOINTS, checkpoints);
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
  public KdaPlan fork() {
    return new KdaPlan(launcher.fork(), packed);
  }
}
