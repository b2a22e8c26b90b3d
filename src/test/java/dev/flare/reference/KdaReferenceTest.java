package dev.flare.reference;

import static dev.flare.reference.AttentionReferenceTest.assertNear;
import static dev.flare.reference.AttentionReferenceTest.repeatHeads;
import static org.assertj.core.api.Assertions.assertThat;
import static org.assertj.core.api.Assertions.assertThatThrownBy;
import static org.assertj.core.api.Assertions.within;

import java.util.Arrays;
import org.jspecify.annotations.Nullable;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.EnumSource;
import org.junit.jupiter.params.provider.ValueSource;

/** The definition of the delta rule against cases by hand, and identities. */
class KdaReferenceTest {
  private static final KdaOptions LOG = KdaOptions.logGate(0.5);

  /** One head, K = 2, V = 3. */
  private static KdaInputs small(double[] q, double[] k, double[] v, double[] g, double... beta) {
    return new KdaInputs(1, 1, 2, 3, q, k, v, g, beta, null, null);
  }

  /** Random inputs with log decays below 0 and betas of either sign as logits. */
  private static KdaInputs random(int rows, int heads, int valueHeads, int dk, int dv) {
    double[] g = AttentionReferenceTest.random(4, rows, valueHeads, dk);
    for (int i = 0; i < g.length; i++) {
      g[i] = -Math.abs(g[i]);
    }
    return new KdaInputs(
        heads,
        valueHeads,
        dk,
        dv,
        AttentionReferenceTest.random(1, rows, heads, dk),
        AttentionReferenceTest.random(2, rows, heads, dk),
        AttentionReferenceTest.random(3, rows, valueHeads, dv),
        g,
        AttentionReferenceTest.random(5, rows, valueHeads),
        null,
        null);
  }

  private static KdaInputs rows(KdaInputs x, int from, int to) {
    int hk = x.heads() * x.keyDim();
    int hvk = x.valueHeads() * x.keyDim();
    int hvv = x.valueHeads() * x.valueDim();
    return new KdaInputs(
        x.heads(),
        x.valueHeads(),
        x.keyDim(),
        x.valueDim(),
        Arrays.copyOfRange(x.q(), from * hk, to * hk),
        Arrays.copyOfRange(x.k(), from * hk, to * hk),
        Arrays.copyOfRange(x.v(), from * hvv, to * hvv),
        Arrays.copyOfRange(x.g(), from * hvk, to * hvk),
        Arrays.copyOfRange(x.beta(), from * x.valueHeads(), to * x.valueHeads()),
        x.aLog(),
        x.dtBias());
  }

  private static KdaInputs gated(
      KdaInputs x, double[] g, double @Nullable [] aLog, double @Nullable [] dtBias) {
    return new KdaInputs(
        x.heads(),
        x.valueHeads(),
        x.keyDim(),
        x.valueDim(),
        x.q(),
        x.k(),
        x.v(),
        g,
        x.beta(),
        aLog,
        dtBias);
  }

  private static KdaResult forward(Tokens tokens, KdaInputs x, KdaOptions options) {
    return KdaReference.forward(tokens, x, options, null, 0);
  }

  // ---- by hand --------------------------------------------------------------------------------

  @Test
  void oneTokenFromNothing() {
    double[] q = {1, 2};
    double[] k = {3, -1};
    double[] v = {5, 6, 7};
    KdaResult got = forward(Tokens.dense(1, 1), small(q, k, v, new double[] {-1, -2}, 0.25), LOG);
    double qk = 1 * 3 + 2 * -1;
    assertNear(
        got.out(), new double[] {0.5 * qk * 0.25 * 5, 0.5 * qk * 0.25 * 6, 0.5 * qk * 0.25 * 7});
    assertNear(got.finalState(), new double[] {3.75, 4.5, 5.25, -1.25, -1.5, -1.75}); // beta k v^T
  }

  @Test
  void oneTokenOfBetaZeroOnlyDecays() {
    double[] g = {-1, -2};
    double[] state = {1, 2, 3, 4, 5, 6};
    KdaResult got =
        KdaReference.forward(
            Tokens.dense(1, 1),
            small(new double[] {1, 1}, new double[] {9, 9}, new double[] {9, 9, 9}, g, 0),
            LOG,
            state,
            0);
    double a = Math.exp(-1);
    double b = Math.exp(-2);
    double[] want = {a, 2 * a, 3 * a, 4 * b, 5 * b, 6 * b};
    assertNear(got.finalState(), want);
    assertNear(
        got.out(),
        new double[] {
          0.5 * (want[0] + want[3]), 0.5 * (want[1] + want[4]), 0.5 * (want[2] + want[5])
        });
  }

