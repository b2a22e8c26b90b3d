package dev.flare.reference;

import static dev.flare.reference.AttentionReference.dot;
import static dev.flare.reference.AttentionReference.forEachSequenceAndHead;
import static dev.flare.reference.Checks.require;

import java.util.Arrays;
import org.jspecify.annotations.Nullable;

/**
 * Multi-head latent attention in float64, in both of its forms. A token's key and value of every
 * head come from one latent vector {@code c} and one rotary key shared by all heads:
 *
 * <pre>
 *   K = c W_uk[h];  V = c W_uv[h];  s = scale * (q_nope . K + q_rope . k_rope)     up-projecting
 *   q' = q_nope W_uk[h]^T;  s = scale * (q' . c + q_rope . k_rope)                   absorbed
 *   out = (softmax(s) c) W_uv[h]
 * </pre>
 *
 * The two are equal in exact arithmetic. Of the options, all that apply to attention apply here.
 */
public final class MlaReference {
  private MlaReference() {}

  /**
   * The widths of a latent attention.
   *
   * @param heads query heads
   * @param nope width of the query part without rotation
   * @param rope width of the rotary part; 0: none
   * @param latent width of the latent vector
   * @param value width of a value
   */
  public record Widths(int heads, int nope, int rope, int latent, int value) {
    /** Checks that all but {@code rope} are positive. */
    public Widths {
      require(
          heads >= 1 && nope >= 1 && rope >= 0 && latent >= 1 && value >= 1,
          "heads %d, nope %d, rope %d, latent %d, value %d: only rope may be 0",
          heads,
          nope,
          rope,
          latent,
          value);
    }

    /** {@return 1 / sqrt(nope + rope): the width before absorption, in both forms} */
    public double defaultScale() {
      return 1 / Math.sqrt(nope + rope);
    }
  }

  /**
   * The up-projecting form.
   *
   * @param queries where the query tokens lie: dense or packed
   * @param keys where the latents lie: dense, packed or paged
   * @param w the widths
   * @param qNope {@code [queries.rows(), H, nope]}
   * @param qRope {@code [queries.rows(), H, rope]}; null when rope is 0
   * @param latents {@code [keys.rows(), latent]}
   * @param kRope {@code [keys.rows(), rope]}; null when rope is 0
   * @param wUk {@code [H, latent, nope]}
   * @param wUv {@code [H, latent, value]}
   * @param options scale, mask and the rest
   * @return out {@code [queries.rows(), H, value]}, and lse
   */
  public static AttentionResult upProjecting(
      Tokens queries,
      Tokens keys,
      Widths w,
      double[] qNope,
      double @Nullable [] qRope,
      double[] latents,
      double @Nullable [] kRope,
      double[] wUk,
      double[] wUv,
      AttentionOptions options) {
    require(
        queries.batch() == keys.batch(),
        "%d query sequences, %d key sequences",
        queries.batch(),
        keys.batch());
    double[] queryRope = ropePart("q_rope", qRope, w.rope(), queries.rows(), w.heads(), w.rope());
    double[] keyRope = ropePart("k_rope", kRope, w.rope(), keys.rows(), w.rope());
    Checks.size("q_nope", qNope, queries.rows(), w.heads(), w.nope());
    Checks.size("c_kv", latents, keys.rows(), w.latent());
    Checks.size("w_uk", wUk, w.heads(), w.latent(), w.nope());
    Checks.size("w_uv", wUv, w.heads(), w.latent(), w.value());
    AttentionResult result = AttentionReference.emptyResult(queries, w.heads(), w.value());
    int width = w.nope() + w.rope();
    forEachSequenceAndHead(
        queries.batch(),
        w.heads(),
        (b, h) -> {
          int nk = keys.length(b);
          double[] k = Checks.allocate(nk, width);
          double[] v = Checks.allocate(nk, w.value());
          int[] keyAt = new int[nk];
          int[] valueAt = new int[nk];
          for (int j = 0; j < nk; j++) {
            int row = keys.row(b, j);
            keyAt[j] = j * width;
            valueAt[j] = j * w.value();
            project(latents, row * w.latent(), wUk, h, w.latent(), w.nope(), k, keyAt[j]);
            project(latents, row * w.latent(), wUv, h, w.latent(), w.value(), v, valueAt[j]);
            System.arraycopy(keyRope, row * w.rope(), k, keyAt[j] + w.nope(), w.rope());
          }
          var head = new AttentionReference.Head(k, keyAt, width, v, valueAt, w.value());
          double[] q = new double[width];
          for (int i = 0; i < queries.length(b); i++) {
            int row = queries.row(b, i) * w.heads() + h;
            System.arraycopy(qNope, row * w.nope(), q, 0, w.nope());
            System.arraycopy(queryRope, row * w.rope(), q, w.nope(), w.rope());
            result.lse()[queries.statistic(b, h, w.heads(), i)] =
                head.attend(
                    q,
                    0,
                    (long) i + nk - queries.length(b),
                    options,
                    AttentionReference.slope(options, queries.batch(), w.heads(), b, h),
                    AttentionReference.sink(options, w.heads(), h),
                    result.out(),
                    row * w.value());
          }
        });
    return result;
  }

