package dev.flare;

/**
 * The result of attention with its log-sum-exp.
 *
 * @param out {@code [B, Sq, H, Dv]}, or {@code [total_q, H, Dv]} for packed queries
 * @param lse natural logarithm of each softmax's denominator, FP32 {@code [B, H, Sq]}, or {@code
 *     [H, total_q]}; -infinity for a query that sees no key (with a sink: the sink)
 */
public record AttentionOutput(Tensor out, Tensor lse) implements AutoCloseable {
  /** Allocates both; if one fails, it leaves nothing behind. */
  static AttentionOutput empty(Device device, Layout out, Shape lse) {
    Tensor first = Tensor.empty(device, out.dtype(), out.shape());
    try {
      return new AttentionOutput(first, Tensor.empty(device, DType.FP32, lse));
    } catch (RuntimeException | Error e) {
      first.close();
      throw e;
    }
  }

  /** Closes both tensors. */
  @Override
  public void close() {
    try (out) {
      lse.close();
    }
  }
}
