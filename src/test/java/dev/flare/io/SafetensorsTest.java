package dev.flare.io;

import static org.assertj.core.api.Assertions.assertThat;
import static org.assertj.core.api.Assertions.assertThatThrownBy;

import dev.flare.ClosedException;
import dev.flare.DType;
import dev.flare.InvalidArgumentException;
import dev.flare.Shape;
import dev.flare.Tensor;
import dev.flare.UnsupportedException;
import java.io.IOException;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.ValueLayout;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.channels.FileChannel;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.NoSuchFileException;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.List;
import java.util.Map;
import java.util.NoSuchElementException;
import java.util.stream.Stream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.Arguments;
import org.junit.jupiter.params.provider.EnumSource;
import org.junit.jupiter.params.provider.MethodSource;

/** Reading and writing safetensors files. */
class SafetensorsTest {
  private static final Path NAME = Path.of("a.safetensors");

  @TempDir Path folder;

  /** A file of this header and data. */
  static byte[] bytes(String json, byte... data) {
    byte[] header = json.getBytes(StandardCharsets.UTF_8);
    return ByteBuffer.allocate(Long.BYTES + header.length + data.length)
        .order(ByteOrder.LITTLE_ENDIAN)
        .putLong(header.length)
        .put(header)
        .put(data)
        .array();
  }

  private static SafetensorsHeader parse(byte... file) throws MalformedFileException {
    return Safetensors.parse(NAME, MemorySegment.ofArray(file));
  }

  private static String tensor(String dtype, String shape, String offsets) {
    return "{\"dtype\":%s,\"shape\":%s,\"data_offsets\":%s}".formatted(dtype, shape, offsets);
  }

  private static String one(String dtype, String shape, String offsets) {
    return "{\"x\":" + tensor(dtype, shape, offsets) + "}";
  }

  // ---- what comes back ------------------------------------------------------------------------

  @ParameterizedTest
  @EnumSource
  void everyElementTypeComesBack(ElementType type) throws IOException {
    Path file = folder.resolve("types.safetensors");
    byte[] raw = new byte[6 * type.bytes()];
    for (int i = 0; i < raw.length; i++) {
      raw[i] = (byte) (i * 37 + 1);
    }
    TensorEntry x = TensorEntry.of("x", type, Shape.of(2, 3), MemorySegment.ofArray(raw));
    Safetensors.write(file, List.of(x), Map.of());
    try (Safetensors open = Safetensors.open(file)) {
      TensorEntry got = open.get("x");
      assertThat(got.type()).isEqualTo(type);
      assertThat(got.shape()).isEqualTo(Shape.of(2, 3));
      assertThat(got.data().mismatch(x.data())).isEqualTo(-1);
      assertThat(got.toDoubles()).isEqualTo(x.toDoubles());
    }
  }

  @Test
  void manyTensorsComeBackAlignedWithTheirMetadata() throws IOException {
    Path file = folder.resolve("many.safetensors");
    List<TensorEntry> written =
        List.of(
            TensorEntry.ofValues("odd bytes", ElementType.U8, Shape.of(3), 1, 2, 255),
            TensorEntry.ofValues("half \"quoted\" é", ElementType.F16, Shape.of(1, 1), -0.5),
            TensorEntry.ofValues("empty", ElementType.F32, Shape.of(4, 0)),
            TensorEntry.ofValues("scalar", ElementType.F64, Shape.of(), Math.PI),
            TensorEntry.ofValues("indices", ElementType.I64, Shape.of(2), -1, 1L << 40));
    Map<String, String> metadata = Map.of("params", "{\"a\": 1}", "", "é\n\u0000");
    Safetensors.write(file, written, metadata);
    try (Safetensors open = Safetensors.open(file)) {
      assertThat(open.metadata()).isEqualTo(metadata);
      assertThat(open.entries()).hasSameSizeAs(written);
      for (TensorEntry want : written) {
        TensorEntry got = open.get(want.name());
        assertThat(got.shape()).isEqualTo(want.shape());
        assertThat(got.toDoubles()).isEqualTo(want.toDoubles());
        assertThat(got.data().address() % got.type().bytes()).isZero();
      }
      assertThat(open.find("absent")).isEmpty();
      assertThatThrownBy(() -> open.get("absent"))
          .isInstanceOf(NoSuchElementException.class)
          .hasMessageContainingAll("absent", "scalar");
    }
  }

