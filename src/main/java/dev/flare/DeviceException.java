package dev.flare;

/** A device is missing, unusable or lost, or a launch on it failed. */
public final class DeviceException extends FlareException {
  private static final long serialVersionUID = 1L;

  /**
   * Makes an exception.
   *
   * @param message what was asked, what was found, what to do
   */
  public DeviceException(String message) {
    super(message);
  }

  /**
   * Makes an exception with the failure that led to it.
   *
   * @param message what was asked, what was found, what to do
   * @param cause the failure underneath
   */
  public DeviceException(String message, Throwable cause) {
    super(message, cause);
  }
}
