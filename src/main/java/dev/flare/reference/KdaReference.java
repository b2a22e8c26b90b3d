package dev.flare.reference;

import static dev.flare.reference.AttentionReference.forEachSequenceAndHead;
import static dev.flare.reference.Checks.require;

import java.util.Arrays;
import org.jspecify.annotations.Nullable;

/** Kimi Delta Attention, token by token, in float64. */
public final class KdaReference {
  private KdaReference() {}

  /**
   * For each token of a sequence, on a K x V state S for each value head:
   *
   * <pre>
   *   S   = diag(exp(gate)) S
   *   e   = v - S^T k
   *   S   = S + k (beta e)^T
   *   out = scale * S^T q
   * </pre>
   *
   * @param tokens the sequences: dense or packed
   * @param x the token data
   * @param options gates, normalisation, scale, state layout
   * @param initialState {@code [N, HV, K, V]} or {@code [N, HV, V, K]}; null: zero
   * @param checkpointInterval tokens between two stored states; 0: store none
   * @return outputs and states
   */
  public static KdaResult forward(
      Tokens tokens,
      KdaInputs x,
      KdaOptions options,
      double @Nullable [] initialState,
      int checkpointInterval) {
    int sequences = tokens.batch();
    int hv = x.valueHeads();
    int stateSize = Math.multiplyExact(x.keyDim(), x.valueDim());
    x.check(tokens.rows(), options);
    Checks.optionalSize("initial_state", initialState, sequences, hv, stateSize);
    require(checkpointInterval >= 0, "checkpoint interval is %d", checkpointInterval);
    int[] cuCheckpoints = new int[sequences + 1];
    for (int n = 0; n < sequences; n++) {
      int count = checkpointInterval == 0 ? 0 : tokens.length(n) / checkpointInterval;
      cuCheckpoints[n + 1] = cuCheckpoints[n] + count;
    }
    double[] out = Checks.allocate(tokens.rows(), hv, x.valueDim());
    double[] finalState = Checks.allocate(sequences, hv, stateSize);
    double[] checkpoints = Checks.allocate(cuCheckpoints[sequences], hv, stateSize);
    forEachSequenceAndHead(
        sequences,
        hv,
        (n, h) -> {
          State state = new State(x, options, h);
          if (initialState != null) {
            state.load(initialState, n);
          }
          for (int t = 0; t < tokens.length(n); t++) {
            state.step(tokens.row(n, t), out);
            if (checkpointInterval > 0 && (t + 1) % checkpointInterval == 0) {
              state.store(checkpoints, cuCheckpoints[n] + (t + 1) / checkpointInterval - 1);
            }
          }
          state.store(finalState, n);
        });
    return new KdaResult(out, finalState, checkpoints, cuCheckpoints);
  }

  /**
   * Where decode finds and leaves the states of its sequences in a pool.
   *
   * @param slots {@code [N, perSequence]}, slots of the pool
   * @param perSequence 1: a sequence's slot is read before its first token and written after its
   *     last; more: the state after token t goes to slot t of the sequence, and the first state
   *     comes from slot {@code accepted - 1}
   * @param paddingSlot a slot of this number reads as zeros and is never written
   * @param accepted {@code [N]}, at least 1; null: 1. Only with more than one slot a sequence
   */
  @SuppressWarnings("ArrayRecordComponent") // plain arrays: see the package
  public record Slots(int[] slots, int perSequence, int paddingSlot, int @Nullable [] accepted) {

    /**
     * {@return slot n for sequence n}
     *
     * @param sequences number of sequences
     */
    public static Slots identity(int sequences) {
      int[] slots = new int[sequences];
      Arrays.setAll(slots, n -> n);
      return new Slots(slots, 1, -1, null);
    }
  }

  /**
   * The same recurrence for a few tokens a sequence, over a pool of states.
   *
   * @param tokens the new tokens of each sequence: dense or packed
   * @param x the token data
   * @param options gates, normalisation, scale, state layout
   * @param pool {@code [slots, HV, K, V]} or {@code [slots, HV, V, K]}; not changed
   * @param slots which slots the sequences use; two sequences must not share one
   * @return out, and as final state a copy of the pool with the slots written
   */
  public static KdaResult decode(
      Tokens tokens, KdaInputs x, KdaOptions options, double[] pool, Slots slots) {
    int sequences = tokens.batch();
    int hv = x.valueHeads();
    int stateSize = Math.multiplyExact(x.keyDim(), x.valueDim());
    int perSequence = slots.perSequence();
    x.check(tokens.rows(), options);
    require(
        pool.length % (hv * stateSize) == 0, "pool has %d elements, want whole slots", pool.length);
    Checks.size("slots", slots.slots(), sequences, perSequence);
    int poolSlots = pool.length / (hv * stateSize);
    for (int slot : slots.slots()) {
      require(
          slot == slots.paddingSlot() || (slot >= 0 && slot < poolSlots),
          "slot %d is neither the padding slot %d nor in 0..%d",
          slot,
          slots.paddingSlot(),
          poolSlots - 1);
    }
    double[] out = Checks.allocate(tokens.rows(), hv, x.valueDim());
    double[] states = pool.clone();
    forEachSequenceAndHead(
        sequences,
        hv,
        (n, h) -> {
          int length = tokens.length(n);
          int first = n * perSequence;
          if (perSequence > 1) {
            require(
                length <= perSequence,
                "sequence %d has %d tokens, %d slots",
                n,
                length,
                perSequence);
          }
          int[] accepted = slots.accepted();
          int count = accepted == null ? 1 : accepted[n];
          require(
              count >= 1 && count <= perSequence,
              "accepted[%d] is %d, want 1..%d",
              n,
              count,
              perSequence);
          int start = slots.slots()[first + count - 1];
          State state = new State(x, options, h);
          if (start != slots.paddingSlot()) {
            state.load(pool, start);
          }
          for (int t = 0; t < length; t++) {
            state.step(tokens.row(n, t), out);
            boolean commit = perSequence > 1 || t == length - 1;
            int slot = slots.slots()[perSequence > 1 ? first + t : first];
            if (commit && slot != slots.paddingSlot()) {
              state.store(states, slot);
            }
          }
        });
    return new KdaResult(out, states, new double[0], new int[sequences + 1]);
  }

