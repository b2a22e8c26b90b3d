package dev.flare.io;

import static org.assertj.core.api.Assertions.assertThat;
import static org.assertj.core.api.Assertions.assertThatThrownBy;

import dev.flare.InvalidArgumentException;
import dev.flare.Shape;
import dev.flare.Tensor;
import dev.flare.UnsupportedException;
import java.io.IOException;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.HexFormat;
import java.util.stream.Stream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.Arguments;
import org.junit.jupiter.params.provider.EnumSource;
import org.junit.jupiter.params.provider.MethodSource;
import org.junit.jupiter.params.provider.ValueSource;

/** Reading and writing npy files. */
class NpyTest {
  private static final Path NAME = Path.of("a.npy");

  @TempDir Path folder;

  /** A file of this version, header text and data. */
  static byte[] bytes(int version, String header, byte... data) {
    byte[] text = header.getBytes(StandardCharsets.UTF_8);
    ByteBuffer file =
        ByteBuffer.allocate(8 + (version == 1 ? 2 : 4) + text.length + data.length)
            .order(ByteOrder.LITTLE_ENDIAN)
            .put(new byte[] {(byte) 0x93, 'N', 'U', 'M', 'P', 'Y', (byte) version, 0});
    if (version == 1) {
      file.putShort((short) text.length);
    } else {
      file.putInt(text.length);
    }
    return file.put(text).put(data).array();
  }

  private static TensorEntry parse(byte... file) throws MalformedFileException {
    return Npy.parse(NAME, MemorySegment.ofArray(file));
  }

  private static String header(String descr, String fortran, String shape) {
    return "{'descr': %s, 'fortran_order': %s, 'shape': %s, }\n".formatted(descr, fortran, shape);
  }

  @ParameterizedTest
  @EnumSource(names = {"F16", "F32", "F64", "I32", "I64", "U8", "I8", "I16", "U16"})
  void arraysComeBack(ElementType type) throws IOException {
    Path file = folder.resolve("x.npy");
    TensorEntry x = TensorEntry.ofValues("any", type, Shape.of(2, 1, 3), 0, 1, 2, 3, 50, 100);
    Npy.write(file, x);
    try (Arena arena = Arena.ofConfined()) {
      TensorEntry got = Npy.open(file, arena);
      assertThat(got.name()).isEqualTo("x");
      assertThat(got.type()).isEqualTo(type);
      assertThat(got.shape()).isEqualTo(x.shape());
      assertThat(got.toDoubles()).isEqualTo(x.toDoubles());
      assertThat(got.data().address() % 64).isZero();
    }
  }

  static Stream<Shape> shapes() {
    return Stream.of(Shape.of(), Shape.of(0), Shape.of(1), Shape.of(5), Shape.of(3, 0, 2));
  }

  @ParameterizedTest
  @MethodSource("shapes")
  void everyShapeComesBack(Shape shape) throws IOException {
    Path file = folder.resolve("x.npy");
    double[] values = new double[(int) shape.elements()];
    Arrays.setAll(values, i -> i - 1.5);
    Npy.write(file, TensorEntry.ofValues("x", ElementType.F32, shape, values));
    try (Arena arena = Arena.ofConfined();
        Tensor copy = Npy.open(file, arena).copy()) {
      TensorEntry got = Npy.open(file, arena);
      assertThat(got.shape()).isEqualTo(shape);
      assertThat(got.toDoubles()).isEqualTo(values);
      assertThat(got.tensor().shape()).isEqualTo(shape);
      assertThat(copy.toDoubleArray()).isEqualTo(values);
    }
  }

  @Test
  void theBytesAreThoseOfNumPy() throws IOException {
    // What numpy.save writes for numpy.arange(3, dtype='<i4').
    String text = "{'descr': '<i4', 'fortran_order': False, 'shape': (3,), }";
    byte[] numpy =
        bytes(
            1,
            text + " ".repeat(117 - text.length()) + "\n",
            HexFormat.of().parseHex("000000000100000002000000"));
    assertThat(parse(numpy).toInts()).containsExactly(0, 1, 2);
    Path file = folder.resolve("arange.npy");
    Npy.write(file, TensorEntry.ofValues("arange", ElementType.I32, Shape.of(3), 0, 1, 2));
    byte[] ours = Files.readAllBytes(file);
    assertThat(parse(ours).toInts()).containsExactly(0, 1, 2);
    assertThat(new String(ours, 10, text.length(), StandardCharsets.US_ASCII)).isEqualTo(text);
    assertThat((ours.length - 12) % 64).isZero();
    assertThat(ours[ours.length - 13]).isEqualTo((byte) '\n');
  }

  @ParameterizedTest
  @ValueSource(ints = {1, 2, 3})
  void everyVersionIsRead(int version) throws MalformedFileException {
    byte[] file =
        bytes(version, header("'<f4'", "False", "(1,)"), new byte[] {0, 0, (byte) 0x80, 0x3f});
    assertThat(parse(file).toDoubles()).containsExactly(1);
  }

  @Test
  void headersMayBeWrittenOtherwise() throws MalformedFileException {
    String text = "{ \"shape\":(2L ,1) ,\t'fortran_order' : False,'descr':'|u1'}";
    assertThat(parse(bytes(1, text, (byte) 3, (byte) 200)).toInts()).containsExactly(3, 200);
  }

