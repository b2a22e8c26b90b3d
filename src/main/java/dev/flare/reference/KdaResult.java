package dev.flare.reference;

/**
 * What the delta rule returns.
 *
 * @param out {@code [rows, HV, V]}
 * @param finalState the state after the last token, {@code [N, HV, K, V]} or {@code [N, HV, V, K]}
 * @param checkpoints the states after every interval of tokens, sequence by sequence, {@code
 *     [cuCheckpoints[N], HV, ...]} in the layout of the states
 * @param cuCheckpoints first checkpoint of each sequence and their total number, {@code [N + 1]}
 */
@SuppressWarnings("ArrayRecordComponent") // plain arrays: see the package
public record KdaResult(
    double[] out, double[] finalState, double[] checkpoints, int[] cuCheckpoints) {}