  @Test
  void aFileWithoutTensorsIsFine() throws IOException {
    Path file = folder.resolve("none.safetensors");
    Safetensors.write(file, List.of(), Map.of());
    try (Safetensors open = Safetensors.open(file)) {
      assertThat(open.entries()).isEmpty();
      assertThat(open.metadata()).isEmpty();
    }
  }

  @Test
  void tensorsAreViewsOfTheMapping() throws IOException {
    Path file = folder.resolve("view.safetensors");
    try (Tensor x = Tensor.randn(1, DType.BF16, 3, 5)) {
      Safetensors.write(file, List.of(TensorEntry.of("x", x)), Map.of());
      Tensor view;
      try (Safetensors open = Safetensors.open(file)) {
        view = open.get("x").tensor();
        assertThat(view.dtype()).isEqualTo(DType.BF16);
        assertThat(view.shape()).isEqualTo(x.shape());
        assertThat(view.isReadOnly()).isTrue();
        assertThat(view.segment().address()).isEqualTo(open.get("x").data().address());
        assertThat(view.toFloatArray()).isEqualTo(x.toFloatArray());
        try (Tensor copy = open.get("x").copy()) {
          assertThat(copy.isReadOnly()).isFalse();
          assertThat(copy.toFloatArray()).isEqualTo(x.toFloatArray());
        }
      }
      assertThat(view.isOpen()).isFalse();
      assertThatThrownBy(view::toFloatArray).isInstanceOf(ClosedException.class);
    }
  }

  @Test
  void misalignedTensorsCanBeCopied() throws IOException {
    Path file = folder.resolve("odd.safetensors");
    String json =
        "{\"a\":%s,\"b\":%s}"
            .formatted(tensor("\"U8\"", "[1]", "[0,1]"), tensor("\"F32\"", "[1]", "[1,5]"));
    while (json.length() % 8 != 0) {
      json += " ";
    }
    Files.write(file, bytes(json, (byte) 7, (byte) 0, (byte) 0, (byte) 0x80, (byte) 0x3f));
    try (Safetensors open = Safetensors.open(file)) {
      assertThatThrownBy(() -> open.get("b").tensor())
          .isInstanceOf(InvalidArgumentException.class)
          .hasMessageContaining("multiple of 4");
      try (Tensor copy = open.get("b").copy()) {
        assertThat(copy.toFloatArray()).containsExactly(1);
      }
      assertThat(open.get("b").toDoubles()).containsExactly(1);
    }
  }

  @Test
  void elementsWithoutDtypeAreNotTensors() throws IOException {
    TensorEntry x = TensorEntry.ofValues("x", ElementType.F64, Shape.of(1), 1);
    assertThatThrownBy(x::tensor)
        .isInstanceOf(UnsupportedException.class)
        .hasMessageContainingAll("F64", "convert");
  }

  @Test
  void onlyDenseTensorsAreWritten() {
    try (Tensor x = Tensor.zeros(DType.FP32, 2, 3)) {
      assertThatThrownBy(() -> TensorEntry.of("x", x.transpose(0, 1)))
          .isInstanceOf(InvalidArgumentException.class)
          .hasMessageContainingAll("strides", "copy()");
    }
  }

  @Test
  void offsetsMayPassTwoGigabytes() throws IOException {
    Path file = folder.resolve("large.safetensors");
    long size = 3L << 30;
    String json =
        "{\"big\":%s,\"tail\":%s}"
            .formatted(
                tensor("\"U8\"", "[" + size + "]", "[0," + size + "]"),
                tensor("\"I32\"", "[1]", "[" + size + "," + (size + 4) + "]"));
    byte[] head = bytes(json);
    try (FileChannel channel = // sparse: three gigabytes that take up one block
        FileChannel.open(file, StandardOpenOption.CREATE_NEW, StandardOpenOption.WRITE)) {
      channel.write(ByteBuffer.wrap(head));
      channel.write(ByteBuffer.wrap(new byte[] {9, 0, 0, 0, 5}), head.length + size - 1);
    }
    try (Safetensors open = Safetensors.open(file)) {
      assertThat(open.get("big").data().byteSize()).isEqualTo(size);
      assertThat(open.get("big").data().get(ValueLayout.JAVA_BYTE, size - 1)).isEqualTo((byte) 9);
      assertThatThrownBy(() -> open.get("big").toDoubles())
          .isInstanceOf(UnsupportedException.class);
      assertThat(open.get("tail").toInts()).containsExactly(5 << 24);
    }
  }

