package dev.flare.testing;

import java.util.stream.Stream;

/**
 * Seeds of random tests: a case is its seed, and the seed is in the test's name. {@code
 * -Dflare.test.seed=N} runs that one alone.
 */
public final class Seeds {
  private Seeds() {}

  /** Seeds from {@code first} on, or the one that the property names. */
  public static Stream<Long> from(long first, int count) {
    String one = System.getProperty("flare.test.seed");
    return one != null
        ? Stream.of(Long.decode(one))
        : Stream.iterate(first, seed -> seed + 1).limit(count);
  }
}