  @Test
  void aRepeatedKeyIsOverwritten() {
    // Beta 1 and a unit key: what the state says for the key becomes the last value.
    double[] k = {1, 0, 1, 0};
    double[] v = {5, 6, 7, -1, -2, -3};
    KdaResult got =
        forward(
            Tokens.dense(1, 2),
            small(new double[] {1, 0, 1, 0}, k, v, new double[4], 1, 1),
            KdaOptions.logGate(1));
    assertNear(got.out(), v);
    assertNear(got.finalState(), new double[] {-1, -2, -3, 0, 0, 0});
  }

  @Test
  void orthogonalKeysDoNotDisturbEachOther() {
    double[] k = {1, 0, 0, 1};
    double[] v = {5, 6, 7, -1, -2, -3};
    KdaResult got =
        forward(
            Tokens.dense(1, 2),
            small(new double[] {0, 0, 1, 1}, k, v, new double[4], 1, 0.5),
            KdaOptions.logGate(1));
    assertNear(got.out(), new double[] {0, 0, 0, 4.5, 5, 5.5});
  }

  @Test
  void betaTwoReflects() {
    // S + 2 k (v - S^T k)^T with v = 0 turns the key's row around.
    double[] state = {1, 2, 3, 4, 5, 6};
    KdaResult got =
        KdaReference.forward(
            Tokens.dense(1, 1),
            small(new double[2], new double[] {1, 0}, new double[3], new double[2], 2),
            LOG,
            state,
            0);
    assertNear(got.finalState(), new double[] {-1, -2, -3, 4, 5, 6});
  }

  @Test
  void noTokensLeaveTheState() {
    KdaInputs none = random(0, 1, 2, 3, 2);
    double[] state = AttentionReferenceTest.random(9, 3, 2, 6);
    KdaResult got = KdaReference.forward(Tokens.packed(0, 0, 0, 0), none, LOG, state, 0);
    assertThat(got.out()).isEmpty();
    assertThat(got.finalState()).isEqualTo(state);
    assertThat(forward(Tokens.packed(0, 0), none, LOG).finalState()).containsOnly(0);
  }

  // ---- gates and betas ------------------------------------------------------------------------

  @Test
  void softplusGateIsItsLogDecay() {
    KdaInputs x = random(4, 1, 2, 3, 2);
    double[] aLog = {0.3, -0.7};
    double[] dtBias = AttentionReferenceTest.random(6, 2, 3);
    double[] log = new double[x.g().length];
    for (int i = 0; i < log.length; i++) {
      int h = i / 3 % 2;
      log[i] = -Math.exp(aLog[h]) * Math.log1p(Math.exp(x.g()[i] + dtBias[h * 3 + i % 3]));
    }
    assertNear(
        forward(Tokens.dense(1, 4), gated(x, x.g(), aLog, dtBias), LOG.withSoftplusGate()).out(),
        forward(Tokens.dense(1, 4), gated(x, log, null, null), LOG).out());
  }

  @Test
  void boundedGateIsItsLogDecayAndNoClampedSoftplus() {
    KdaInputs x = random(4, 1, 2, 3, 2);
    double[] aLog = {0.3, -0.7};
    double[] dtBias = AttentionReferenceTest.random(6, 2, 3);
    double[] log = new double[x.g().length];
    double[] clamped = new double[x.g().length];
    for (int i = 0; i < log.length; i++) {
      int h = i / 3 % 2;
      double biased = x.g()[i] + dtBias[h * 3 + i % 3];
      log[i] = -5 / (1 + Math.exp(-Math.exp(aLog[h]) * biased));
      clamped[i] = Math.max(-5, -Math.exp(aLog[h]) * Math.log1p(Math.exp(biased)));
    }
    Tokens tokens = Tokens.dense(1, 4);
    double[] bounded =
        forward(tokens, gated(x, x.g(), aLog, dtBias), LOG.withBoundedGate(-5)).out();
    assertNear(bounded, forward(tokens, gated(x, log, null, null), LOG).out());
    double[] other = forward(tokens, gated(x, clamped, null, null), LOG).out();
    assertThat(ErrorMetrics.of(other, bounded).relative()).isGreaterThan(0.01);
  }

