package dev.flare.io;

import dev.flare.InvalidArgumentException;
import java.io.IOException;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.ValueLayout;
import java.nio.ByteOrder;
import java.nio.channels.FileChannel;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.List;
import java.util.Map;
import java.util.NoSuchElementException;
import java.util.Optional;

/**
 * An open safetensors file, mapped into memory.
 *
 * <p>Layout: 8 bytes header length (little-endian), a JSON header that names each tensor's dtype,
 * shape and byte range, then the bytes of the tensors without gaps. A header that breaks a rule is
 * refused: bad JSON, a repeated key, a dtype that is not one of {@link ElementType}, a size that
 * does not match the byte range, ranges that overlap, leave holes or leave the file, or anything
 * behind the last tensor.
 *
 * <p><b>Ownership.</b> {@link #open(Path)} makes a file that the caller closes; its entries end
 * with it. With {@link #open(Path, Arena)} the mapping lives as long as the arena.
 *
 * <p><b>Threads.</b> Any thread may use an open file. Closing it while another thread reads an
 * entry's bytes throws {@link IllegalStateException} in one of the two. A file must not be
 * shortened while it is open: touching bytes that are gone is an {@link InternalError}.
 */
public final class Safetensors implements AutoCloseable {
  /** The longest header that the format allows, in bytes. */
  static final long MAX_HEADER_BYTES = 100_000_000;

  private final Path file;
  private final Arena arena;
  private final boolean ownsArena;
  private final SafetensorsHeader header;

  private Safetensors(Path file, Arena arena, boolean ownsArena, SafetensorsHeader header) {
    this.file = file;
    this.arena = arena;
    this.ownsArena = ownsArena;
    this.header = header;
  }

  /**
   * Maps a file and checks its header.
   *
   * @param file the file
   * @return the open file; close it
   * @throws MalformedFileException if it is not a safetensors file
   * @throws IOException if it cannot be read
   */
  @SuppressWarnings("MustBeClosedChecker") // the object owns the arena and closes it
  public static Safetensors open(Path file) throws IOException {
    Arena arena = Arena.ofShared();
    try {
      return open(file, arena, true);
    } catch (IOException | RuntimeException | Error e) {
      arena.close();
      throw e;
    }
  }

  /**
   * Maps a file for the life of an arena.
   *
   * @param file the file
   * @param arena keeps the mapping; closing the returned object does not close it
   * @return the open file
   * @throws MalformedFileException if it is not a safetensors file
   * @throws IOException if it cannot be read
   */
  public static Safetensors open(Path file, Arena arena) throws IOException {
    return open(file, arena, false);
  }

  private static Safetensors open(Path file, Arena arena, boolean ownsArena) throws IOException {
    MemorySegment bytes;
    try (FileChannel channel = FileChannel.open(file, StandardOpenOption.READ)) {
      bytes = channel.map(FileChannel.MapMode.READ_ONLY, 0, channel.size(), arena);
    }
    return new Safetensors(file, arena, ownsArena, parse(file, bytes));
  }

  /** Checks the header of {@code bytes}, a whole file, and cuts the tensors out of it. */
  static SafetensorsHeader parse(Path file, MemorySegment bytes) throws MalformedFileException {
    if (bytes.byteSize() < Long.BYTES) {
      throw new MalformedFileException(
          file, "has " + bytes.byteSize() + " bytes, too few for the 8 of a header length");
    }
    ValueLayout.OfLong littleEndian =
        ValueLayout.JAVA_LONG_UNALIGNED.withOrder(ByteOrder.LITTLE_ENDIAN);
    long headerBytes = bytes.get(littleEndian, 0);
    if (headerBytes < 0 || headerBytes > MAX_HEADER_BYTES) {
      throw new MalformedFileException(
          file,
          "header length is "
              + Long.toUnsignedString(headerBytes)
              + ", the format allows "
              + MAX_HEADER_BYTES);
    }
    long rest = bytes.byteSize() - Long.BYTES;
    if (headerBytes > rest) {
      throw new MalformedFileException(
          file, "header length is " + headerBytes + ", the file has " + rest + " bytes after it");
    }
    byte[] json = bytes.asSlice(Long.BYTES, headerBytes).toArray(ValueLayout.JAVA_BYTE);
    return SafetensorsHeader.parse(file, json, bytes.asSlice(Long.BYTES + headerBytes));
  }

  /**
   * Writes a file: all of it or nothing. The bytes go to a temporary file beside it, which then
   * takes its place in one step; a file that is open elsewhere keeps its old contents.
   *
   * @param file the file; replaced if it exists
   * @param entries the tensors, in any order, with distinct names
   * @param metadata free text by key
   * @throws InvalidArgumentException if two entries have one name, one is called {@code
   *     __metadata__}, or the header would be longer than the format allows
   * @throws IOException if writing fails
   */
  public static void write(Path file, List<TensorEntry> entries, Map<String, String> metadata)
      throws IOException {
    SafetensorsHeader.Layout layout = SafetensorsHeader.layOut(entries, metadata);
    AtomicFile.write(
        file,
        out -> {
          out.write(layout.prefix());
          for (TensorEntry entry : layout.order()) {
            out.write(entry.data());
          }
        });
  }

  /** {@return the file's path, as it was opened} */
  public Path file() {
    return file;
  }

  /** {@return the free text of the header by key, in the file's order} */
  public Map<String, String> metadata() {
    return header.metadata();
  }

  /** {@return the tensors in the order of the header} */
  public List<TensorEntry> entries() {
    return List.copyOf(header.entries().values());
  }

  /**
   * {@return the tensor of a name, if the file has it}
   *
   * @param name the name
   */
  public Optional<TensorEntry> find(String name) {
    return Optional.ofNullable(header.entries().get(name));
  }

  /**
   * {@return the tensor of a name}
   *
   * @param name the name
   * @throws NoSuchElementException if the file has none; the message lists those it has
   */
  public TensorEntry get(String name) {
    return find(name)
        .orElseThrow(
            () ->
                new NoSuchElementException(
                    file + " has no tensor '" + name + "'; it has " + names()));
  }

  private String names() {
    int shown = 20;
    List<String> names = List.copyOf(header.entries().keySet());
    return names.size() <= shown
        ? names.toString()
        : names.subList(0, shown) + " and " + (names.size() - shown) + " more";
  }

  /** Unmaps the file, unless an arena was given; its entries must not be used any more. */
  @Override
  public void close() {
    if (ownsArena && arena.scope().isAlive()) {
      arena.close();
    }
  }

  /** {@return the path and the number of tensors} */
  @Override
  public String toString() {
    return "Safetensors[" + file + ", " + header.entries().size() + " tensors]";
  }
}
