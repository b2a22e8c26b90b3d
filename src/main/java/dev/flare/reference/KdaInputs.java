package dev.flare.reference;

import static dev.flare.reference.Checks.require;

import org.jspecify.annotations.Nullable;

/**
 * The token data of Kimi Delta Attention. Value head {@code hv} reads query/key head {@code hv /
 * (HV / H)}.
 *
 * @param heads H, query and key heads
 * @param valueHeads HV, value heads, a multiple of {@code heads}
 * @param keyDim K
 * @param valueDim V
 * @param q {@code [rows, H, K]}
 * @param k {@code [rows, H, K]}
 * @param v {@code [rows, HV, V]}
 * @param g {@code [rows, HV, K]}
 * @param beta {@code [rows, HV]}, or {@code [rows, HV, V]}
 * @param aLog {@code [HV]}; null: exp(aLog) is 1
 * @param dtBias {@code [HV, K]}; null: 0
 */
@SuppressWarnings("ArrayRecordComponent") // plain arrays: see the package
public record KdaInputs(
    int heads,
    int valueHeads,
    int keyDim,
    int valueDim,
    double[] q,
    double[] k,
    double[] v,
    double[] g,
    double[] beta,
    double @Nullable [] aLog,
    double @Nullable [] dtBias) {

  /** Checks that the counts are positive and that {@code heads} divides {@code valueHeads}. */
  public KdaInputs {
    require(
        heads >= 1 && valueHeads >= 1 && valueHeads % heads == 0,
        "%d value heads over %d heads: want a multiple",
        valueHeads,
        heads);
    require(keyDim >= 1 && valueDim >= 1, "head dims %d and %d: want at least 1", keyDim, valueDim);
  }

  void check(int rows, KdaOptions options) {
    Checks.size("q", q, rows, heads, keyDim);
    Checks.size("k", k, rows, heads, keyDim);
    Checks.size("v", v, rows, valueHeads, valueDim);
    Checks.size("g", g, rows, valueHeads, keyDim);
    Checks.size("beta", beta, rows, valueHeads, options.perChannelBeta() ? valueDim : 1);
    Checks.optionalSize("a_log", aLog, valueHeads);
    Checks.optionalSize("dt_bias", dtBias, valueHeads, keyDim);
  }
}
