package dev.flare.reference;

import org.jspecify.annotations.Nullable;

/** Argument checks shared by the definitions: an oracle fed wrong sizes must not answer at all. */
final class Checks {
  private Checks() {}

  @SuppressWarnings("AnnotateFormatMethod") // its annotation would be a dependency
  static void require(boolean condition, String message, Object... arguments) {
    if (!condition) {
      throw new IllegalArgumentException(String.format(message, arguments));
    }
  }

  /** Requires that {@code array} holds exactly the product of {@code extents} elements. */
  static void size(String name, double[] array, long... extents) {
    size(name, array.length, extents);
  }

  static void size(String name, int[] array, long... extents) {
    size(name, array.length, extents);
  }

  static void optionalSize(String name, double @Nullable [] array, long... extents) {
    if (array != null) {
      size(name, array.length, extents);
    }
  }

  private static void size(String name, int length, long... extents) {
    long wanted = 1;
    StringBuilder shape = new StringBuilder();
    for (long extent : extents) {
      require(extent >= 0, "%s has a negative extent %d", name, extent);
      wanted = Math.multiplyExact(wanted, extent);
      shape.append(shape.isEmpty() ? "" : ", ").append(extent);
    }
    require(length == wanted, "%s has %d elements, want %d = [%s]", name, length, wanted, shape);
  }

  /** Allocates a zeroed array of the product of {@code extents} elements. */
  static double[] allocate(long... extents) {
    long size = 1;
    for (long extent : extents) {
      size = Math.multiplyExact(size, extent);
    }
    return new double[Math.toIntExact(size)];
  }
}
