package dev.flare.reference;

import static org.assertj.core.api.Assertions.assertThat;
import static org.assertj.core.api.Assertions.within;

import dev.flare.testing.Cases;
import java.util.Arrays;
import java.util.SplittableRandom;
import java.util.stream.Stream;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.EnumSource;
import org.junit.jupiter.params.provider.MethodSource;

/** What must hold of the definitions whatever the sizes, storage and options. */
class IdentitiesTest {
  static Stream<Cases.Attention> attention() {
    return Cases.stream(0xA11, 40, Cases::attention);
  }

  static Stream<Cases.Mla> mla() {
    return Cases.stream(0x31A, 12, Cases::mla);
  }

  static Stream<Cases.Kda> kda() {
    return Cases.stream(0xDA, 25, Cases::kda);
  }

  /** With all scores equal and one-hot values, out tells which keys a row sees. */
  @ParameterizedTest(name = "sq={0} sk={1}")
  @CsvSource({"1,1", "1,7", "5,5", "3,7", "7,3", "6,1", "4,0", "9,4"})
  void masksFollowTheirDefinition(int nq, int nk) {
    Heads heads = new Heads(1, 1, 1, Math.max(1, nk));
    double[] identity = new double[nk * nk];
    for (int j = 0; j < nk; j++) {
      identity[j * nk + j] = 1;
    }
    int[] bounds = {AttentionOptions.UNBOUNDED, 0, 1, 2, 5, 20, Integer.MAX_VALUE};
    for (int left : bounds) {
      for (int right : bounds) {
        for (boolean causal : new boolean[] {false, true}) {
          AttentionResult result =
              AttentionReference.attention(
                  Tokens.dense(1, nq),
                  Tokens.dense(1, nk),
                  heads,
                  new double[nq],
                  new double[nk],
                  identity,
                  AttentionOptions.full(1).withWindow(left, right).withCausal(causal));
          for (int i = 0; i < nq; i++) {
            long p = (long) i + nk - nq;
            long lo = left < 0 ? 0 : Math.max(0, p - left);
            long hi = causal ? p : right < 0 ? nk - 1 : p + (long) right;
            hi = Math.min(hi, nk - 1);
            int count = (int) Math.max(0, hi - lo + 1);
            for (int j = 0; j < nk; j++) {
              boolean visible = lo <= j && j <= hi;
              assertThat(result.out()[i * nk + j])
                  .as("i=%d j=%d L=%d R=%d causal=%b", i, j, left, right, causal)
                  .isCloseTo(visible ? 1.0 / count : 0, within(1e-14));
            }
            double lse = count == 0 ? Double.NEGATIVE_INFINITY : Math.log(count);
            assertThat(result.lse()[i]).isCloseTo(lse, within(1e-14));
          }
        }
      }
    }
  }

  /** Storage, batch mates and what lies between the rows change no bit. */
  @ParameterizedTest(name = "{0}")
  @MethodSource("attention")
  void aSequenceAloneIsItselfInABatch(Cases.Attention c) {
    AttentionResult batch = c.reference();
    Tokens queries = c.queries().tokens();
    Tokens keys = c.keys().tokens();
    Heads heads = c.heads();
    for (int b = 0; b < queries.batch(); b++) {
      int nq = queries.length(b);
      AttentionOptions options = c.options();
      double[] slopes = options.alibiSlopes();
      if (slopes != null && slopes.length > heads.query()) {
        int from = b * heads.query();
        options = options.withAlibiSlopes(Arrays.copyOfRange(slopes, from, from + heads.query()));
      }
      AttentionResult alone =
          AttentionReference.attention(
              Tokens.dense(1, nq),
              Tokens.dense(1, keys.length(b)),
              heads,
              gather(queries, b, c.q(), heads.query() * heads.dim()),
              gather(keys, b, c.k(), heads.kv() * heads.dim()),
              gather(keys, b, c.v(), heads.kv() * heads.valueDim()),
              options);
      assertThat(gather(queries, b, batch.out(), heads.query() * heads.valueDim()))
          .isEqualTo(alone.out());
      for (int h = 0; h < heads.query(); h++) {
        for (int i = 0; i < nq; i++) {
          assertThat(batch.lse()[queries.statistic(b, h, heads.query(), i)])
              .isEqualTo(alone.lse()[h * nq + i]);
        }
      }
    }
  }

  private static double[] gather(Tokens tokens, int b, double[] x, int width) {
    double[] y = new double[tokens.length(b) * width];
    for (int t = 0; t < tokens.length(b); t++) {
      System.arraycopy(x, tokens.row(b, t) * width, y, t * width, width);
    }
    return y;
  }