  /**
   * The absorbed form: one key of width latent + rope for all heads, whose first {@code latent}
   * channels are also the value.
   *
   * @param queries where the query tokens lie: dense or packed
   * @param keys where the cache rows lie: dense, packed or paged
   * @param heads query heads
   * @param latent width of the latent vector
   * @param rope width of the rotary part; 0: none
   * @param q {@code [queries.rows(), H, latent + rope]}: the absorbed query, then the rotary part
   * @param cache {@code [keys.rows(), latent + rope]}
   * @param options with an explicit scale, 1 / sqrt(nope + rope) of the model: the widths here do
   *     not tell it
   * @return out {@code [queries.rows(), H, latent]}, and lse
   */
  public static AttentionResult absorbed(
      Tokens queries,
      Tokens keys,
      int heads,
      int latent,
      int rope,
      double[] q,
      double[] cache,
      AttentionOptions options) {
    Heads shape = new Heads(heads, 1, latent + rope, latent);
    return AttentionReference.attention(
        queries, keys, shape, q, cache, cache, latent + rope, options);
  }

  /**
   * The absorbed form over a list of rows for each query token. No mask: the list decides. A row
   * listed twice counts twice.
   *
   * @param queries where the query tokens lie: dense or packed
   * @param cacheRows rows of the cache
   * @param heads query heads
   * @param latent width of the latent vector
   * @param rope width of the rotary part; 0: none
   * @param q {@code [queries.rows(), H, latent + rope]}
   * @param cache {@code [cacheRows, latent + rope]}
   * @param indices rows of the cache, {@code [queries.rows(), topK]}; outside 0..cacheRows: absent
   * @param topK entries in a list
   * @param counts how many entries of each list count, {@code [queries.rows()]}; null: all
   * @param options scale and sink
   * @return out {@code [queries.rows(), H, latent]}, and lse
   */
  public static AttentionResult absorbedSparse(
      Tokens queries,
      int cacheRows,
      int heads,
      int latent,
      int rope,
      double[] q,
      double[] cache,
      int[] indices,
      int topK,
      int @Nullable [] counts,
      AttentionOptions options) {
    int width = latent + rope;
    Checks.size("q", q, queries.rows(), heads, width);
    Checks.size("cache", cache, cacheRows, width);
    Checks.size("indices", indices, queries.rows(), topK);
    require(
        counts == null || counts.length == queries.rows(),
        "counts want one entry for each of %d query rows",
        queries.rows());
    AttentionOptions unmasked =
        options
            .withCausal(false)
            .withWindow(AttentionOptions.UNBOUNDED, AttentionOptions.UNBOUNDED);
    AttentionResult result = AttentionReference.emptyResult(queries, heads, latent);
    forEachSequenceAndHead(
        queries.batch(),
        heads,
        (b, h) -> {
          for (int i = 0; i < queries.length(b); i++) {
            int token = queries.row(b, i);
            int count = counts == null ? topK : Math.clamp(counts[token], 0, topK);
            int[] rows =
                Arrays.stream(indices, token * topK, token * topK + count)
                    .filter(row -> row >= 0 && row < cacheRows)
                    .map(row -> row * width)
                    .toArray();
            var head = new AttentionReference.Head(cache, rows, width, cache, rows, latent);
            int row = token * heads + h;
            result.lse()[queries.statistic(b, h, heads, i)] =
                head.attend(
                    q,
                    row * width,
                    0,
                    unmasked,
                    0,
                    AttentionReference.sink(options, heads, h),
                    result.out(),
                    row * latent);
          }
        });
    return result;
  }

