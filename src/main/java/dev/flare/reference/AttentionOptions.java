package dev.flare.reference;

import org.jspecify.annotations.Nullable;

/**
 * What shapes the scores of an attention: scale, mask and the additions to the softmax.
 *
 * <p>Masks are aligned bottom-right: query {@code i} of {@code nq} stands at position {@code p = i
 * + nk - nq} among the {@code nk} keys. A window shows it the keys {@code p - windowLeft .. p +
 * windowRight}, both inclusive; causal is a right bound of 0, whatever {@code windowRight} says.
 *
 * @param scale multiplies q.k; any real number
 * @param causal hides every key right of the query's own position
 * @param windowLeft keys left of the query's position that it sees; negative: all
 * @param windowRight keys right of the query's position that it sees; negative: all
 * @param softcap turns a score s into softcap * tanh(s / softcap); 0 or negative: off
 * @param sink one more logit a query head, without a value and unscaled, {@code [H]}; null: none
 * @param alibiSlopes bias of -slope * |p - j|, {@code [H]} or {@code [B, H]}; null: none
 */
@SuppressWarnings("ArrayRecordComponent") // plain arrays: see the package
public record AttentionOptions(
    double scale,
    boolean causal,
    int windowLeft,
    int windowRight,
    double softcap,
    double @Nullable [] sink,
    double @Nullable [] alibiSlopes) {

  /** A window side without a bound. */
  public static final int UNBOUNDED = -1;

  /**
   * {@return options with every key visible and nothing but a scale}
   *
   * @param scale multiplies q.k
   */
  public static AttentionOptions full(double scale) {
    return new AttentionOptions(scale, false, UNBOUNDED, UNBOUNDED, 0, null, null);
  }

  /**
   * {@return options with the bottom-right aligned causal mask}
   *
   * @param scale multiplies q.k
   */
  public static AttentionOptions causal(double scale) {
    return full(scale).withCausal(true);
  }

  /**
   * {@return a copy with another causal flag}
   *
   * @param value whether to hide the keys right of the own position
   */
  public AttentionOptions withCausal(boolean value) {
    return new AttentionOptions(scale, value, windowLeft, windowRight, softcap, sink, alibiSlopes);
  }

  /**
   * {@return a copy with another window}
   *
   * @param left keys left of the own position; negative: all
   * @param right keys right of the own position; negative: all
   */
  public AttentionOptions withWindow(int left, int right) {
    return new AttentionOptions(scale, causal, left, right, softcap, sink, alibiSlopes);
  }

  /**
   * {@return a copy with another softcap}
   *
   * @param value the cap; 0: off
   */
  public AttentionOptions withSoftcap(double value) {
    return new AttentionOptions(scale, causal, windowLeft, windowRight, value, sink, alibiSlopes);
  }

  /**
   * {@return a copy with another learnable sink}
   *
   * @param value {@code [H]}; null: none
   */
  public AttentionOptions withSink(double @Nullable ... value) {
    return new AttentionOptions(
        scale, causal, windowLeft, windowRight, softcap, value, alibiSlopes);
  }

  /**
   * {@return a copy with other ALiBi slopes}
   *
   * @param value {@code [H]} or {@code [B, H]}; null: none
   */
  public AttentionOptions withAlibiSlopes(double @Nullable ... value) {
    return new AttentionOptions(scale, causal, windowLeft, windowRight, softcap, sink, value);
  }

  /** {@return the first key that a query at {@code position} sees} */
  int firstVisible(long position) {
    return windowLeft < 0 ? 0 : (int) Math.max(0, position - windowLeft);
  }

  /**
   * Returns the last of {@code keys} keys that a query at {@code position} sees; may be before the
   * first.
   */
  int lastVisible(long position, int keys) {
    if (!causal && windowRight < 0) {
      return keys - 1;
    }
    long right = causal ? 0 : windowRight;
    return (int) Math.max(-1, Math.min(keys - 1, position + right));
  }
}
