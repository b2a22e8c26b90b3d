package dev.flare.internal;

import static java.lang.foreign.ValueLayout.JAVA_LONG;

import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;

/** A few bytes of native memory for each thread, to pass out-pointers without allocating. */
final class Scratch {
  private static final int TEXT_BYTES = 2048;
  private static final int STRUCT_BYTES = 256;
  private static final ThreadLocal<Scratch> CURRENT = ThreadLocal.withInitial(Scratch::new);

  // Lives as long as its thread, so the collector may free it.
  private final MemorySegment word;
  private final MemorySegment second;
  private final MemorySegment text;
  private final MemorySegment struct;

  private Scratch() {
    Arena arena = Arena.ofAuto();
    word = arena.allocate(JAVA_LONG);
    second = arena.allocate(JAVA_LONG);
    text = arena.allocate(TEXT_BYTES);
    struct = arena.allocate(STRUCT_BYTES, JAVA_LONG.byteSize());
  }

  static Scratch get() {
    return CURRENT.get();
  }

  /** Eight bytes. */
  MemorySegment word() {
    return word;
  }

  /** Eight more. */
  MemorySegment second() {
    return second;
  }

  /** Room for a NUL-terminated text. */
  MemorySegment text() {
    return text;
  }

  /** Room for a small struct, zeroed. */
  MemorySegment struct() {
    return struct.fill((byte) 0);
  }
}
