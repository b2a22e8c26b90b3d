package dev.flare.reference;

import static dev.flare.reference.Checks.require;

/**
 * How far an output is from its reference. Equal infinities agree; a NaN or an unequal infinity
 * counts as non-finite and makes both errors infinite.
 *
 * @param relative Frobenius norm of the difference over that of the reference, finite elements;
 *     where the reference is all zero: 0 if the output is too, else infinite
 * @param maxAbsolute largest absolute difference
 * @param worst index of the element with the largest difference, or of the first non-finite one; -1
 *     for an empty tensor
 * @param notFinite elements that are NaN on either side or infinite on one side only
 */
public record ErrorMetrics(double relative, double maxAbsolute, int worst, long notFinite) {

  /**
   * {@return the errors of {@code out}, element by element}
   *
   * @param out what was computed
   * @param reference what is right
   */
  public static ErrorMetrics of(double[] out, double[] reference) {
    require(
        out.length == reference.length,
        "out has %d elements, its reference %d",
        out.length,
        reference.length);
    double squaredError = 0;
    double squaredNorm = 0;
    double max = -1;
    int worst = -1;
    long notFinite = 0;
    for (int i = 0; i < out.length; i++) {
      double error = out[i] == reference[i] ? 0 : Math.abs(out[i] - reference[i]);
      if (!Double.isFinite(error)) {
        worst = notFinite == 0 ? i : worst;
        notFinite++;
        continue;
      }
      squaredError += error * error;
      if (Double.isFinite(reference[i])) {
        squaredNorm += reference[i] * reference[i];
      }
      if (error > max && notFinite == 0) {
        max = error;
        worst = i;
      }
    }
    if (notFinite > 0) {
      return new ErrorMetrics(Double.POSITIVE_INFINITY, Double.POSITIVE_INFINITY, worst, notFinite);
    }
    double relative = squaredError == 0 ? 0 : Math.sqrt(squaredError / squaredNorm);
    return new ErrorMetrics(relative, Math.max(max, 0), worst, 0);
  }

  /**
   * {@return the errors of {@code out}, element by element}
   *
   * @param out what was computed
   * @param reference what is right
   */
  public static ErrorMetrics of(float[] out, double[] reference) {
    double[] widened = new double[out.length];
    for (int i = 0; i < out.length; i++) {
      widened[i] = out[i];
    }
    return of(widened, reference);
  }

  /**
   * {@return whether every element is a number and the relative error at most the bound}
   *
   * @param tolerance the bound
   */
  public boolean relativeWithin(double tolerance) {
    return notFinite == 0 && relative <= tolerance;
  }

  /**
   * {@return whether every element is a number and no difference exceeds the bound}
   *
   * @param tolerance the bound
   */
  public boolean absoluteWithin(double tolerance) {
    return notFinite == 0 && maxAbsolute <= tolerance;
  }

  @Override
  public String toString() {
    return notFinite > 0
        ? String.format("%d non-finite or NaN elements, the first at %d", notFinite, worst)
        : String.format("relative %.3e, max abs %.3e at %d", relative, maxAbsolute, worst);
  }
}