  @Test
  void anArenaKeepsTheMapping() throws IOException {
    Path file = folder.resolve("arena.safetensors");
    Safetensors.write(
        file, List.of(TensorEntry.ofValues("x", ElementType.F32, Shape.of(1), 2)), Map.of());
    TensorEntry x;
    try (Arena arena = Arena.ofConfined()) {
      try (Safetensors open = Safetensors.open(file, arena)) {
        x = open.get("x");
      }
      assertThat(x.toDoubles()).containsExactly(2);
    }
    assertThatThrownBy(x::toDoubles).isInstanceOf(IllegalStateException.class);
  }

  @Test
  void closingTwiceIsHarmless() throws IOException {
    Path file = folder.resolve("twice.safetensors");
    Safetensors.write(file, List.of(), Map.of());
    Safetensors open = Safetensors.open(file);
    open.close();
    open.close();
  }

  @Test
  void aMissingFileIsAnIoException() {
    assertThatThrownBy(() -> Safetensors.open(folder.resolve("absent")))
        .isInstanceOf(NoSuchFileException.class);
  }

  // ---- writing --------------------------------------------------------------------------------

  @Test
  void aFailedWriteLeavesTheOldFile() throws IOException {
    Path file = folder.resolve("kept.safetensors");
    Safetensors.write(
        file, List.of(TensorEntry.ofValues("x", ElementType.F32, Shape.of(1), 1)), Map.of());
    byte[] before = Files.readAllBytes(file);
    TensorEntry gone;
    try (Arena arena = Arena.ofConfined()) {
      gone = TensorEntry.of("y", ElementType.F32, Shape.of(2), arena.allocate(8));
    }
    assertThatThrownBy(() -> Safetensors.write(file, List.of(gone), Map.of()))
        .isInstanceOf(IllegalStateException.class);
    assertThat(file).hasBinaryContent(before);
    try (Stream<Path> files = Files.list(folder)) {
      assertThat(files).containsExactly(file);
    }
  }

  @Test
  void anOpenFileCanBeReplacedByItsOwnTensors() throws IOException {
    Path file = folder.resolve("self.safetensors");
    TensorEntry x = TensorEntry.ofValues("x", ElementType.F32, Shape.of(2), 1, 2);
    Safetensors.write(file, List.of(x), Map.of());
    try (Safetensors old = Safetensors.open(file)) {
      Safetensors.write(file, old.entries(), Map.of("version", "2"));
      assertThat(old.get("x").toDoubles()).containsExactly(1, 2);
    }
    try (Safetensors replaced = Safetensors.open(file)) {
      assertThat(replaced.metadata()).containsEntry("version", "2");
      assertThat(replaced.get("x").toDoubles()).containsExactly(1, 2);
    }
  }

  @Test
  void namesAreWrittenOnce() {
    TensorEntry x = TensorEntry.ofValues("x", ElementType.F32, Shape.of(1), 1);
    TensorEntry reserved = TensorEntry.ofValues("__metadata__", ElementType.F32, Shape.of(1), 1);
    Path file = folder.resolve("names.safetensors");
    assertThatThrownBy(() -> Safetensors.write(file, List.of(x, x), Map.of()))
        .isInstanceOf(InvalidArgumentException.class)
        .hasMessageContaining("'x' twice");
    assertThatThrownBy(() -> Safetensors.write(file, List.of(reserved), Map.of()))
        .isInstanceOf(InvalidArgumentException.class)
        .hasMessageContaining("__metadata__");
    assertThat(file).doesNotExist();
  }

  // ---- hostile headers ------------------------------------------------------------------------

