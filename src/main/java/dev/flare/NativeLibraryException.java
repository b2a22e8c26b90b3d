package dev.flare;

/** The C library is not usable here; {@code Flare.status()} tells the same as a value. */
public final class NativeLibraryException extends FlareException {
  private static final long serialVersionUID = 1L;

  /**
   * Makes an exception.
   *
   * @param message what was asked, what was found, what to do
   */
  public NativeLibraryException(String message) {
    super(message);
  }

  /**
   * Makes an exception with the failure that led to it.
   *
   * @param message what was asked, what was found, what to do
   * @param cause the failure underneath
   */
  public NativeLibraryException(String message, Throwable cause) {
    super(message, cause);
  }
}