  @Test
  void gatesSaturate() {
    double[] state = {1, 1, 1, 1, 1, 1};
    double[] zero = new double[2];
    double[] raw = {50, -50};
    KdaInputs x = small(zero, zero, new double[3], raw, 0);
    Tokens one = Tokens.dense(1, 1);
    double[] bounded = KdaReference.forward(one, x, LOG.withBoundedGate(-5), state, 0).finalState();
    assertThat(bounded[0]).isCloseTo(Math.exp(-5), within(1e-15)); // at the bound
    assertThat(bounded[3]).isCloseTo(1, within(1e-15)); // kept
    double[] huge = {1000, -1000};
    double[] softplus =
        KdaReference.forward(
                one, small(zero, zero, new double[3], huge, 0), LOG.withSoftplusGate(), state, 0)
            .finalState();
    assertThat(softplus[0]).isZero(); // exp(-1000)
    assertThat(softplus[3]).isEqualTo(1);
  }

  @Test
  void betaLogitsAreSquashed() {
    double[] logits = {-800, 0, 800};
    double[] sigmoid = {0, 0.5, 1};
    double[] q = {1, 0, 1, 0, 1, 0};
    double[] v = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    Tokens tokens = Tokens.dense(3, 1);
    double[] zero = new double[6];
    for (KdaOptions.Beta beta :
        new KdaOptions.Beta[] {KdaOptions.Beta.SIGMOID, KdaOptions.Beta.TWICE_SIGMOID}) {
      double factor = beta == KdaOptions.Beta.SIGMOID ? 1 : 2;
      double[] raw = Arrays.stream(sigmoid).map(b -> factor * b).toArray();
      assertThat(forward(tokens, small(q, q, v, zero, logits), LOG.withBeta(beta)).out())
          .isEqualTo(forward(tokens, small(q, q, v, zero, raw), LOG).out());
    }
  }

  @Test
  void betaPerChannelScalesEachValueChannel() {
    double[] q = {1, 0};
    double[] v = {5, 6, 7};
    KdaInputs x = small(q, q, v, new double[2], 0.5, 1, 0);
    KdaResult got = forward(Tokens.dense(1, 1), x, KdaOptions.logGate(1).withPerChannelBeta(true));
    assertNear(got.out(), new double[] {2.5, 6, 0});
    KdaInputs y = random(5, 1, 2, 3, 4);
    KdaInputs repeated =
        new KdaInputs(
            1, 2, 3, 4, y.q(), y.k(), y.v(), y.g(), repeatHeads(y.beta(), 10, 1, 4), null, null);
    assertThat(forward(Tokens.dense(1, 5), repeated, LOG.withPerChannelBeta(true)).out())
        .isEqualTo(forward(Tokens.dense(1, 5), y, LOG).out());
  }

  @Test
  void normalisedKeysAreUnitVectors() {
    double[] k = {3e4, 4e4};
    KdaResult got =
        forward(
            Tokens.dense(1, 1),
            small(new double[] {0.3, 0.4}, k, new double[] {1, 0, 0}, new double[2], 1),
            KdaOptions.logGate(1).withL2norm(true));
    // Of the query, 0.25 + 1e-6 stands under the root.
    assertThat(got.out()[0]).isCloseTo(0.5 / Math.sqrt(0.25 + 1e-6), within(1e-14));
    double[] zero = {0, 0};
    KdaInputs none = small(zero, zero, new double[] {1, 1, 1}, zero, 1);
    assertThat(forward(Tokens.dense(1, 1), none, LOG.withL2norm(true)).out()).containsOnly(0);
  }

  // ---- storage --------------------------------------------------------------------------------

