package dev.flare;

/**
 * The order of a recurrent state's last two dimensions. It has no default: where K = V, a wrong one
 * goes unseen.
 */
public enum StateLayout {
  /** {@code [N, HV, K, V]}. */
  KV(1),
  /** {@code [N, HV, V, K]}. */
  VK(2);

  private final int code;

  StateLayout(int code) {
    this.code = code;
  }

  /** The FLARE_STATE_ constant. */
  int code() {
    return code;
  }

  /** The shape of {@code n} states. */
  Shape shape(long n, long heads, long keyDim, long valueDim) {
    return this == KV ? Shape.of(n, heads, keyDim, valueDim) : Shape.of(n, heads, valueDim, keyDim);
  }

  /** The shape in words. */
  String form(String n) {
    return this == KV ? "[" + n + ", HV, K, V]" : "[" + n + ", HV, V, K]";
  }
}
