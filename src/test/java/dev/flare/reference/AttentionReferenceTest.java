package dev.flare.reference;

import static org.assertj.core.api.Assertions.assertThat;
import static org.assertj.core.api.Assertions.assertThatThrownBy;
import static org.assertj.core.api.Assertions.within;

import java.util.Arrays;
import java.util.List;
import java.util.SplittableRandom;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.ValueSource;

/** The definition of attention against cases that can be worked out by hand, and identities. */
class AttentionReferenceTest {
  private static final double NONE = Double.NEGATIVE_INFINITY;
  private static final Heads ONE = new Heads(1, 1, 1, 1);

  static double[] random(long seed, int... dims) {
    SplittableRandom random = new SplittableRandom(seed);
    int size = Arrays.stream(dims).reduce(1, Math::multiplyExact);
    double[] x = new double[size];
    Arrays.setAll(x, i -> random.nextGaussian());
    return x;
  }

  static void assertNear(double[] got, double[] want) {
    ErrorMetrics error = ErrorMetrics.of(got, want);
    assertThat(error.relativeWithin(1e-13)).as("%s", error).isTrue();
  }

  private static void assertNear(AttentionResult got, AttentionResult want) {
    assertNear(got.out(), want.out());
    ErrorMetrics error = ErrorMetrics.of(got.lse(), want.lse());
    assertThat(error.absoluteWithin(1e-12)).as("%s", error).isTrue();
  }

  /** One head of width 1: {@code nq} queries of 1 over keys of 0, values 1, 2, 3, ... */
  private static AttentionResult count(int nq, int nk, AttentionOptions options) {
    double[] q = new double[nq];
    Arrays.fill(q, 1);
    double[] v = new double[nk];
    Arrays.setAll(v, j -> j + 1);
    return AttentionReference.attention(
        Tokens.dense(1, nq), Tokens.dense(1, nk), ONE, q, new double[nk], v, options);
  }

  // ---- by hand --------------------------------------------------------------------------------

  @Test
  void twoKeysByHand() {
    // Scores 0.5 * 2 * {0, ln 3 } = {0, ln 3}: weights 1/4 and 3/4.
    AttentionResult got =
        AttentionReference.attention(
            Tokens.dense(1, 1),
            Tokens.dense(1, 2),
            new Heads(1, 1, 1, 2),
            new double[] {2},
            new double[] {0, Math.log(3)},
            new double[] {4, 0, 8, 1},
            AttentionOptions.full(0.5));
    assertNear(got.out(), new double[] {7, 0.75});
    assertThat(got.lse()[0]).isCloseTo(Math.log(4), within(1e-15));
  }

  @Test
  void masksAlignAtTheBottomRight() {
    AttentionResult got = count(3, 5, AttentionOptions.causal(1));
    assertNear(got.out(), new double[] {2, 2.5, 3});
    assertNear(got.lse(), new double[] {Math.log(3), Math.log(4), Math.log(5)});
  }

  @Test
  void queriesBeforeTheFirstKeySeeNothing() {
    AttentionResult got = count(5, 2, AttentionOptions.causal(1));
    assertThat(got.out()).containsExactly(0, 0, 0, 1, 1.5);
    assertThat(got.lse()).containsExactly(NONE, NONE, NONE, 0, Math.log(2));
  }

  @ParameterizedTest
  @CsvSource({
    // left, right, causal, first and last value seen by queries 0..4 of 5 (0 to 0: none)
    "0, 0, false, 1 1, 2 2, 3 3, 4 4, 5 5",
    "1, 0, false, 1 1, 1 2, 2 3, 3 4, 4 5",
    "1, 1, false, 1 2, 1 3, 2 4, 3 5, 4 5",
    "1, 3, true, 1 1, 1 2, 2 3, 3 4, 4 5",
    "-1, 1, false, 1 2, 1 3, 1 4, 1 5, 1 5",
    "0, -1, false, 1 5, 2 5, 3 5, 4 5, 5 5",
    "-1, -1, false, 1 5, 1 5, 1 5, 1 5, 1 5",
    "2147483647, 2147483647, false, 1 5, 1 5, 1 5, 1 5, 1 5"
  })
  void windowsIncludeBothEnds(
      int left, int right, boolean causal, String a, String b, String c, String d, String e) {
    AttentionResult got =
        count(5, 5, AttentionOptions.full(1).withWindow(left, right).withCausal(causal));
    List<String> seen = List.of(a, b, c, d, e);
    for (int i = 0; i < 5; i++) {
      double first = seen.get(i).charAt(0) - '0';
      double last = seen.get(i).charAt(2) - '0';
      assertThat(got.out()[i]).as("query %d", i).isCloseTo((first + last) / 2, within(1e-14));
      assertThat(got.lse()[i]).isCloseTo(Math.log(last - first + 1), within(1e-14));
    }
  }

