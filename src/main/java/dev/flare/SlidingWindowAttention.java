package dev.flare;

/**
 * Attention to the nearest keys only; its time grows with sequence length times window, not with
 * the square of the length.
 *
 * <pre>{@code
 * Tensor out = SlidingWindowAttention.of(4096).run(q, k, v);
 * }</pre>
 *
 * <p>Shapes, dtypes, options and thread rules: {@link SoftmaxAttention}.
 */
public final class SlidingWindowAttention extends SoftmaxAttention<SlidingWindowAttention> {
  private SlidingWindowAttention(AttentionSettings settings) {
    super(settings);
  }

  /**
   * A causal window as models count it: a query sees its own key and the {@code window - 1} before.
   *
   * @param window visible keys, at least 1
   * @return windowed attention with default options
   * @throws InvalidArgumentException if {@code window} is less than 1
   */
  public static SlidingWindowAttention of(long window) {
    return between(Checks.positive("window", window) - 1, 0);
  }

  /**
   * A window on both sides: the query at position p sees the keys from {@code p - left} to {@code p
   * + right}.
   *
   * @param left keys before the own one; negative for all
   * @param right keys after the own one; negative for all
   * @return windowed attention with default options
   */
  public static SlidingWindowAttention between(long left, long right) {
    return new SlidingWindowAttention(
        new AttentionSettings()
            .with(
                s -> {
                  s.mask = AttentionSettings.MASK_WINDOW;
                  s.windowLeft = left;
                  s.windowRight = right;
                }));
  }

  @Override
  SlidingWindowAttention make(AttentionSettings changed) {
    return new SlidingWindowAttention(changed);
  }
}
