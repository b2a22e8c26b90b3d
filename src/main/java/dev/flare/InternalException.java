package dev.flare;

/** A fault inside flare, never the caller's: please report it with its text. */
public final class InternalException extends FlareException {
  private static final long serialVersionUID = 1L;

  /**
   * Makes an exception.
   *
   * @param message what was asked, what was found, what to do
   */
  public InternalException(String message) {
    super(message);
  }

  /**
   * Makes an exception with the failure that led to it.
   *
   * @param message what was asked, what was found, what to do
   * @param cause the failure underneath
   */
  public InternalException(String message, Throwable cause) {
    super(message, cause);
  }
}
