package dev.flare;

import java.util.function.Consumer;
import org.jspecify.annotations.Nullable;

/**
 * Kimi Delta Attention (KDA): a gated delta rule on one K x V state a head, whose cost grows with
 * the length and not with its square.
 *
 * <p>For each token, on a state S:
 *
 * <pre>
 * S = diag(exp(gate)) S
 * e = v - S^T k
 * S = S + beta k e^T
 * out = scale * S^T q
 * </pre>
 *
 * <pre>{@code
 * Tensor out = KimiDeltaAttention.bounded(-5).run(q, k, v, g, beta, aLog, dtBias);
 * }</pre>
 *
 * <p><b>Shapes.</b> B batches of T tokens, H query and key heads, HV value heads (a multiple of H;
 * value head h reads query head {@code h / (HV / H)}), K and V channels, 1 to 512 each. q, k {@code
 * [B, T, H, K]}; v, out {@code [B, T, HV, V]}; g {@code [B, T, HV, K]}; beta {@code [B, T, HV]}.
 * States {@code [N, HV, K, V]} or {@code [N, HV, V, K]} ({@link #withStateLayout}), N = B unless
 * packed ({@link #withVarlen}). Any strides do, but the last dimension must be dense (beta's is
 * free, a head's state must be dense).
 *
 * <p><b>Dtypes.</b> q, k, v and out alike: FP32, FP16 or BF16; g and beta any of these; states FP32
 * or BF16. The running state and all sums are FP32.
 *
 * <p><b>Threads.</b> Immutable; any thread may use it. Tensors given as options are the caller's
 * and must be open when it runs. Paper: Kimi Linear, arXiv 2510.26692.
 */
public final class KimiDeltaAttention {
  private final KdaSettings settings;

  private KimiDeltaAttention(KdaSettings settings) {
    this.settings = settings;
  }

  /**
   * The bounded gate, with what models do around it: log decay = {@code lowerBound *
   * sigmoid(exp(aLog) * (g + dtBias))}, q and k normalised, beta from logits.
   *
   * @param lowerBound less than 0; models use -5
   * @return attention with {@link #withQkL2Norm} on and {@link Beta#SIGMOID}
   * @throws InvalidArgumentException if {@code lowerBound} is not negative
   */
  public static KimiDeltaAttention bounded(double lowerBound) {
    float bound = Checks.finite("lowerBound", lowerBound);
    if (!(bound < 0)) {
      throw new InvalidArgumentException("lowerBound", lowerBound, "less than 0");
    }
    return model(KdaSettings.GATE_BOUNDED, bound);
  }

  /**
   * The softplus gate, with what models do around it: log decay = {@code -exp(aLog) * softplus(g +
   * dtBias)}, q and k normalised, beta from logits.
   *
   * @return attention with {@link #withQkL2Norm} on and {@link Beta#SIGMOID}
   */
  public static KimiDeltaAttention softplus() {
    return model(KdaSettings.GATE_SOFTPLUS, 0);
  }

  /**
   * The bare recurrence: g is the log decay itself, 0 or less; q, k and beta are taken as they are.
   *
   * @return attention with {@link #withQkL2Norm} off and {@link Beta#RAW}
   */
  public static KimiDeltaAttention logGate() {
    return new KimiDeltaAttention(new KdaSettings());
  }

  private static KimiDeltaAttention model(int gate, float lowerBound) {
    return new KimiDeltaAttention(
        new KdaSettings()
            .with(
                s -> {
                  s.gate = gate;
                  s.lowerBound = lowerBound;
                  s.l2norm = true;
                  s.beta = Beta.SIGMOID;
                }));
  }

  private KimiDeltaAttention with(Consumer<KdaSettings> change) {
    return new KimiDeltaAttention(settings.with(change));
  }

