package dev.flare.internal;

import static org.assertj.core.api.Assertions.assertThat;
import static org.junit.jupiter.api.Assumptions.assumeTrue;

import dev.flare.generated.flare.flare_h;
import java.io.IOException;
import java.io.InputStream;
import java.lang.foreign.AddressLayout;
import java.lang.foreign.FunctionDescriptor;
import java.lang.foreign.GroupLayout;
import java.lang.foreign.MemoryLayout;
import java.lang.foreign.PaddingLayout;
import java.lang.foreign.ValueLayout;
import java.lang.reflect.Method;
import java.lang.reflect.Modifier;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.MessageDigest;
import java.util.ArrayList;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.stream.Collectors;
import java.util.stream.Stream;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Tag;
import org.junit.jupiter.api.Test;

/**
 * The committed bindings against what the library says of itself: sizes, offsets, signatures and
 * constants, in both directions.
 */
@Tag("classpath")
class BindingAbiTest {
  private static final String PACKAGE = "dev.flare.generated.flare.";

  @BeforeEach
  void needsLibrary() {
    NativeLibrary.Status status = NativeLibrary.status();
    assumeTrue(status instanceof NativeLibrary.Ready, () -> "libflare: " + status);
  }

  /** The library's lines of one kind, by name. */
  private static Map<String, String> library(String kind) {
    Map<String, String> found = new TreeMap<>();
    Kernels.abi()
        .lines()
        .map(line -> line.split(" ", 3))
        .filter(words -> words[0].equals(kind))
        .forEach(words -> found.put(words[1], words[2]));
    return found;
  }

  private static List<GroupLayout> structs() {
    return library("struct").keySet().stream().map(BindingAbiTest::layout).toList();
  }

  private static GroupLayout layout(String struct) {
    try {
      return (GroupLayout) Class.forName(PACKAGE + struct).getMethod("layout").invoke(null);
    } catch (ReflectiveOperationException e) {
      throw new LinkageError("no binding of struct " + struct, e);
    }
  }

  @Test
  void structSizesAgree() {
    Map<String, String> bound = new TreeMap<>();
    for (GroupLayout struct : structs()) {
      bound.put(struct.name().orElseThrow(), Long.toString(struct.byteSize()));
    }
    assertThat(bound).isEqualTo(library("struct")).hasSizeGreaterThan(8);
  }

  @Test
  void fieldOffsetsAndSizesAgree() {
    Map<String, String> bound = new TreeMap<>();
    for (GroupLayout struct : structs()) {
      long offset = 0;
      for (MemoryLayout member : struct.memberLayouts()) {
        if (!(member instanceof PaddingLayout)) {
          bound.put(
              struct.name().orElseThrow() + "." + member.name().orElseThrow(),
              offset + " " + member.byteSize());
        }
        offset += member.byteSize();
      }
    }
    assertThat(bound).isEqualTo(library("field")).hasSizeGreaterThan(200);
  }

  @Test
  void functionsAgree() {
    Map<String, String> bound = new TreeMap<>();
    for (Method method : flare_h.class.getMethods()) {
      if (method.getName().endsWith("$descriptor")) {
        String name = method.getName().replace("$descriptor", "");
        try {
          bound.put(name, signature((FunctionDescriptor) method.invoke(null)));
        } catch (ReflectiveOperationException e) {
          throw new LinkageError(name, e);
        }
      }
    }
    // Java has no unsigned types: the library's are compared by width.
    Map<String, String> want = new TreeMap<>();
    library("function")
        .forEach(
            (name, types) -> want.put(name, types.replace("u32", "i32").replace("u64", "i64")));
    assertThat(bound).isEqualTo(want).hasSizeGreaterThan(15);
  }

  private static String signature(FunctionDescriptor descriptor) {
    return descriptor.returnLayout().map(BindingAbiTest::type).orElse("void")
        + descriptor.argumentLayouts().stream()
            .map(BindingAbiTest::type)
            .collect(Collectors.joining(",", "(", ")"));
  }

  private static String type(MemoryLayout layout) {
    return switch (layout) {
      case AddressLayout a -> "ptr";
      case ValueLayout.OfInt i -> "i32";
      case ValueLayout.OfLong l -> "i64";
      default -> layout.toString();
    };
  }

