package dev.flare;

import dev.flare.internal.Struct.I32;
import dev.flare.internal.Struct.Pointer;
import org.jspecify.annotations.Nullable;

/** The index tensors of a plan, which must all be INT32 or all INT64. */
final class IndexTensors {
  private final Launcher.Builder plan;
  private @Nullable DType dtype;

  IndexTensors(Launcher.Builder plan) {
    this.plan = plan;
  }

  /** Adds one of any shape; null adds none. */
  void add(String name, Pointer field, @Nullable Tensor tensor) {
    if (tensor != null) {
      dtype = Checks.index(name, tensor, dtype);
      plan.fixed(name, field, tensor);
    }
  }

  /** Adds a dense row of {@code count} indices; null adds none. */
  void lengths(String name, Pointer field, @Nullable Tensor tensor, long count) {
    if (tensor != null) {
      Checks.form(name, tensor, "[B]");
      Checks.shape(name, tensor, "[B]", count);
      add(name, field, tensor);
    }
  }

  /** Tells the C library which of the two it is. */
  void dtype(I32 field) {
    if (dtype != null) {
      plan.params().set(field, dtype.code());
    }
  }
}