  /**
   * Sets the factor of the result.
   *
   * @param scale any finite number; by default {@code 1/sqrt(K)}
   * @return a changed copy
   */
  public KimiDeltaAttention withScale(double scale) {
    float value = Checks.finite("scale", scale);
    return with(s -> s.scale = value);
  }

  /**
   * Divides q and k by their length: {@code x / sqrt(sum of squares + 1e-6)}.
   *
   * @param normalise false to take them as they are
   * @return a changed copy
   */
  public KimiDeltaAttention withQkL2Norm(boolean normalise) {
    return with(s -> s.l2norm = normalise);
  }

  /**
   * Chooses what becomes of beta.
   *
   * @param beta raw, or logits
   * @return a changed copy
   */
  public KimiDeltaAttention withBeta(Beta beta) {
    return with(s -> s.beta = beta);
  }

  /**
   * Chooses the order of a state's dimensions; needed where states come in or go out.
   *
   * @param layout K first or V first
   * @return a changed copy
   */
  public KimiDeltaAttention withStateLayout(StateLayout layout) {
    return with(s -> s.stateLayout = layout);
  }

  /**
   * Chooses the dtype of states that flare allocates.
   *
   * @param dtype FP32, the default, or BF16
   * @return a changed copy
   */
  public KimiDeltaAttention withStateType(DType dtype) {
    if (dtype != DType.FP32 && dtype != DType.BF16) {
      throw new InvalidArgumentException("dtype", dtype, "FP32 or BF16");
    }
    return with(s -> s.stateType = dtype);
  }

  /**
   * Packs sequences of different lengths one after the other along T, with B = 1.
   *
   * @param cuSeqlens {@code [N + 1]} INT32 or INT64: where each sequence starts; the last is T.
   *     Empty sequences are fine
   * @return a changed copy, which refers to the tensor
   */
  public KimiDeltaAttention withVarlen(Tensor cuSeqlens) {
    Checks.present("cuSeqlens", cuSeqlens);
    return with(s -> s.cuSeqlens = cuSeqlens);
  }

  /**
   * Takes states from a pool instead of row by row: {@code [slots, HV, K, V]}.
   *
   * @param slots {@code [N]} INT32 or INT64; for {@link #decode} also {@code [N, T]}: then the
   *     state is written after each token, to that token's slot
   * @param paddingSlot a slot that reads as zeros and is not written; -1 is usual
   * @return a changed copy, which refers to the tensor
   */
  public KimiDeltaAttention withSlots(Tensor slots, long paddingSlot) {
    Checks.present("slots", slots);
    return with(
        s -> {
          s.slots = slots;
          s.paddingSlot = paddingSlot;
        });
  }

  /**
   * Tells how many tokens of the last draft were accepted: {@link #decode} starts from the state
   * after them. Goes with slots {@code [N, T]}.
   *
   * @param accepted {@code [N]} INT32 or INT64, 1 to T
   * @return a changed copy, which refers to the tensor
   */
  public KimiDeltaAttention withAccepted(Tensor accepted) {
    Checks.present("accepted", accepted);
    return with(s -> s.accepted = accepted);
  }

  /**
   * Keeps the state after every {@code interval} tokens, for {@link #runWithState}.
   *
   * @param interval a multiple of 64
   * @return a changed copy
   */
  public KimiDeltaAttention withCheckpoints(long interval) {
    Checks.positive("interval", interval);
    return with(
        s -> {
          s.checkpointInterval = interval;
          s.cuCheckpoints = null;
        });
  }

  /**
   * Keeps the state after every {@code interval} tokens of each packed sequence.
   *
   * @param interval a multiple of 64
   * @param cuCheckpoints {@code [N + 1]} INT32 or INT64: the first row of each sequence's
   *     checkpoints, {@code length / interval} of them; the last is how many there are in all
   * @return a changed copy, which refers to the tensor
   */
  public KimiDeltaAttention withCheckpoints(long interval, Tensor cuCheckpoints) {
    Checks.positive("interval", interval);
    Checks.present("cuCheckpoints", cuCheckpoints);
    return with(
        s -> {
          s.checkpointInterval = interval;
          s.cuCheckpoints = cuCheckpoints;
        });
  }

