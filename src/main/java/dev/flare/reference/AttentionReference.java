package dev.flare.reference;

import static dev.flare.reference.Checks.require;

import java.util.Arrays;
import java.util.List;
import java.util.stream.IntStream;
import org.jspecify.annotations.Nullable;

/** Softmax attention and the merge of partial results, in float64. */
public final class AttentionReference {
  private AttentionReference() {}

  /**
   * Softmax attention of every query over the keys that it sees.
   *
   * <pre>
   *   s_j = scale * q.k_j;  s_j = softcap * tanh(s_j / softcap);  s_j += -slope * |p - j|
   *   m   = max over visible j of s_j, and the sink
   *   l   = sum exp(s_j - m) + exp(sink - m)
   *   out = sum exp(s_j - m) v_j / l;  lse = m + ln l
   * </pre>
   *
   * @param queries where the query tokens lie: dense or packed
   * @param keys where the key and value tokens lie: dense, packed or paged
   * @param heads head counts and widths
   * @param q {@code [queries.rows(), H, D]}
   * @param k {@code [keys.rows(), Hk, D]}; rows that no query sees may hold anything, NaN included
   * @param v {@code [keys.rows(), Hk, Dv]}, likewise
   * @param options scale, mask, softcap, ALiBi, sink
   * @return out and lse
   */
  public static AttentionResult attention(
      Tokens queries,
      Tokens keys,
      Heads heads,
      double[] q,
      double[] k,
      double[] v,
      AttentionOptions options) {
    Checks.size("v", v, keys.rows(), heads.kv(), heads.valueDim());
    return attention(queries, keys, heads, q, k, v, heads.valueDim(), options);
  }

  /**
   * As above; values lie {@code valueStride} elements apart, so that they may be parts of the keys.
   */
  static AttentionResult attention(
      Tokens queries,
      Tokens keys,
      Heads heads,
      double[] q,
      double[] k,
      double[] v,
      int valueStride,
      AttentionOptions options) {
    require(
        queries.batch() == keys.batch(),
        "%d query sequences, %d key sequences",
        queries.batch(),
        keys.batch());
    Checks.size("q", q, queries.rows(), heads.query(), heads.dim());
    Checks.size("k", k, keys.rows(), heads.kv(), heads.dim());
    AttentionResult result = emptyResult(queries, heads.query(), heads.valueDim());
    int group = heads.query() / heads.kv();
    forEachSequenceAndHead(
        queries.batch(),
        heads.query(),
        (b, h) -> {
          int nk = keys.length(b);
          int[] keyAt = new int[nk];
          int[] valueAt = new int[nk];
          for (int j = 0; j < nk; j++) {
            int row = keys.row(b, j) * heads.kv() + h / group;
            keyAt[j] = row * heads.dim();
            valueAt[j] = row * valueStride;
          }
          Head head = new Head(k, keyAt, heads.dim(), v, valueAt, heads.valueDim());
          double slope = slope(options, queries.batch(), heads.query(), b, h);
          for (int i = 0; i < queries.length(b); i++) {
            int row = queries.row(b, i) * heads.query() + h;
            result.lse()[queries.statistic(b, h, heads.query(), i)] =
                head.attend(
                    q,
                    row * heads.dim(),
                    (long) i + nk - queries.length(b),
                    options,
                    slope,
                    sink(options, heads.query(), h),
                    result.out(),
                    row * heads.valueDim());
          }
        });
    return result;
  }

  /**
   * The keys and values that the queries of one head see: key {@code j} starts at {@code
   * k[keyAt[j]]}, value {@code j} at {@code v[valueAt[j]]}.
   */
  @SuppressWarnings("ArrayRecordComponent") // plain arrays: see the package
  record Head(double[] k, int[] keyAt, int dim, double[] v, int[] valueAt, int valueDim) {

    /** Attends from one query at {@code position}; writes {@code out} and returns the LSE. */
    double attend(
        double[] q,
        int qAt,
        long position,
        AttentionOptions options,
        double slope,
        double sink,
        double[] out,
        int outAt) {
      int first = options.firstVisible(position);
      int last = options.lastVisible(position, keyAt.length);
      double[] score = new double[Math.max(0, last - first + 1)];
      double max = sink;
      for (int j = first; j <= last; j++) {
        double s = options.scale() * dot(q, qAt, k, keyAt[j], dim);
        if (options.softcap() > 0) {
          s = options.softcap() * Math.tanh(s / options.softcap());
        }
        s -= slope * Math.abs(position - j);
        score[j - first] = s;
        max = Math.max(max, s);
      }
      Arrays.fill(out, outAt, outAt + valueDim, 0);
      if (max == Double.NEGATIVE_INFINITY) {
        return max; // no key is visible, or every score is -infinity
      }
      if (max == Double.POSITIVE_INFINITY && sink == max) {
        return max; // the sink takes all the weight; the formula would say infinity - infinity
      }
      double sum = Math.exp(sink - max);
      for (int j = first; j <= last; j++) {
        double weight = Math.exp(score[j - first] - max);
        sum += weight;
        for (int c = 0; c < valueDim; c++) {
          out[outAt + c] += weight * v[valueAt[j] + c];
        }
      }
      for (int c = 0; c < valueDim; c++) {
        out[outAt + c] /= sum;
      }
      return max + Math.log(sum);
    }
  }

