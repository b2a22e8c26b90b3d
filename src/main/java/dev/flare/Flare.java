package dev.flare;

import dev.flare.internal.Driver;
import dev.flare.internal.NativeLibrary;
import org.jspecify.annotations.Nullable;

/**
 * What this installation of flare can do.
 *
 * <p>Nothing here throws where a GPU, a driver or the C library is missing: absence is an answer.
 * Thread-safe.
 */
public final class Flare {
  private Flare() {}

  /** Whether one thing that flare needs is there. */
  public sealed interface Part permits Ready, Missing {
    /**
     * Tells whether it can be used.
     *
     * @return true for {@link Ready}
     */
    default boolean isReady() {
      return this instanceof Ready;
    }
  }

  /**
   * It is there.
   *
   * @param detail what was found: version, place
   */
  public record Ready(String detail) implements Part {}

  /**
   * It is not there, or can't be used.
   *
   * @param reason why, in one line
   * @param remedy what to do about it
   * @param cause what was thrown underneath, if anything
   */
  public record Missing(String reason, String remedy, @Nullable Throwable cause) implements Part {}

  /**
   * Which parts of flare are usable.
   *
   * @param library the C library with the CPU kernels; without it only tensors work
   * @param cuda the NVIDIA driver and its GPUs
   */
  public record Status(Part library, Part cuda) {
    /** Returns two lines for people, with remedies. */
    @Override
    public String toString() {
      return "library: " + line(library) + "\ncuda: " + line(cuda);
    }

    private static String line(Part part) {
      return switch (part) {
        case Ready ready -> "ready, " + ready.detail();
        case Missing missing ->
            "not usable, " + missing.reason() + ". What to do: " + missing.remedy();
      };
    }
  }

  /**
   * Tells whether the C library and CUDA are usable, and if not, why. It tries to load what has not
   * been loaded yet, so that a cause that has gone away is noticed.
   *
   * @return never null; printing it is meaningful
   */
  public static Status status() {
    Part library =
        switch (NativeLibrary.status()) {
          case NativeLibrary.Ready r -> new Ready(r.buildInfo() + ", from " + r.origin());
          case NativeLibrary.Missing m -> new Missing(m.reason(), m.remedy(), m.cause());
        };
    Part cuda =
        switch (Driver.status()) {
          case Driver.Ready r ->
              new Ready(
                  r.devices()
                      + " GPU(s), driver for CUDA "
                      + r.version() / 1000
                      + "."
                      + r.version() % 1000 / 10);
          case Driver.Missing m -> new Missing(m.reason(), m.remedy(), m.cause());
        };
    return new Status(library, cuda);
  }

  /**
   * Returns the version of the C library.
   *
   * @return for example 0.1.0
   * @throws NativeLibraryException if it can't be used, telling why
   */
  public static String version() {
    return require().version();
  }

  /** The library, or the reason why not as an exception. */
  static NativeLibrary.Ready require() {
    return switch (NativeLibrary.status()) {
      case NativeLibrary.Ready r -> r;
      case NativeLibrary.Missing m -> {
        String text =
            "flare's C library is not usable: " + m.reason() + ". What to do: " + m.remedy();
        throw m.cause() == null
            ? new NativeLibraryException(text)
            : new NativeLibraryException(text, m.cause());
      }
    };
  }
}
