package dev.flare;

import java.util.function.Consumer;
import org.jspecify.annotations.Nullable;

/** The options of Kimi Delta Attention. Changed only while {@link #with} makes it. */
final class KdaSettings implements Cloneable {
  static final int FLAG_SCALE = 1;
  static final int GATE_LOG = 0;
  static final int GATE_SOFTPLUS = 1;
  static final int GATE_BOUNDED = 2;

  int gate;
  float lowerBound;
  boolean l2norm;
  Beta beta = Beta.RAW;
  @Nullable Float scale;
  @Nullable StateLayout stateLayout;
  DType stateType = DType.FP32;
  int threads;
  boolean deterministic;
  Kernel kernel = Kernel.AUTO;
  @Nullable Tensor cuSeqlens;
  @Nullable Tensor slots;
  long paddingSlot = -1;
  @Nullable Tensor accepted;
  long checkpointInterval;
  @Nullable Tensor cuCheckpoints;

  KdaSettings with(Consumer<KdaSettings> change) {
    try {
      KdaSettings copy = (KdaSettings) clone();
      change.accept(copy);
      return copy;
    } catch (CloneNotSupportedException e) {
      throw new AssertionError(e);
    }
  }

  StateLayout requireLayout() {
    if (stateLayout == null) {
      throw new InvalidArgumentException(
          "stateLayout", null, "withStateLayout(StateLayout.KV or VK): states have no default");
    }
    return stateLayout;
  }

  /** Sizes of one call. */
  record Sizes(
      long batch,
      long tokens,
      long sequences,
      long heads,
      long valueHeads,
      long keyDim,
      long valueDim,
      boolean perChannelBeta) {}

  /** Checks the token tensors against each other and against the options. */
  Sizes check(
      Tensor q,
      Tensor k,
      Tensor v,
      Tensor g,
      Tensor beta,
      @Nullable Tensor aLog,
      @Nullable Tensor dtBias) {
    Device device = Checks.present("q", q).device();
    Checks.form("q", q, "[B, T, H, K]");
    MlaSettings.activation("q", q);
    Checks.present("k", k, device);
    Checks.form("k", k, "[B, T, H, K]");
    Checks.dtype("k", k, q.dtype());
    Checks.shape("k", k, "[B, T, H, K] as q", q.shape().dims());
    Checks.present("v", v, device);
    Checks.form("v", v, "[B, T, HV, V]");
    Checks.dtype("v", v, q.dtype());
    long batch = q.dim(0);
    long tokens = q.dim(1);
    long valueHeads = v.dim(2);
    Checks.shape("v", v, "[B, T, HV, V]", batch, tokens, valueHeads, v.dim(3));
    if (q.dim(2) == 0 || valueHeads % q.dim(2) != 0) {
      throw new InvalidArgumentException(
          "v", valueHeads + " heads", "a multiple of the " + q.dim(2) + " heads of q");
    }
    Checks.present("g", g, device);
    Checks.form("g", g, "[B, T, HV, K]");
    MlaSettings.activation("g", g);
    Checks.shape("g", g, "[B, T, HV, K]", batch, tokens, valueHeads, q.dim(3));
    Checks.present("beta", beta, device);
    MlaSettings.activation("beta", beta);
    boolean perChannel = beta.rank() == 4;
    if (perChannel) {
      Checks.form("beta", beta, "[B, T, HV, V]");
      Checks.shape("beta", beta, "[B, T, HV, V]", batch, tokens, valueHeads, v.dim(3));
    } else {
      Checks.shape("beta", beta, "[B, T, HV]", batch, tokens, valueHeads);
    }
    if (gate == GATE_LOG && (aLog != null || dtBias != null)) {
      throw new InvalidArgumentException(
          aLog != null ? "aLog" : "dtBias", "a tensor", "null: the log gate takes g as it is");
    }
    if (aLog != null) {
      Checks.present("aLog", aLog, device);
      Checks.vector("aLog", aLog, DType.FP32, "[HV]", valueHeads);
    }
    if (dtBias != null) {
      Checks.present("dtBias", dtBias, device);
      Checks.dtype("dtBias", dtBias, DType.FP32);
      Checks.shape("dtBias", dtBias, "[HV, K]", valueHeads, q.dim(3));
      if (!dtBias.isContiguous()) {
        throw new InvalidArgumentException(
            "dtBias", dtBias.layout(), "a dense tensor; copy with contiguous()");
      }
    }
    long sequences = batch;
    if (cuSeqlens != null) {
      if (batch != 1) {
        throw new InvalidArgumentException(
            "q", q.shape(), "B = 1: withVarlen() packs all tokens along T");
      }
      sequences = Checks.sequences("cuSeqlens", cuSeqlens);
    }
    return new Sizes(
        batch, tokens, sequences, q.dim(2), valueHeads, q.dim(3), v.dim(3), perChannel);
  }

  /** Checks a tensor of {@code n} states; null passes. */
  void checkState(String name, @Nullable Tensor state, Device device, Sizes sizes, long n) {
    if (state == null) {
      return;
    }
    Checks.present(name, state, device);
    StateLayout order = requireLayout();
    if (state.dtype() != DType.FP32 && state.dtype() != DType.BF16) {
      throw new InvalidArgumentException(name, state.dtype(), "FP32 or BF16");
    }
    Shape want = order.shape(n, sizes.valueHeads, sizes.keyDim, sizes.valueDim);
    Checks.shape(name, state, order.form(slots != null ? "slots" : "N"), want.dims());
    Layout layout = state.layout();
    if (layout.shape().elements() > 0
        && ((layout.dim(3) > 1 && layout.stride(3) != 1)
            || (layout.dim(2) > 1 && layout.stride(2) != layout.dim(3)))) {
      throw new InvalidArgumentException(
          name, layout, "each head's state dense; only the two outer strides are free");
    }
    if ((layout.dim(0) > 1 && layout.stride(0) == 0)
        || (layout.dim(1) > 1 && layout.stride(1) == 0)) {
      // The C library takes a stride of 0 as "dense".
      throw new InvalidArgumentException(name, layout, "a state of its own for each head");
    }
  }
}
