package dev.flare.cli;

import dev.flare.DType;
import dev.flare.Device;
import dev.flare.Shape;
import dev.flare.Tensor;
import java.util.ArrayDeque;
import java.util.Deque;
import java.util.EnumMap;
import java.util.Map;

/**
 * Inputs of one benchmark row on a device, and everything else that has to be closed with it.
 *
 * <p>Large tensors are made of one block of normal numbers, laid out again and again from changing
 * offsets: making gigabytes of random numbers on the host would take longer than measuring. Not
 * thread safe.
 */
final class BenchData implements AutoCloseable {
  private static final long BLOCK = 1 << 22;
  private static final long STEP = 1_000_003; // prime: two tiles never start alike

  private final Device device;
  private final Map<DType, Tensor> blocks = new EnumMap<>(DType.class);
  private final Deque<AutoCloseable> owned = new ArrayDeque<>();
  private long tiles;

  BenchData(Device device) {
    this.device = device;
  }

  Device device() {
    return device;
  }

  /** {@return normal numbers} */
  Tensor normal(DType dtype, long... dims) {
    Tensor tensor = empty(dtype, dims);
    Tensor flat = tensor.reshape(tensor.elements());
    Tensor block = block(dtype);
    for (long at = 0; at < flat.elements(); ) {
      long from = tiles++ * STEP % (BLOCK / 2);
      long n = Math.min(flat.elements() - at, BLOCK / 2);
      flat.slice(0, at, at + n).copyFrom(block.slice(0, from, from + n));
      at += n;
    }
    return tensor;
  }

  /** {@return normal numbers times {@code gain}; for small tensors} */
  Tensor scaled(DType dtype, double gain, long... dims) {
    try (Tensor wide = Tensor.randn(0x5EED + tiles++, DType.FP32, dims)) {
      float[] values = wide.toFloatArray();
      for (int i = 0; i < values.length; i++) {
        values[i] *= (float) gain;
      }
      try (Tensor onHost = Tensor.of(dtype, values, dims)) {
        return empty(dtype, dims).copyFrom(onHost);
      }
    }
  }

  private Tensor block(DType dtype) {
    return blocks.computeIfAbsent(
        dtype,
        type -> {
          try (Tensor onHost = Tensor.randn(0xB10C, type, BLOCK)) {
            return empty(type, BLOCK).copyFrom(onHost);
          }
        });
  }

  Tensor ints(int[] values, long... dims) {
    try (Tensor onHost = Tensor.of(values, dims)) {
      return empty(DType.INT32, dims).copyFrom(onHost);
    }
  }

  /** {@return an output: an element that no kernel writes stays NaN} */
  Tensor output(DType dtype, long... dims) {
    return empty(dtype, dims).fill(Double.NaN);
  }

  Tensor empty(DType dtype, long... dims) {
    return keep(Tensor.empty(device, dtype, Shape.of(dims)));
  }

  <T extends AutoCloseable> T keep(T resource) {
    owned.push(resource);
    return resource;
  }

  @Override
  public void close() {
    while (!owned.isEmpty()) {
      try {
        owned.pop().close();
      } catch (Exception e) {
        throw new IllegalStateException("a tensor or plan of the benchmark is in use", e);
      }
    }
  }
}