  @Test
  void aRightBoundReachesBeforeTheFirstKey() {
    // Queries stand at -3 .. 1; with two keys to the right the first sees none, the second one.
    AttentionResult got = count(5, 2, AttentionOptions.full(1).withWindow(0, 2));
    assertThat(got.out()).containsExactly(0, 1, 1.5, 1.5, 2);
    assertThat(got.lse()).containsExactly(NONE, 0, Math.log(2), Math.log(2), 0);
  }

  @Test
  void aSinkTakesWeightAndHasNoValue() {
    AttentionResult got = count(1, 3, AttentionOptions.full(1).withSink(0.0));
    assertNear(got.out(), new double[] {6.0 / 4});
    assertThat(got.lse()[0]).isCloseTo(Math.log(4), within(1e-15));
  }

  @Test
  void aSinkIsAllThatAnEmptyRowSees() {
    AttentionResult got = count(3, 1, AttentionOptions.causal(1).withSink(0.25));
    assertThat(got.out()[0]).isZero();
    assertThat(got.lse()[0]).isEqualTo(0.25);
  }

  @Test
  void sinksOfInfiniteWeight() {
    assertThat(count(1, 3, AttentionOptions.full(1).withSink(NONE)).out()[0]).isEqualTo(2);
    AttentionResult all = count(1, 3, AttentionOptions.full(1).withSink(Double.POSITIVE_INFINITY));
    assertThat(all.out()[0]).isZero();
    assertThat(all.lse()[0]).isInfinite().isPositive();
    AttentionResult far = count(1, 3, AttentionOptions.full(1).withSink(800));
    assertThat(far.out()[0]).isBetween(0.0, 1e-300);
    assertThat(far.lse()[0]).isEqualTo(800);
  }

  @Test
  void softcapBoundsScores() {
    double[] one = {1};
    double[] keys = {1e6, -1e6};
    double[] values = {1, 0};
    AttentionResult got =
        AttentionReference.attention(
            Tokens.dense(1, 1),
            Tokens.dense(1, 2),
            ONE,
            one,
            keys,
            values,
            AttentionOptions.full(1).withSoftcap(1));
    double weight = 1 / (1 + Math.exp(-2)); // scores 1 and -1
    assertThat(got.out()[0]).isCloseTo(weight, within(1e-15));
  }

  @Test
  void softcapComesAfterScaleAndBeforeAlibi() {
    AttentionOptions options = AttentionOptions.causal(2).withSoftcap(3).withAlibiSlopes(0.5);
    AttentionResult got =
        AttentionReference.attention(
            Tokens.dense(1, 1),
            Tokens.dense(1, 2),
            ONE,
            new double[] {1},
            new double[] {5, 1},
            new double[] {1, 0},
            options);
    double far = 3 * Math.tanh(10.0 / 3) - 0.5;
    double near = 3 * Math.tanh(2.0 / 3);
    assertThat(got.out()[0]).isCloseTo(1 / (1 + Math.exp(near - far)), within(1e-15));
    assertThat(got.lse()[0]).isCloseTo(Math.log(Math.exp(far) + Math.exp(near)), within(1e-14));
  }

  @Test
  void alibiCountsDistanceOnBothSides() {
    AttentionResult got = count(3, 3, AttentionOptions.full(1).withAlibiSlopes(Math.log(2)));
    // The middle query weighs its neighbours by 1/2: (1/2 + 2 + 3/2) / 2.
    assertThat(got.out()[1]).isCloseTo(2, within(1e-15));
    assertThat(got.lse()[1]).isCloseTo(Math.log(2), within(1e-15));
    assertThat(got.lse()[0]).isCloseTo(Math.log(1.75), within(1e-15));
  }

