package dev.flare.internal;

import dev.flare.generated.flare.flare_h;
import java.io.File;
import java.io.IOException;
import java.io.InputStream;
import java.lang.foreign.MemorySegment;
import java.nio.file.AtomicMoveNotSupportedException;
import java.nio.file.FileStore;
import java.nio.file.Files;
import java.nio.file.LinkOption;
import java.nio.file.Path;
import java.nio.file.StandardCopyOption;
import java.nio.file.attribute.PosixFileAttributes;
import java.nio.file.attribute.PosixFilePermission;
import java.nio.file.attribute.PosixFilePermissions;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.util.ArrayList;
import java.util.HexFormat;
import java.util.List;
import java.util.Locale;
import java.util.Set;
import org.jspecify.annotations.Nullable;

/**
 * Finds, loads and checks {@code libflare.so}.
 *
 * <p>Tried in this order: the file or folder that {@code -Dflare.library.path} names (then nothing
 * else); the library inside the jar, copied once into a cache folder under the hash of its content
 * ({@code -Dflare.cache.dir}, or {@code flare} in the user's cache folder); the folders of {@code
 * java.library.path}.
 *
 * <p>A failure is a value and is not remembered: the next call tries again. Thread-safe.
 */
public final class NativeLibrary {
  private static final String FILE = "libflare.so";
  private static final String PATH_PROPERTY = "flare.library.path";
  private static final String CACHE_PROPERTY = "flare.cache.dir";
  private static final Set<PosixFilePermission> PRIVATE =
      PosixFilePermissions.fromString("rwx------");

  private static volatile @Nullable Ready ready;

  private NativeLibrary() {}

  /** Whether the library can be called. */
  public sealed interface Status permits Ready, Missing {}

  /**
   * It can.
   *
   * @param origin the file that was loaded
   * @param version of the library, such as 0.1.0
   * @param buildInfo its own line about compiler and backends
   */
  public record Ready(String origin, String version, String buildInfo) implements Status {}

  /**
   * It can't.
   *
   * @param reason one line
   * @param remedy what to do
   * @param cause what was thrown, if anything
   */
  public record Missing(String reason, String remedy, @Nullable Throwable cause)
      implements Status {}

  /** Loads the library if that has not happened, and tells how it went. */
  public static Status status() {
    Ready known = ready;
    return known != null ? known : load();
  }

  /** Whether {@link #status} has found it before: a plain read, for the hot path. */
  public static boolean isReady() {
    return ready != null;
  }

  private static synchronized Status load() {
    Ready known = ready;
    if (known != null) {
      return known;
    }
    Status status = find();
    if (status instanceof Ready found) {
      ready = found;
    }
    return status;
  }

  private static Status find() {
    String override = System.getProperty(PATH_PROPERTY);
    if (override != null && !override.isBlank()) {
      Path path = Path.of(override);
      return open(Files.isDirectory(path) ? path.resolve(FILE) : path);
    }
    String os = System.getProperty("os.name");
    if (!os.equals("Linux")) {
      return new Missing(
          "flare's kernels are built for Linux, and this is " + os,
          "run on Linux, or build libflare for this system and set -D" + PATH_PROPERTY,
          null);
    }
    String resource = "/META-INF/native/linux-" + architecture() + "/" + FILE;
    try (InputStream stream = NativeLibrary.class.getResourceAsStream(resource)) {
      if (stream != null) {
        return openCached(stream.readAllBytes());
      }
    } catch (IOException e) {
      return new Missing("cannot read " + resource + " in the jar", "check the jar", e);
    }
    List<String> tried = new ArrayList<>();
    for (String folder :
        System.getProperty("java.library.path", "").split(File.pathSeparator, -1)) {
      if (!folder.isEmpty()) {
        Path candidate = Path.of(folder, FILE);
        if (Files.isRegularFile(candidate)) {
          return open(candidate);
        }
        tried.add(folder);
      }
    }
    return new Missing(
        "no "
            + FILE
            + ": this jar has no "
            + resource
            + ", and java.library.path has none "
            + tried,
        "build it with scripts/build-native, or set -D" + PATH_PROPERTY + " to the file",
        null);
  }

