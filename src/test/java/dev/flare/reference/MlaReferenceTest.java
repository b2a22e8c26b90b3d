package dev.flare.reference;

import static dev.flare.reference.AttentionReferenceTest.assertNear;
import static dev.flare.reference.AttentionReferenceTest.random;
import static org.assertj.core.api.Assertions.assertThat;
import static org.assertj.core.api.Assertions.assertThatThrownBy;
import static org.assertj.core.api.Assertions.within;

import java.util.Arrays;
import java.util.stream.IntStream;
import org.jspecify.annotations.Nullable;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

/** The definition of latent attention: its two forms agree, and cases by hand. */
class MlaReferenceTest {
  private static final int BATCH = 2;
  private static final int QUERIES = 3;
  private static final int KEYS = 5;

  /** Random inputs of one set of widths. */
  private static final class Case {
    final MlaReference.Widths w;
    final Tokens queries = Tokens.dense(BATCH, QUERIES);
    final Tokens keys = Tokens.dense(BATCH, KEYS);
    final double[] qNope;
    final double @Nullable [] qRope;
    final double[] latents;
    final double @Nullable [] kRope;
    final double[] wUk;
    final double[] wUv;

    Case(int rope) {
      w = new MlaReference.Widths(3, 4, rope, 6, 5);
      qNope = random(1, queries.rows(), w.heads(), w.nope());
      qRope = rope == 0 ? null : random(2, queries.rows(), w.heads(), rope);
      latents = random(3, keys.rows(), w.latent());
      kRope = rope == 0 ? null : random(4, keys.rows(), rope);
      wUk = random(5, w.heads(), w.latent(), w.nope());
      wUv = random(6, w.heads(), w.latent(), w.value());
    }

    AttentionResult upProjecting(AttentionOptions options) {
      return MlaReference.upProjecting(
          queries, keys, w, qNope, qRope, latents, kRope, wUk, wUv, options);
    }

    double[] absorbedQuery() {
      return MlaReference.absorbQuery(queries.rows(), w, qNope, qRope, wUk);
    }

    double[] cache() {
      int width = w.latent() + w.rope();
      double[] cache = new double[keys.rows() * width];
      for (int row = 0; row < keys.rows(); row++) {
        System.arraycopy(latents, row * w.latent(), cache, row * width, w.latent());
        if (kRope != null) {
          System.arraycopy(kRope, row * w.rope(), cache, row * width + w.latent(), w.rope());
        }
      }
      return cache;
    }

    AttentionResult absorbed(AttentionOptions options) {
      return MlaReference.absorbed(
          queries, keys, w.heads(), w.latent(), w.rope(), absorbedQuery(), cache(), options);
    }
  }

  @ParameterizedTest
  @ValueSource(ints = {0, 2})
  void theTwoFormsAgree(int rope) {
    Case c = new Case(rope);
    AttentionOptions options = AttentionOptions.causal(c.w.defaultScale()).withSink(0.1, 0.2, 0.3);
    AttentionResult up = c.upProjecting(options);
    AttentionResult latent = c.absorbed(options);
    assertNear(MlaReference.projectOutput(c.queries.rows(), c.w, latent.out(), c.wUv), up.out());
    assertNear(latent.lse(), up.lse());
  }

  @Test
  void upProjectingIsAttentionOverProjectedKeys() {
    Case c = new Case(2);
    int rows = c.keys.rows();
    int heads = c.w.heads();
    double[] k = new double[rows * heads * 6];
    double[] v = new double[rows * heads * 5];
    for (int row = 0; row < rows; row++) {
      for (int h = 0; h < heads; h++) {
        for (int n = 0; n < 4; n++) {
          k[(row * heads + h) * 6 + n] = projected(c.latents, c.wUk, row, h, n, 6, 4);
        }
        System.arraycopy(c.kRope, row * 2, k, (row * heads + h) * 6 + 4, 2);
        for (int n = 0; n < 5; n++) {
          v[(row * heads + h) * 5 + n] = projected(c.latents, c.wUv, row, h, n, 6, 5);
        }
      }
    }
    double[] q = new double[c.queries.rows() * heads * 6];
    for (int i = 0; i < c.queries.rows() * heads; i++) {
      System.arraycopy(c.qNope, i * 4, q, i * 6, 4);
      System.arraycopy(c.qRope, i * 2, q, i * 6 + 4, 2);
    }
    AttentionOptions options = AttentionOptions.causal(0.4);
    AttentionResult want =
        AttentionReference.attention(
            c.queries, c.keys, new Heads(heads, heads, 6, 5), q, k, v, options);
    AttentionResult got = c.upProjecting(options);
    assertNear(got.out(), want.out());
    assertNear(got.lse(), want.lse());
  }