  @Test
  void alibiSlopesMayDifferByBatch() {
    Heads heads = new Heads(2, 1, 3, 2);
    double[] q = random(1, 2, 4, 2, 3);
    double[] k = random(2, 2, 4, 3);
    double[] v = random(3, 2, 4, 2);
    double[] slopes = {0.1, 0.2, 0.3, 0.4};
    Tokens tokens = Tokens.dense(2, 4);
    AttentionResult both =
        AttentionReference.attention(
            tokens, tokens, heads, q, k, v, AttentionOptions.causal(1).withAlibiSlopes(slopes));
    for (int b = 0; b < 2; b++) {
      AttentionResult alone =
          AttentionReference.attention(
              Tokens.dense(1, 4),
              Tokens.dense(1, 4),
              heads,
              Arrays.copyOfRange(q, b * 24, b * 24 + 24),
              Arrays.copyOfRange(k, b * 12, b * 12 + 12),
              Arrays.copyOfRange(v, b * 8, b * 8 + 8),
              AttentionOptions.causal(1)
                  .withAlibiSlopes(Arrays.copyOfRange(slopes, 2 * b, 2 * b + 2)));
      assertThat(Arrays.copyOfRange(both.out(), b * 16, b * 16 + 16)).isEqualTo(alone.out());
    }
  }

  // ---- values ---------------------------------------------------------------------------------

  @ParameterizedTest
  @ValueSource(doubles = {1e4, -1e4, 1e300})
  void largeScoresDoNotOverflow(double score) {
    AttentionResult got =
        AttentionReference.attention(
            Tokens.dense(1, 1),
            Tokens.dense(1, 2),
            ONE,
            new double[] {1},
            new double[] {score, score},
            new double[] {1, 3},
            AttentionOptions.full(1));
    assertThat(got.out()[0]).isEqualTo(2);
    assertThat(got.lse()[0]).isCloseTo(score + Math.log(2), within(Math.ulp(score)));
  }

  @Test
  void anAbsentScoreOfMinusInfinityIsAnEmptyRow() {
    AttentionResult got =
        AttentionReference.attention(
            Tokens.dense(1, 1),
            Tokens.dense(1, 2),
            ONE,
            new double[] {1},
            new double[] {NONE, NONE},
            new double[] {1, 3},
            AttentionOptions.full(1));
    assertThat(got.out()).containsExactly(0);
    assertThat(got.lse()).containsExactly(NONE);
  }

  @Test
  void hiddenKeysMayBeNaNAndVisibleOnesShow() {
    double[] k = {Double.NaN, 0, 0, 0};
    double[] v = {Double.NaN, 2, 3, 4};
    AttentionResult got =
        AttentionReference.attention(
            Tokens.dense(1, 4),
            Tokens.dense(1, 4),
            ONE,
            new double[4],
            k,
            v,
            AttentionOptions.full(1).withWindow(1, 0));
    assertThat(got.out()[0]).isNaN();
    assertThat(got.out()[1]).isNaN();
    assertThat(got.out()[2]).isEqualTo(2.5);
    assertThat(got.out()[3]).isEqualTo(3.5);
  }

  @Test
  void scaleMayBeZeroOrNegative() {
    double[] q = random(4, 2, 8);
    double[] k = random(5, 3, 8);
    double[] v = random(6, 3, 8);
    Heads heads = new Heads(1, 1, 8, 8);
    Tokens two = Tokens.dense(1, 2);
    Tokens three = Tokens.dense(1, 3);
    AttentionResult flat =
        AttentionReference.attention(two, three, heads, q, k, v, AttentionOptions.full(0));
    for (int c = 0; c < 8; c++) {
      assertThat(flat.out()[c]).isCloseTo((v[c] + v[8 + c] + v[16 + c]) / 3, within(1e-15));
    }
    double[] minusQ = Arrays.stream(q).map(x -> -x).toArray();
    assertNear(
        AttentionReference.attention(two, three, heads, q, k, v, AttentionOptions.full(-0.3)),
        AttentionReference.attention(two, three, heads, minusQ, k, v, AttentionOptions.full(0.3)));
  }

  // ---- storage --------------------------------------------------------------------------------