  @Test
  void stateLayoutsAreTransposed() {
    int dk = 3;
    int dv = 5;
    KdaInputs x = random(4, 1, 2, dk, dv);
    double[] kv = AttentionReferenceTest.random(8, 1, 2, dk, dv);
    Tokens tokens = Tokens.dense(1, 4);
    KdaResult a = KdaReference.forward(tokens, x, LOG, kv, 2);
    KdaResult b =
        KdaReference.forward(
            tokens, x, LOG.withStateLayout(KdaOptions.StateLayout.VK), transpose(kv, dk, dv), 2);
    assertThat(b.out()).isEqualTo(a.out());
    assertThat(b.finalState()).isEqualTo(transpose(a.finalState(), dk, dv));
    assertThat(b.checkpoints()).isEqualTo(transpose(a.checkpoints(), dk, dv));
  }

  private static double[] transpose(double[] x, int rows, int columns) {
    double[] y = new double[x.length];
    for (int i = 0; i < x.length; i++) {
      int in = i % (rows * columns);
      y[i - in + in % columns * rows + in / columns] = x[i];
    }
    return y;
  }

  @ParameterizedTest
  @ValueSource(ints = {1, 2, 4, 8})
  void groupedHeadsAreRepeatedHeads(int group) {
    int heads = 2;
    KdaInputs x = random(5, heads, heads * group, 3, 4);
    KdaInputs repeated =
        new KdaInputs(
            heads * group,
            heads * group,
            3,
            4,
            repeatHeads(x.q(), heads, 3, group),
            repeatHeads(x.k(), heads, 3, group),
            x.v(),
            x.g(),
            x.beta(),
            null,
            null);
    Tokens tokens = Tokens.dense(1, 5);
    assertThat(forward(tokens, x, LOG).out()).isEqualTo(forward(tokens, repeated, LOG).out());
  }

  @ParameterizedTest
  @ValueSource(ints = {0, 1, 3, 6, 7})
  void aCarriedStateIsOneCall(int cut) {
    KdaInputs x = random(7, 1, 2, 3, 4);
    double[] initial = AttentionReferenceTest.random(9, 1, 2, 12);
    KdaResult whole = KdaReference.forward(Tokens.dense(1, 7), x, LOG, initial, 0);
    KdaResult head = KdaReference.forward(Tokens.dense(1, cut), rows(x, 0, cut), LOG, initial, 0);
    KdaResult tail =
        KdaReference.forward(Tokens.dense(1, 7 - cut), rows(x, cut, 7), LOG, head.finalState(), 0);
    assertThat(tail.finalState()).isEqualTo(whole.finalState());
    assertThat(Arrays.copyOf(whole.out(), cut * 8)).isEqualTo(head.out());
    assertThat(Arrays.copyOfRange(whole.out(), cut * 8, 56)).isEqualTo(tail.out());
  }

  @Test
  void packedSequencesAreIndependent() {
    int[] starts = {0, 0, 3, 3, 4, 7, 7};
    KdaInputs x = random(7, 1, 2, 3, 4);
    double[] initial = AttentionReferenceTest.random(9, 6, 2, 12);
    KdaResult all = KdaReference.forward(Tokens.packed(starts), x, LOG, initial, 2);
    assertThat(all.cuCheckpoints()).containsExactly(0, 0, 1, 1, 1, 2, 2);
    for (int n = 0; n < 6; n++) {
      int length = starts[n + 1] - starts[n];
      KdaResult alone =
          KdaReference.forward(
              Tokens.dense(1, length),
              rows(x, starts[n], starts[n + 1]),
              LOG,
              Arrays.copyOfRange(initial, n * 24, n * 24 + 24),
              2);
      assertThat(Arrays.copyOfRange(all.out(), starts[n] * 8, starts[n + 1] * 8))
          .isEqualTo(alone.out());
      assertThat(Arrays.copyOfRange(all.finalState(), n * 24, n * 24 + 24))
          .isEqualTo(alone.finalState());
      assertThat(
              Arrays.copyOfRange(
                  all.checkpoints(), all.cuCheckpoints()[n] * 24, all.cuCheckpoints()[n + 1] * 24))
          .isEqualTo(alone.checkpoints());
    }
  }

  @Test
  void checkpointsAreFinalStatesOfPrefixes() {
    KdaInputs x = random(7, 1, 2, 3, 4);
    KdaResult got = KdaReference.forward(Tokens.dense(1, 7), x, LOG, null, 3);
    assertThat(got.cuCheckpoints()).containsExactly(0, 2);
    for (int c = 0; c < 2; c++) {
      int length = 3 * (c + 1);
      KdaResult prefix = forward(Tokens.dense(1, length), rows(x, 0, length), LOG);
      assertThat(Arrays.copyOfRange(got.checkpoints(), c * 24, c * 24 + 24))
          .isEqualTo(prefix.finalState());
    }
  }

