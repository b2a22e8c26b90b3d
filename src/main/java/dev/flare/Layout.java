package dev.flare;

import java.util.Arrays;

/** Where the elements of a tensor lie, counted from its first one. Immutable. */
final class Layout {
  private final DType dtype;
  private final Shape shape;
  private final long[] strides; // elements
  private final long extent; // elements from the first to past the last
  private final boolean contiguous;

  private Layout(DType dtype, Shape shape, long[] strides) {
    this.dtype = dtype;
    this.shape = shape;
    this.strides = strides;
    this.extent = extent(dtype, shape, strides);
    this.contiguous = isContiguous(shape, strides);
  }

  static Layout dense(DType dtype, Shape shape) {
    return new Layout(dtype, shape, shape.contiguousStrides());
  }

  static Layout strided(DType dtype, Shape shape, long... strides) {
    if (strides.length != shape.rank()) {
      throw new InvalidArgumentException(
          "strides",
          Arrays.toString(strides),
          "one stride for each of the " + shape.rank() + " dimensions of " + shape);
    }
    for (long s : strides) {
      if (s < 0) {
        throw new InvalidArgumentException(
            "strides", Arrays.toString(strides), "strides of zero or more elements");
      }
    }
    return new Layout(dtype, shape, canonical(shape, strides));
  }

  /**
   * A dimension of one element has no stride of its own: it gets the one it would have in dense
   * memory, so that kernels see no odd number there.
   */
  private static long[] canonical(Shape shape, long[] strides) {
    long[] result = strides.clone();
    long inner = 1;
    for (int i = result.length - 1; i >= 0; i--) {
      if (shape.at(i) == 1) {
        result[i] = inner;
      } else if (shape.elements() > 0) {
        inner = Math.max(1, result[i]) * shape.at(i);
      }
    }
    return result;
  }

  private static long extent(DType dtype, Shape shape, long[] strides) {
    if (shape.elements() == 0) {
      return 0;
    }
    try {
      long last = 0;
      for (int i = 0; i < strides.length; i++) {
        last = Math.addExact(last, Math.multiplyExact(shape.at(i) - 1, strides[i]));
      }
      long extent = Math.addExact(last, 1);
      Math.multiplyExact(extent, dtype.bytes());
      return extent;
    } catch (ArithmeticException e) {
      throw new InvalidArgumentException(
          "shape",
          shape + " with strides " + Arrays.toString(strides) + " of " + dtype,
          "at most 2^63-1 bytes from the first to the last element");
    }
  }

  private static boolean isContiguous(Shape shape, long[] strides) {
    if (shape.elements() == 0) {
      return true;
    }
    long step = 1;
    for (int i = strides.length - 1; i >= 0; i--) {
      if (shape.at(i) != 1 && strides[i] != step) {
        return false;
      }
      step *= shape.at(i);
    }
    return true;
  }

  DType dtype() {
    return dtype;
  }

  Shape shape() {
    return shape;
  }

  int rank() {
    return strides.length;
  }

  long dim(int axis) {
    return shape.at(axis);
  }

  long stride(int axis) {
    return strides[axis];
  }

  long[] strides() {
    return strides.clone();
  }

  /** Bytes from the first to past the last element. */
  long extentBytes() {
    return extent * dtype.bytes();
  }

  /** Bytes of the elements alone. */
  long bytes() {
    return shape.elements() * dtype.bytes();
  }

  /** Whether elements with places of their own leave none between them, in whichever order. */
  boolean isGapless() {
    return extent == shape.elements();
  }

  boolean isContiguous() {
    return contiguous;
  }

  /** Whether no element is reachable by two different indices. */
  boolean isInjective() {
    // Sorted by stride, each dimension must step over all that the smaller ones span.
    int rank = strides.length;
    Integer[] order = new Integer[rank];
    for (int i = 0; i < rank; i++) {
      order[i] = i;
    }
    Arrays.sort(order, (a, b) -> Long.compare(strides[a], strides[b]));
    long span = 1;
    for (int i : order) {
      if (shape.at(i) > 1) {
        if (strides[i] < span) {
          return shape.elements() == 0;
        }
        span += (shape.at(i) - 1) * strides[i];
      }
    }
    return true;
  }

  @Override
  public boolean equals(Object other) {
    // Most launches bring the very tensors of the launch before.
    if (this == other) { // most launches bring the very tensors of the launch before
      return true;
    }
    return other instanceof Layout that
        && dtype == that.dtype
        && shape.equals(that.shape)
        && Arrays.equals(strides, that.strides);
  }

  @Override
  public int hashCode() {
    return 31 * shape.hashCode() + Arrays.hashCode(strides);
  }

  @Override
  public String toString() {
    return dtype + " " + shape + (contiguous ? "" : " strides " + Arrays.toString(strides));
  }
}
