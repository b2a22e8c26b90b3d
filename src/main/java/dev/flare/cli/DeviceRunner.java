package dev.flare.cli;

import dev.flare.Device;
import java.util.Arrays;
import java.util.Map;

/** Runs cases through the public API on one device. */
final class DeviceRunner implements CaseRunner {
  private final Device device;

  DeviceRunner(Device device) {
    this.device = device;
  }

  @Override
  public Outcome run(KernelCase c) {
    try (PreparedCase prepared = PreparedCase.of(c, device)) {
      prepared.poison();
      prepared.launch();
      Map<String, double[]> first = prepared.results();
      prepared.poison();
      long start = System.nanoTime();
      prepared.launch();
      double seconds = (System.nanoTime() - start) / 1e9;
      Map<String, double[]> second = prepared.results();
      // Arrays.equals compares bits, but for one: it takes all NaN as equal.
      boolean repeatable =
          first.keySet().stream().allMatch(t -> Arrays.equals(first.get(t), second.get(t)));
      return new Outcome(prepared.kernelName(), seconds, repeatable, second);
    }
  }

  /** Nothing is kept from case to case. */
  @Override
  public void close() {}
}
