package dev.flare;

import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.stream.Stream;

/** What Linux tells about this machine. */
final class HostInfo {
  private HostInfo() {}

  static String processor() {
    String model = value(Path.of("/proc/cpuinfo"), "model name");
    return model.isEmpty() ? System.getProperty("os.arch") : model;
  }

  static Device.Memory memory() {
    Path file = Path.of("/proc/meminfo");
    return new Device.Memory(
        kibibytes(value(file, "MemAvailable")), kibibytes(value(file, "MemTotal")));
  }

  private static long kibibytes(String text) {
    return text.isEmpty() ? 0 : Long.parseLong(text.split(" ", 2)[0]) << 10;
  }

  /** What follows "key :" in a file of /proc; empty if there is no such line. */
  private static String value(Path file, String key) {
    if (!Files.isReadable(file)) {
      return "";
    }
    try (Stream<String> lines = Files.lines(file)) {
      return lines
          .filter(line -> line.startsWith(key))
          .map(line -> line.substring(line.indexOf(':') + 1).strip())
          .findFirst()
          .orElse("");
    } catch (IOException e) {
      throw new UncheckedIOException(e);
    }
  }
}
