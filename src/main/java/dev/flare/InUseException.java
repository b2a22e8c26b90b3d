package dev.flare;

/** Something is busy: a tensor closed while a call uses it, or a plan launched from two threads. */
public final class InUseException extends FlareException {
  private static final long serialVersionUID = 1L;

  /**
   * Makes an exception.
   *
   * @param message what was asked, what was found, what to do
   */
  public InUseException(String message) {
    super(message);
  }
}
