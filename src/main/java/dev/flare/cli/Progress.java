package dev.flare.cli;

import java.io.Console;
import java.io.PrintWriter;

/**
 * One line at the bottom of a terminal that says what is being done; silent where the output is a
 * file or a pipe. {@link #clear} before other output is printed. Not thread safe.
 */
final class Progress {
  private static final int WIDTH = 78;

  private final PrintWriter out;
  private final boolean enabled;
  private boolean shown;

  Progress(PrintWriter out, boolean enabled) {
    this.out = out;
    this.enabled = enabled;
  }

  /** A progress line on {@code out} when standard input and output are a terminal. */
  // JDK 22 to 24 never return null; 25 does again where no terminal is attached.
  @SuppressWarnings("SystemConsoleNull")
  static Progress on(PrintWriter out) {
    Console console = System.console();
    return new Progress(out, console != null && console.isTerminal());
  }

  /** Shows step {@code index} (from 0) of {@code count}. */
  void show(int index, int count, String what) {
    if (!enabled) {
      return;
    }
    String text = "[" + (index + 1) + "/" + count + "] " + what;
    text = text.length() > WIDTH ? text.substring(0, WIDTH) : text;
    out.print("\r" + text + " ".repeat(WIDTH - text.length()));
    out.flush();
    shown = true;
  }

  /** Removes the line. */
  void clear() {
    if (shown) {
      out.print("\r" + " ".repeat(WIDTH) + "\r");
      out.flush();
      shown = false;
    }
  }
}