  static String architecture() {
    String arch = System.getProperty("os.arch").toLowerCase(Locale.ROOT);
    return switch (arch) {
      case "amd64", "x86_64" -> "x86_64";
      case "arm64", "aarch64" -> "aarch64";
      default -> arch;
    };
  }

  // ---- the copy in the cache ------------------------------------------------------------------

  private static Status openCached(byte[] content) {
    Path folder = cacheFolder();
    String hash = sha256(content);
    Path file = folder.resolve("libflare-" + hash.substring(0, 16) + ".so");
    try {
      makePrivate(folder);
      if (!holds(file, hash)) {
        write(content, file);
      }
    } catch (IOException | SecurityException e) {
      return new Missing(
          "cannot put " + FILE + " into the cache folder " + folder + ": " + e.getMessage(),
          "set -D"
              + CACHE_PROPERTY
              + " to a folder that only you can write, or -D"
              + PATH_PROPERTY
              + " to a libflare.so outside the jar",
          e);
    }
    return open(file);
  }

  private static Path cacheFolder() {
    String set = System.getProperty(CACHE_PROPERTY);
    if (set != null && !set.isBlank()) {
      return Path.of(set).toAbsolutePath();
    }
    String xdg = System.getenv("XDG_CACHE_HOME");
    if (xdg != null && Path.of(xdg).isAbsolute()) {
      return Path.of(xdg, "flare");
    }
    Path home = Path.of(System.getProperty("user.home", ""));
    if (home.isAbsolute() && Files.isWritable(home)) {
      return home.resolve(".cache").resolve("flare");
    }
    // Without a home of one's own: the user's name keeps people apart, makePrivate() keeps them
    // out.
    return Path.of(System.getProperty("java.io.tmpdir"))
        .toAbsolutePath()
        .resolve("flare-" + System.getProperty("user.name"));
  }

  /** Others must not be able to put a file of theirs where a library is loaded from. */
  private static void makePrivate(Path folder) throws IOException {
    if (!Files.isDirectory(folder, LinkOption.NOFOLLOW_LINKS)) {
      Path parent = folder.getParent();
      if (parent != null) {
        Files.createDirectories(parent);
      }
      try {
        Files.createDirectory(folder, PosixFilePermissions.asFileAttribute(PRIVATE));
      } catch (java.nio.file.FileAlreadyExistsException e) {
        if (!Files.isDirectory(folder, LinkOption.NOFOLLOW_LINKS)) {
          throw e;
        }
      }
    }
    PosixFileAttributes attributes =
        Files.readAttributes(folder, PosixFileAttributes.class, LinkOption.NOFOLLOW_LINKS);
    Set<PosixFilePermission> permissions = attributes.permissions();
    if (permissions.contains(PosixFilePermission.GROUP_WRITE)
        || permissions.contains(PosixFilePermission.OTHERS_WRITE)) {
      throw new IOException(
          "others can write to it (" + PosixFilePermissions.toString(permissions) + ")");
    }
    if (!attributes.owner().getName().equals(owner())) {
      throw new IOException("it belongs to " + attributes.owner().getName());
    }
  }

  /** Who this process is, as the file system names it; user.name can be set to anything. */
  private static String owner() throws IOException {
    return Files.getOwner(Path.of("/proc/self")).getName();
  }

  private static boolean holds(Path file, String hash) throws IOException {
    return Files.isRegularFile(file, LinkOption.NOFOLLOW_LINKS)
        && sha256(Files.readAllBytes(file)).equals(hash);
  }

  private static void write(byte[] content, Path file) throws IOException {
    Path folder = file.getParent();
    Path temporary =
        Files.createTempFile(
            folder, ".libflare-", ".tmp", PosixFilePermissions.asFileAttribute(PRIVATE));
    try {
      Files.write(temporary, content);
      try {
        Files.move(temporary, file, StandardCopyOption.ATOMIC_MOVE);
      } catch (AtomicMoveNotSupportedException e) {
        Files.move(temporary, file, StandardCopyOption.REPLACE_EXISTING);
      }
    } finally {
      Files.deleteIfExists(temporary);
    }
  }