  // ---- decode ---------------------------------------------------------------------------------

  @ParameterizedTest
  @EnumSource
  void decodeIsForwardOnAPool(KdaOptions.StateLayout layout) {
    KdaOptions options = LOG.withStateLayout(layout);
    KdaInputs x = random(4, 1, 2, 3, 4);
    double[] pool = AttentionReferenceTest.random(9, 5, 2, 12);
    Tokens tokens = Tokens.dense(2, 2);
    KdaResult got =
        KdaReference.decode(
            tokens, x, options, pool, new KdaReference.Slots(new int[] {3, 1}, 1, -1, null));
    double[] initial = new double[48];
    System.arraycopy(pool, 3 * 24, initial, 0, 24);
    System.arraycopy(pool, 24, initial, 24, 24);
    KdaResult want = KdaReference.forward(tokens, x, options, initial, 0);
    assertThat(got.out()).isEqualTo(want.out());
    double[] states = pool.clone();
    System.arraycopy(want.finalState(), 0, states, 3 * 24, 24);
    System.arraycopy(want.finalState(), 24, states, 24, 24);
    assertThat(got.finalState()).isEqualTo(states);
  }

  @Test
  void paddingReadsZerosAndIsNotWritten() {
    KdaInputs x = random(2, 1, 1, 2, 3);
    double[] pool = AttentionReferenceTest.random(9, 2, 6);
    KdaResult got =
        KdaReference.decode(
            Tokens.dense(2, 1),
            x,
            LOG,
            pool,
            new KdaReference.Slots(new int[] {-1, -1}, 1, -1, null));
    assertThat(got.finalState()).isEqualTo(pool);
    assertThat(got.out()).isEqualTo(forward(Tokens.dense(2, 1), x, LOG).out());
  }

  @Test
  void everyTokenOfADraftHasItsSlot() {
    KdaInputs x = random(3, 1, 1, 2, 3);
    double[] pool = AttentionReferenceTest.random(9, 4, 6);
    int[] slots = {2, 0, 3};
    // Two tokens of the last draft were accepted: it goes on from slot 0.
    KdaResult got =
        KdaReference.decode(
            Tokens.dense(1, 3), x, LOG, pool, new KdaReference.Slots(slots, 3, -1, new int[] {2}));
    double[] start = Arrays.copyOf(pool, 6);
    assertThat(got.out())
        .isEqualTo(KdaReference.forward(Tokens.dense(1, 3), x, LOG, start, 0).out());
    for (int t = 0; t < 3; t++) {
      KdaResult prefix =
          KdaReference.forward(Tokens.dense(1, t + 1), rows(x, 0, t + 1), LOG, start, 0);
      assertThat(Arrays.copyOfRange(got.finalState(), slots[t] * 6, slots[t] * 6 + 6))
          .isEqualTo(prefix.finalState());
    }
    assertThat(Arrays.copyOfRange(got.finalState(), 6, 12))
        .isEqualTo(Arrays.copyOfRange(pool, 6, 12));
  }

  @Test
  void wrongSizesAreRefused() {
    KdaInputs x = random(2, 1, 1, 2, 3);
    assertThatThrownBy(() -> forward(Tokens.dense(1, 3), x, LOG))
        .isInstanceOf(IllegalArgumentException.class)
        .hasMessageContaining("q has 4 elements");
    assertThatThrownBy(
            () ->
                KdaReference.decode(
                    Tokens.dense(2, 1),
                    x,
                    LOG,
                    new double[6],
                    new KdaReference.Slots(new int[] {0, 1}, 1, -1, null)))
        .isInstanceOf(IllegalArgumentException.class)
        .hasMessageContaining("slot 1 is neither");
    assertThatThrownBy(() -> LOG.withBoundedGate(0))
        .isInstanceOf(IllegalArgumentException.class)
        .hasMessageContaining("lower_bound");
    assertThatThrownBy(() -> random(1, 2, 3, 1, 1))
        .isInstanceOf(IllegalArgumentException.class)
        .hasMessageContaining("3 value heads over 2");
  }
}