  /** The state of one value head and the step that one token takes it. */
  private static final class State {
    private final KdaInputs x;
    private final KdaOptions options;
    private final int h; // value head
    private final int qkHead;
    private final int dk;
    private final int dv;
    private final double[] s; // [K, V], whatever the layout outside
    private final double[] q;
    private final double[] k;
    private final double[] decay;
    private final double[] error;

    State(KdaInputs x, KdaOptions options, int h) {
      this.x = x;
      this.options = options;
      this.h = h;
      this.qkHead = h / (x.valueHeads() / x.heads());
      this.dk = x.keyDim();
      this.dv = x.valueDim();
      this.s = new double[dk * dv];
      this.q = new double[dk];
      this.k = new double[dk];
      this.decay = new double[dk];
      this.error = new double[dv];
    }

    /** Takes one token: row {@code row} of the inputs and of {@code out}. */
    void step(int row, double[] out) {
      readHead(x.q(), row, q);
      readHead(x.k(), row, k);
      readDecay(row);
      for (int c = 0; c < dk; c++) {
        for (int j = 0; j < dv; j++) {
          s[c * dv + j] *= decay[c];
        }
      }
      int valueAt = (row * x.valueHeads() + h) * dv;
      for (int j = 0; j < dv; j++) {
        error[j] = x.v()[valueAt + j];
      }
      for (int c = 0; c < dk; c++) {
        for (int j = 0; j < dv; j++) {
          error[j] -= s[c * dv + j] * k[c];
        }
      }
      for (int j = 0; j < dv; j++) {
        error[j] *= beta(row, j);
      }
      for (int j = 0; j < dv; j++) {
        out[valueAt + j] = 0;
      }
      for (int c = 0; c < dk; c++) {
        for (int j = 0; j < dv; j++) {
          s[c * dv + j] += k[c] * error[j];
          out[valueAt + j] += options.scale() * q[c] * s[c * dv + j];
        }
      }
    }

    private void readHead(double[] array, int row, double[] channels) {
      System.arraycopy(array, (row * x.heads() + qkHead) * dk, channels, 0, dk);
      if (options.l2norm()) {
        double squares = 0;
        for (double c : channels) {
          squares += c * c;
        }
        double norm = Math.sqrt(squares + 1e-6);
        for (int c = 0; c < dk; c++) {
          channels[c] /= norm;
        }
      }
    }

    private void readDecay(int row) {
      double[] aLog = x.aLog();
      double[] dtBias = x.dtBias();
      double a = aLog == null ? 1 : Math.exp(aLog[h]);
      for (int c = 0; c < dk; c++) {
        double raw = x.g()[(row * x.valueHeads() + h) * dk + c];
        double biased = raw + (dtBias == null ? 0 : dtBias[h * dk + c]);
        double logDecay =
            switch (options.gate()) {
              case LOG -> raw;
              case SOFTPLUS -> -a * softplus(biased);
              case BOUNDED -> options.lowerBound() * sigmoid(a * biased);
            };
        decay[c] = Math.exp(logDecay);
      }
    }

    private double beta(int row, int channel) {
      int head = row * x.valueHeads() + h;
      double raw = x.beta()[options.perChannelBeta() ? head * dv + channel : head];
      return switch (options.beta()) {
        case RAW -> raw;
        case SIGMOID -> sigmoid(raw);
        case TWICE_SIGMOID -> 2 * sigmoid(raw);
      };
    }

    /** Reads the state of this head from entry {@code n} of {@code states}. */
    void load(double[] states, int n) {
      int at = (n * x.valueHeads() + h) * dk * dv;
      for (int c = 0; c < dk; c++) {
        for (int j = 0; j < dv; j++) {
          s[c * dv + j] = states[at + outside(c, j)];
        }
      }
    }

    /** Writes the state of this head to entry {@code n} of {@code states}. */
    void store(double[] states, int n) {
      int at = (n * x.valueHeads() + h) * dk * dv;
      for (int c = 0; c < dk; c++) {
        for (int j = 0; j < dv; j++) {
          states[at + outside(c, j)] = s[c * dv + j];
        }
      }
    }

    private int outside(int c, int j) {
      return switch (options.stateLayout()) {
        case KV -> c * dv + j;
        case VK -> j * dk + c;
      };
    }
  }

  private static double sigmoid(double x) {
    return 1 / (1 + Math.exp(-x));
  }

  private static double softplus(double x) {
    return x > 20 ? x : Math.log1p(Math.exp(x));
  }
}
