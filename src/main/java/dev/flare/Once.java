package dev.flare;

import dev.flare.internal.Kernels;
import dev.flare.internal.Kernels.Operation;
import dev.flare.internal.Struct;
import dev.flare.internal.Struct.Pointer;
import org.jspecify.annotations.Nullable;

/** Operations without a plan: caches, casts, merges. */
final class Once {
  private Once() {}

  /** A tensor of the call; null is passed on as NULL. */
  record Argument(String name, Pointer field, @Nullable Tensor tensor) {}

  static Argument argument(String name, Pointer field, @Nullable Tensor tensor) {
    return new Argument(name, field, tensor);
  }

  /** Runs a filled struct, with its tensors held open. */
  static void run(Operation operation, Struct params, Argument... arguments) {
    int held = 0;
    try {
      for (Argument argument : arguments) {
        if (argument.tensor != null) {
          argument.tensor.acquire(argument.name);
          params.set(argument.field, argument.tensor.address());
        }
        held++;
      }
      int status = Kernels.run(operation, params.segment());
      if (status != 0) {
        throw Failures.of(operation, status);
      }
    } finally {
      while (held > 0) {
        held--;
        Tensor tensor = arguments[held].tensor;
        if (tensor != null) {
          tensor.release();
        }
      }
    }
  }
}
