package dev.flare;

import dev.flare.internal.AttentionMergeParams;
import dev.flare.internal.Kernels.Operation;
import java.lang.foreign.Arena;

/**
 * FlashAttention-2: exact softmax attention that never stores the score matrix.
 *
 * <pre>{@code
 * Tensor out = FlashAttention.causal().run(q, k, v);
 * Tensor out = flash(q, k, v); // the same, with a static import
 * }</pre>
 *
 * <p>Shapes, dtypes, options and thread rules: {@link SoftmaxAttention}. Paper: FlashAttention-2,
 * arXiv 2307.08691.
 */
public final class FlashAttention extends SoftmaxAttention<FlashAttention> {
  private FlashAttention(AttentionSettings settings) {
    super(settings);
  }

  /**
   * Attention in which a query sees no key after its own position.
   *
   * @return causal attention with default options
   */
  public static FlashAttention causal() {
    return masked(AttentionSettings.MASK_CAUSAL, 0, 0);
  }

  /**
   * Attention in which a query sees every key.
   *
   * @return attention without a mask, with default options
   */
  public static FlashAttention full() {
    return masked(AttentionSettings.MASK_NONE, 0, 0);
  }

  /**
   * Attention in which the query at position p sees the keys from {@code p - left} to {@code p +
   * right}.
   *
   * @param left keys before the own one; negative for all
   * @param right keys after the own one; negative for all
   * @return windowed attention with default options
   */
  public static FlashAttention window(long left, long right) {
    return masked(AttentionSettings.MASK_WINDOW, left, right);
  }

  private static FlashAttention masked(int mask, long left, long right) {
    return new FlashAttention(
        new AttentionSettings()
            .with(
                s -> {
                  s.mask = mask;
                  s.windowLeft = left;
                  s.windowRight = right;
                }));
  }

  /**
   * Computes causal attention with default options: {@code causal().run(q, k, v)}.
   *
   * @param q queries {@code [B, Sq, H, D]}
   * @param k keys {@code [B, Sk, Hk, D]}
   * @param v values {@code [B, Sk, Hk, Dv]}
   * @return {@code [B, Sq, H, Dv]}, a new tensor that the caller closes
   * @throws InvalidArgumentException if the tensors do not fit each other
   * @throws NativeLibraryException if the C library is not usable here
   */
  public static Tensor flash(Tensor q, Tensor k, Tensor v) {
    return causal().run(q, k, v);
  }

  /**
   * Joins results over disjoint sets of keys into the result over all of them: {@code lse = ln sum
   * exp(lse_p)}, {@code out = sum exp(lse_p - lse) out_p}.
   *
   * @param partialOut FP32, FP16 or BF16 {@code [P, B, S, H, D]}
   * @param partialLse FP32 {@code [P, B, H, S]}; a part with -infinity counts for nothing
   * @return {@code [B, S, H, D]} of the same dtype and {@code [B, H, S]}, which the caller closes
   * @throws InvalidArgumentException if the tensors do not fit each other
   * @throws NativeLibraryException if the C library is not usable here
   */
  public static AttentionOutput merge(Tensor partialOut, Tensor partialLse) {
    Flare.require();
    Device device = Checks.present("partialOut", partialOut).device();
    Checks.present("partialLse", partialLse, device);
    Checks.form("partialOut", partialOut, "[P, B, S, H, D]");
    Checks.form("partialLse", partialLse, "[P, B, H, S]");
    Checks.dtype("partialLse", partialLse, DType.FP32);
    Layout from = partialOut.layout();
    Layout weights = partialLse.layout();
    Checks.shape(
        "partialLse",
        partialLse,
        "[P, B, H, S]",
        from.dim(0),
        from.dim(1),
        from.dim(3),
        from.dim(2));
    AttentionOutput result =
        AttentionOutput.empty(
            device,
            Layout.dense(
                partialOut.dtype(), Shape.of(from.dim(1), from.dim(2), from.dim(3), from.dim(4))),
            Shape.of(from.dim(1), from.dim(3), from.dim(2)));
    Layout out = result.out().layout();
    Layout lse = result.lse().layout();
    try (Arena arena = Arena.ofConfined()) {
      var params =
          AttentionMergeParams.allocate(arena)
              .set(AttentionMergeParams.DTYPE, partialOut.dtype().code())
              .set(AttentionMergeParams.NUM_PARTIALS, from.dim(0))
              .set(AttentionMergeParams.BATCH, from.dim(1))
              .set(AttentionMergeParams.SEQLEN, from.dim(2))
              .set(AttentionMergeParams.HEADS, from.dim(3))
              .set(AttentionMergeParams.HEAD_DIM, from.dim(4))
              .set(AttentionMergeParams.PARTIAL_OUT_STRIDE_P, from.stride(0))
              .set(AttentionMergeParams.PARTIAL_OUT_STRIDE_B, from.stride(1))
              .set(AttentionMergeParams.PARTIAL_OUT_STRIDE_S, from.stride(2))
              .set(AttentionMergeParams.PARTIAL_OUT_STRIDE_H, from.stride(3))
              .set(AttentionMergeParams.PARTIAL_LSE_STRIDE_P, weights.stride(0))
              .set(AttentionMergeParams.PARTIAL_LSE_STRIDE_B, weights.stride(1))
              .set(AttentionMergeParams.PARTIAL_LSE_STRIDE_H, weights.stride(2))
              .set(AttentionMergeParams.OUT_STRIDE_B, out.stride(0))
              .set(AttentionMergeParams.OUT_STRIDE_S, out.stride(1))
              .set(AttentionMergeParams.OUT_STRIDE_H, out.stride(2))
              .set(AttentionMergeParams.LSE_STRIDE_B, lse.stride(0))
              .set(AttentionMergeParams.LSE_STRIDE_H, lse.stride(1));
      Once.run(
          Operation.ATTENTION_MERGE,
          device,
          null,
          params,
          Once.argument("partialOut", AttentionMergeParams.PARTIAL_OUT, partialOut),
          Once.argument("partialLse", AttentionMergeParams.PARTIAL_LSE, partialLse),
          Once.argument("out", AttentionMergeParams.OUT, result.out()),
          Once.argument("lse", AttentionMergeParams.LSE, result.lse()));
      return result;
    } catch (RuntimeException | Error e) {
      result.close();
      throw e;
    }
  }

  @Override
  FlashAttention make(AttentionSettings changed) {
    return new FlashAttention(changed);
  }
}
