package dev.flare;

/** The device that tests of operations run on: {@code -Dflare.test.device=cuda:N}, else the CPU. */
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
}
