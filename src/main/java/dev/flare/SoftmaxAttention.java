package dev.flare;

import org.jspecify.annotations.Nullable;

/**
 * Softmax attention: {@code softmax(scale * q k^T + mask) v}, with its options.
 *
 * <p>An object is a choice of options and holds no memory; {@code with...} methods return a changed
 * copy. {@link #run} computes in one line; {@link #plan} prepares for launching many times.
 *
 * <p><b>Shapes.</b> q {@code [B, Sq, H, D]}, k {@code [B, Sk, Hk, D]}, v {@code [B, Sk, Hk, Dv]},
 * out {@code [B, Sq, H, Dv]}, log-sum-exp {@code [B, H, Sq]} in FP32. Tensors laid out {@code [B,
 * H, S, D]} go in as {@code q.transpose(1, 2)}: any strides do, but the last dimension must be
 * dense. H is a multiple of Hk; query head h reads key head {@code h / (H / Hk)}. D and Dv are 1 to
 * 512. Packed ({@link #withVarlen}) and paged ({@link #withPages}) inputs have their own shapes.
 *
 * <p><b>Dtypes.</b> q, k and v alike: FP32, FP16, BF16 or FP8_E4M3. Sums are kept in FP32.
 *
 * <p><b>Order.</b> Scores are scaled, capped ({@link #withSoftcap}), biased ({@link #withAlibi})
 * and masked. Masks are aligned to the bottom right: query i of Sq stands at position {@code i + Sk
 * - Sq}. A query that sees no key has out = 0 and log-sum-exp = -infinity (with a sink: the sink).
 *
 * <p><b>Threads.</b> Immutable; any thread may use it. Tensors given as options are the caller's
 * and must be open when it runs.
 *
 * @param <S> the kind of attention that {@code with...} methods return
 */
