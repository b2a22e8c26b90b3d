package dev.flare;

/**
 * Which kernel an operation may use.
 *
 * <p>The system property {@code flare.kernel} ({@code portable} or {@code sm90}), read when a plan
 * is made, stands in for {@link #AUTO}: for tests, and to opt out of a kernel.
 */
public enum Kernel {
  /** The fastest one for the device and the shapes. */
  AUTO(0),
  /** The one that runs everywhere: the CPU backend, or code for sm_80 and newer. */
  PORTABLE(1),
  /** The one for Hopper GPUs; an error where it can't run. */
  SM90(2);

  private static final String PROPERTY = "flare.kernel";

  private final int code;

  Kernel(int code) {
    this.code = code;
  }

  /** The FLARE_KERNEL_ constant, after the property. */
  int code() {
    if (this != AUTO) {
      return code;
    }
    String forced = System.getProperty(PROPERTY, "");
    return switch (forced) {
      case "", "auto" -> AUTO.code;
      case "portable" -> PORTABLE.code;
      case "sm90" -> SM90.code;
      default ->
          throw new InvalidArgumentException(
              "-D" + PROPERTY, "\"" + forced + "\"", "auto, portable or sm90");
    };
  }
}
