package dev.flare;

import org.jspecify.annotations.Nullable;

/** An argument does not fit: its message names the argument, what it was, and what is wanted. */
public final class InvalidArgumentException extends FlareException {
  private static final long serialVersionUID = 1L;

  /**
   * Makes an exception from a finished text.
   *
   * @param message names the argument, what was found and what is wanted
   */
  public InvalidArgumentException(String message) {
    super(message);
  }

  /**
   * Makes an exception that reads {@code argument: got X, want Y}.
   *
   * @param argument the parameter's name
   * @param got what the caller passed
   * @param want what would have been accepted
   */
  public InvalidArgumentException(String argument, @Nullable Object got, String want) {
    super(argument + ": got " + got + ", want " + want);
  }
}
