package dev.flare.io;

import dev.flare.DType;
import dev.flare.UnsupportedException;
import dev.flare.reference.Precision;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.ValueLayout;
import java.nio.ByteOrder;
import java.util.Optional;
import org.jspecify.annotations.Nullable;

/**
 * Element types of tensor files. A file may hold more types than flare computes with; such tensors
 * can be listed and copied, and only {@link #dtype} refuses them.
 *
 * <p>Elements are little-endian and need no alignment.
 */
public enum ElementType {
  /** Booleans, a byte each. */
  BOOL(1, "|b1", null, null),
  /** Unsigned bytes. */
  U8(1, "|u1", DType.UINT8, null),
  /** Signed bytes. */
  I8(1, "|i1", null, null),
  /** FP8 with 5 exponent and 2 fraction bits. */
  F8_E5M2(1, null, null, null),
  /** FP8 with 4 exponent and 3 fraction bits, without infinities. */
  F8_E4M3(1, null, DType.FP8_E4M3, Precision.FP8_E4M3),
  /** 16-bit signed integers. */
  I16(2, "<i2", null, null),
  /** 16-bit unsigned integers. */
  U16(2, "<u2", null, null),
  /** IEEE binary16. */
  F16(2, "<f2", DType.FP16, Precision.FP16),
  /** The upper half of a binary32. npy files have no such type. */
  BF16(2, null, DType.BF16, Precision.BF16),
  /** 32-bit signed integers. */
  I32(4, "<i4", DType.INT32, null),
  /** 32-bit unsigned integers. */
  U32(4, "<u4", null, null),
  /** IEEE binary32. */
  F32(4, "<f4", DType.FP32, Precision.FP32),
  /** IEEE binary64. */
  F64(8, "<f8", null, null),
  /** 64-bit signed integers. */
  I64(8, "<i8", DType.INT64, null),
  /** 64-bit unsigned integers. */
  U64(8, "<u8", null, null);

  private static final ValueLayout.OfShort SHORT =
      ValueLayout.JAVA_SHORT_UNALIGNED.withOrder(ByteOrder.LITTLE_ENDIAN);
  private static final ValueLayout.OfInt INT =
      ValueLayout.JAVA_INT_UNALIGNED.withOrder(ByteOrder.LITTLE_ENDIAN);
  private static final ValueLayout.OfLong LONG =
      ValueLayout.JAVA_LONG_UNALIGNED.withOrder(ByteOrder.LITTLE_ENDIAN);

  private final int bytes;
  private final @Nullable String npyDescriptor;
  private final @Nullable DType dtype;
  private final @Nullable Precision precision;

  ElementType(
      int bytes,
      @Nullable String npyDescriptor,
      @Nullable DType dtype,
      @Nullable Precision precision) {
    this.bytes = bytes;
    this.npyDescriptor = npyDescriptor;
    this.dtype = dtype;
    this.precision = precision;
  }

  /** {@return the size of one element in bytes} */
  public int bytes() {
    return bytes;
  }

  /**
   * {@return the dtype of a tensor with such elements}
   *
   * @throws UnsupportedException if flare has none
   */
  public DType dtype() {
    if (dtype == null) {
      throw new UnsupportedException(
          "elements of type "
              + this
              + " have no flare dtype: convert the file to F32, F16 or BF16");
    }
    return dtype;
  }

  /**
   * {@return the type that elements of a tensor have in a file}
   *
   * @param dtype the tensor's dtype
   */
  public static ElementType of(DType dtype) {
    for (ElementType type : values()) {
      if (type.dtype == dtype) {
        return type;
      }
    }
    throw new AssertionError("no element type for " + dtype);
  }

  /** The type of this name in a safetensors header, if there is one. */
  static Optional<ElementType> named(String name) {
    for (ElementType type : values()) {
      if (type.name().equals(name)) {
        return Optional.of(type);
      }
    }
    return Optional.empty();
  }

  /** The type of this descriptor in an npy header, if there is one. */
  static Optional<ElementType> described(String descriptor) {
    for (ElementType type : values()) {
      if (descriptor.equals(type.npyDescriptor)) {
        return Optional.of(type);
      }
    }
    return Optional.empty();
  }

  /** The descriptor of this type in an npy header, if it has one. */
  Optional<String> npyDescriptor() {
    return Optional.ofNullable(npyDescriptor);
  }

  /** The number that starts at {@code offset}; 64-bit integers are rounded to double. */
  double decode(MemorySegment data, long offset) {
    return switch (this) {
      case BOOL, U8 -> data.get(ValueLayout.JAVA_BYTE, offset) & 0xff;
      case I8 -> data.get(ValueLayout.JAVA_BYTE, offset);
      // E5M2 is the upper byte of a binary16.
      case F8_E5M2 -> Precision.FP16.decode(data.get(ValueLayout.JAVA_BYTE, offset) << 8);
      case F8_E4M3 -> Precision.FP8_E4M3.decode(data.get(ValueLayout.JAVA_BYTE, offset));
      case I16 -> data.get(SHORT, offset);
      case U16 -> data.get(SHORT, offset) & 0xffff;
      case F16 -> Float.float16ToFloat(data.get(SHORT, offset));
      case BF16 -> Float.intBitsToFloat(data.get(SHORT, offset) << 16);
      case I32 -> data.get(INT, offset);
      case U32 -> data.get(INT, offset) & 0xffff_ffffL;
      case F32 -> Float.intBitsToFloat(data.get(INT, offset));
      case F64 -> Double.longBitsToDouble(data.get(LONG, offset));
      case I64 -> data.get(LONG, offset);
      case U64 -> {
        long bits = data.get(LONG, offset);
        yield bits >= 0
            ? bits
            : 2.0 * (bits >>> 1 | (bits & 1)); // the last bit keeps rounding right
      }
    };
  }

  /** Writes the nearest element: floating-point types round to even, integers too, saturating. */
  void encode(MemorySegment data, long offset, double value) {
    if (precision != null) {
      put(data, offset, precision.encode(value));
      return;
    }
    switch (this) {
      case F64 -> data.set(LONG, offset, Double.doubleToRawLongBits(value));
      case I64 -> data.set(LONG, offset, (long) Math.rint(value));
      case I32 -> put(data, offset, (int) Math.rint(value));
      case I16 -> put(data, offset, saturate(value, Short.MIN_VALUE, Short.MAX_VALUE));
      case U16 -> put(data, offset, saturate(value, 0, 0xffff));
      case I8 -> put(data, offset, saturate(value, Byte.MIN_VALUE, Byte.MAX_VALUE));
      case U8 -> put(data, offset, saturate(value, 0, 0xff));
      default ->
          throw new UnsupportedException(
              "writing numbers as " + this + ": use F32, F16, BF16, I32");
    }
  }

  private void put(MemorySegment data, long offset, int bits) {
    switch (bytes) {
      case 1 -> data.set(ValueLayout.JAVA_BYTE, offset, (byte) bits);
      case 2 -> data.set(SHORT, offset, (short) bits);
      default -> data.set(INT, offset, bits);
    }
  }

  private static int saturate(double value, int min, int max) {
    return Math.clamp((long) Math.rint(value), min, max);
  }

  /** The whole number that starts at {@code offset}. */
  long decodeInteger(MemorySegment data, long offset) {
    return switch (this) {
      case I64 -> data.get(LONG, offset);
      case BOOL, U8, I8, I16, U16, I32, U32 -> (long) decode(data, offset);
      default ->
          throw new UnsupportedException("elements of type " + this + " are not whole numbers");
    };
  }
}