  @Test
  void oneDimensionInFortranOrderIsTheSame() throws MalformedFileException {
    byte[] file = bytes(1, header("'|u1'", "True", "(2,)"), (byte) 1, (byte) 2);
    assertThat(parse(file).toInts()).containsExactly(1, 2);
  }

  @Test
  void whatNpyLacksIsNotWritten() {
    TensorEntry x = TensorEntry.ofValues("x", ElementType.BF16, Shape.of(1), 1);
    assertThatThrownBy(() -> Npy.write(folder.resolve("x.npy"), x))
        .isInstanceOf(UnsupportedException.class)
        .hasMessageContainingAll("BF16", "safetensors");
    long[] ones = new long[30_000];
    Arrays.fill(ones, 1);
    TensorEntry deep = TensorEntry.ofValues("x", ElementType.F32, Shape.of(ones), 1);
    assertThatThrownBy(() -> Npy.write(folder.resolve("x.npy"), deep))
        .isInstanceOf(InvalidArgumentException.class)
        .hasMessageContaining("fewer dimensions");
    assertThat(folder).isEmptyDirectory();
  }

  static Stream<Arguments> hostileHeaders() {
    String huge = "9223372036854775807";
    return Stream.of(
        Arguments.of("Fortran order", header("'<f4'", "True", "(1, 1)"), 4, "Fortran order"),
        Arguments.of("big-endian", header("'>f4'", "False", "(1,)"), 4, "descr is '>f4'"),
        Arguments.of("objects", header("'|O'", "False", "(1,)"), 8, "descr is '|O'"),
        Arguments.of("complex", header("'<c8'", "False", "(1,)"), 8, "descr is '<c8'"),
        Arguments.of("records", header("[('a', '<f4')]", "False", "(1,)"), 4, "quoted string"),
        Arguments.of("no dict", "[]", 0, "want '{'"),
        Arguments.of("empty", "", 0, "its end"),
        Arguments.of("cut off", "{'descr': '<f4", 0, "short quoted string"),
        Arguments.of("fields missing", "{}", 0, "lacks one of"),
        Arguments.of("field twice", "{'descr': '<f4', 'descr': '<f4'}", 0, "two of 'descr'"),
        Arguments.of("unknown field", "{'strides': (1,)}", 0, "a key 'strides'"),
        Arguments.of("order is a number", header("'<f4'", "0", "(1,)"), 4, "True or False"),
        Arguments.of("shape is a list", header("'<f4'", "False", "[1]"), 4, "want '('"),
        Arguments.of("negative extent", header("'<f4'", "False", "(-1,)"), 4, "an extent"),
        Arguments.of("fraction", header("'<f4'", "False", "(1.5,)"), 4, "want ')'"),
        Arguments.of(
            "extent of 2^63", header("'<f4'", "False", "(9223372036854775808,)"), 4, "2^63-1"),
        Arguments.of(
            "elements overflow",
            header("'|u1'", "False", "(4294967296, 4294967296)"),
            0,
            "too many"),
        Arguments.of("bytes overflow", header("'<f8'", "False", "(" + huge + ",)"), 0, "too many"),
        Arguments.of(
            "too few bytes", header("'<f4'", "False", "(2,)"), 4, "4 bytes of data, want 8"),
        Arguments.of(
            "too many bytes", header("'<f4'", "False", "(1,)"), 5, "5 bytes of data, want 4"),
        Arguments.of("code", "__import__('os').system('true')", 0, "want '{'"),
        Arguments.of("text behind", header("'<f4'", "False", "(1,)") + "x", 4, "the end"));
  }

  @ParameterizedTest(name = "{0}")
  @MethodSource("hostileHeaders")
  void hostileHeadersAreRefused(String what, String text, int dataBytes, String message) {
    assertThatThrownBy(() -> parse(bytes(1, text, new byte[dataBytes])))
        .as(what)
        .isInstanceOf(MalformedFileException.class)
        .hasMessageStartingWith("a.npy: ")
        .hasMessageContaining(message);
  }

  @Test
  void hostileBeginningsAreRefused() {
    byte[] whole = bytes(2, header("'<f4'", "False", "(1,)"), new byte[4]);
    for (int size = 0; size < whole.length; size++) {
      byte[] cut = Arrays.copyOf(whole, size);
      assertThatThrownBy(() -> parse(cut)).isInstanceOf(MalformedFileException.class);
    }
    assertThatThrownBy(() -> parse(bytes(4, "")))
        .isInstanceOf(MalformedFileException.class)
        .hasMessageContaining("version is 4");
    byte[] length = whole.clone();
    Arrays.fill(length, 8, 12, (byte) 0xff);
    assertThatThrownBy(() -> parse(length))
        .isInstanceOf(MalformedFileException.class)
        .hasMessageContaining("header length is 4294967295");
    byte[] magic = whole.clone();
    magic[1] = 'n';
    assertThatThrownBy(() -> parse(magic))
        .isInstanceOf(MalformedFileException.class)
        .hasMessageContaining("NUMPY");
  }
}
