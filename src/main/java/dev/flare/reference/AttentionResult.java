package dev.flare.reference;

/**
 * What an attention returns. Rows that see no key have out 0 and lse -infinity (with a sink: the
 * sink). Query rows beyond a sequence's used length hold the same.
 *
 * @param out {@code [rows, H, dv]}
 * @param lse natural log of the sum of the exponentials, the sink's included: {@code [B, H, N]} for
 *     dense queries, {@code [H, T]} for packed ones
 */
@SuppressWarnings("ArrayRecordComponent") // plain arrays: see the package
public record AttentionResult(double[] out, double[] lse) {}
