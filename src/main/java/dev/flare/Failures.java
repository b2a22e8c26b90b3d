package dev.flare;

import dev.flare.internal.Kernels;

/** Turns a status of the C library into the exception that a caller sees. The cold path. */
final class Failures {
  private Failures() {}

  /** The exception for this thread's last call of a function that runs nothing. */
  static FlareException of(String call, int status) {
    String text = call + ": " + Kernels.lastError();
    return status < 100
        ? new InvalidArgumentException(text)
        : status < 200 ? new UnsupportedException(text) : new InternalException(text);
  }

  /** The exception for this thread's last call, which returned {@code status}. */
  static FlareException of(Kernels.Operation operation, int status, Device device) {
    String detail = Kernels.lastError();
    String text = detail.isEmpty() ? Kernels.statusName(status) : detail;
    if (status < 100) {
      return new InvalidArgumentException(text);
    }
    if (status < 200) {
      return new UnsupportedException(text);
    }
    String named = operation + " failed with " + Kernels.statusName(status) + ": " + text;
    if (Kernels.isOutOfMemory(status)) {
      return new OutOfMemoryException(named);
    }
    if (Kernels.isContextLost(status) && !device.isCpu()) {
      device.gpu().lose(text);
      device.gpu().requireAlive();
    }
    if (status >= 300 && status < 400) {
      return new DeviceException(named);
    }
    return new InternalException(named);
  }
}
