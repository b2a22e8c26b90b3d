package dev.flare.cli;

import org.jspecify.annotations.Nullable;

/**
 * One line of {@code flare doctor}.
 *
 * @param level what it means for running flare
 * @param what the thing looked at
 * @param detail what was found
 * @param remedy what to do; for what does not work
 */
record Finding(Level level, String what, String detail, @Nullable String remedy) {
  enum Level {
    /** Works. */
    OK("ok"),
    /** Not there, and not needed for the device asked for. */
    NONE("--"),
    /** Stops flare from working on the device asked for. */
    FAIL("FAIL");

    private final String text;

    Level(String text) {
      this.text = text;
    }

    String text() {
      return text;
    }
  }

  static Finding ok(String what, String detail) {
    return new Finding(Level.OK, what, detail, null);
  }

  static Finding none(String what, String detail) {
    return new Finding(Level.NONE, what, detail, null);
  }

  static Finding fail(String what, String detail, String remedy) {
    return new Finding(Level.FAIL, what, detail, remedy);
  }
}