  static Stream<Arguments> hostileHeaders() {
    String huge = "9223372036854775807";
    return Stream.of(
        Arguments.of("no object", "[]", 0, "does not begin with '{'"),
        Arguments.of("empty", "", 0, "does not begin with '{'"),
        Arguments.of("space first", " {}", 0, "does not begin with '{'"),
        Arguments.of("cut off", "{\"x\":", 0, "not JSON at character"),
        Arguments.of("two objects", "{}{}", 0, "goes on"),
        Arguments.of("comment", "{/**/}", 0, "not JSON"),
        Arguments.of("tensor is a number", "{\"x\":1}", 0, "tensor 'x' is 1"),
        Arguments.of(
            "metadata is a list", "{\"__metadata__\":[]}", 0, "__metadata__ is START_ARRAY"),
        Arguments.of(
            "metadata of a number", "{\"__metadata__\":{\"a\":1}}", 0, "__metadata__.a is 1"),
        Arguments.of(
            "metadata twice", "{\"__metadata__\":{},\"__metadata__\":{}}", 0, "two of __m"),
        Arguments.of(
            "metadata key twice", "{\"__metadata__\":{\"a\":\"\",\"a\":\"\"}}", 0, "two of 'a'"),
        Arguments.of(
            "name twice",
            "{\"x\":%1$s,\"x\":%1$s}".formatted(tensor("\"U8\"", "[0]", "[0,0]")),
            0,
            "two tensors 'x'"),
        Arguments.of(
            "field twice", "{\"x\":{\"dtype\":\"U8\",\"dtype\":\"U8\"}}", 0, "two of dtype"),
        Arguments.of("unknown field", "{\"x\":{\"stride\":[1]}}", 0, "stride: no such field"),
        Arguments.of("field missing", "{\"x\":{\"dtype\":\"U8\"}}", 0, "lacks one of"),
        Arguments.of("unknown dtype", one("\"F33\"", "[1]", "[0,4]"), 4, "dtype is 'F33'"),
        Arguments.of("dtype is a number", one("1", "[1]", "[0,4]"), 4, "dtype is 1"),
        Arguments.of("lower case dtype", one("\"f32\"", "[1]", "[0,4]"), 4, "dtype is 'f32'"),
        Arguments.of("negative extent", one("\"F32\"", "[-1]", "[0,4]"), 4, "shape[0] is -1"),
        Arguments.of("fraction", one("\"F32\"", "[1.0]", "[0,4]"), 4, "shape[0] is 1.0"),
        Arguments.of("extent is text", one("\"F32\"", "[\"1\"]", "[0,4]"), 4, "shape[0] is 1"),
        Arguments.of("extent is null", one("\"F32\"", "[null]", "[0,4]"), 4, "shape[0] is null"),
        Arguments.of(
            "nested shape", one("\"F32\"", "[[1]]", "[0,4]"), 4, "shape[0] is START_ARRAY"),
        Arguments.of(
            "extent of 2^63", one("\"F32\"", "[9223372036854775808]", "[0,4]"), 4, "2^63-1"),
        Arguments.of(
            "elements overflow", one("\"U8\"", "[4294967296,4294967296]", "[0,0]"), 0, "too many"),
        Arguments.of("bytes overflow", one("\"F64\"", "[" + huge + "]", "[0,0]"), 0, "too many"),
        Arguments.of(
            "overflow hidden by a zero",
            one("\"U8\"", "[0," + huge + "," + huge + "]", "[0,1]"),
            1,
            "has 1 bytes, want 0"),
        Arguments.of(
            "100 dimensions",
            one("\"U8\"", "[1" + ",1".repeat(99) + "]", "[0,1]"),
            1,
            "more than 64 numbers"),
        Arguments.of(
            "shape is an object", one("\"U8\"", "{}", "[0,1]"), 1, "shape is START_OBJECT"),
        Arguments.of("size does not match", one("\"F32\"", "[2]", "[0,4]"), 4, "4 bytes, want 8"),
        Arguments.of("one offset", one("\"U8\"", "[1]", "[1]"), 1, "data_offsets are [1]"),
        Arguments.of(
            "three offsets", one("\"U8\"", "[1]", "[0,1,2]"), 2, "data_offsets are [0, 1, 2]"),
        Arguments.of(
            "end before begin", one("\"U8\"", "[1]", "[1,0]"), 1, "data_offsets are [1, 0]"),
        Arguments.of("negative offset", one("\"U8\"", "[1]", "[-1,0]"), 1, "data_offsets[0] is -1"),
        Arguments.of("end behind the file", one("\"U8\"", "[2]", "[0,2]"), 1, "ends at 2"),
        Arguments.of("far away", one("\"U8\"", "[1]", "[" + huge + "," + huge + "]"), 1, "ends at"),
        Arguments.of("hole first", one("\"U8\"", "[1]", "[1,2]"), 2, "after a hole from 0"),
        Arguments.of("bytes behind", one("\"U8\"", "[1]", "[0,1]"), 3, "2 bytes of no tensor"),
        Arguments.of("bytes of nobody", "{}", 1, "1 bytes of no tensor"),
        Arguments.of(
            "overlap",
            "{\"x\":%s,\"y\":%s}"
                .formatted(tensor("\"U8\"", "[2]", "[0,2]"), tensor("\"U8\"", "[2]", "[1,3]")),
            3,
            "'y' begins at 1, inside another"),
        Arguments.of(
            "hole between",
            "{\"x\":%s,\"y\":%s}"
                .formatted(tensor("\"U8\"", "[1]", "[0,1]"), tensor("\"U8\"", "[1]", "[2,3]")),
            3,
            "'y' begins at 2, after a hole from 1"),
        Arguments.of(
            "the same bytes twice",
            "{\"x\":%1$s,\"y\":%1$s}".formatted(tensor("\"U8\"", "[1]", "[0,1]")),
            1,
            "inside another"),
        Arguments.of("deep nesting", "{\"x\":" + "[".repeat(1000), 0, "tensor 'x' is START_ARRAY"),
        Arguments.of("long name", "{\"" + "n".repeat(60_000) + "\":1}", 0, ""));
  }

