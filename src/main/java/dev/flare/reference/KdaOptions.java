package dev.flare.reference;

import static dev.flare.reference.Checks.require;

/**
 * How the inputs of Kimi Delta Attention become its gates.
 *
 * @param gate what {@code g} holds
 * @param lowerBound of {@link Gate#BOUNDED}: the log decay lies between it and 0; below 0
 * @param l2norm whether q and k are divided by sqrt(sum of squares + 1e-6) over their channels
 * @param beta what becomes of {@code beta}
 * @param perChannelBeta whether {@code beta} has one value a value channel, {@code [.., HV, V]}
 * @param scale multiplies q
 * @param stateLayout order of the two dimensions of every state
 */
public record KdaOptions(
    Gate gate,
    double lowerBound,
    boolean l2norm,
    Beta beta,
    boolean perChannelBeta,
    double scale,
    StateLayout stateLayout) {

  /** What {@code g} holds. */
  public enum Gate {
    /** The log decay itself. */
    LOG,
    /** Log decay = -exp(aLog) * softplus(g + dtBias). */
    SOFTPLUS,
    /** Log decay = lowerBound * sigmoid(exp(aLog) * (g + dtBias)). */
    BOUNDED
  }

  /** What becomes of {@code beta}. */
  public enum Beta {
    /** Taken as it is. */
    RAW,
    /** Sigmoid(beta). */
    SIGMOID,
    /** 2 * sigmoid(beta): negative eigenvalues of the transition are allowed. */
    TWICE_SIGMOID
  }

  /** The order of a state's dimensions. */
  public enum StateLayout {
    /** {@code [N, HV, K, V]}. */
    KV,
    /** {@code [N, HV, V, K]}. */
    VK
  }

  /** Checks the bound. */
  public KdaOptions {
    require(
        gate != Gate.BOUNDED || lowerBound < 0,
        "lower_bound is %s, the bounded gate wants one below 0",
        lowerBound);
  }

  /**
   * {@return options for a given log decay, raw beta, no normalisation, [K, V] states}
   *
   * @param scale multiplies q
   */
  public static KdaOptions logGate(double scale) {
    return new KdaOptions(Gate.LOG, 0, false, Beta.RAW, false, scale, StateLayout.KV);
  }

  /** {@return a copy with the softplus gate} */
  public KdaOptions withSoftplusGate() {
    return new KdaOptions(Gate.SOFTPLUS, 0, l2norm, beta, perChannelBeta, scale, stateLayout);
  }

  /**
   * {@return a copy with the bounded gate}
   *
   * @param value the lower bound, below 0
   */
  public KdaOptions withBoundedGate(double value) {
    return new KdaOptions(Gate.BOUNDED, value, l2norm, beta, perChannelBeta, scale, stateLayout);
  }

  /**
   * {@return a copy with q and k normalised or not}
   *
   * @param value whether to normalise
   */
  public KdaOptions withL2norm(boolean value) {
    return new KdaOptions(gate, lowerBound, value, beta, perChannelBeta, scale, stateLayout);
  }

  /**
   * {@return a copy with another use of beta}
   *
   * @param value what becomes of beta
   */
  public KdaOptions withBeta(Beta value) {
    return new KdaOptions(gate, lowerBound, l2norm, value, perChannelBeta, scale, stateLayout);
  }

  /**
   * {@return a copy with one beta a head or one a value channel}
   *
   * @param value whether beta is {@code [.., HV, V]}
   */
  public KdaOptions withPerChannelBeta(boolean value) {
    return new KdaOptions(gate, lowerBound, l2norm, beta, value, scale, stateLayout);
  }

  /**
   * {@return a copy with another state layout}
   *
   * @param value order of the state's dimensions
   */
  public KdaOptions withStateLayout(StateLayout value) {
    return new KdaOptions(gate, lowerBound, l2norm, beta, perChannelBeta, scale, value);
  }
}