  /**
   * Makes results independent of batch mates, and of where a sequence is cut at multiples of 64.
   *
   * @param deterministic true for equal bits
   * @return a changed copy
   */
  public KimiDeltaAttention withDeterministic(boolean deterministic) {
    return with(s -> s.deterministic = deterministic);
  }

  /**
   * Limits the threads that the CPU uses.
   *
   * @param threads 0, the default, for all cores
   * @return a changed copy
   */
  public KimiDeltaAttention withThreads(int threads) {
    Checks.notNegative("threads", threads);
    return with(s -> s.threads = threads);
  }

  /**
   * Chooses the kernel.
   *
   * @param kernel an error follows where it can't run
   * @return a changed copy
   */
  public KimiDeltaAttention withKernel(Kernel kernel) {
    return with(s -> s.kernel = kernel);
  }

  // ---- forward --------------------------------------------------------------------------------

  /**
   * Computes attention from a state of zeros, with neither aLog nor dtBias.
   *
   * @param q queries {@code [B, T, H, K]}
   * @param k keys {@code [B, T, H, K]}
   * @param v values {@code [B, T, HV, V]}
   * @param g gate input {@code [B, T, HV, K]}, of its own dtype
   * @param beta {@code [B, T, HV]}, or {@code [B, T, HV, V]} for one per channel; of its own dtype
   * @return {@code [B, T, HV, V]}, a new dense tensor that the caller closes
   * @throws InvalidArgumentException if shapes, strides, dtypes or options do not fit each other
   * @throws UnsupportedException if there is no kernel for them
   * @throws NativeLibraryException if the C library is not usable here
   */
  public Tensor run(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta) {
    return run(q, k, v, g, beta, null, null);
  }

  /**
   * Computes attention from a state of zeros.
   *
   * @param q queries {@code [B, T, H, K]}
   * @param k keys {@code [B, T, H, K]}
   * @param v values {@code [B, T, HV, V]}
   * @param g gate input {@code [B, T, HV, K]}, of its own dtype
   * @param beta {@code [B, T, HV]}, or {@code [B, T, HV, V]} for one per channel; of its own dtype
   * @param aLog FP32 {@code [HV]}: logarithm of the gate's rate; null for a rate of 1
   * @param dtBias FP32 {@code [HV, K]}, added to g; null for 0
   * @return {@code [B, T, HV, V]}, a new dense tensor that the caller closes
   * @throws InvalidArgumentException if shapes, strides, dtypes or options do not fit each other
   * @throws UnsupportedException if there is no kernel for them
   * @throws NativeLibraryException if the C library is not usable here
   */
  public Tensor run(
      Tensor q,
      Tensor k,
      Tensor v,
      Tensor g,
      Tensor beta,
      @Nullable Tensor aLog,
      @Nullable Tensor dtBias) {
    try (KdaPlan plan =
        KdaPlan.of(settings, q, k, v, g, beta, aLog, dtBias, null, KdaPlan.NO_STATES, true)) {
      Tensor out = plan.emptyOutput();
      try {
        plan.launch(q, k, v, g, beta, aLog, dtBias, out);
        return out;
      } catch (RuntimeException | Error e) {
        out.close();
        throw e;
      }
    }
  }

