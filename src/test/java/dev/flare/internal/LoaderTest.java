package dev.flare.internal;

import static java.nio.charset.StandardCharsets.UTF_8;
import static org.assertj.core.api.Assertions.assertThat;
import static org.junit.jupiter.api.Assumptions.assumeTrue;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.attribute.PosixFilePermissions;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.TimeUnit;
import java.util.stream.Stream;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Tag;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

/** How the library is found, each time in a fresh JVM: loading happens once in a process. */
@Tag("classpath")
class LoaderTest {
  private static String classes;
  private static Path library;

  @TempDir Path folder;

  @BeforeAll
  static void findClasses() throws Exception {
    classes = classPath();
    NativeLibrary.Status status = NativeLibrary.status();
    assumeTrue(status instanceof NativeLibrary.Ready, () -> "libflare: " + status);
    library = Path.of(((NativeLibrary.Ready) status).origin());
  }

  /** The main and the test classes with what they need, whether we run as a module or not. */
  static String classPath() throws Exception {
    List<String> path = new ArrayList<>();
    path.add(
        Path.of(NativeLibrary.class.getProtectionDomain().getCodeSource().getLocation().toURI())
            .toString());
    path.addAll(Arrays.asList(System.getProperty("java.class.path").split(":", -1)));
    // As a module the test classes are patched in, and no path names them.
    path.add(Path.of("target", "test-classes").toAbsolutePath().toString());
    return String.join(":", path);
  }

  private record Result(int exit, String out) {}

  /** Runs {@link LoaderProbe} on the class path. */
  private Result probe(String... options) throws Exception {
    List<String> command = new ArrayList<>();
    command.add(Path.of(System.getProperty("java.home"), "bin", "java").toString());
    command.addAll(List.of("-Xshare:auto", "-XX:TieredStopAtLevel=1", "-cp", classes));
    command.addAll(List.of(options));
    command.add(LoaderProbe.class.getName());
    Process process = new ProcessBuilder(command).redirectErrorStream(true).start();
    String out = new String(process.getInputStream().readAllBytes(), UTF_8);
    assertThat(process.waitFor(60, TimeUnit.SECONDS)).isTrue();
    return new Result(process.exitValue(), out);
  }

  private static final String ACCESS = "--enable-native-access=ALL-UNNAMED";

  /** Points at a cache of this test's own, and away from java.library.path. */
  private String cache() {
    return "-Dflare.cache.dir=" + folder.resolve("cache");
  }

  /** Some tests are about the library in the jar; a bundle has it beside the jar instead. */
  private static void assumeCarried() {
    assumeTrue(
        NativeLibrary.class.getResource(
                "/META-INF/native/linux-" + NativeLibrary.architecture() + "/libflare.so")
            != null,
        "these classes carry no libflare.so");
  }

  @Test
  void deniedNativeAccessIsAValueWithARemedy() throws Exception {
    Result result = probe("--illegal-native-access=deny", cache());
    assertThat(result.out)
        .contains("Missing")
        .contains("native access is off")
        .contains("--enable-native-access=ALL-UNNAMED")
        .contains("tensor works: true")
        .doesNotContain("NoClassDefFoundError");
    assertThat(result.exit).isZero();
  }

  @Test
  void withoutTheFlagItWorksAndTheJvmWarns() throws Exception {
    assumeCarried();
    Result result = probe(cache());
    assertThat(result.out).contains("Ready").contains("WARNING").contains("kernel works: true");
  }

  @Test
  void withTheFlagItWorksInSilence() throws Exception {
    assumeCarried();
    Result result = probe(ACCESS, "--illegal-native-access=deny", cache());
    assertThat(result.out).contains("Ready").doesNotContain("WARNING");
  }

