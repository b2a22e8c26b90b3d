package dev.flare;

import java.util.Arrays;

/**
 * The extents of a tensor, outermost dimension first.
 *
 * <p>Immutable; any thread may use it. A dimension may be zero; a shape without dimensions is that
 * of a scalar and has one element.
 */
public final class Shape {
  private final long[] dims;
  private final long elements;

  private Shape(long[] dims) {
    long n = 1;
    boolean empty = false;
    for (long d : dims) {
      if (d < 0) {
        throw new InvalidArgumentException(
            "shape", Arrays.toString(dims), "dimensions that are zero or positive");
      }
      empty |= d == 0;
    }
    for (long d : dims) {
      // An empty shape may have factors whose product does not fit: it still has zero elements.
      long high = empty ? 0 : Math.multiplyHigh(n, d);
      n = empty ? 0 : n * d;
      if (high != 0 || n < 0) {
        throw new InvalidArgumentException(
            "shape", Arrays.toString(dims), "at most 2^63-1 elements in all");
      }
    }
    this.dims = dims;
    this.elements = n;
  }

  /**
   * Makes a shape.
   *
   * @param dims extents, outermost first; copied
   * @return the shape
   * @throws InvalidArgumentException if an extent is negative, or if the number of elements does
   *     not fit in a long
   */
  public static Shape of(long... dims) {
    return new Shape(dims.clone());
  }

  /**
   * Returns the number of dimensions.
   *
   * @return zero for a scalar
   */
  public int rank() {
    return dims.length;
  }

  /**
   * Returns one extent.
   *
   * @param axis from 0 (outermost) to rank-1; negative values count from the end, -1 is the
   *     innermost
   * @return elements along that axis
   * @throws InvalidArgumentException if there is no such axis
   */
  public long dim(int axis) {
    return dims[axis(axis)];
  }

  /**
   * Returns the number of elements.
   *
   * @return the product of all extents
   */
  public long elements() {
    return elements;
  }

  /**
   * Returns the extents.
   *
   * @return a new array, outermost first
   */
  public long[] dims() {
    return dims.clone();
  }

  /**
   * Returns the strides of a dense row-major tensor of this shape.
   *
   * @return a new array: distance in elements between neighbours along each axis
   */
  public long[] contiguousStrides() {
    long[] strides = new long[dims.length];
    long step = 1;
    for (int i = dims.length - 1; i >= 0; i--) {
      strides[i] = step;
      // Extents of zero would make every outer stride zero; nothing is addressed then anyway.
      step *= elements == 0 ? Math.min(1, dims[i]) : dims[i];
    }
    return strides;
  }

  /** Resolves a possibly negative axis. */
  int axis(int axis) {
    int resolved = axis < 0 ? axis + dims.length : axis;
    if (resolved < 0 || resolved >= dims.length) {
      throw new InvalidArgumentException(
          "axis", axis, "an axis of " + this + ", which has " + dims.length);
    }
    return resolved;
  }

  /** The extent of a resolved axis, without checks: for loops of this package. */
  long at(int axis) {
    return dims[axis];
  }

  @Override
  public boolean equals(Object other) {
    return other instanceof Shape that && Arrays.equals(dims, that.dims);
  }

  @Override
  public int hashCode() {
    return Arrays.hashCode(dims);
  }

  /** Returns the extents as {@code [2, 1024, 16, 128]}. */
  @Override
  public String toString() {
    return Arrays.toString(dims);
  }
}