  @Test
  void constantsAgree() {
    Map<String, String> bound = new TreeMap<>();
    for (Method method : flare_h.class.getMethods()) {
      if (method.getName().startsWith("FLARE_")
          && method.getParameterCount() == 0
          && Modifier.isStatic(method.getModifiers())) {
        try {
          bound.put(method.getName(), String.valueOf(method.invoke(null)));
        } catch (ReflectiveOperationException e) {
          throw new LinkageError(method.getName(), e);
        }
      }
    }
    assertThat(bound).isEqualTo(library("constant")).hasSizeGreaterThan(50);
  }

  @Test
  void everySymbolResolves() throws ReflectiveOperationException {
    List<String> resolved = new ArrayList<>();
    for (Method method : flare_h.class.getMethods()) {
      if (method.getName().endsWith("$handle")) {
        assertThat(method.invoke(null)).as(method.getName()).isNotNull();
        resolved.add(method.getName());
      }
    }
    assertThat(resolved).hasSize(library("function").size());
  }

  @Test
  void commonFieldsComeFirstInEveryParamsStruct() {
    for (GroupLayout struct : structs()) {
      if (!struct.name().orElseThrow().endsWith("_params")) {
        continue;
      }
      List<String> first =
          struct.memberLayouts().stream().limit(6).map(m -> m.name().orElseThrow()).toList();
      assertThat(first)
          .as(struct.name().orElseThrow())
          .containsExactly("struct_size", "flags", "device", "kernel", "stream", "num_threads");
    }
  }

  @Test
  void fieldConstantsCoverEveryField() throws ReflectiveOperationException {
    // The ring's own list of fields, written by hand, misses nothing and mixes nothing up.
    TreeSet<String> missing = new TreeSet<>();
    for (GroupLayout struct : structs()) {
      String name = struct.name().orElseThrow();
      Class<?> params = Class.forName("dev.flare.internal." + camel(name));
      for (MemoryLayout member : struct.memberLayouts()) {
        String field = member.name().orElse("reserved");
        if (field.startsWith("reserved")) {
          continue;
        }
        var constant =
            Stream.of(params.getDeclaredFields())
                .filter(f -> f.getName().equalsIgnoreCase(field))
                .findFirst();
        if (constant.isEmpty()) {
          missing.add(name + "." + field);
          continue;
        }
        constant.get().setAccessible(true);
        Object value = constant.get().get(null);
        long offset = (long) value.getClass().getMethod("offset").invoke(value);
        assertThat(offset)
            .as(name + "." + field)
            .isEqualTo(struct.byteOffset(MemoryLayout.PathElement.groupElement(field)));
      }
    }
    assertThat(missing).isEmpty();
  }

  private static String camel(String struct) {
    return Stream.of(struct.substring("flare_".length()).split("_"))
        .map(word -> Character.toUpperCase(word.charAt(0)) + word.substring(1))
        .collect(Collectors.joining());
  }

  /** Generated files are as the generator wrote them. */
  @Test
  void nobodyEditedTheBindings() throws Exception {
    Path root = Path.of("generated");
    assumeTrue(Files.isDirectory(root), "not in a source tree");
    Map<String, String> listed = new TreeMap<>();
    for (String line : Files.readAllLines(root.resolve("SHA256SUMS"))) {
      String[] words = line.split("\\s+", 2);
      listed.put(words[1], words[0]);
    }
    Map<String, String> found = new TreeMap<>();
    for (String part : List.of("dev", "include")) {
      try (Stream<Path> files = Files.walk(root.resolve(part))) {
        for (Path file : files.filter(Files::isRegularFile).toList()) {
          found.put(root.relativize(file).toString(), sha256(file));
        }
      }
    }
    assertThat(found).isEqualTo(listed);
  }

  private static String sha256(Path file) throws Exception {
    try (InputStream in = Files.newInputStream(file)) {
      return HexFormat.of()
          .formatHex(MessageDigest.getInstance("SHA-256").digest(in.readAllBytes()));
    } catch (IOException e) {
      throw new AssertionError(file.toString(), e);
    }
  }
}
