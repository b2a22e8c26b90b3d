package dev.flare;

import java.util.ArrayList;
import java.util.List;

/**
 * A copy between two layouts of one shape, as the fewest copies of rows.
 *
 * <p>Dimensions that lie alike on both sides are joined. What is left innermost and dense on both
 * is the width of a row, the longest other dimension counts rows, and the rest are calls. Bytes.
 */
record StridedCopy(long width, long rows, long targetPitch, long sourcePitch, List<Loop> loops) {

  /** A dimension that takes a call for each index. */
  record Loop(long count, long targetStep, long sourceStep) {}

  private record Dim(long count, long target, long source) {
    /** Whether {@code inner} goes on where one step of this dimension ends. */
    boolean continues(Dim inner) {
      return target == inner.target * inner.count && source == inner.source * inner.count;
    }
  }

  /** The driver takes no larger pitch. */
  private static final long MAX_PITCH = Integer.MAX_VALUE;

  /**
   * Plans the copy.
   *
   * @param target where each element has its own place
   * @param source of the same shape and dtype
   */
  static StridedCopy of(Layout target, Layout source) {
    int bytes = target.dtype().bytes();
    List<Dim> dims = joined(target, source, bytes);
    long width = bytes;
    if (!dims.isEmpty() && dims.getLast().target == bytes && dims.getLast().source == bytes) {
      width = dims.removeLast().count * bytes;
    }
    Dim rows = new Dim(1, width, width);
    for (Dim dim : dims) {
      boolean fits = dim.source >= width && dim.target <= MAX_PITCH && dim.source <= MAX_PITCH;
      if (fits && dim.target >= width && dim.count > rows.count) {
        rows = dim;
      }
    }
    List<Loop> loops = new ArrayList<>();
    for (Dim dim : dims) {
      if (!dim.equals(rows)) { // no two dimensions of a target have one stride
        loops.add(new Loop(dim.count, dim.target, dim.source));
      }
    }
    return new StridedCopy(width, rows.count, rows.target, rows.source, List.copyOf(loops));
  }

  /** Dimensions of more than one element, the target's largest stride first, joined. */
  private static List<Dim> joined(Layout target, Layout source, int bytes) {
    List<Dim> dims = new ArrayList<>();
    for (int i = 0; i < target.rank(); i++) {
      if (target.dim(i) > 1) {
        dims.add(new Dim(target.dim(i), target.stride(i) * bytes, source.stride(i) * bytes));
      }
    }
    dims.sort((a, b) -> Long.compare(b.target, a.target));
    for (int i = dims.size() - 2; i >= 0; i--) {
      Dim outer = dims.get(i);
      Dim inner = dims.get(i + 1);
      if (outer.continues(inner)) {
        dims.set(i, new Dim(outer.count * inner.count, inner.target, inner.source));
        dims.remove(i + 1);
      }
    }
    return dims;
  }

  /** Whether it is one piece of memory on both sides. */
  boolean isBlock() {
    return rows == 1 && loops.isEmpty();
  }

  /** How many copies of rows it takes. */
  long calls() {
    long calls = 1;
    for (Loop loop : loops) {
      calls = Math.multiplyExact(calls, loop.count);
    }
    return calls;
  }

  /** Receives the first byte of each call on both sides. */
  interface Call {
    void copy(long target, long source);
  }

  /** Makes the calls, for memory that begins at these addresses. */
  void forEachCall(long target, long source, Call call) {
    forEachCall(0, target, source, call);
  }

  private void forEachCall(int depth, long target, long source, Call call) {
    if (depth == loops.size()) {
      call.copy(target, source);
      return;
    }
    Loop loop = loops.get(depth);
    for (long i = 0; i < loop.count; i++) {
      forEachCall(depth + 1, target + i * loop.targetStep, source + i * loop.sourceStep, call);
    }
  }
}
