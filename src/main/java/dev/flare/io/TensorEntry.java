package dev.flare.io;

import dev.flare.DType;
import dev.flare.InvalidArgumentException;
import dev.flare.Shape;
import dev.flare.Tensor;
import dev.flare.UnsupportedException;
import java.lang.foreign.MemorySegment;
import java.util.Arrays;

/**
 * A named tensor of a file: element type, shape, and its bytes, dense and row-major.
 *
 * <p>The bytes belong to whoever made the entry: entries of an open file are read-only views of the
 * mapping and end with it. Immutable but for the bytes; any thread may use it.
 */
public final class TensorEntry {
  private final String name;
  private final ElementType type;
  private final Shape shape;
  private final MemorySegment data;

  private TensorEntry(String name, ElementType type, Shape shape, MemorySegment data) {
    this.name = name;
    this.type = type;
    this.shape = shape;
    this.data = data;
  }

  /**
   * Makes an entry over existing bytes, which are not copied.
   *
   * @param name name in the file
   * @param type element type
   * @param shape extents, outermost first
   * @param data exactly the bytes of the elements, dense, row-major, little-endian
   * @return the entry
   * @throws InvalidArgumentException if {@code data} has another size
   */
  public static TensorEntry of(String name, ElementType type, Shape shape, MemorySegment data) {
    long bytes = byteSize(type, shape);
    if (data.byteSize() != bytes) {
      throw new InvalidArgumentException(
          "data", data.byteSize() + " bytes", bytes + " bytes: " + type + " " + shape);
    }
    return new TensorEntry(name, type, shape, data);
  }

  /**
   * Makes an entry over the memory of a tensor, which is not copied and must stay open while the
   * entry is used.
   *
   * @param name name in the file
   * @param tensor dense, row-major, on the CPU
   * @return the entry
   * @throws InvalidArgumentException if the tensor has gaps or another order
   * @throws dev.flare.ClosedException if the tensor is closed
   */
  public static TensorEntry of(String name, Tensor tensor) {
    if (!tensor.isContiguous()) {
      throw new InvalidArgumentException(
          "tensor", Arrays.toString(tensor.strides()) + " strides", "a dense one; copy() it first");
    }
    return of(name, ElementType.of(tensor.dtype()), tensor.shape(), tensor.segment());
  }

  /**
   * Makes an entry with elements on the heap.
   *
   * @param name name in the file
   * @param type element type
   * @param shape extents, outermost first
   * @param values the elements, row-major; each is rounded to the nearest one of {@code type},
   *     whole numbers saturate
   * @return the entry
   * @throws InvalidArgumentException if the number of values is not that of the shape
   * @throws UnsupportedException for types that are only copied: BOOL, F8_E5M2, U32, U64
   */
  public static TensorEntry ofValues(String name, ElementType type, Shape shape, double... values) {
    if (values.length != shape.elements()) {
      throw new InvalidArgumentException(
          "values", values.length, shape.elements() + " of shape " + shape);
    }
    byte[] bytes = new byte[Math.toIntExact(byteSize(type, shape))];
    MemorySegment data = MemorySegment.ofArray(bytes);
    for (int i = 0; i < values.length; i++) {
      type.encode(data, (long) i * type.bytes(), values[i]);
    }
    return new TensorEntry(name, type, shape, data);
  }

  private static long byteSize(ElementType type, Shape shape) {
    try {
      return Math.multiplyExact(shape.elements(), (long) type.bytes());
    } catch (ArithmeticException e) {
      throw new InvalidArgumentException("shape", shape, "at most 2^63-1 bytes of " + type);
    }
  }

  /** {@return the name in the file} */
  public String name() {
    return name;
  }

  /** {@return the element type} */
  public ElementType type() {
    return type;
  }

  /**
   * {@return the dtype of a tensor over these bytes}
   *
   * @throws UnsupportedException if flare has none for these elements
   */
  public DType dtype() {
    return type.dtype();
  }

  /** {@return the extents, outermost first} */
  public Shape shape() {
    return shape;
  }

  /** {@return the bytes: dense, row-major, little-endian, of any alignment} */
  public MemorySegment data() {
    return data;
  }

  /**
   * Makes a tensor over the bytes, without copying them. It borrows them: it must not be used once
   * the file or arena that they belong to is closed. Over a file it is read-only.
   *
   * @return a dense tensor on the CPU
   * @throws UnsupportedException if flare has no dtype for these elements
   * @throws InvalidArgumentException if the bytes lie in a Java array, or not at a multiple of the
   *     element's size (a file may be written so; {@link #copy} takes any)
   */
  public Tensor tensor() {
    return Tensor.of(data, dtype(), shape.dims());
  }

  /**
   * Copies the bytes into a tensor of their own, whatever their alignment.
   *
   * @return a dense tensor on the CPU that the caller closes
   * @throws UnsupportedException if flare has no dtype for these elements
   * @throws dev.flare.OutOfMemoryException if there is not that much memory
   */
  public Tensor copy() {
    Tensor copy = Tensor.empty(dtype(), shape.dims());
    copy.segment().copyFrom(data);
    return copy;
  }

  /**
   * {@return the elements as doubles, row-major; exact but for 64-bit integers}
   *
   * @throws UnsupportedException for more elements than an array holds
   */
  public double[] toDoubles() {
    double[] values = new double[arraySize()];
    for (int i = 0; i < values.length; i++) {
      values[i] = type.decode(data, (long) i * type.bytes());
    }
    return values;
  }

  /**
   * {@return the elements of an index tensor, row-major}
   *
   * @throws UnsupportedException for elements that are not whole numbers, or more of them than an
   *     array holds
   * @throws InvalidArgumentException for an element that does not fit in an int
   */
  public int[] toInts() {
    int[] values = new int[arraySize()];
    for (int i = 0; i < values.length; i++) {
      long value = type.decodeInteger(data, (long) i * type.bytes());
      if (value != (int) value) {
        throw new InvalidArgumentException(
            name + "[" + i + "]", value, "a number that fits in 32 bits");
      }
      values[i] = (int) value;
    }
    return values;
  }

  private int arraySize() {
    // The largest array that HotSpot allocates.
    if (shape.elements() > Integer.MAX_VALUE - 8) {
      throw new UnsupportedException(
          name + " has " + shape.elements() + " elements, too many for an array: use data()");
    }
    return (int) shape.elements();
  }

  /** {@return name, type and shape, such as {@code k BF16 [2, 67, 2, 128]}} */
  @Override
  public String toString() {
    return name + " " + type + " " + shape;
  }
}