  /**
   * Computes attention and the state after the last token. Needs {@link #withStateLayout}.
   *
   * @param q queries {@code [B, T, H, K]}
   * @param k keys {@code [B, T, H, K]}
   * @param v values {@code [B, T, HV, V]}
   * @param g gate input {@code [B, T, HV, K]}, of its own dtype
   * @param beta {@code [B, T, HV]}, or {@code [B, T, HV, V]} for one per channel; of its own dtype
   * @param aLog FP32 {@code [HV]}: logarithm of the gate's rate; null for a rate of 1
   * @param dtBias FP32 {@code [HV, K]}, added to g; null for 0
   * @param initialState {@code [N, HV, K, V]} or {@code [N, HV, V, K]}; null for zeros
   * @return new dense tensors that the caller closes
   * @throws InvalidArgumentException if shapes, strides, dtypes or options do not fit each other
   * @throws UnsupportedException if there is no kernel for them
   * @throws NativeLibraryException if the C library is not usable here
   */
  public DeltaOutput runWithState(
      Tensor q,
      Tensor k,
      Tensor v,
      Tensor g,
      Tensor beta,
      @Nullable Tensor aLog,
      @Nullable Tensor dtBias,
      @Nullable Tensor initialState) {
    return KdaPlan.runWithState(settings, q, k, v, g, beta, aLog, dtBias, initialState);
  }

  /**
   * Computes attention over whole prompts, starting from and moving on the states of a pool.
   *
   * @param q queries {@code [B, T, H, K]}
   * @param k keys {@code [B, T, H, K]}
   * @param v values {@code [B, T, HV, V]}
   * @param g gate input {@code [B, T, HV, K]}, of its own dtype
   * @param beta {@code [B, T, HV]}, or {@code [B, T, HV, V]} for one per channel; of its own dtype
   * @param aLog FP32 {@code [HV]}: logarithm of the gate's rate; null for a rate of 1
   * @param dtBias FP32 {@code [HV, K]}, added to g; null for 0
   * @param states one sequence for each of the batch, or for each packed one
   * @return {@code [B, T, HV, V]}, a new dense tensor that the caller closes
   * @throws InvalidArgumentException if shapes, strides, dtypes or options do not fit each other
   * @throws UnsupportedException if there is no kernel for them
   * @throws NativeLibraryException if the C library is not usable here
   */
  public Tensor run(
      Tensor q,
      Tensor k,
      Tensor v,
      Tensor g,
      Tensor beta,
      @Nullable Tensor aLog,
      @Nullable Tensor dtBias,
      DeltaState.Batch states) {
    Tensor pool = states.states().pool();
    KimiDeltaAttention pooled = on(states);
    try (KdaPlan plan =
        KdaPlan.of(
            pooled.settings,
            q,
            k,
            v,
            g,
            beta,
            aLog,
            dtBias,
            null,
            new KdaPlan.States(pool, pool, null),
            true)) {
      Tensor out = plan.emptyOutput();
      try {
        plan.launch(q, k, v, g, beta, aLog, dtBias, out, pool, pool);
        return out;
      } catch (RuntimeException | Error e) {
        out.close();
        throw e;
      }
    }
  }

  /**
   * Takes its states from a pool: {@code withStateLayout} and {@code withSlots} of the batch.
   *
   * @param states sequences of a {@link DeltaState}
   * @return a changed copy, which refers to the batch's slots
   */
  public KimiDeltaAttention on(DeltaState.Batch states) {
    return withStateLayout(states.states().layout())
        .withSlots(states.slots(), DeltaState.PADDING_SLOT);
  }

  /**
   * Prepares for launching many times with tensors that look like these, from a state of zeros;
   * their content is not read. The output of a launch is dense.
   *
   * @param q queries {@code [B, T, H, K]}
   * @param k keys {@code [B, T, H, K]}
   * @param v values {@code [B, T, HV, V]}
   * @param g gate input {@code [B, T, HV, K]}, of its own dtype
   * @param beta {@code [B, T, HV]}, or {@code [B, T, HV, V]} for one per channel; of its own dtype
   * @param aLog FP32 {@code [HV]}: logarithm of the gate's rate; null for a rate of 1
   * @param dtBias FP32 {@code [HV, K]}, added to g; null for 0
   * @return a plan that the caller closes
   * @throws InvalidArgumentException if shapes, strides, dtypes or options do not fit each other
   * @throws UnsupportedException if there is no kernel for them
   * @throws NativeLibraryException if the C library is not usable here
   */
  public KdaPlan plan(
      Tensor q,
      Tensor k,
      Tensor v,
      Tensor g,
      Tensor beta,
      @Nullable Tensor aLog,
      @Nullable Tensor dtBias) {
    return KdaPlan.of(settings, q, k, v, g, beta, aLog, dtBias, null, KdaPlan.NO_STATES, false);
  }

