package dev.flare;

/** The arguments are valid, but this device, dtype or combination of options has no kernel. */
public final class UnsupportedException extends FlareException {
  private static final long serialVersionUID = 1L;

  /**
   * Makes an exception.
   *
   * @param message what was asked, what was found, what to do
   */
  public UnsupportedException(String message) {
    super(message);
  }
}
