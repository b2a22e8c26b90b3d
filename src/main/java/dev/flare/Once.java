package dev.flare;

import dev.flare.internal.CommonParams;
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

  /**
   * Runs a filled struct, with its tensors held open.
   *
   * @param stream null for the device's default stream
   */
  static void run(
      Operation operation,
      Device device,
      @Nullable Stream stream,
      Struct params,
      Argument... arguments) {
    Flare.require();
    params.set(CommonParams.DEVICE, device.kernelDevice());
    Stream on = Stream.of(stream, device);
    if (on == null) {
      run(operation, device, params, null, arguments);
      return;
    }
    on.begin();
    try {
      on.gpu().requireAlive();
      params.set(CommonParams.STREAM, on.handle());
      run(operation, device, params, on, arguments);
      on.captured();
    } finally {
      on.end();
    }
  }

  private static void run(
      Operation operation,
      Device device,
      Struct params,
      @Nullable Stream on,
      Argument... arguments) {
    int held = 0;
    try {
      for (Argument argument : arguments) {
        if (argument.tensor != null) {
          Checks.present(argument.name, argument.tensor, device);
          argument.tensor.acquire(argument.name, on);
          params.set(argument.field, argument.tensor.address());
        }
        held++;
      }
      int status = Kernels.run(operation, params.segment());
      if (status != 0) {
        throw Failures.of(operation, status, device);
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
