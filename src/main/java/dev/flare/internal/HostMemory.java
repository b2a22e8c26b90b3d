package dev.flare.internal;

import static java.lang.foreign.ValueLayout.ADDRESS;
import static java.lang.foreign.ValueLayout.JAVA_LONG;

import java.io.IOException;
import java.lang.foreign.Arena;
import java.lang.foreign.FunctionDescriptor;
import java.lang.foreign.Linker;
import java.lang.foreign.MemorySegment;
import java.lang.invoke.MethodHandle;
import java.nio.channels.FileChannel;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import org.jspecify.annotations.Nullable;

/**
 * Host memory for tensors and workspaces.
 *
 * <p>It comes from the C heap, because {@link Arena#allocate} writes zeros over every byte, by one
 * thread: 300 ms for 256 MiB that a kernel is about to overwrite. Where native access is denied an
 * arena's own memory does, so that tensors work without it.
 */
public final class HostMemory {
  /** Alignment of every allocation: what a workspace needs, and more than any vector load wants. */
  public static final long ALIGNMENT = 256;

  private static final long SLACK = ALIGNMENT;

  private HostMemory() {}

  /** The C heap's functions; null where native access is denied. */
  private record CHeap(MethodHandle malloc, MethodHandle calloc, MethodHandle free) {
    static final @Nullable CHeap INSTANCE = find();

    private static @Nullable CHeap find() {
      Linker linker = Linker.nativeLinker();
      var symbols = linker.defaultLookup();
      try {
        return new CHeap(
            linker.downcallHandle(
                symbols.find("malloc").orElseThrow(), FunctionDescriptor.of(ADDRESS, JAVA_LONG)),
            linker.downcallHandle(
                symbols.find("calloc").orElseThrow(),
                FunctionDescriptor.of(ADDRESS, JAVA_LONG, JAVA_LONG)),
            linker.downcallHandle(
                symbols.find("free").orElseThrow(), FunctionDescriptor.ofVoid(ADDRESS)));
      } catch (IllegalCallerException e) {
        return null;
      }
    }

    MemorySegment allocate(long bytes, boolean zeroed) {
      try {
        return zeroed
            ? (MemorySegment) calloc.invokeExact(1L, bytes)
            : (MemorySegment) malloc.invokeExact(bytes);
      } catch (Throwable e) {
        throw new AssertionError(e);
      }
    }

    void release(MemorySegment base) {
      try {
        free.invokeExact(base);
      } catch (Throwable e) {
        throw new AssertionError(e);
      }
    }
  }

  /**
   * Allocates memory aligned to {@link #ALIGNMENT}.
   *
   * @param bytes may be 0
   * @param zeroed false leaves the content undefined
   * @return null if there is not that much
   */
  @SuppressWarnings("MustBeClosedChecker") // the allocation closes it
  public static @Nullable Allocation allocate(long bytes, boolean zeroed) {
    Arena arena = Arena.ofShared();
    MemorySegment segment = allocate(arena, bytes, zeroed);
    if (segment == null) {
      arena.close();
      return null;
    }
    return Allocation.owned(segment, arena);
  }

  /**
   * Allocates a plan's workspace, which closes with {@code arena}.
   *
   * @return null if there is not that much
   */
  public static @Nullable MemorySegment workspace(Arena arena, long bytes) {
    return allocate(arena, bytes, false);
  }

  private static @Nullable MemorySegment allocate(Arena arena, long bytes, boolean zeroed) {
    if (bytes > Long.MAX_VALUE - SLACK) {
      return null;
    }
    CHeap heap = CHeap.INSTANCE;
    if (heap == null) {
      try {
        return arena.allocate(Math.max(bytes, 1), ALIGNMENT).asSlice(0, bytes);
      } catch (OutOfMemoryError e) {
        return null;
      }
    }
    MemorySegment base = heap.allocate(bytes + SLACK, zeroed);
    if (base.equals(MemorySegment.NULL)) {
      return null;
    }
    long aligned = (base.address() + SLACK - 1) & -ALIGNMENT;
    return MemorySegment.ofAddress(aligned).reinterpret(bytes, arena, s -> heap.release(base));
  }

  /**
   * Maps a part of a file, read-only.
   *
   * @throws IOException if the file cannot be opened, or is shorter than {@code offset + bytes}
   */
  @SuppressWarnings("MustBeClosedChecker") // the allocation closes it
  public static Allocation map(Path file, long offset, long bytes) throws IOException {
    try (FileChannel channel = FileChannel.open(file, StandardOpenOption.READ)) {
      long size = channel.size();
      if (offset > size - bytes) {
        throw new IOException(
            file + " has " + size + " bytes; " + bytes + " from offset " + offset + " are wanted");
      }
      Arena arena = Arena.ofShared();
      try {
        return Allocation.owned(
            channel.map(FileChannel.MapMode.READ_ONLY, offset, bytes, arena), arena);
      } catch (IOException | RuntimeException | Error e) {
        arena.close();
        throw e;
      }
    }
  }

  /** Host memory that the driver allocated, as a segment that can be closed. */
  public static final class Pinned {
    private final MemorySegment segment;
    private final Arena arena;

    private Pinned(MemorySegment segment, Arena arena) {
      this.segment = segment;
      this.arena = arena;
    }

    public MemorySegment segment() {
      return segment;
    }

    /** Ends access from Java; false if somebody reads or copies it right now. */
    public boolean close() {
      try {
        arena.close();
        return true;
      } catch (IllegalStateException e) {
        return false;
      }
    }
  }

  /** Makes memory at an address reachable; the caller gives it back after closing. */
  @SuppressWarnings("MustBeClosedChecker") // Pinned closes it
  public static Pinned at(long address, long bytes) {
    Arena arena = Arena.ofShared();
    return new Pinned(MemorySegment.ofAddress(address).reinterpret(bytes, arena, null), arena);
  }
}