  @ParameterizedTest
  @ValueSource(ints = {1, 2, 3, 5})
  void groupsOfHeadsShareKeys(int group) {
    int kv = 2;
    int heads = kv * group;
    double[] q = random(1, 4, heads, 3);
    double[] k = random(2, 5, kv, 3);
    double[] v = random(3, 5, kv, 2);
    AttentionOptions options = AttentionOptions.causal(0.7);
    assertNear(
        AttentionReference.attention(
            Tokens.dense(1, 4), Tokens.dense(1, 5), new Heads(heads, kv, 3, 2), q, k, v, options),
        AttentionReference.attention(
            Tokens.dense(1, 4),
            Tokens.dense(1, 5),
            new Heads(heads, heads, 3, 2),
            q,
            repeatHeads(k, kv, 3, group),
            repeatHeads(v, kv, 2, group),
            options));
  }

  /** {@code [rows, heads, dim] -> [rows, heads * times, dim]}. */
  static double[] repeatHeads(double[] x, int heads, int dim, int times) {
    double[] y = new double[x.length * times];
    for (int h = 0; h < y.length / dim; h++) {
      System.arraycopy(x, h / times * dim, y, h * dim, dim);
    }
    return y;
  }

  @Test
  void packedSequencesAreIndependent() {
    int[] cuQ = {0, 0, 3, 3, 4, 6, 6};
    int[] cuK = {0, 2, 2, 4, 9, 10, 10};
    Heads heads = new Heads(2, 1, 4, 3);
    double[] q = random(7, 6, 2, 4);
    double[] k = random(8, 10, 1, 4);
    double[] v = random(9, 10, 1, 3);
    AttentionOptions options = AttentionOptions.causal(0.5).withSink(0.1, NONE);
    AttentionResult all =
        AttentionReference.attention(
            Tokens.packed(cuQ), Tokens.packed(cuK), heads, q, k, v, options);
    for (int b = 0; b < cuQ.length - 1; b++) {
      int nq = cuQ[b + 1] - cuQ[b];
      AttentionResult alone =
          AttentionReference.attention(
              Tokens.dense(1, nq),
              Tokens.dense(1, cuK[b + 1] - cuK[b]),
              heads,
              Arrays.copyOfRange(q, cuQ[b] * 8, cuQ[b + 1] * 8),
              Arrays.copyOfRange(k, cuK[b] * 4, cuK[b + 1] * 4),
              Arrays.copyOfRange(v, cuK[b] * 3, cuK[b + 1] * 3),
              options);
      assertThat(Arrays.copyOfRange(all.out(), cuQ[b] * 6, cuQ[b + 1] * 6)).isEqualTo(alone.out());
      for (int h = 0; h < 2; h++) { // lse is [H, T] here, [1, H, N] there
        assertThat(Arrays.copyOfRange(all.lse(), h * 6 + cuQ[b], h * 6 + cuQ[b + 1]))
            .isEqualTo(Arrays.copyOfRange(alone.lse(), h * nq, h * nq + nq));
      }
    }
  }

  @Test
  void nothingAtAllIsFine() {
    AttentionResult none =
        AttentionReference.attention(
            Tokens.dense(0, 3),
            Tokens.dense(0, 3),
            ONE,
            new double[0],
            new double[0],
            new double[0],
            AttentionOptions.full(1));
    assertThat(none.out()).isEmpty();
    assertThat(none.lse()).isEmpty();
    assertThat(count(2, 0, AttentionOptions.full(1)).lse()).containsExactly(NONE, NONE);
    assertThat(count(2, 0, AttentionOptions.full(1)).out()).containsExactly(0, 0);
    assertThat(count(0, 2, AttentionOptions.full(1)).out()).isEmpty();
  }

  @Test
  void pagesOnlyMoveRows() {
    Heads heads = new Heads(2, 2, 4, 3);
    int[] lengths = {5, 0, 2};
    int[] table = {4, 1, 3, -7, 99, -1, 0, -1, -1};
    double[] k = new double[5 * 2 * 8];
    double[] v = new double[5 * 2 * 6];
    Arrays.fill(k, Double.NaN);
    Arrays.fill(v, Double.NaN);
    double[] denseK = random(1, 3, 5, 8);
    double[] denseV = random(2, 3, 5, 6);
    for (int b = 0; b < 3; b++) {
      for (int t = 0; t < lengths[b]; t++) {
        int row = table[b * 3 + t / 2] * 2 + t % 2;
        System.arraycopy(denseK, (b * 5 + t) * 8, k, row * 8, 8);
        System.arraycopy(denseV, (b * 5 + t) * 6, v, row * 6, 6);
      }
    }
    double[] q = random(3, 3, 2, 8);
    AttentionOptions options = AttentionOptions.causal(0.5);
    AttentionResult paged =
        AttentionReference.attention(
            Tokens.dense(3, 2), Tokens.paged(5, 2, table, 3, lengths), heads, q, k, v, options);
    AttentionResult dense =
        AttentionReference.attention(
            Tokens.dense(3, 2),
            Tokens.dense(3, 5).used(lengths),
            heads,
            q,
            denseK,
            denseV,
            options);
    assertThat(paged.out()).isEqualTo(dense.out());
    assertThat(paged.lse()).isEqualTo(dense.lse());
  }