  @Test
  void theResourceIsExtractedOnceAndPrivately() throws Exception {
    assumeCarried();
    Path cache = folder.resolve("cache");
    assertThat(probe(ACCESS, cache()).out).contains("Ready").contains(cache + "/libflare-");
    Path file = only(cache);
    assertThat(PosixFilePermissions.toString(Files.getPosixFilePermissions(cache)))
        .isEqualTo("rwx------");
    assertThat(PosixFilePermissions.toString(Files.getPosixFilePermissions(file)))
        .isEqualTo("rwx------");
    var written = Files.getLastModifiedTime(file);
    assertThat(probe(ACCESS, cache()).out).contains("Ready");
    assertThat(Files.getLastModifiedTime(file)).isEqualTo(written);
    assertThat(only(cache)).isEqualTo(file);

    // A file of that name with other content is not loaded.
    Files.writeString(file, "not a library");
    assertThat(probe(ACCESS, cache()).out).contains("Ready");
    assertThat(Files.size(only(cache))).isGreaterThan(10_000);
  }

  @Test
  void aCacheThatOthersCanWriteToIsRefused() throws Exception {
    assumeCarried();
    Path cache = Files.createDirectory(folder.resolve("cache"));
    Files.setPosixFilePermissions(cache, PosixFilePermissions.fromString("rwxrwxrwx"));
    assertThat(probe(ACCESS, cache()).out)
        .contains("Missing")
        .contains("others can write to it")
        .contains("-Dflare.cache.dir");
  }

  @Test
  void aCacheThatIsNoFolderIsRefused() throws Exception {
    assumeCarried();
    Files.writeString(folder.resolve("cache"), "");
    assertThat(probe(ACCESS, cache()).out).contains("Missing").contains("-Dflare.cache.dir");
  }

  @Test
  void theOverrideIsLoadedWhereItLies() throws Exception {
    Path copy = Files.copy(library, folder.resolve("mine.so"));
    assertThat(probe(ACCESS, "-Dflare.library.path=" + copy, cache()).out)
        .contains("Ready")
        .contains("origin=" + copy);
    assertThat(folder.resolve("cache")).doesNotExist();
    Path named = Files.createDirectory(folder.resolve("lib"));
    Files.copy(library, named.resolve("libflare.so"));
    assertThat(probe(ACCESS, "-Dflare.library.path=" + named, cache()).out)
        .contains("Ready")
        .contains("origin=" + named.resolve("libflare.so"));
  }

  @Test
  void aWrongOverrideIsNotReplacedInSilence() throws Exception {
    assertThat(probe(ACCESS, "-Dflare.library.path=/no/such/libflare.so", cache()).out)
        .contains("Missing")
        .contains("there is no /no/such/libflare.so");
    Path text = Files.writeString(folder.resolve("text.so"), "hello");
    assertThat(probe(ACCESS, "-Dflare.library.path=" + text, cache()).out)
        .contains("Missing")
        .contains("file too short");
  }

  @Test
  void anotherLibraryIsToldApart() throws Exception {
    Path other = anySharedLibrary();
    assertThat(probe(ACCESS, "-Dflare.library.path=" + other, cache()).out)
        .contains("Missing")
        .contains("is not flare's library")
        .contains("flare_version");
  }

  /** One that a JVM doesn't load by itself. */
  private static Path anySharedLibrary() {
    Path java = Path.of(System.getProperty("java.home"), "lib", "libmanagement_ext.so");
    assumeTrue(Files.exists(java), "no " + java);
    return java;
  }

  @Test
  void aFailureIsTriedAgain() throws Exception {
    // The probe asks twice; between the two the file appears.
    Path late = folder.resolve("late.so");
    assertThat(
            probe(
                    ACCESS,
                    "-Dflare.library.path=" + late,
                    "-Dprobe.then.copy=" + library + ":" + late,
                    cache())
                .out)
        .contains("Missing")
        .contains("then Ready");
  }

  private static Path only(Path cache) throws IOException {
    try (Stream<Path> files = Files.list(cache)) {
      List<Path> all = files.toList();
      assertThat(all).hasSize(1);
      return all.getFirst();
    }
  }
}
