package dev.flare.internal;

import static java.lang.foreign.ValueLayout.JAVA_DOUBLE;
import static java.lang.foreign.ValueLayout.JAVA_FLOAT;
import static java.lang.foreign.ValueLayout.JAVA_INT;
import static java.lang.foreign.ValueLayout.JAVA_LONG;

import java.lang.foreign.AddressLayout;
import java.lang.foreign.Arena;
import java.lang.foreign.MemoryLayout;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.SequenceLayout;
import java.lang.foreign.ValueLayout;

/**
 * A params struct of the C ABI in native memory, zeroed but for its size.
 *
 * <p>Setters write one field and allocate nothing, compiled or not: pointers go in as numbers,
 * since a segment for each would be an object for each.
 */
public final class Struct {
  private final MemorySegment segment;

  private Struct(MemorySegment segment) {
    this.segment = segment;
  }

  static Struct allocate(Arena arena, MemoryLayout layout, I32 structSize) {
    Struct struct = new Struct(arena.allocate(layout));
    return struct.set(structSize, (int) layout.byteSize());
  }

  /** A copy in other memory. */
  public Struct copy(Arena arena) {
    MemorySegment to = arena.allocate(segment.byteSize(), Long.BYTES);
    return new Struct(to.copyFrom(segment));
  }

  public MemorySegment segment() {
    return segment;
  }

  public Struct set(I32 field, int value) {
    segment.set(JAVA_INT, field.offset, value);
    return this;
  }

  public Struct set(I64 field, long value) {
    segment.set(JAVA_LONG, field.offset, value);
    return this;
  }

  public Struct set(F32 field, float value) {
    segment.set(JAVA_FLOAT, field.offset, value);
    return this;
  }

  public Struct set(F64 field, double value) {
    segment.set(JAVA_DOUBLE, field.offset, value);
    return this;
  }

  public Struct set(Pointer field, long address) {
    segment.set(JAVA_LONG, field.offset, address);
    return this;
  }

  public Struct set(I64Array field, int index, long value) {
    segment.setAtIndex(JAVA_LONG, field.offset / Long.BYTES + index, value);
    return this;
  }

  public int get(I32 field) {
    return segment.get(JAVA_INT, field.offset);
  }

  public long get(Pointer field) {
    return segment.get(JAVA_LONG, field.offset);
  }

  public long get(I64Array field, int index) {
    return segment.getAtIndex(JAVA_LONG, field.offset / Long.BYTES + index);
  }

  /** A field of type int32_t or uint32_t; the layout makes sure that it is. */
  public record I32(long offset) {
    static I32 of(ValueLayout.OfInt layout, long offset) {
      return new I32(offset);
    }
  }

  /** A field of type int64_t or uint64_t. */
  public record I64(long offset) {
    static I64 of(ValueLayout.OfLong layout, long offset) {
      return new I64(offset);
    }
  }

  /** A field of type float. */
  public record F32(long offset) {
    static F32 of(ValueLayout.OfFloat layout, long offset) {
      return new F32(offset);
    }
  }

  /** A field of type double. */
  public record F64(long offset) {
    static F64 of(ValueLayout.OfDouble layout, long offset) {
      return new F64(offset);
    }
  }

  /** A pointer. */
  public record Pointer(long offset) {
    static Pointer of(AddressLayout layout, long offset) {
      return new Pointer(offset);
    }
  }

  /** An array of int64_t inside the struct. */
  public record I64Array(long offset, int length) {
    static I64Array of(SequenceLayout layout, long offset) {
      return new I64Array(offset, (int) layout.elementCount());
    }
  }
}