  @Test
  void unusedQueriesAreEmptyRows() {
    double[] q = new double[4];
    double[] k = {0, 0, Double.NaN};
    double[] v = {1, 3, Double.NaN};
    AttentionResult got =
        AttentionReference.attention(
            Tokens.dense(1, 4).used(2),
            Tokens.dense(1, 3).used(2),
            ONE,
            q,
            k,
            v,
            AttentionOptions.causal(1));
    assertThat(got.out()).containsExactly(1, 2, 0, 0);
    assertThat(got.lse()).containsExactly(0, Math.log(2), NONE, NONE);
  }

  // ---- merging --------------------------------------------------------------------------------

  @Test
  void mergingPartsOfTheKeysIsAttentionOverAll() {
    Heads heads = new Heads(2, 1, 4, 3);
    Tokens queries = Tokens.dense(1, 3);
    double[] q = random(1, 3, 2, 4);
    double[] k = random(2, 7, 4);
    double[] v = random(3, 7, 3);
    AttentionOptions options = AttentionOptions.full(0.9);
    AttentionResult all =
        AttentionReference.attention(queries, Tokens.dense(1, 7), heads, q, k, v, options);
    int[] cuts = {0, 1, 1, 5, 7}; // one part is empty
    AttentionResult[] parts = new AttentionResult[4];
    for (int p = 0; p < 4; p++) {
      int n = cuts[p + 1] - cuts[p];
      parts[p] =
          AttentionReference.attention(
              queries,
              Tokens.dense(1, n),
              heads,
              q,
              Arrays.copyOfRange(k, cuts[p] * 4, cuts[p + 1] * 4),
              Arrays.copyOfRange(v, cuts[p] * 3, cuts[p + 1] * 3),
              options);
    }
    Arrays.fill(parts[1].out(), Double.NaN); // a part without weight is not looked at
    assertNear(AttentionReference.merge(queries, 2, 3, List.of(parts)), all);
    assertNear(AttentionReference.merge(queries, 2, 3, List.of(all)), all);
    AttentionResult none = AttentionReference.merge(queries, 2, 3, List.of());
    assertThat(none.out()).containsOnly(0);
    assertThat(none.lse()).containsOnly(NONE);
  }

  @Test
  void descaleMultipliesHeads() {
    double[] got =
        AttentionReference.descale(
            Tokens.packed(0, 1, 2), 2, 1, new double[] {1, 2, 3, 4}, new double[] {10, 100}, 1);
    assertThat(got).containsExactly(10, 20, 300, 400);
  }

  // ---- wrong sizes ----------------------------------------------------------------------------

  @Test
  void wrongSizesAreRefused() {
    Tokens one = Tokens.dense(1, 1);
    double[] x = {1};
    double[] two = {1, 2};
    AttentionOptions full = AttentionOptions.full(1);
    assertThatThrownBy(() -> AttentionReference.attention(one, one, ONE, two, x, x, full))
        .isInstanceOf(IllegalArgumentException.class)
        .hasMessageContaining("q has 2 elements");
    assertThatThrownBy(
            () -> AttentionReference.attention(one, one, ONE, x, x, x, full.withSink(1, 2)))
        .isInstanceOf(IllegalArgumentException.class)
        .hasMessageContaining("sink has 2");
    assertThatThrownBy(() -> new Heads(3, 2, 1, 1))
        .isInstanceOf(IllegalArgumentException.class)
        .hasMessageContaining("3 query heads over 2");
    assertThatThrownBy(() -> Tokens.packed(0, 2, 1))
        .isInstanceOf(IllegalArgumentException.class)
        .hasMessageContaining("falls from 2 to 1");
    assertThatThrownBy(() -> Tokens.paged(1, 4, new int[] {0}, 1, 5))
        .isInstanceOf(IllegalArgumentException.class)
        .hasMessageContaining("needs 2 pages");
  }
}