public abstract sealed class SoftmaxAttention<S extends SoftmaxAttention<S>>
    permits FlashAttention, SlidingWindowAttention {
  final AttentionSettings settings;

  SoftmaxAttention(AttentionSettings settings) {
    this.settings = settings;
  }

  abstract S make(AttentionSettings changed);

  /**
   * Sets the factor of the scores.
   *
   * @param scale any finite number; by default {@code 1/sqrt(D)}
   * @return a changed copy
   */
  public S withScale(double scale) {
    float value = Checks.finite("scale", scale);
    return make(settings.with(s -> s.scale = value));
  }

  /**
   * Caps the scores: {@code softcap * tanh(score / softcap)}.
   *
   * @param softcap more than 0; 0 turns it off
   * @return a changed copy
   */
  public S withSoftcap(double softcap) {
    float value = Checks.finite("softcap", softcap);
    if (value < 0) {
      throw new InvalidArgumentException("softcap", softcap, "0 (off) or more");
    }
    return make(settings.with(s -> s.softcap = value));
  }

  /**
   * Adds a bias that grows with distance: {@code -slope * |i + Sk - Sq - j|}.
   *
   * @param slopes FP32 {@code [H]} or {@code [B, H]}
   * @return a changed copy, which refers to the tensor
   */
  public S withAlibi(Tensor slopes) {
    Checks.present("slopes", slopes);
    return make(settings.with(s -> s.alibi = slopes));
  }

  /**
   * Adds one more logit to the softmax of each head, which has no value: attention that goes
   * nowhere.
   *
   * @param logits FP32 {@code [H]}; the log-sum-exp includes them
   * @return a changed copy, which refers to the tensor
   */
  public S withSink(Tensor logits) {
    Checks.present("logits", logits);
    return make(settings.with(s -> s.sink = logits));
  }

  /**
   * Gives the factors that FP8 inputs were divided by.
   *
   * @param query FP32 {@code [B, Hk]}; null for 1
   * @param key FP32 {@code [B, Hk]}; null for 1
   * @param value FP32 {@code [B, Hk]}; null for 1
   * @return a changed copy, which refers to the tensors
   */
  public S withDescale(@Nullable Tensor query, @Nullable Tensor key, @Nullable Tensor value) {
    return make(
        settings.with(
            s -> {
              s.queryDescale = query;
              s.keyDescale = key;
              s.valueDescale = value;
            }));
  }

  /**
   * Chooses the dtype of the result.
   *
   * @param dtype FP32, FP16 or BF16; by default that of the inputs, BF16 for FP8 inputs
   * @return a changed copy
   */
  public S withOutputType(DType dtype) {
    return make(settings.with(s -> s.outputType = dtype));
  }

  /**
   * Takes sequences of different lengths, packed one after the other: q {@code [total_q, H, D]}, k
   * {@code [total_k, Hk, D]}, v, out alike, log-sum-exp {@code [H, total_q]}.
   *
   * @param cuSeqlensQ {@code [B + 1]} INT32 or INT64: where each sequence's queries start; the last
   *     is total_q
   * @param maxSeqlenQ the most queries that a sequence has
   * @param cuSeqlensK the same for keys
   * @param maxSeqlenK the most keys that a sequence has
   * @return a changed copy, which refers to the tensors
   */
  public S withVarlen(Tensor cuSeqlensQ, long maxSeqlenQ, Tensor cuSeqlensK, long maxSeqlenK) {
    return withVarlenQueries(cuSeqlensQ, maxSeqlenQ).withVarlenKeys(cuSeqlensK, maxSeqlenK);
  }

  /**
   * Packs the queries alone, as {@link #withVarlen} does: for paged or equally long keys.
   *
   * @param cuSeqlensQ {@code [B + 1]} INT32 or INT64
   * @param maxSeqlenQ the most queries that a sequence has
   * @return a changed copy, which refers to the tensor
   */
  public S withVarlenQueries(Tensor cuSeqlensQ, long maxSeqlenQ) {
    Checks.present("cuSeqlensQ", cuSeqlensQ);
    Checks.notNegative("maxSeqlenQ", maxSeqlenQ);
    return make(
        settings.with(
            s -> {
              s.cuSeqlensQ = cuSeqlensQ;
              s.maxSeqlenQ = maxSeqlenQ;
            }));
  }

  /**
   * Packs keys and values alone, as {@link #withVarlen} does.
   *
   * @param cuSeqlensK {@code [B + 1]} INT32 or INT64
   * @param maxSeqlenK the most keys that a sequence has
   * @return a changed copy, which refers to the tensor
   */
  public S withVarlenKeys(Tensor cuSeqlensK, long maxSeqlenK) {
    Checks.present("cuSeqlensK", cuSeqlensK);
    Checks.notNegative("maxSeqlenK", maxSeqlenK);
    return make(
        settings.with(
            s -> {
              s.cuSeqlensK = cuSeqlensK;
              s.maxSeqlenK = maxSeqlenK;
              s.blockTable = null;
            }));
  }

  /**
   * Uses only the first rows of each sequence: padded batches, caches that are not full.
   *
   * @param queries {@code [B]} INT32 or INT64; null for all. Rows beyond are not written
   * @param keys {@code [B]} INT32 or INT64; null for all. Rows beyond are not read
   * @return a changed copy, which refers to the tensors
   */
  public S withUsedLengths(@Nullable Tensor queries, @Nullable Tensor keys) {
    return make(
        settings.with(
            s -> {
              s.usedQ = queries;
              s.usedK = keys;
            }));
  }

  /**
   * Takes keys and values from pages: k {@code [pages, page_size, Hk, D]}, v {@code [pages,
   * page_size, Hk, Dv]}. Key j of sequence b lies in page {@code blockTable[b][j / page_size]}.
   *
   * @param blockTable {@code [B, n]} INT32 or INT64, n >= maxSeqlenK / page_size rounded up;
   *     entries beyond a sequence's length are not read
   * @param lengths {@code [B]}, of the same dtype: keys of each sequence
   * @param maxSeqlenK the most keys that a sequence has
   * @return a changed copy, which refers to the tensors
   */
  public S withPages(Tensor blockTable, Tensor lengths, long maxSeqlenK) {
    Checks.present("blockTable", blockTable);
    Checks.present("lengths", lengths);
    Checks.notNegative("maxSeqlenK", maxSeqlenK);
    return make(
        settings.with(
            s -> {
              s.blockTable = blockTable;
              s.usedK = lengths;
              s.maxSeqlenK = maxSeqlenK;
              s.cuSeqlensK = null;
            }));
  }

  /**
   * Splits the keys of a sequence, to keep all cores busy when there are few queries.
   *
   * @param splits 1 for none; by default, 0, flare decides
   * @return a changed copy
   */
  public S withSplits(int splits) {
    Checks.notNegative("splits", splits);
    return make(settings.with(s -> s.splits = splits));
  }

  /**
   * Makes results independent of what else is in the batch.
   *
   * @param deterministic true for fixed split sizes
   * @return a changed copy
   */
  public S withDeterministic(boolean deterministic) {
    return make(settings.with(s -> s.deterministic = deterministic));
  }

  /**
   * Limits the threads that the CPU uses.
   *
   * @param threads 0, the default, for all cores
   * @return a changed copy
   */
  public S withThreads(int threads) {
    Checks.notNegative("threads", threads);
    return make(settings.with(s -> s.threads = threads));
  }

  /**
   * Chooses the kernel.
   *
   * @param kernel an error follows where it can't run
   * @return a changed copy
   */
  public S withKernel(Kernel kernel) {
    return make(settings.with(s -> s.kernel = kernel));
  }

  // ---- running --------------------------------------------------------------------------------

  /**
   * Computes attention.
   *
   * @param q queries
   * @param k keys
   * @param v values
   * @return a new dense tensor that the caller closes
   * @throws InvalidArgumentException if shapes, strides, dtypes or options do not fit each other
   * @throws UnsupportedException if there is no kernel for them
   * @throws NativeLibraryException if the C library is not usable here
   */
  public Tensor run(Tensor q, Tensor k, Tensor v) {
    try (AttentionPlan plan = AttentionPlan.of(settings, q, k, v, null, null, false, true)) {
      Tensor out = plan.emptyOutput();
      try {
        plan.launch(q, k, v, out);
        return out;
      } catch (RuntimeException | Error e) {
        out.close();
        throw e;
      }
    }
  }

  /**
   * Computes attention over the sequences of a paged cache.
   *
   * @param q queries {@code [B, Sq, H, D]}, whose keys and values are in the cache already
   * @param batch sequences of a {@link PagedKvCache}
   * @return a new dense tensor that the caller closes
   * @throws InvalidArgumentException if the queries do not fit the cache
   * @throws NativeLibraryException if the C library is not usable here
   */
  public Tensor run(Tensor q, KvCache.Batch batch) {
    if (!(batch.cache() instanceof PagedKvCache cache)) {
      throw new InvalidArgumentException(
          "batch", "sequences of a latent cache", "sequences of a PagedKvCache");
    }
    return withPages(batch.blockTable(), batch.lengths(), batch.maxLength())
        .run(q, cache.keys(), cache.values());
  }

  /**
   * Computes attention and the log-sum-exp of its scores, which merging partial results needs.
   *
   * @param q queries
   * @param k keys
   * @param v values
   * @return two new dense tensors that the caller closes
   * @throws InvalidArgumentException if shapes, strides, dtypes or options do not fit each other
   * @throws UnsupportedException if there is no kernel for them
   * @throws NativeLibraryException if the C library is not usable here
   */
  public AttentionOutput runWithLse(Tensor q, Tensor k, Tensor v) {
    try (AttentionPlan plan = AttentionPlan.of(settings, q, k, v, null, null, true, true)) {
      AttentionOutput result = plan.emptyOutputs();
      try {
        plan.launch(q, k, v, result.out(), result.lse());
        return result;
      } catch (RuntimeException | Error e) {
        result.close();
        throw e;
      }
    }
  }

  /**
   * Prepares for launching many times with tensors that look like these; their content is not read.
   * The output of a launch is dense.
   *
   * @param q queries
   * @param k keys
   * @param v values
   * @return a plan that the caller closes
   * @throws InvalidArgumentException if shapes, strides, dtypes or options do not fit each other
   * @throws UnsupportedException if there is no kernel for them
   * @throws NativeLibraryException if the C library is not usable here
   */
  public AttentionPlan plan(Tensor q, Tensor k, Tensor v) {
    return AttentionPlan.of(settings, q, k, v, null, null, false, false);
  }

  /**
   * Prepares for launching many times with tensors that look like these, written to an output of
   * any strides, with or without a log-sum-exp.
   *
   * @param q queries
   * @param k keys
   * @param v values
   * @param out where a launch writes
   * @param lse where a launch writes the log-sum-exp, FP32; null if it is not wanted
   * @return a plan that the caller closes
   * @throws InvalidArgumentException if shapes, strides, dtypes or options do not fit each other
   * @throws UnsupportedException if there is no kernel for them
   * @throws NativeLibraryException if the C library is not usable here
   */
  public AttentionPlan plan(Tensor q, Tensor k, Tensor v, Tensor out, @Nullable Tensor lse) {
    Checks.present("out", out);
    return AttentionPlan.of(settings, q, k, v, out, lse, lse != null, false);
  }
}