  @ParameterizedTest(name = "{0}")
  @MethodSource("hostileHeaders")
  void hostileHeadersAreRefused(String what, String json, int dataBytes, String message) {
    assertThatThrownBy(() -> parse(bytes(json, new byte[dataBytes])))
        .as(what)
        .isInstanceOf(MalformedFileException.class)
        .hasMessageStartingWith("a.safetensors: ")
        .hasMessageContaining(message)
        .extracting(e -> e.getMessage().length())
        .satisfies(length -> assertThat((int) length).isLessThan(1000));
  }

  static Stream<Arguments> hostileLengths() {
    return Stream.of(
        Arguments.of(-1L, "18446744073709551615, the format allows 100000000"),
        Arguments.of(Long.MIN_VALUE, "9223372036854775808, the format allows"),
        Arguments.of(100_000_001L, "100000001, the format allows"),
        Arguments.of(3L, "is 3, the file has 2 bytes after it"));
  }

  @ParameterizedTest
  @MethodSource("hostileLengths")
  void hostileHeaderLengthsAreRefused(long length, String message) {
    byte[] file =
        ByteBuffer.allocate(10)
            .order(ByteOrder.LITTLE_ENDIAN)
            .putLong(length)
            .put((byte) '{')
            .array();
    assertThatThrownBy(() -> parse(file))
        .isInstanceOf(MalformedFileException.class)
        .hasMessageContaining(message);
  }

  @Test
  void aFileTooShortForALengthIsRefused() {
    for (int size = 0; size < 8; size++) {
      byte[] file = new byte[size];
      assertThatThrownBy(() -> parse(file))
          .isInstanceOf(MalformedFileException.class)
          .hasMessageContaining("has " + size + " bytes");
    }
  }

  @Test
  void headersMustBeUtf8() {
    byte[] file = bytes("{\"x\":1}");
    file[10] = (byte) 0xff;
    assertThatThrownBy(() -> parse(file))
        .isInstanceOf(MalformedFileException.class)
        .hasMessageContaining("not UTF-8");
  }

  @Test
  void tensorsMayBeListedInAnyOrder() throws MalformedFileException {
    String json =
        "{\"last\":%s,\"none\":%s,\"first\":%s}  "
            .formatted(
                tensor("\"U8\"", "[1]", "[1,2]"),
                tensor("\"U8\"", "[0]", "[1,1]"),
                tensor("\"U8\"", "[1]", "[0,1]"));
    SafetensorsHeader header = parse(bytes(json, (byte) 1, (byte) 2));
    assertThat(header.entries().keySet()).containsExactly("last", "none", "first");
    assertThat(header.entries().get("last").toInts()).containsExactly(2);
  }

  @Test
  void messagesNameTheFile() throws IOException {
    Path file = folder.resolve("refused.safetensors");
    Files.write(file, bytes("{}", (byte) 0));
    assertThatThrownBy(() -> Safetensors.open(file))
        .isInstanceOf(MalformedFileException.class)
        .hasMessageContaining(file.toString());
  }
}