  /**
   * Moves W_uk to the query's side: {@code q' = q_nope W_uk[h]^T}, followed by the rotary part.
   *
   * @param rows query tokens
   * @param w the widths
   * @param qNope {@code [rows, H, nope]}
   * @param qRope {@code [rows, H, rope]}; null when rope is 0
   * @param wUk {@code [H, latent, nope]}
   * @return {@code [rows, H, latent + rope]}
   */
  public static double[] absorbQuery(
      int rows, Widths w, double[] qNope, double @Nullable [] qRope, double[] wUk) {
    double[] queryRope = ropePart("q_rope", qRope, w.rope(), rows, w.heads(), w.rope());
    Checks.size("q_nope", qNope, rows, w.heads(), w.nope());
    Checks.size("w_uk", wUk, w.heads(), w.latent(), w.nope());
    int width = w.latent() + w.rope();
    double[] q = Checks.allocate(rows, w.heads(), width);
    for (int r = 0; r < rows * w.heads(); r++) {
      int h = r % w.heads();
      for (int c = 0; c < w.latent(); c++) {
        int weightAt = (h * w.latent() + c) * w.nope();
        q[r * width + c] = dot(qNope, r * w.nope(), wUk, weightAt, w.nope());
      }
      System.arraycopy(queryRope, r * w.rope(), q, r * width + w.latent(), w.rope());
    }
    return q;
  }

  /**
   * Projects the absorbed form's output to values: {@code out W_uv[h]}.
   *
   * @param rows query tokens
   * @param w the widths
   * @param out {@code [rows, H, latent]}
   * @param wUv {@code [H, latent, value]}
   * @return {@code [rows, H, value]}
   */
  public static double[] projectOutput(int rows, Widths w, double[] out, double[] wUv) {
    Checks.size("out", out, rows, w.heads(), w.latent());
    Checks.size("w_uv", wUv, w.heads(), w.latent(), w.value());
    double[] values = Checks.allocate(rows, w.heads(), w.value());
    for (int r = 0; r < rows * w.heads(); r++) {
      project(
          out, r * w.latent(), wUv, r % w.heads(), w.latent(), w.value(), values, r * w.value());
    }
    return values;
  }

  /** {@code y[0..width) = x[0..latent) W[h]}, where W is {@code [H, latent, width]}. */
  private static void project(
      double[] x, int xAt, double[] weight, int h, int latent, int width, double[] y, int yAt) {
    for (int c = 0; c < latent; c++) {
      int weightAt = (h * latent + c) * width;
      for (int n = 0; n < width; n++) {
        y[yAt + n] += x[xAt + c] * weight[weightAt + n];
      }
    }
  }

  private static double[] ropePart(
      String name, double @Nullable [] part, int rope, long... extents) {
    double[] present = part == null ? new double[0] : part;
    require(part != null || rope == 0, "%s is missing, rope width is %d", name, rope);
    Checks.size(name, present, extents);
    return present;
  }
}
