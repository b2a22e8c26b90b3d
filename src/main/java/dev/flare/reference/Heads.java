package dev.flare.reference;

import static dev.flare.reference.Checks.require;

/**
 * The per-token shape of an attention: query head {@code h} reads kv head {@code h / (query / kv)}.
 *
 * @param query query heads
 * @param kv key/value heads, a divisor of {@code query}
 * @param dim width of a query or key
 * @param valueDim width of a value
 */
public record Heads(int query, int kv, int dim, int valueDim) {
  /** Checks that the counts are positive and that {@code kv} divides {@code query}. */
  public Heads {
    require(
        query >= 1 && kv >= 1 && query % kv == 0,
        "%d query heads over %d kv heads: want a multiple",
        query,
        kv);
    require(dim >= 1 && valueDim >= 1, "head dims %d and %d, want at least 1", dim, valueDim);
  }
}
