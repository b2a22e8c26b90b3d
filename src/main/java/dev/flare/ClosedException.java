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
}