  private static double projected(
      double[] latents, double[] weight, int row, int h, int n, int latent, int width) {
    return IntStream.range(0, latent)
        .mapToDouble(c -> latents[row * latent + c] * weight[(h * latent + c) * width + n])
        .sum();
  }

  @Test
  void equalLatentsGiveTheirProjection() {
    Case c = new Case(2);
    Arrays.fill(c.latents, 1);
    double[] out = c.upProjecting(AttentionOptions.full(c.w.defaultScale())).out();
    for (int h = 0; h < c.w.heads(); h++) {
      for (int n = 0; n < c.w.value(); n++) {
        double columnSum = 0;
        for (int l = 0; l < c.w.latent(); l++) {
          columnSum += c.wUv[(h * c.w.latent() + l) * c.w.value() + n];
        }
        assertThat(out[h * c.w.value() + n]).isCloseTo(columnSum, within(1e-13));
      }
    }
  }

  @Test
  void rowsThatSeeNothingAreEmpty() {
    Tokens queries = Tokens.dense(1, 3);
    Tokens keys = Tokens.dense(1, 4).used(1);
    double[] cache = random(1, 4, 6);
    Arrays.fill(cache, 6, 24, Double.NaN);
    AttentionResult got =
        MlaReference.absorbed(
            queries, keys, 2, 4, 2, random(2, 3, 2, 6), cache, AttentionOptions.causal(1));
    assertThat(Arrays.copyOf(got.out(), 2 * 2 * 4)).containsOnly(0);
    assertThat(Arrays.copyOfRange(got.out(), 16, 20)).isEqualTo(Arrays.copyOf(cache, 4));
    assertThat(got.lse()[0]).isEqualTo(Double.NEGATIVE_INFINITY);
    assertThat(got.lse()[2]).isFinite();
  }

  @Test
  void sparseOverAllRowsIsDense() {
    Case c = new Case(2);
    AttentionOptions options = AttentionOptions.full(0.3);
    int[] all = new int[c.queries.rows() * KEYS];
    for (int i = 0; i < all.length; i++) {
      all[i] = i / (QUERIES * KEYS) * KEYS + i % KEYS; // the rows of the query's own sequence
    }
    AttentionResult sparse =
        MlaReference.absorbedSparse(
            c.queries,
            c.keys.rows(),
            c.w.heads(),
            c.w.latent(),
            c.w.rope(),
            c.absorbedQuery(),
            c.cache(),
            all,
            KEYS,
            null,
            options);
    AttentionResult dense = c.absorbed(options);
    assertNear(sparse.out(), dense.out());
    assertNear(sparse.lse(), dense.lse());
  }

  @Test
  void sparseListsSkipAbsentRowsAndCountDoubles() {
    double[] cache = {1, 3};
    double[] q = {0, 0, 0, 0};
    // No row; row 1 twice and row 0 once; a count that ends the list; a count beyond it.
    int[] indices = {-1, 7, Integer.MIN_VALUE, 1, 1, 0, 0, 1, 1, 1, -1, -1};
    int[] counts = {3, 3, 1, 99};
    AttentionResult got =
        MlaReference.absorbedSparse(
            Tokens.dense(1, 4), 2, 1, 1, 0, q, cache, indices, 3, counts, AttentionOptions.full(1));
    assertNear(got.out(), new double[] {0, 7.0 / 3, 1, 3});
    assertThat(got.lse()[0]).isEqualTo(Double.NEGATIVE_INFINITY);
    assertThat(got.lse()[1]).isCloseTo(Math.log(3), within(1e-15));
  }

  @Test
  void missingRotaryPartsAreNamed() {
    Case c = new Case(2);
    assertThatThrownBy(
            () ->
                MlaReference.upProjecting(
                    c.queries,
                    c.keys,
                    c.w,
                    c.qNope,
                    null,
                    c.latents,
                    c.kRope,
                    c.wUk,
                    c.wUv,
                    AttentionOptions.full(1)))
        .isInstanceOf(IllegalArgumentException.class)
        .hasMessageContaining("q_rope is missing");
    assertThatThrownBy(() -> new MlaReference.Widths(1, 0, 0, 1, 1))
        .isInstanceOf(IllegalArgumentException.class);
  }
}
