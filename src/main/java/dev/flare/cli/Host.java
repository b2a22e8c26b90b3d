package dev.flare.cli;

import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import java.util.Optional;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import java.util.stream.Stream;

/** What the machine says about itself. */
final class Host {
  private static final Pattern GLIBC_BANNER =
      Pattern.compile("GNU C Library [^\\n]*release version (\\d+\\.\\d+)");

  private Host() {}

  /**
   * {@return the version of the C library of this process, "2.36" say; empty if it is not glibc}
   */
  static Optional<String> glibc() {
    try (Stream<String> maps = Files.lines(Path.of("/proc/self/maps"))) {
      Optional<String> file =
          maps.filter(line -> line.matches(".*/libc[.-][^/]*so[^/]*"))
              .map(line -> line.substring(line.indexOf('/')))
              .findFirst();
      if (file.isEmpty()) {
        return Optional.empty();
      }
      // The banner that the file prints when it is run.
      String bytes = Files.readString(Path.of(file.get()), StandardCharsets.ISO_8859_1);
      Matcher banner = GLIBC_BANNER.matcher(bytes);
      return banner.find() ? Optional.of(banner.group(1)) : Optional.empty();
    } catch (IOException e) {
      return Optional.empty();
    }
  }

  /** {@return whether version {@code have} is at least {@code want}, both "major.minor"} */
  static boolean atLeast(String have, String want) {
    String[] a = have.split("\\.", -1);
    String[] b = want.split("\\.", -1);
    for (int i = 0; i < b.length; i++) {
      int left = i < a.length ? Integer.parseInt(a[i]) : 0;
      int right = Integer.parseInt(b[i]);
      if (left != right) {
        return left > right;
      }
    }
    return true;
  }

  /** {@return the processor's name; "unknown processor" where Linux does not tell} */
  static String processor() {
    return first(Path.of("/proc/cpuinfo"), "model name").orElse("unknown processor");
  }

  /** {@return the NVIDIA kernel driver's version line, where one is loaded} */
  static Optional<String> nvidiaKernelDriver() {
    return first(Path.of("/proc/driver/nvidia/version"), "NVRM version");
  }

  /** {@return whether a PCI device of NVIDIA is there, with or without a driver} */
  static boolean hasNvidiaHardware() {
    try (Stream<Path> devices = Files.list(Path.of("/sys/bus/pci/devices"))) {
      return devices.anyMatch(
          device ->
              "0x10de".equals(read(device.resolve("vendor")))
                  && read(device.resolve("class")).startsWith("0x03"));
    } catch (IOException e) {
      return false; // no PCI bus to look at
    }
  }

  private static String read(Path file) {
    try {
      return Files.readString(file).strip();
    } catch (IOException e) {
      return "";
    }
  }

  private static Optional<String> first(Path file, String key) {
    try {
      List<String> lines = Files.readAllLines(file);
      return lines.stream()
          .filter(line -> line.startsWith(key))
          .findFirst()
          .map(line -> line.substring(line.indexOf(':') + 1).strip());
    } catch (IOException e) {
      return Optional.empty();
    }
  }
}