  /**
   * Prepares for launching many times, with states, written to an output of any strides.
   *
   * @param q queries {@code [B, T, H, K]}
   * @param k keys {@code [B, T, H, K]}
   * @param v values {@code [B, T, HV, V]}
   * @param g gate input {@code [B, T, HV, K]}, of its own dtype
   * @param beta {@code [B, T, HV]}, or {@code [B, T, HV, V]} for one per channel; of its own dtype
   * @param aLog FP32 {@code [HV]}: logarithm of the gate's rate; null for a rate of 1
   * @param dtBias FP32 {@code [HV, K]}, added to g; null for 0
   * @param out where a launch writes
   * @param initialState {@code [N, HV, K, V]} or {@code [N, HV, V, K]}, or a pool ({@link
   *     #withSlots}); null for zeros
   * @param finalState the same; may be the tensor of initialState; null if it is not wanted
   * @param checkpoints dense states ({@link #withCheckpoints}); null if they are not wanted
   * @return a plan that the caller closes
   * @throws InvalidArgumentException if shapes, strides, dtypes or options do not fit each other
   * @throws UnsupportedException if there is no kernel for them
   * @throws NativeLibraryException if the C library is not usable here
   */
  public KdaPlan plan(
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
    Checks.present("out", out);
    return KdaPlan.of(
        settings,
        q,
        k,
        v,
        g,
        beta,
        aLog,
        dtBias,
        out,
        new KdaPlan.States(initialState, finalState, checkpoints),
        false);
  }

  // ---- decode ---------------------------------------------------------------------------------

  /**
   * Computes one or a few new tokens of each sequence and moves the states on, in place. Needs
   * {@link #withStateLayout}.
   *
   * @param q queries {@code [B, T, H, K]}
   * @param k keys {@code [B, T, H, K]}
   * @param v values {@code [B, T, HV, V]}
   * @param g gate input {@code [B, T, HV, K]}, of its own dtype
   * @param beta {@code [B, T, HV]}, or {@code [B, T, HV, V]} for one per channel; of its own dtype
   * @param aLog FP32 {@code [HV]}: logarithm of the gate's rate; null for a rate of 1
   * @param dtBias FP32 {@code [HV, K]}, added to g; null for 0
   * @param state {@code [N, HV, K, V]} or {@code [N, HV, V, K]}, or a pool ({@link #withSlots}); it
   *     is overwritten
   * @return {@code [B, T, HV, V]}, a new dense tensor that the caller closes
   * @throws InvalidArgumentException if shapes, strides, dtypes or options do not fit each other
   * @throws UnsupportedException if there is no kernel for them
   * @throws NativeLibraryException if the C library is not usable here
   */
  public Tensor decode(
      Tensor q,
      Tensor k,
      Tensor v,
      Tensor g,
      Tensor beta,
      @Nullable Tensor aLog,
      @Nullable Tensor dtBias,
      Tensor state) {
    try (KdaDecodePlan plan =
        KdaDecodePlan.of(settings, q, k, v, g, beta, aLog, dtBias, null, state, null, true)) {
      Tensor out = plan.emptyOutput();
      try {
        plan.launch(q, k, v, g, beta, aLog, dtBias, out, state);
        return out;
      } catch (RuntimeException | Error e) {
        out.close();
        throw e;
      }
    }
  }

