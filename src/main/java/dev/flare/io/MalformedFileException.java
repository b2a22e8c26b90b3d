package dev.flare.io;

import java.io.IOException;
import java.nio.file.Path;
import org.jspecify.annotations.Nullable;

/** A file does not follow its format: the message names the file, the place and what is wrong. */
public final class MalformedFileException extends IOException {
  private static final long serialVersionUID = 1L;

  /**
   * Makes an exception that reads {@code file: what}.
   *
   * @param file the file, relative or absolute, as it was opened
   * @param what the place in the file, what was found there and what the format wants
   */
  public MalformedFileException(Path file, String what) {
    this(file, what, null);
  }

  /**
   * Makes an exception that reads {@code file: what}.
   *
   * @param file the file, relative or absolute, as it was opened
   * @param what the place in the file, what was found there and what the format wants
   * @param cause the failure underneath; null: none
   */
  public MalformedFileException(Path file, String what, @Nullable Throwable cause) {
    super(file + ": " + what, cause);
  }
}