  /** Only associativity separates the two forms of latent attention. */
  @ParameterizedTest(name = "{0}")
  @MethodSource("mla")
  void absorbedAndUpProjectingAgree(Cases.Mla c) {
    AttentionResult up = c.reference();
    MlaReference.Widths w = c.widths();
    int rows = c.queries().tokens().rows();
    AttentionResult latent =
        MlaReference.absorbed(
            c.queries().tokens(),
            c.keys().tokens(),
            w.heads(),
            w.latent(),
            w.rope(),
            MlaReference.absorbQuery(rows, w, c.qNope(), c.qRope(), c.wUk()),
            c.cache(),
            c.options());
    double[] out = MlaReference.projectOutput(rows, w, latent.out(), c.wUv());
    assertThat(ErrorMetrics.of(out, up.out()).relative()).isLessThan(1e-12);
    assertThat(ErrorMetrics.of(latent.lse(), up.lse()).maxAbsolute()).isLessThan(1e-11);
  }

  /** The step as one matrix: S = (I - b k k^T) diag(exp g) S + b k v^T, a b for each column. */
  @ParameterizedTest
  @EnumSource(KdaOptions.StateLayout.class)
  void theStepIsAnAffineMapOfTheState(KdaOptions.StateLayout layout) {
    int rows = 6;
    int dk = 4;
    int dv = 3;
    SplittableRandom random = new SplittableRandom(3);
    double[] k = Cases.normals(random, Precision.FP32, rows * dk, 0.4);
    double[] v = Cases.normals(random, Precision.FP32, rows * dv, 1);
    double[] g = Cases.normals(random, Precision.FP32, rows * dk, 0.3);
    double[] beta = Cases.normals(random, Precision.FP32, rows * dv, 0.5);
    double[] state = Cases.normals(random, Precision.FP32, dk * dv, 1);
    KdaResult result =
        KdaReference.forward(
            Tokens.dense(1, rows),
            new KdaInputs(1, 1, dk, dv, new double[rows * dk], k, v, g, beta, null, null),
            KdaOptions.logGate(1).withPerChannelBeta(true).withStateLayout(layout),
            inLayout(layout, state, dk, dv),
            0);
    for (int t = 0; t < rows; t++) {
      double[] next = new double[dk * dv];
      for (int j = 0; j < dv; j++) {
        double b = beta[t * dv + j];
        for (int r = 0; r < dk; r++) {
          double sum = b * k[t * dk + r] * v[t * dv + j];
          for (int c = 0; c < dk; c++) {
            double transition = (r == c ? 1 : 0) - b * k[t * dk + r] * k[t * dk + c];
            sum += transition * Math.exp(g[t * dk + c]) * state[c * dv + j];
          }
          next[r * dv + j] = sum;
        }
      }
      state = next;
    }
    double[] want = inLayout(layout, state, dk, dv);
    assertThat(ErrorMetrics.of(result.finalState(), want).relative()).isLessThan(1e-13);
  }

  private static double[] inLayout(KdaOptions.StateLayout layout, double[] state, int dk, int dv) {
    double[] result = new double[state.length];
    for (int c = 0; c < dk; c++) {
      for (int j = 0; j < dv; j++) {
        int at = layout == KdaOptions.StateLayout.KV ? c * dv + j : j * dk + c;
        result[at] = state[c * dv + j];
      }
    }
    return result;
  }

  /** Cut anywhere, alone, a sequence goes on from its state bit for bit. */
  @ParameterizedTest(name = "{0}")
  @MethodSource("kda")
  void aCarriedStateIsOneCall(Cases.Kda c) {
    KdaResult whole = c.reference();
    Tokens tokens = c.tokens().tokens();
    KdaInputs x = c.inputs();
    int n = tokens.batch() - 1;
    int length = tokens.length(n);
    int start = length == 0 ? 0 : tokens.row(n, 0);
    int cut = start + length / 3;
    int end = start + length;
    int stateSize = x.valueHeads() * x.keyDim() * x.valueDim();
    double[] states = c.initialState();
    double[] initial =
        states == null ? null : Arrays.copyOfRange(states, n * stateSize, (n + 1) * stateSize);
    KdaResult first =
        KdaReference.forward(
            Tokens.dense(1, cut - start), rows(x, start, cut), c.options(), initial, 0);
    KdaResult second =
        KdaReference.forward(
            Tokens.dense(1, end - cut), rows(x, cut, end), c.options(), first.finalState(), 0);
    int width = x.valueHeads() * x.valueDim();
    assertThat(second.out()).isEqualTo(Arrays.copyOfRange(whole.out(), cut * width, end * width));
    assertThat(second.finalState())
        .isEqualTo(Arrays.copyOfRange(whole.finalState(), n * stateSize, (n + 1) * stateSize));
  }

  private static KdaInputs rows(KdaInputs x, int from, int to) {
    int qk = x.heads() * x.keyDim();
    int value = x.valueHeads() * x.valueDim();
    int gate = x.valueHeads() * x.keyDim();
    return new KdaInputs(
        x.heads(),
        x.valueHeads(),
        x.keyDim(),
        x.valueDim(),
        Arrays.copyOfRange(x.q(), from * qk, to * qk),
        Arrays.copyOfRange(x.k(), from * qk, to * qk),
        Arrays.copyOfRange(x.v(), from * value, to * value),
        Arrays.copyOfRange(x.g(), from * gate, to * gate),
        Arrays.copyOfRange(x.beta(), from * x.valueHeads(), to * x.valueHeads()),
        x.aLog(),
        x.dtBias());
  }
}
