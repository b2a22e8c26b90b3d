package dev.flare;

import org.jspecify.annotations.Nullable;

/** Checks of arguments before they reach the C library: each names argument, found and wanted. */
final class Checks {
  private Checks() {}

  /** Neither null nor closed nor on another device. */
  static Tensor present(String name, @Nullable Tensor tensor, Device device) {
    Tensor found = present(name, tensor);
    if (!found.device().equals(device)) {
      throw new InvalidArgumentException(
          name, "a tensor on " + found.device(), "one on " + device + "; move it with to(device)");
    }
    return found;
  }

  /** Neither null nor closed. */
  static Tensor present(String name, @Nullable Tensor tensor) {
    if (tensor == null) {
      throw new InvalidArgumentException(name, null, "a tensor");
    }
    if (!tensor.isOpen()) {
      throw new ClosedException(name + ": " + tensor + " can't be used any more");
    }
    return tensor;
  }

  /**
   * As many dimensions as {@code form} has, which reads like {@code [B, Sq, H, D]}; the last one
   * without gaps.
   */
  static void form(String name, Tensor tensor, String form) {
    int rank = 1;
    for (int i = 0; i < form.length(); i++) {
      rank += form.charAt(i) == ',' ? 1 : 0;
    }
    if (tensor.rank() != rank) {
      throw new InvalidArgumentException(name, tensor.shape(), form);
    }
    Layout layout = tensor.layout();
    if (layout.dim(rank - 1) > 1 && layout.stride(rank - 1) != 1) {
      throw new InvalidArgumentException(
          name,
          layout,
          "stride 1 along the last dimension; copy with contiguous(), or copy() a view");
    }
  }

  static void dtype(String name, Tensor tensor, DType want) {
    if (tensor.dtype() != want) {
      throw new InvalidArgumentException(
          name, tensor.dtype(), want + "; convert with to(DType." + want + ")");
    }
  }

  /** An exact shape, in words where {@code form} helps. */
  static void shape(String name, Tensor tensor, String form, long... dims) {
    boolean equal = tensor.rank() == dims.length;
    for (int i = 0; equal && i < dims.length; i++) {
      equal = tensor.layout().dim(i) == dims[i];
    }
    if (!equal) {
      throw new InvalidArgumentException(name, tensor.shape(), form + " = " + Shape.of(dims));
    }
  }

  /** A dense row of numbers. */
  static void vector(String name, Tensor tensor, DType dtype, String form, long length) {
    dtype(name, tensor, dtype);
    form(name, tensor, form);
    shape(name, tensor, form, length);
  }

  /** A dense row of indices, of the dtype that the operation's other indices have. */
  static DType index(String name, Tensor tensor, @Nullable DType others) {
    if (tensor.dtype() != DType.INT32 && tensor.dtype() != DType.INT64) {
      throw new InvalidArgumentException(name, tensor.dtype(), "INT32 or INT64");
    }
    if (others != null && tensor.dtype() != others) {
      throw new InvalidArgumentException(
          name, tensor.dtype(), others + " like the other index tensors; convert with to(dtype)");
    }
    return tensor.dtype();
  }

  /** Number of sequences of an array of cumulative lengths. */
  static long sequences(String name, Tensor cuSeqlens) {
    form(name, cuSeqlens, "[B + 1]");
    if (cuSeqlens.elements() == 0) {
      throw new InvalidArgumentException(name, cuSeqlens.shape(), "[B + 1] with B >= 0");
    }
    return cuSeqlens.elements() - 1;
  }

  /** Checks a block table against the pool {@code [pages, page_size, ...]}; the size of a page. */
  static long pages(Tensor blockTable, long batch, String poolName, Tensor pool, long maxLength) {
    form("blockTable", blockTable, "[B, max_pages]");
    long size = positive("page_size of " + poolName, pool.dim(1));
    long pages = maxLength / size + (maxLength % size == 0 ? 0 : 1);
    if (blockTable.dim(0) != batch || blockTable.dim(1) < pages) {
      throw new InvalidArgumentException(
          "blockTable",
          blockTable.shape(),
          "["
              + batch
              + ", at least "
              + pages
              + "], for "
              + maxLength
              + " rows in pages of "
              + size);
    }
    return size;
  }

  static long positive(String name, long value) {
    if (value < 1) {
      throw new InvalidArgumentException(name, value, "at least 1");
    }
    return value;
  }

  static long notNegative(String name, long value) {
    if (value < 0) {
      throw new InvalidArgumentException(name, value, "at least 0");
    }
    return value;
  }

  static float finite(String name, double value) {
    float rounded = (float) value;
    if (!Float.isFinite(rounded)) {
      throw new InvalidArgumentException(name, value, "a finite number");
    }
    return rounded;
  }
}
