package dev.flare.cli;

import java.util.LinkedHashMap;
import java.util.Map;
import java.util.function.UnaryOperator;

/** Gives the reference's results, changed as a test wants; counts its cases. */
final class FakeRunner implements CaseRunner {
  private final UnaryOperator<double[]> fault;
  private final boolean repeatable;
  int cases;
  boolean closed;

  FakeRunner(UnaryOperator<double[]> fault, boolean repeatable) {
    this.fault = fault;
    this.repeatable = repeatable;
  }

  static FakeRunner exact() {
    return new FakeRunner(UnaryOperator.identity(), true);
  }

  /** Every result is off by this share of itself. */
  static FakeRunner scaled(double factor) {
    return new FakeRunner(
        values -> {
          double[] changed = values.clone();
          for (int i = 0; i < changed.length; i++) {
            changed[i] *= factor;
          }
          return changed;
        },
        true);
  }

  @Override
  public Outcome run(KernelCase c) {
    cases++;
    Map<String, double[]> tensors = new LinkedHashMap<>();
    CaseReference.of(c).forEach((name, values) -> tensors.put(name, fault.apply(values)));
    return new Outcome("fake", 1e-3, repeatable, tensors);
  }

  @Override
  public void close() {
    closed = true;
  }
}
