package dev.flare.io;

import java.nio.file.Path;
import java.util.Arrays;
import org.jspecify.annotations.Nullable;

/**
 * The header of an npy file: a Python dict literal such as {@code {'descr': '<f4', 'fortran_order':
 * False, 'shape': (2, 3), }}. Only what such a dict may hold is read; nothing is evaluated.
 *
 * @param descriptor element type
 * @param fortranOrder whether the first index runs fastest
 * @param shape extents
 */
@SuppressWarnings("ArrayRecordComponent") // handed on once, never compared
record NpyHeader(String descriptor, boolean fortranOrder, long[] shape) {

  static NpyHeader parse(Path file, String text) throws MalformedFileException {
    return new Parser(file, text).header();
  }

  private static final class Parser {
    private final Path file;
    private final String text;
    private int at;
    private @Nullable String descriptor;
    private @Nullable Boolean fortranOrder;
    private long @Nullable [] shape;

    Parser(Path file, String text) {
      this.file = file;
      this.text = text;
    }

    NpyHeader header() throws MalformedFileException {
      expect('{');
      while (!accept('}')) {
        readField();
        if (!accept(',')) {
          expect('}');
          break;
        }
      }
      skipSpace();
      if (at != text.length()) {
        throw malformed("the end of the header");
      }
      if (descriptor == null || fortranOrder == null || shape == null) {
        throw new MalformedFileException(
            file, "header lacks one of 'descr', 'fortran_order', 'shape'");
      }
      return new NpyHeader(descriptor, fortranOrder, shape);
    }

    private void readField() throws MalformedFileException {
      String key = readString();
      boolean repeated =
          switch (key) {
            case "descr" -> descriptor != null;
            case "fortran_order" -> fortranOrder != null;
            case "shape" -> shape != null;
            default -> throw new MalformedFileException(file, "header has a key '" + key + "'");
          };
      if (repeated) {
        throw new MalformedFileException(file, "header has two of '" + key + "'");
      }
      expect(':');
      switch (key) {
        case "descr" -> descriptor = readString();
        case "fortran_order" -> fortranOrder = readBoolean();
        default -> shape = readTuple();
      }
    }

    private String readString() throws MalformedFileException {
      skipSpace();
      char quote = at < text.length() ? text.charAt(at) : 0;
      if (quote != '\'' && quote != '"') {
        throw malformed("a quoted string (records and objects are not read)");
      }
      int end = text.indexOf(quote, at + 1);
      if (end < 0 || end - at > 64) {
        throw malformed("a short quoted string");
      }
      String value = text.substring(at + 1, end);
      at = end + 1;
      return value;
    }

    private boolean readBoolean() throws MalformedFileException {
      skipSpace();
      for (String word : new String[] {"True", "False"}) {
        if (text.startsWith(word, at)) {
          at += word.length();
          return word.equals("True");
        }
      }
      throw malformed("True or False");
    }

    private long[] readTuple() throws MalformedFileException {
      expect('(');
      long[] dims = new long[4];
      int count = 0;
      while (!accept(')')) {
        if (count == dims.length) {
          dims = Arrays.copyOf(dims, 2 * count);
        }
        dims[count++] = readLong();
        if (!accept(',')) {
          expect(')');
          break;
        }
      }
      return Arrays.copyOf(dims, count);
    }

    private long readLong() throws MalformedFileException {
      skipSpace();
      int end = at;
      while (end < text.length() && text.charAt(end) >= '0' && text.charAt(end) <= '9') {
        end++;
      }
      long value;
      try {
        value = Long.parseLong(text, at, end, 10);
      } catch (NumberFormatException e) {
        throw malformed("an extent from 0 to 2^63-1");
      }
      at = end;
      if (at < text.length() && text.charAt(at) == 'L') {
        at++; // Python 2 wrote long integers so
      }
      return value;
    }

    private boolean accept(char wanted) {
      skipSpace();
      if (at < text.length() && text.charAt(at) == wanted) {
        at++;
        return true;
      }
      return false;
    }

    private void expect(char wanted) throws MalformedFileException {
      if (!accept(wanted)) {
        throw malformed("'" + wanted + "'");
      }
    }

    private void skipSpace() {
      while (at < text.length() && " \t\n\r".indexOf(text.charAt(at)) >= 0) {
        at++;
      }
    }

    private MalformedFileException malformed(String wanted) {
      String found =
          at < text.length()
              ? "'" + text.substring(at, Math.min(at + 20, text.length())) + "'"
              : "its end";
      return new MalformedFileException(
          file, "header has " + found + " at character " + at + ", want " + wanted);
    }
  }
}
