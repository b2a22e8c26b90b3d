package dev.flare;

import static org.assertj.core.api.Assertions.assertThat;

/**
 * The device that tests of operations run on: {@code -Dflare.test.device=cuda:N}, else the CPU.
 * Makes tensors there.
 */
final class TestDevice {
  private static final String NAME = System.getProperty("flare.test.device", "cpu");

  private TestDevice() {}

  static Device chosen() {
    return NAME.equals("cpu") ? Device.cpu() : gpu();
  }

  /** The GPU of tests that need one: the chosen one, else the first. */
  static Device gpu() {
    return Device.cuda(NAME.equals("cpu") ? 0 : Integer.parseInt(NAME.substring("cuda:".length())));
  }

  /** Fails unless a kernel's name tells that it is the device's: a silent fall-back shows. */
  static void assertRanOn(String kernelName) {
    assertThat(kernelName).matches(chosen().isCpu() ? "cpu_.*" : ".*_sm(80|90)(_.*)?");
  }

  /** A head dimension that the device takes: GPUs want multiples of 8. */
  static int headDim(int any) {
    return chosen().isCpu() ? any : Math.ceilDiv(any, 8) * 8;
  }

  static long headDim(long any) {
    return chosen().isCpu() ? any : Math.ceilDiv(any, 8) * 8;
  }

  /** Takes a host tensor to the device. */
  private static Tensor move(Tensor onHost) {
    if (chosen().isCpu()) {
      return onHost;
    }
    try (onHost) {
      return onHost.to(chosen());
    }
  }

  static Tensor of(DType dtype, float[] values, long... dims) {
    return move(Tensor.of(dtype, values, dims));
  }

  static Tensor of(int[] values, long... dims) {
    return move(Tensor.of(values, dims));
  }

  static Tensor of(long[] values, long... dims) {
    return move(Tensor.of(values, dims));
  }

  static Tensor randn(long seed, DType dtype, long... dims) {
    return move(Tensor.randn(seed, dtype, dims));
  }

  static Tensor full(double value, DType dtype, long... dims) {
    return Tensor.full(chosen(), value, dtype, Shape.of(dims));
  }

  static Tensor empty(DType dtype, long... dims) {
    return Tensor.empty(chosen(), dtype, Shape.of(dims));
  }

  static Tensor zeros(DType dtype, long... dims) {
    return zeros(dtype, Shape.of(dims));
  }

  static Tensor zeros(DType dtype, Shape shape) {
    return Tensor.zeros(chosen(), dtype, shape);
  }
}
