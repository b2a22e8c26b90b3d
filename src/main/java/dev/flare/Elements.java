package dev.flare;

import static java.lang.foreign.ValueLayout.JAVA_BYTE;
import static java.lang.foreign.ValueLayout.JAVA_FLOAT;
import static java.lang.foreign.ValueLayout.JAVA_INT;
import static java.lang.foreign.ValueLayout.JAVA_LONG;
import static java.lang.foreign.ValueLayout.JAVA_SHORT;

import java.lang.foreign.MemorySegment;
import java.util.stream.LongStream;

/**
 * Reading and writing the elements of host tensors, a run along the innermost dimension at a time.
 */
final class Elements {
  /** Work on fewer elements isn't worth a second thread. */
  private static final long PARALLEL = 1L << 18;

  private static final int CHUNK = 1 << 14;
  private static final Thread ANOTHER = Thread.ofPlatform().unstarted(() -> {});

  private Elements() {}

  // ---- one element ----------------------------------------------------------------------------

  static double get(MemorySegment s, DType dtype, long at) {
    return switch (dtype) {
      case FP32 -> s.getAtIndex(JAVA_FLOAT, at);
      case FP16 -> Float.float16ToFloat(s.getAtIndex(JAVA_SHORT, at));
      case BF16 -> FloatCodec.fromBf16(s.getAtIndex(JAVA_SHORT, at));
      case FP8_E4M3 -> FloatCodec.fromE4m3(s.get(JAVA_BYTE, at));
      case INT32 -> s.getAtIndex(JAVA_INT, at);
      case INT64 -> s.getAtIndex(JAVA_LONG, at);
      case UINT8 -> s.get(JAVA_BYTE, at) & 0xff;
    };
  }

  static void set(MemorySegment s, DType dtype, long at, double value) {
    switch (dtype) {
      case FP32 -> s.setAtIndex(JAVA_FLOAT, at, (float) value);
      // Through float: rounding twice differs from rounding once only for doubles that no float is
      // near to, and is what the C side does.
      case FP16 -> s.setAtIndex(JAVA_SHORT, at, Float.floatToFloat16((float) value));
      case BF16 -> s.setAtIndex(JAVA_SHORT, at, FloatCodec.toBf16((float) value));
      case FP8_E4M3 -> s.set(JAVA_BYTE, at, FloatCodec.toE4m3((float) value));
      case INT32 -> s.setAtIndex(JAVA_INT, at, (int) Math.rint(value));
      case INT64 -> s.setAtIndex(JAVA_LONG, at, (long) Math.rint(value));
      case UINT8 -> s.set(JAVA_BYTE, at, (byte) Math.max(0, Math.min(255, (int) Math.rint(value))));
    }
  }

  // ---- runs ------------------------------------------------------------------------------------

  /** Reads {@code n} elements from index {@code at} on, {@code stride} apart. */
  static void read(
      MemorySegment s, DType dtype, long at, long stride, float[] to, int toAt, int n) {
    switch (dtype) {
      case FP32 -> {
        if (stride == 1) {
          MemorySegment.copy(s, JAVA_FLOAT, at * Float.BYTES, to, toAt, n);
        } else {
          for (int i = 0; i < n; i++) {
            to[toAt + i] = s.getAtIndex(JAVA_FLOAT, at + i * stride);
          }
        }
      }
      case FP16 -> {
        for (int i = 0; i < n; i++) {
          to[toAt + i] = Float.float16ToFloat(s.getAtIndex(JAVA_SHORT, at + i * stride));
        }
      }
      case BF16 -> {
        for (int i = 0; i < n; i++) {
          to[toAt + i] = FloatCodec.fromBf16(s.getAtIndex(JAVA_SHORT, at + i * stride));
        }
      }
      case FP8_E4M3 -> {
        for (int i = 0; i < n; i++) {
          to[toAt + i] = FloatCodec.fromE4m3(s.get(JAVA_BYTE, at + i * stride));
        }
      }
      case INT32, INT64, UINT8 -> {
        for (int i = 0; i < n; i++) {
          to[toAt + i] = (float) get(s, dtype, at + i * stride);
        }
      }
    }
  }

