package dev.flare.io;

import dev.flare.InvalidArgumentException;
import dev.flare.Shape;
import dev.flare.UnsupportedException;
import java.io.IOException;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.ValueLayout;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.channels.FileChannel;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.Arrays;
import java.util.stream.Collectors;

/**
 * Reads and writes npy files, NumPy's format for one array: versions 1, 2 and 3, little-endian
 * numbers in C order.
 *
 * <p>bfloat16 and FP8 have no npy type; use {@link Safetensors} for them.
 */
public final class Npy {
  private static final byte[] MAGIC = {(byte) 0x93, 'N', 'U', 'M', 'P', 'Y'};

  /** No real header comes near; what claims more is not one. */
  private static final long MAX_HEADER_BYTES = 1 << 20;

  /** NumPy aligns the data to this, so that it can be mapped. */
  private static final int ALIGNMENT = 64;

  private Npy() {}

  /**
   * Maps a file for the life of an arena.
   *
   * @param file the file
   * @param arena keeps the mapping
   * @return the array, named like the file without its ending
   * @throws MalformedFileException if it is not an npy file, or holds what flare does not read:
   *     objects, records, big-endian numbers, arrays in Fortran order
   * @throws IOException if it cannot be read
   */
  public static TensorEntry open(Path file, Arena arena) throws IOException {
    try (FileChannel channel = FileChannel.open(file, StandardOpenOption.READ)) {
      MemorySegment bytes = channel.map(FileChannel.MapMode.READ_ONLY, 0, channel.size(), arena);
      return parse(file, bytes);
    }
  }

  /** Checks the header of {@code bytes}, a whole file, and cuts the array out of it. */
  static TensorEntry parse(Path file, MemorySegment bytes) throws MalformedFileException {
    int fixed = MAGIC.length + 2;
    if (bytes.byteSize() < fixed
        || bytes.asSlice(0, MAGIC.length).mismatch(MemorySegment.ofArray(MAGIC)) >= 0) {
      throw new MalformedFileException(file, "does not begin with \\x93NUMPY and a version");
    }
    int version = bytes.get(ValueLayout.JAVA_BYTE, MAGIC.length);
    if (version < 1 || version > 3) {
      throw new MalformedFileException(file, "version is " + version + ", want 1, 2 or 3");
    }
    int lengthBytes = version == 1 ? 2 : 4;
    if (bytes.byteSize() < fixed + lengthBytes) {
      throw new MalformedFileException(file, "ends inside the header length");
    }
    long headerBytes = 0;
    for (int i = lengthBytes - 1; i >= 0; i--) {
      headerBytes = headerBytes << 8 | (bytes.get(ValueLayout.JAVA_BYTE, fixed + i) & 0xff);
    }
    int start = fixed + lengthBytes;
    long rest = bytes.byteSize() - start;
    if (headerBytes > Math.min(rest, MAX_HEADER_BYTES)) {
      throw new MalformedFileException(
          file,
          "header length is "
              + headerBytes
              + ", the file has "
              + rest
              + " bytes after it and flare reads headers up to "
              + MAX_HEADER_BYTES);
    }
    byte[] text = bytes.asSlice(start, headerBytes).toArray(ValueLayout.JAVA_BYTE);
    NpyHeader header = NpyHeader.parse(file, new String(text, StandardCharsets.UTF_8));
    return cut(file, header, bytes.asSlice(start + headerBytes));
  }

  private static TensorEntry cut(Path file, NpyHeader header, MemorySegment data)
      throws MalformedFileException {
    ElementType type =
        ElementType.described(header.descriptor())
            .orElseThrow(
                () ->
                    new MalformedFileException(
                        file,
                        "descr is '"
                            + header.descriptor()
                            + "', want one of "
                            + descriptors()
                            + ": convert with astype"));
    Shape shape;
    long bytes;
    try {
      shape = Shape.of(header.shape());
      bytes = Math.multiplyExact(shape.elements(), (long) type.bytes());
    } catch (InvalidArgumentException | ArithmeticException e) {
      throw new MalformedFileException(
          file, "shape is " + Arrays.toString(header.shape()) + ": too many elements", e);
    }
    if (header.fortranOrder() && shape.rank() > 1) {
      throw new MalformedFileException(
          file, "is in Fortran order: save it with numpy.ascontiguousarray");
    }
    if (bytes != data.byteSize()) {
      throw new MalformedFileException(
          file,
          "has "
              + data.byteSize()
              + " bytes of data, want "
              + bytes
              + " for "
              + type
              + " "
              + shape);
    }
    return TensorEntry.of(stem(file), type, shape, data);
  }

  private static String stem(Path file) {
    Path fileName = file.getFileName();
    String name = fileName == null ? "" : fileName.toString();
    return name.endsWith(".npy") ? name.substring(0, name.length() - 4) : name;
  }

  private static String descriptors() {
    return Arrays.stream(ElementType.values())
        .flatMap(type -> type.npyDescriptor().stream())
        .collect(Collectors.joining(" "));
  }

  /**
   * Writes a version 1 file: all of it or nothing, by way of a temporary file beside it.
   *
   * @param file the file; replaced if it exists
   * @param entry the array; its name is not stored
   * @throws UnsupportedException if the format has no such element type
   * @throws IOException if writing fails
   */
  public static void write(Path file, TensorEntry entry) throws IOException {
    String descriptor =
        entry
            .type()
            .npyDescriptor()
            .orElseThrow(
                () ->
                    new UnsupportedException(
                        "npy has no type for " + entry.type() + ": write safetensors, or F32"));
    StringBuilder shape = new StringBuilder();
    for (long dim : entry.shape().dims()) {
      shape.append(dim).append(", "); // a trailing comma is legal, and needed for one dimension
    }
    String dict =
        "{'descr': '%s', 'fortran_order': False, 'shape': (%s), }"
            .formatted(descriptor, shape.toString().stripTrailing());
    int fixed = MAGIC.length + 2 + 2;
    int total = Math.ceilDiv(fixed + dict.length() + 1, ALIGNMENT) * ALIGNMENT;
    if (total - fixed > 0xffff) {
      throw new InvalidArgumentException("shape", entry.shape(), "fewer dimensions");
    }
    byte[] prefix = new byte[total];
    Arrays.fill(prefix, (byte) ' ');
    prefix[total - 1] = '\n';
    ByteBuffer.wrap(prefix)
        .order(ByteOrder.LITTLE_ENDIAN)
        .put(MAGIC)
        .put((byte) 1)
        .put((byte) 0)
        .putShort((short) (total - fixed))
        .put(dict.getBytes(StandardCharsets.US_ASCII));
    AtomicFile.write(
        file,
        out -> {
          out.write(prefix);
          out.write(entry.data());
        });
  }
}
