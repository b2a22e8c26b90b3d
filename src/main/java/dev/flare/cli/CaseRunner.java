package dev.flare.cli;

import java.util.Map;

/** Runs cases on a device; a seam for tests, which put wrong results in. */
interface CaseRunner extends AutoCloseable {
  /**
   * What a call gave.
   *
   * @param kernel name of the kernel that ran
   * @param seconds time of one call, data already on the device
   * @param repeatable whether a second call gave the same bits
   * @param tensors results by the names of the golden files' format, the shapes of the reference
   */
  record Outcome(
      String kernel, double seconds, boolean repeatable, Map<String, double[]> tensors) {}

  /** Runs the case twice over poisoned outputs. */
  Outcome run(KernelCase c);

  @Override
  void close();
}