  /** Writes {@code n} elements from index {@code at} on, {@code stride} apart. */
  static void write(
      MemorySegment s, DType dtype, long at, long stride, float[] from, int fromAt, int n) {
    switch (dtype) {
      case FP32 -> {
        if (stride == 1) {
          MemorySegment.copy(from, fromAt, s, JAVA_FLOAT, at * Float.BYTES, n);
        } else {
          for (int i = 0; i < n; i++) {
            s.setAtIndex(JAVA_FLOAT, at + i * stride, from[fromAt + i]);
          }
        }
      }
      case FP16 -> {
        for (int i = 0; i < n; i++) {
          s.setAtIndex(JAVA_SHORT, at + i * stride, Float.floatToFloat16(from[fromAt + i]));
        }
      }
      case BF16 -> {
        for (int i = 0; i < n; i++) {
          s.setAtIndex(JAVA_SHORT, at + i * stride, FloatCodec.toBf16(from[fromAt + i]));
        }
      }
      case FP8_E4M3 -> {
        for (int i = 0; i < n; i++) {
          s.set(JAVA_BYTE, at + i * stride, FloatCodec.toE4m3(from[fromAt + i]));
        }
      }
      case INT32, INT64, UINT8 -> {
        for (int i = 0; i < n; i++) {
          set(s, dtype, at + i * stride, from[fromAt + i]);
        }
      }
    }
  }

  // ---- whole tensors --------------------------------------------------------------------------

  /** One run: its first element's index in row-major order, where that lies, and its length. */
  interface Run {
    void accept(long ordinal, long at, int n);
  }

  /**
   * Visits all elements in runs along the innermost dimension, on several threads if there are
   * many.
   *
   * @param layout the tensor; elements of a run are {@code innerStride(layout)} apart
   * @param shared whether other threads may take part
   */
  static void forEachRun(Layout layout, boolean shared, Run run) {
    long elements = layout.shape().elements();
    if (elements == 0) {
      return;
    }
    if (layout.isContiguous()) {
      long chunks = (elements + CHUNK - 1) / CHUNK;
      range(chunks, elements, shared)
          .forEach(
              c -> run.accept(c * CHUNK, c * CHUNK, (int) Math.min(CHUNK, elements - c * CHUNK)));
      return;
    }
    int inner = layout.rank() - 1;
    long width = layout.dim(inner);
    long rows = elements / width;
    range(rows, elements, shared)
        .forEach(
            row -> {
              long at = rowStart(layout, row);
              for (long c = 0; c < width; c += CHUNK) {
                run.accept(
                    row * width + c,
                    at + c * layout.stride(inner),
                    (int) Math.min(CHUNK, width - c));
              }
            });
  }

  private static LongStream range(long n, long elements, boolean shared) {
    LongStream stream = LongStream.range(0, n);
    return elements < PARALLEL || !shared ? stream : stream.parallel();
  }

  /** Whether other threads may touch it: memory of a confined arena stays with its thread. */
  static boolean isShared(MemorySegment segment) {
    return segment.isAccessibleBy(ANOTHER);
  }

  static long innerStride(Layout layout) {
    return layout.isContiguous() || layout.rank() == 0 ? 1 : layout.stride(layout.rank() - 1);
  }

  /** Index of the first element of the row-major {@code row}-th run along the last dimension. */
  private static long rowStart(Layout layout, long row) {
    long at = 0;
    long rest = row;
    for (int i = layout.rank() - 2; i >= 0; i--) {
      long dim = layout.dim(i);
      at += rest % dim * layout.stride(i);
      rest /= dim;
    }
    return at;
  }

