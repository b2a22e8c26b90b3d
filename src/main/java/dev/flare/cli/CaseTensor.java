package dev.flare.cli;

import dev.flare.reference.Precision;

/**
 * Numbers of a case: every value is one of {@code precision}, so that storing them loses nothing.
 *
 * @param precision the format in which kernels get the numbers; INT32 tensors have FP32 here and
 *     {@code integer} set
 * @param integer whether these are indices
 * @param shape extents, outermost first
 * @param values row-major
 */
@SuppressWarnings("ArrayRecordComponent") // plain arrays: nobody changes or compares them
record CaseTensor(Precision precision, boolean integer, int[] shape, double[] values) {

  static CaseTensor of(Precision precision, double[] values, int... shape) {
    return new CaseTensor(precision, false, shape, precision.round(values));
  }

  static CaseTensor indices(int[] values, int... shape) {
    double[] wide = new double[values.length];
    for (int i = 0; i < values.length; i++) {
      wide[i] = values[i];
    }
    return new CaseTensor(Precision.FP32, true, shape, wide);
  }

  int[] toInts() {
    int[] ints = new int[values.length];
    for (int i = 0; i < ints.length; i++) {
      ints[i] = (int) values[i];
    }
    return ints;
  }
}
