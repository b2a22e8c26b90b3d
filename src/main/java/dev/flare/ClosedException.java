package dev.flare;

/** A tensor, plan or cache was used after it had been closed. */
public final class ClosedException extends FlareException {
  private static final long serialVersionUID = 1L;

  /**
   * Makes an exception.
   *
   * @param message what was asked, what was found, what to do
   */
  public ClosedException(String message) {
    super(message);
  }

  /**
   * Makes an exception with the place where it was closed.
   *
   * @param message what was asked, what was found, what to do
   * @param closeSite the stack of the closing call
   */
  public ClosedException(String message, Throwable closeSite) {
    super(message, closeSite);
  }
}