  /** Copies elements of equal dtype between layouts of equal shape. */
  static void copy(MemorySegment from, Layout fromLayout, MemorySegment to, Layout toLayout) {
    int bytes = toLayout.dtype().bytes();
    if (fromLayout.isContiguous() && toLayout.isContiguous()) {
      MemorySegment.copy(from, 0, to, 0, toLayout.bytes());
      return;
    }
    int rank = toLayout.rank();
    long toStride = toLayout.stride(rank - 1);
    long fromStride = fromLayout.stride(rank - 1);
    long width = toLayout.dim(rank - 1);
    long elements = toLayout.shape().elements();
    range(elements / Math.max(1, width), elements, isShared(from) && isShared(to))
        .forEach(
            row -> {
              long source = rowStart(fromLayout, row);
              long target = rowStart(toLayout, row);
              if (toStride == 1 && fromStride == 1) {
                MemorySegment.copy(from, source * bytes, to, target * bytes, width * bytes);
                return;
              }
              for (long i = 0; i < width; i++) {
                long s = source + i * fromStride;
                long t = target + i * toStride;
                switch (bytes) {
                  case 1 -> to.set(JAVA_BYTE, t, from.get(JAVA_BYTE, s));
                  case 2 -> to.setAtIndex(JAVA_SHORT, t, from.getAtIndex(JAVA_SHORT, s));
                  case 4 -> to.setAtIndex(JAVA_INT, t, from.getAtIndex(JAVA_INT, s));
                  default -> to.setAtIndex(JAVA_LONG, t, from.getAtIndex(JAVA_LONG, s));
                }
              }
            });
  }

  /** Converts elements between layouts of equal shape and different dtypes, through float. */
  static void convert(MemorySegment from, Layout fromLayout, MemorySegment to, Layout toLayout) {
    // Both sides in the same runs: along the last dimension, unless both are dense.
    boolean dense = fromLayout.isContiguous() && toLayout.isContiguous();
    Layout runs = dense || !toLayout.isContiguous() ? toLayout : fromLayout;
    long fromStride = dense ? 1 : innerStrideOf(fromLayout);
    long toStride = dense ? 1 : innerStrideOf(toLayout);
    long width = dense ? 0 : Math.max(1, toLayout.dim(toLayout.rank() - 1));
    forEachRun(
        runs,
        isShared(from) && isShared(to),
        (ordinal, at, n) -> {
          float[] buffer = new float[n];
          long source = dense ? at : locate(fromLayout, ordinal, width);
          long target = dense ? at : locate(toLayout, ordinal, width);
          read(from, fromLayout.dtype(), source, fromStride, buffer, 0, n);
          write(to, toLayout.dtype(), target, toStride, buffer, 0, n);
        });
  }

  private static long innerStrideOf(Layout layout) {
    return layout.stride(layout.rank() - 1);
  }

  private static long locate(Layout layout, long ordinal, long width) {
    return rowStart(layout, ordinal / width) + ordinal % width * layout.stride(layout.rank() - 1);
  }

  /**
   * The {@code i}-th number of the standard normal sequence of {@code seed}: i alone decides it.
   */
  static float normal(long seed, long i) {
    // Box-Muller on the two halves of a SplitMix64 output; a pair of elements shares one.
    // The seed is moved first: mix(0) is 0, and seed 0 would begin with the largest number there
    // is.
    long z = mix(mix(seed + 0x9E3779B97F4A7C15L) + (i >>> 1) * 0x9E3779B97F4A7C15L);
    double u = ((z >>> 32) + 0.5) * 0x1p-32;
    double angle = (z & 0xffffffffL) * (2 * Math.PI * 0x1p-32);
    double radius = Math.sqrt(-2 * Math.log(u));
    return (float) (radius * ((i & 1) == 0 ? Math.cos(angle) : Math.sin(angle)));
  }

  private static long mix(long value) {
    long z = value;
    z = (z ^ z >>> 30) * 0xBF58476D1CE4E5B9L;
    z = (z ^ z >>> 27) * 0x94D049BB133111EBL;
    return z ^ z >>> 31;
  }
}
