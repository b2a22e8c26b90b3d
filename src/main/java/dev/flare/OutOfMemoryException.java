package dev.flare;

/** Memory could not be had: the message tells bytes asked and what was available. */
public final class OutOfMemoryException extends FlareException {
  private static final long serialVersionUID = 1L;

  /**
   * Makes an exception.
   *
   * @param message what was asked, what was found, what to do
   */
  public OutOfMemoryException(String message) {
    super(message);
  }

  /**
   * Makes an exception with the failure that led to it.
   *
   * @param message what was asked, what was found, what to do
   * @param cause the failure underneath
   */
  public OutOfMemoryException(String message, Throwable cause) {
    super(message, cause);
  }
}
