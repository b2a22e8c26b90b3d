package dev.flare;

/**
 * The root of everything that flare throws: what was asked, what was found, what to do.
 *
 * <p>Unchecked. The subclasses tell the kinds apart; catch this one to catch them all.
 */
public abstract class FlareException extends RuntimeException {
  private static final long serialVersionUID = 1L;

  /**
   * Makes an exception.
   *
   * @param message what was asked, what was found, what to do
   */
  protected FlareException(String message) {
    super(message);
  }

  /**
   * Makes an exception with the failure that led to it.
   *
   * @param message what was asked, what was found, what to do
   * @param cause the failure underneath
   */
  protected FlareException(String message, Throwable cause) {
    super(message, cause);
  }
}
