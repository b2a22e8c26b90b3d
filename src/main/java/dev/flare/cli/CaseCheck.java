package dev.flare.cli;

import dev.flare.reference.ErrorMetrics;
import dev.flare.reference.Tolerances;
import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import java.util.Map;

/**
 * How one tensor of a result compares with what it should be.
 *
 * @param tensor its name
 * @param error the distances
 * @param absolute whether the largest difference counts (lse), not the relative error
 * @param tolerance what the error may be at most
 */
record CaseCheck(String tensor, ErrorMetrics error, boolean absolute, double tolerance) {

  /** Compares every expected tensor. */
  static List<CaseCheck> of(
      KernelCase c, Map<String, double[]> expected, Map<String, double[]> found) {
    List<CaseCheck> checks = new ArrayList<>();
    expected.forEach(
        (tensor, want) -> {
          double[] got = found.get(tensor);
          if (got == null) {
            throw new IllegalArgumentException(
                c.name() + ": the operation gives no tensor '" + tensor + "'");
          }
          if (got.length != want.length) {
            throw new IllegalArgumentException(
                c.name()
                    + ": '"
                    + tensor
                    + "' has "
                    + got.length
                    + " elements, its reference "
                    + want.length);
          }
          boolean absolute = tensor.equals("lse");
          double tolerance = absolute ? Tolerances.lse(c.precision()) : c.relativeTolerance();
          checks.add(new CaseCheck(tensor, ErrorMetrics.of(got, want), absolute, tolerance));
        });
    return checks;
  }

  boolean passed() {
    return absolute ? error.absoluteWithin(tolerance) : error.relativeWithin(tolerance);
  }

  /** {@return the error that the tolerance bounds} */
  double measured() {
    return absolute ? error.maxAbsolute() : error.relative();
  }

  /** {@return name, error and tolerance, in a few words} */
  String summary() {
    return tensor
        + " "
        + scientific(measured())
        + (passed() ? " <= " : " > ")
        + scientific(tolerance);
  }

  static String scientific(double value) {
    return value == 0 ? "0" : String.format(Locale.ROOT, "%.1e", value);
  }
}