  /**
   * Merges partial results over disjoint sets of keys by their LSE: {@code L = ln sum exp(L_p)},
   * {@code out = sum exp(L_p - L) out_p}. A part with LSE -infinity is skipped, whatever its out
   * holds.
   *
   * @param queries where the query tokens lie; fixes the layout of lse
   * @param heads query heads
   * @param valueDim width of a value
   * @param parts results of one shape, {@code out [rows, H, dv]}
   * @return the result over all keys
   */
  public static AttentionResult merge(
      Tokens queries, int heads, int valueDim, List<AttentionResult> parts) {
    AttentionResult merged = emptyResult(queries, heads, valueDim);
    for (AttentionResult part : parts) {
      Checks.size("out", part.out(), queries.rows(), heads, valueDim);
      Checks.size("lse", part.lse(), queries.rows(), heads);
    }
    forEachSequenceAndHead(
        queries.batch(),
        heads,
        (b, h) -> {
          for (int i = 0; i < queries.length(b); i++) {
            int at = queries.statistic(b, h, heads, i);
            int outAt = (queries.row(b, i) * heads + h) * valueDim;
            double max = Double.NEGATIVE_INFINITY;
            for (AttentionResult part : parts) {
              max = Math.max(max, part.lse()[at]);
            }
            if (max == Double.NEGATIVE_INFINITY) {
              continue;
            }
            double sum = 0;
            for (AttentionResult part : parts) {
              sum += Math.exp(part.lse()[at] - max);
            }
            double lse = max + Math.log(sum);
            for (AttentionResult part : parts) {
              if (part.lse()[at] == Double.NEGATIVE_INFINITY) {
                continue;
              }
              double weight = Math.exp(part.lse()[at] - lse);
              for (int c = 0; c < valueDim; c++) {
                merged.out()[outAt + c] += weight * part.out()[outAt + c];
              }
            }
            merged.lse()[at] = lse;
          }
        });
    return merged;
  }

  /**
   * Multiplies each head of each sequence by its own factor: what stored fp8 values stand for.
   *
   * @param tokens where the tokens of {@code x} lie
   * @param heads heads of {@code x}
   * @param dim width of a head
   * @param x {@code [rows, heads, dim]}, as stored
   * @param factors {@code [B, factorHeads]}; head {@code h} uses {@code h / (heads / factorHeads)}
   * @param factorHeads heads that have a factor, a divisor of {@code heads}
   * @return the products; rows of no sequence keep their value
   */
  public static double[] descale(
      Tokens tokens, int heads, int dim, double[] x, double[] factors, int factorHeads) {
    Checks.size("x", x, tokens.rows(), heads, dim);
    Checks.size("factors", factors, tokens.batch(), factorHeads);
    double[] y = x.clone();
    int group = heads / factorHeads;
    for (int b = 0; b < tokens.batch(); b++) {
      for (int t = 0; t < tokens.length(b); t++) {
        for (int h = 0; h < heads; h++) {
          int at = (tokens.row(b, t) * heads + h) * dim;
          for (int c = 0; c < dim; c++) {
            y[at + c] = x[at + c] * factors[b * factorHeads + h / group];
          }
        }
      }
    }
    return y;
  }

  static AttentionResult emptyResult(Tokens queries, int heads, int valueDim) {
    double[] lse = Checks.allocate(queries.rows(), heads);
    Arrays.fill(lse, Double.NEGATIVE_INFINITY);
    return new AttentionResult(Checks.allocate(queries.rows(), heads, valueDim), lse);
  }

  static double sink(AttentionOptions options, int heads, int h) {
    double @Nullable [] sink = options.sink();
    Checks.optionalSize("sink", sink, heads);
    return sink == null ? Double.NEGATIVE_INFINITY : sink[h];
  }

  static double slope(AttentionOptions options, int batch, int heads, int b, int h) {
    double @Nullable [] slopes = options.alibiSlopes();
    if (slopes == null) {
      return 0;
    }
    require(
        slopes.length == heads || slopes.length == batch * heads,
        "alibi_slopes has %d elements, want [%d] or [%d, %d]",
        slopes.length,
        heads,
        batch,
        heads);
    return slopes.length == heads ? slopes[h] : slopes[b * heads + h];
  }

  static double dot(double[] a, int aAt, double[] b, int bAt, int n) {
    double sum = 0;
    for (int c = 0; c < n; c++) {
      sum += a[aAt + c] * b[bAt + c];
    }
    return sum;
  }

  /** Work on one head of one sequence. */
  interface PerHead {
    void accept(int b, int h);
  }

  static void forEachSequenceAndHead(int batch, int heads, PerHead body) {
    IntStream.range(0, Math.multiplyExact(batch, heads))
        .parallel()
        .forEach(i -> body.accept(i / heads, i % heads));
  }
}
