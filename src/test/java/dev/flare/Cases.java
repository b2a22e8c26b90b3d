package dev.flare;

import dev.flare.reference.ErrorMetrics;
import dev.flare.reference.Precision;
import java.util.SplittableRandom;
import java.util.stream.Stream;

/**
 * Random inputs that can be made again: a case is its seed, and the seed is in the test's name.
 * {@code -Dflare.test.seed=N} runs that one alone.
 */
final class Cases {
  private static final String SEED_PROPERTY = "flare.test.seed";

  private Cases() {}

  /** Seeds from {@code first} on, or the one that the property names. */
  static Stream<Long> seeds(long first, int count) {
    String one = System.getProperty(SEED_PROPERTY);
    if (one != null) {
      return Stream.of(Long.decode(one));
    }
    return Stream.iterate(first, s -> s + 1).limit(count);
  }

  static int pick(SplittableRandom random, int... choices) {
    return choices[random.nextInt(choices.length)];
  }

  static DType pick(SplittableRandom random, DType... choices) {
    return choices[random.nextInt(choices.length)];
  }

  static Precision precision(DType dtype) {
    return Precision.valueOf(dtype.name());
  }

  /** Normal numbers, rounded to the dtype so that tensor and reference see the same. */
  static double[] normals(SplittableRandom random, DType dtype, long... dims) {
    double[] x = new double[Math.toIntExact(Shape.of(dims).elements())];
    Precision precision = precision(dtype);
    for (int i = 0; i < x.length; i++) {
      x[i] = precision.round(random.nextGaussian());
    }
    return x;
  }

  static float[] floats(double... x) {
    float[] y = new float[x.length];
    for (int i = 0; i < x.length; i++) {
      y[i] = (float) x[i];
    }
    return y;
  }

  static Tensor dense(DType dtype, double[] values, long... dims) {
    return TestDevice.of(dtype, floats(values), dims);
  }

  /**
   * The values inside larger memory full of NaN, with gaps along every dimension but the last: what
   * is read outside shows in the result.
   *
   * @return a view; {@code owner[0]} is to be closed
   */
  static Tensor padded(DType dtype, double[] values, Tensor[] owner, long... dims) {
    long[] outer = dims.clone();
    for (int i = 0; i < outer.length; i++) {
      outer[i] = i == outer.length - 1 ? TestDevice.headDim(outer[i]) + 8 : outer[i] + 1;
    }
    Tensor all = TestDevice.full(Double.NaN, dtype, outer);
    owner[0] = all;
    Tensor view = all;
    for (int i = 0; i < dims.length; i++) {
      view = view.slice(i, 0, dims[i]);
    }
    try (Tensor source = dense(dtype, values, dims)) {
      view.copyFrom(source);
    }
    return view;
  }

  /** Fails unless the tensor is as near to the reference as the bound says. */
  static void assertRelative(String what, Tensor got, double[] want, double bound) {
    ErrorMetrics error = ErrorMetrics.of(got.toDoubleArray(), want);
    if (!error.relativeWithin(bound)) {
      throw new AssertionError(what + ": " + error + ", want at most " + bound + " relative");
    }
  }

  static void assertAbsolute(String what, Tensor got, double[] want, double bound) {
    ErrorMetrics error = ErrorMetrics.of(got.toDoubleArray(), want);
    if (!error.absoluteWithin(bound)) {
      throw new AssertionError(what + ": " + error + ", want at most " + bound + " absolute");
    }
  }
}