  private static String sha256(byte[] content) {
    try {
      return HexFormat.of().formatHex(MessageDigest.getInstance("SHA-256").digest(content));
    } catch (NoSuchAlgorithmException e) {
      throw new AssertionError("every Java platform has SHA-256", e);
    }
  }

  // ---- loading --------------------------------------------------------------------------------

  private static Status open(Path file) {
    Path path = file.toAbsolutePath();
    try {
      // Not SymbolLookup.libraryLookup: it drops the linker's text, which says what is wrong.
      System.load(path.toString());
    } catch (IllegalCallerException e) {
      return accessDenied(e);
    } catch (UnsatisfiedLinkError e) {
      return unloadable(path, e);
    }
    return check(path);
  }

  private static Missing accessDenied(Throwable e) {
    Module self = NativeLibrary.class.getModule();
    String to = self.isNamed() ? self.getName() : "ALL-UNNAMED";
    return new Missing(
        "native access is off for flare", "start Java with --enable-native-access=" + to, e);
  }

  private static Missing unloadable(Path path, UnsatisfiedLinkError e) {
    String text = String.valueOf(e.getMessage());
    if (!Files.exists(path)) {
      return new Missing(
          "there is no " + path, "correct -D" + PATH_PROPERTY + ", or leave it out", e);
    }
    if (text.contains("already loaded in another classloader")) {
      return new Missing(
          path + " is in use by another class loader of this process",
          "load flare once, in a class loader that both share",
          e);
    }
    if (text.contains("failed to map segment") || text.contains("Operation not permitted")) {
      return new Missing(
          "files in " + path.getParent() + " must not be executed (" + mountOf(path) + ")",
          "set -D" + CACHE_PROPERTY + " to a folder on a file system mounted without noexec",
          e);
    }
    if (text.contains("GLIBC") || text.contains("GLIBCXX")) {
      return new Missing(
          "the system's C or C++ library is too old: " + text,
          "run on a system with glibc 2.34 and libstdc++ of GCC 11 or newer, or build libflare there"
              + " with scripts/build-native",
          e);
    }
    return new Missing(text, "build it for this machine with scripts/build-native", e);
  }

  private static String mountOf(Path path) {
    try {
      FileStore store = Files.getFileStore(path);
      return store.toString();
    } catch (IOException e) {
      return "mount unknown: " + e.getMessage();
    }
  }

  /** The jar and the library must speak the same ABI. */
  private static Status check(Path path) {
    try {
      int library = flare_h.flare_version();
      int wanted = flare_h.FLARE_VERSION();
      // Before 1.0 a minor version may change the ABI.
      if (library >>> 8 != wanted >>> 8) {
        return new Missing(
            path + " is version " + version(library) + ", and this jar needs " + version(wanted),
            "use the library that the jar brings, or one built from the same sources",
            null);
      }
      return new Ready(path.toString(), version(library), text(flare_h.flare_build_info()));
    } catch (ExceptionInInitializerError | NoClassDefFoundError e) {
      return e.getCause() instanceof IllegalCallerException denied
          ? accessDenied(denied)
          : new Missing("the bindings cannot be used: " + e.getCause(), "report it", e);
    } catch (UnsatisfiedLinkError | AssertionError e) {
      return new Missing(
          path + " is not flare's library: " + e.getMessage(),
          "set -D" + PATH_PROPERTY + " to flare's own libflare.so",
          e);
    }
  }

  private static String version(int packed) {
    return (packed >>> 16) + "." + (packed >>> 8 & 0xff) + "." + (packed & 0xff);
  }

  /** A NUL-terminated string in static memory. */
  static String text(MemorySegment pointer) {
    return pointer.getString(0);
  }
}