  /**
   * Computes one or a few new tokens of each sequence and moves its state in a pool on.
   *
   * @param q queries {@code [B, T, H, K]}
   * @param k keys {@code [B, T, H, K]}
   * @param v values {@code [B, T, HV, V]}
   * @param g gate input {@code [B, T, HV, K]}, of its own dtype
   * @param beta {@code [B, T, HV]}, or {@code [B, T, HV, V]} for one per channel; of its own dtype
   * @param aLog FP32 {@code [HV]}: logarithm of the gate's rate; null for a rate of 1
   * @param dtBias FP32 {@code [HV, K]}, added to g; null for 0
   * @param states one sequence for each of the batch
   * @return {@code [B, T, HV, V]}, a new dense tensor that the caller closes
   * @throws InvalidArgumentException if shapes, strides, dtypes or options do not fit each other
   * @throws UnsupportedException if there is no kernel for them
   * @throws NativeLibraryException if the C library is not usable here
   */
  public Tensor decode(
      Tensor q,
      Tensor k,
      Tensor v,
      Tensor g,
      Tensor beta,
      @Nullable Tensor aLog,
      @Nullable Tensor dtBias,
      DeltaState.Batch states) {
    return on(states).decode(q, k, v, g, beta, aLog, dtBias, states.states().pool());
  }

  /**
   * Prepares decode for launching many times with tensors that look like these; their content is
   * not read. The output of a launch is dense.
   *
   * @param q queries {@code [B, T, H, K]}
   * @param k keys {@code [B, T, H, K]}
   * @param v values {@code [B, T, HV, V]}
   * @param g gate input {@code [B, T, HV, K]}, of its own dtype
   * @param beta {@code [B, T, HV]}, or {@code [B, T, HV, V]} for one per channel; of its own dtype
   * @param aLog FP32 {@code [HV]}: logarithm of the gate's rate; null for a rate of 1
   * @param dtBias FP32 {@code [HV, K]}, added to g; null for 0
   * @param state states or a pool of them ({@link #withSlots})
   * @return a plan that the caller closes
   * @throws InvalidArgumentException if shapes, strides, dtypes or options do not fit each other
   * @throws UnsupportedException if there is no kernel for them
   * @throws NativeLibraryException if the C library is not usable here
   */
  public KdaDecodePlan planDecode(
      Tensor q,
      Tensor k,
      Tensor v,
      Tensor g,
      Tensor beta,
      @Nullable Tensor aLog,
      @Nullable Tensor dtBias,
      Tensor state) {
    return KdaDecodePlan.of(settings, q, k, v, g, beta, aLog, dtBias, null, state, null, false);
  }

  /**
   * Prepares decode for launching many times, written to an output of any strides and, if wanted,
   * to other states.
   *
   * @param q queries {@code [B, T, H, K]}
   * @param k keys {@code [B, T, H, K]}
   * @param v values {@code [B, T, HV, V]}
   * @param g gate input {@code [B, T, HV, K]}, of its own dtype
   * @param beta {@code [B, T, HV]}, or {@code [B, T, HV, V]} for one per channel; of its own dtype
   * @param aLog FP32 {@code [HV]}: logarithm of the gate's rate; null for a rate of 1
   * @param dtBias FP32 {@code [HV, K]}, added to g; null for 0
   * @param out where a launch writes
   * @param state states or a pool of them ({@link #withSlots})
   * @param stateOut where the new states go, laid out like {@code state}; null for in place
   * @return a plan that the caller closes
   * @throws InvalidArgumentException if shapes, strides, dtypes or options do not fit each other
   * @throws UnsupportedException if there is no kernel for them
   * @throws NativeLibraryException if the C library is not usable here
   */
  public KdaDecodePlan planDecode(
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
    Checks.present("out", out);
    return KdaDecodePlan.of(settings, q, k, v, g, beta, aLog, dtBias, out, state, stateOut, false);
  }
}
