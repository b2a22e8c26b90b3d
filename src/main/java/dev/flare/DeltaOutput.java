package dev.flare;

import org.jspecify.annotations.Nullable;

/**
 * The result of {@link KimiDeltaAttention} with its states.
 *
 * @param out {@code [B, T, HV, V]}
 * @param state after the last token of each sequence, {@code [N, HV, K, V]} or {@code [N, HV, V,
 *     K]}
 * @param checkpoints states on the way, one a row, if {@code withCheckpoints} asked for them
 */
public record DeltaOutput(Tensor out, Tensor state, @Nullable Tensor checkpoints)
    implements AutoCloseable {
  /** Closes all tensors. */
  @Override
  public void close() {
    try (out;
        state) {
      if (checkpoints != null) {
        checkpoints.close();
      }
    }
  }
}
