package dev.flare;

import org.jspecify.annotations.Nullable;

/**
 * Multi-head latent attention (MLA): attention over keys and values that are projected up from one
 * small latent row per token, which is all that a cache keeps.
 *
 * <p>Two forms of the same function:
 *
 * <ul>
 *   <li>{@link #run} (prefill) projects up inside the kernel: {@code k = c_kv w_uk}, {@code v =
 *       c_kv w_uv}, and neither is ever stored.
 *   <li>{@link #decode} (absorbed) moves the projections to the query and the output, so that every
 *       head reads the latent rows themselves.
 * </ul>
 *
 * <pre>{@code
 * Tensor out = MultiHeadLatentAttention.causal().run(qNope, qRope, cKv, kRope, wUk, wUv);
 * }</pre>
 *
 * <p><b>Names.</b> B sequences, H heads, Sq queries, Sk latent rows; d_c latent channels, d_nope
 * and d_rope query channels without and with position, d_v channels of the result. The scale is
 * {@code 1/sqrt(d_nope + d_rope)} unless given. Dtypes: FP32, FP16 or BF16, all alike; sums are
 * kept in FP32. Latent rows may also be UINT8 rows of 656 bytes: 512 e4m3 values, 4 FP32 scales, 64
 * BF16 rope values. Any strides do, but the last dimension must be dense.
 *
 * <p>Masks are aligned to the bottom right. A query that sees no row has out = 0 and log-sum-exp =
 * -infinity.
 *
 * <p><b>Threads.</b> Immutable; any thread may use it. Tensors given as options are the caller's
 * and must be open when it runs. Paper: DeepSeek-V2, arXiv 2405.04434.
 */
public final class MultiHeadLatentAttention {
  private final MlaSettings settings;

  private MultiHeadLatentAttention(MlaSettings settings) {
    this.settings = settings;
  }

  /**
   * Attention in which a query sees no row after its own position.
   *
   * @return causal attention with default options
   */
  public static MultiHeadLatentAttention causal() {
    return new MultiHeadLatentAttention(new MlaSettings().with(s -> s.causal = true));
  }

  /**
   * Attention in which a query sees every row.
   *
   * @return attention without a mask, with default options
   */
  public static MultiHeadLatentAttention full() {
    return new MultiHeadLatentAttention(new MlaSettings());
  }

  private MultiHeadLatentAttention with(java.util.function.Consumer<MlaSettings> change) {
    return new MultiHeadLatentAttention(settings.with(change));
  }

  /**
   * Sets the factor of the scores.
   *
   * @param scale any finite number; by default {@code 1/sqrt(d_nope + d_rope)}
   * @return a changed copy
   */
  public MultiHeadLatentAttention withScale(double scale) {
    float value = Checks.finite("scale", scale);
    return with(s -> s.scale = value);
  }

  /**
   * Tells the query's widths before absorption, which {@link #decode} can't see in an absorbed
   * query: where the rope part starts, and the default scale.
   *
   * @param nope d_nope, for the scale; 0 if the scale is given
   * @param rope d_rope: the last channels of a query that carries them itself
   * @return a changed copy
   */
  public MultiHeadLatentAttention withHeadDims(long nope, long rope) {
    Checks.notNegative("nope", nope);
    Checks.notNegative("rope", rope);
    return with(
        s -> {
          s.nopeDim = nope;
          s.ropeDim = rope;
        });
  }

  /**
   * Chooses the order of the weights' dimensions.
   *
   * @param layout by default {@link WeightLayout#LATENT_FIRST}
   * @return a changed copy
   */
  public MultiHeadLatentAttention withWeightLayout(WeightLayout layout) {
    return with(s -> s.weightLayout = layout);
  }

  /**
   * Chooses the dtype of the result.
   *
   * @param dtype FP32, FP16 or BF16; by default that of the queries
   * @return a changed copy
   */
  public MultiHeadLatentAttention withOutputType(DType dtype) {
    return with(s -> s.outputType = dtype);
  }

  /**
   * Packs queries of different lengths one after the other: {@code [total_q, H, .]}, log-sum-exp
   * {@code [H, total_q]}.
   *
   * @param cuSeqlensQ {@code [B + 1]} INT32 or INT64: where each sequence's queries start
   * @param maxSeqlenQ the most queries that a sequence has
   * @return a changed copy, which refers to the tensor
   */
  public MultiHeadLatentAttention withVarlenQueries(Tensor cuSeqlensQ, long maxSeqlenQ) {
    Checks.present("cuSeqlensQ", cuSeqlensQ);
    Checks.notNegative("maxSeqlenQ", maxSeqlenQ);
    return with(
        s -> {
          s.cuSeqlensQ = cuSeqlensQ;
          s.maxSeqlenQ = maxSeqlenQ;
        });
  }

  /**
   * Packs latent rows of different lengths one after the other: c_kv {@code [total_k, d_c]}. For
   * prefill.
   *
   * @param cuSeqlensK {@code [B + 1]} INT32 or INT64: where each sequence's rows start
   * @param maxSeqlenK the most rows that a sequence has
   * @return a changed copy, which refers to the tensor
   */
  public MultiHeadLatentAttention withVarlenLatents(Tensor cuSeqlensK, long maxSeqlenK) {
    Checks.present("cuSeqlensK", cuSeqlensK);
    Checks.notNegative("maxSeqlenK", maxSeqlenK);
    return with(
        s -> {
          s.cuSeqlensK = cuSeqlensK;
          s.maxSeqlenK = maxSeqlenK;
          s.blockTable = null;
        });
  }

  /**
   * Uses only the first rows of each sequence: padded batches, caches that are not full.
   *
   * @param queries {@code [B]} INT32 or INT64; null for all. Rows beyond are not written. For
   *     prefill
   * @param latents {@code [B]} INT32 or INT64; null for all. Rows beyond are not read
   * @return a changed copy, which refers to the tensors
   */
  public MultiHeadLatentAttention withUsedLengths(
      @Nullable Tensor queries, @Nullable Tensor latents) {
    return with(
        s -> {
          s.usedQ = queries;
          s.usedK = latents;
        });
  }

  /**
   * Takes latent rows from pages: {@code [pages, page_size, .]}. Row j of sequence b lies in page
   * {@code blockTable[b][j / page_size]}.
   *
   * @param blockTable {@code [B, n]} INT32 or INT64, n >= maxSeqlenK / page_size rounded up;
   *     entries beyond a sequence's length are not read
   * @param lengths {@code [B]}, of the same dtype: rows of each sequence, new ones included
   * @param maxSeqlenK the most rows that a sequence has
   * @return a changed copy, which refers to the tensors
   */
  public MultiHeadLatentAttention withPages(Tensor blockTable, Tensor lengths, long maxSeqlenK) {
    Checks.present("blockTable", blockTable);
    Checks.present("lengths", lengths);
    Checks.notNegative("maxSeqlenK", maxSeqlenK);
    return with(
        s -> {
          s.blockTable = blockTable;
          s.usedK = lengths;
          s.maxSeqlenK = maxSeqlenK;
          s.cuSeqlensK = null;
        });
  }

  /**
   * Lets each query attend to chosen rows only. For decode.
   *
   * @param indices {@code [B, Sq, topk]} INT32 or INT64: row i is page {@code i / page_size},
   *     offset {@code i % page_size} of the latents {@code [pages, page_size, .]}; contiguous
   *     latents count as one page a sequence. Negative or too large means absent
   * @param counts {@code [B, Sq]} of the same dtype: how many indices count; null for all
   * @return a changed copy, which refers to the tensors
   */
  public MultiHeadLatentAttention withSparse(Tensor indices, @Nullable Tensor counts) {
    Checks.present("indices", indices);
    return with(
        s -> {
          s.indices = indices;
          s.topkLength = counts;
        });
  }

  /**
   * Adds one more logit to the softmax of each head, which has no value. For decode.
   *
   * @param logits FP32 {@code [H]}; the log-sum-exp includes them
   * @return a changed copy, which refers to the tensor
   */
  public MultiHeadLatentAttention withSink(Tensor logits) {
    Checks.present("logits", logits);
    return with(s -> s.sink = logits);
  }

  /**
   * Splits the rows of a sequence, to keep all cores busy when there are few queries. For decode.
   *
   * @param splits 1 for none; by default, 0, flare decides
   * @return a changed copy
   */
  public MultiHeadLatentAttention withSplits(int splits) {
    Checks.notNegative("splits", splits);
    return with(s -> s.splits = splits);
  }

  /**
   * Makes results independent of what else is in the batch.
   *
   * @param deterministic true for fixed split sizes
   * @return a changed copy
   */
  public MultiHeadLatentAttention withDeterministic(boolean deterministic) {
    return with(s -> s.deterministic = deterministic);
  }

  /**
   * Limits the threads that the CPU uses.
   *
   * @param threads 0, the default, for all cores
   * @return a changed copy
   */
  public MultiHeadLatentAttention withThreads(int threads) {
    Checks.notNegative("threads", threads);
    return with(s -> s.threads = threads);
  }

  /**
   * Chooses the kernel.
   *
   * @param kernel an error follows where it can't run
   * @return a changed copy
   */
  public MultiHeadLatentAttention withKernel(Kernel kernel) {
    return with(s -> s.kernel = kernel);
  }

  // ---- prefill --------------------------------------------------------------------------------

  /**
   * Computes attention without a rope part, projecting up inside the kernel.
   *
   * @param qNope {@code [B, Sq, H, d_nope]}
   * @param cKv {@code [B, Sk, d_c]}
   * @param wUk {@code [H, d_c, d_nope]}
   * @param wUv {@code [H, d_c, d_v]}
   * @return {@code [B, Sq, H, d_v]}, a new dense tensor that the caller closes
   * @throws InvalidArgumentException if shapes, strides, dtypes or options do not fit each other
   * @throws UnsupportedException if there is no kernel for them
   * @throws NativeLibraryException if the C library is not usable here
   */
  public Tensor run(Tensor qNope, Tensor cKv, Tensor wUk, Tensor wUv) {
    return run(qNope, null, cKv, null, wUk, wUv);
  }

  /**
   * Computes attention, projecting up inside the kernel.
   *
   * @param qNope {@code [B, Sq, H, d_nope]}
   * @param qRope {@code [B, Sq, H, d_rope]}; null if there is no rope part
   * @param cKv {@code [B, Sk, d_c]}, or UINT8 {@code [B, Sk, 656]}
   * @param kRope {@code [B, Sk, d_rope]}; null if there is no rope part, or if packed rows carry it
   * @param wUk {@code [H, d_c, d_nope]}, or as {@link #withWeightLayout} says
   * @param wUv {@code [H, d_c, d_v]}, or as {@link #withWeightLayout} says
   * @return {@code [B, Sq, H, d_v]}, a new dense tensor that the caller closes
   * @throws InvalidArgumentException if shapes, strides, dtypes or options do not fit each other
   * @throws UnsupportedException if there is no kernel for them
   * @throws NativeLibraryException if the C library is not usable here
   */
  public Tensor run(
      Tensor qNope,
      @Nullable Tensor qRope,
      Tensor cKv,
      @Nullable Tensor kRope,
      Tensor wUk,
      Tensor wUv) {
    try (MlaPrefillPlan plan =
        MlaPrefillPlan.of(settings, qNope, qRope, cKv, kRope, wUk, wUv, null, null, false, true)) {
      Tensor out = plan.emptyOutput();
      try {
        plan.launch(qNope, qRope, cKv, kRope, wUk, wUv, out);
        return out;
      } catch (RuntimeException | Error e) {
        out.close();
        throw e;
      }
    }
  }

  /**
   * Computes attention and the log-sum-exp of its scores, projecting up inside the kernel.
   *
   * @param qNope {@code [B, Sq, H, d_nope]}
   * @param qRope {@code [B, Sq, H, d_rope]}; null if there is no rope part
   * @param cKv {@code [B, Sk, d_c]}, or UINT8 {@code [B, Sk, 656]}
   * @param kRope {@code [B, Sk, d_rope]}; null if there is no rope part, or if packed rows carry it
   * @param wUk {@code [H, d_c, d_nope]}, or as {@link #withWeightLayout} says
   * @param wUv {@code [H, d_c, d_v]}, or as {@link #withWeightLayout} says
   * @return two new dense tensors that the caller closes
   * @throws InvalidArgumentException if shapes, strides, dtypes or options do not fit each other
   * @throws UnsupportedException if there is no kernel for them
   * @throws NativeLibraryException if the C library is not usable here
   */
  public AttentionOutput runWithLse(
      Tensor qNope,
      @Nullable Tensor qRope,
      Tensor cKv,
      @Nullable Tensor kRope,
      Tensor wUk,
      Tensor wUv) {
    try (MlaPrefillPlan plan =
        MlaPrefillPlan.of(settings, qNope, qRope, cKv, kRope, wUk, wUv, null, null, true, true)) {
      AttentionOutput result = plan.emptyOutputs();
      try {
        plan.launch(null, qNope, qRope, cKv, kRope, wUk, wUv, result.out(), result.lse());
        return result;
      } catch (RuntimeException | Error e) {
        result.close();
        throw e;
      }
    }
  }

  /**
   * Prepares prefill for launching many times with tensors that look like these; their content is
   * not read. The output of a launch is dense.
   *
   * @param qNope {@code [B, Sq, H, d_nope]}
   * @param qRope {@code [B, Sq, H, d_rope]}; null if there is no rope part
   * @param cKv {@code [B, Sk, d_c]}, or UINT8 {@code [B, Sk, 656]}
   * @param kRope {@code [B, Sk, d_rope]}; null if there is no rope part, or if packed rows carry it
   * @param wUk {@code [H, d_c, d_nope]}, or as {@link #withWeightLayout} says
   * @param wUv {@code [H, d_c, d_v]}, or as {@link #withWeightLayout} says
   * @return a plan that the caller closes
   * @throws InvalidArgumentException if shapes, strides, dtypes or options do not fit each other
   * @throws UnsupportedException if there is no kernel for them
   * @throws NativeLibraryException if the C library is not usable here
   */
  public MlaPrefillPlan plan(
      Tensor qNope,
      @Nullable Tensor qRope,
      Tensor cKv,
      @Nullable Tensor kRope,
      Tensor wUk,
      Tensor wUv) {
    return MlaPrefillPlan.of(
        settings, qNope, qRope, cKv, kRope, wUk, wUv, null, null, false, false);
  }

  /**
   * Prepares prefill for launching many times, written to an output of any strides, with or without
   * a log-sum-exp.
   *
   * @param qNope {@code [B, Sq, H, d_nope]}
   * @param qRope {@code [B, Sq, H, d_rope]}; null if there is no rope part
   * @param cKv {@code [B, Sk, d_c]}, or UINT8 {@code [B, Sk, 656]}
   * @param kRope {@code [B, Sk, d_rope]}; null if there is no rope part, or if packed rows carry it
   * @param wUk {@code [H, d_c, d_nope]}, or as {@link #withWeightLayout} says
   * @param wUv {@code [H, d_c, d_v]}, or as {@link #withWeightLayout} says
   * @param out where a launch writes
   * @param lse where a launch writes the log-sum-exp, FP32 {@code [B, H, Sq]}; null if not wanted
   * @return a plan that the caller closes
   * @throws InvalidArgumentException if shapes, strides, dtypes or options do not fit each other
   * @throws UnsupportedException if there is no kernel for them
   * @throws NativeLibraryException if the C library is not usable here
   */
  public MlaPrefillPlan plan(
      Tensor qNope,
      @Nullable Tensor qRope,
      Tensor cKv,
      @Nullable Tensor kRope,
      Tensor wUk,
      Tensor wUv,
      Tensor out,
      @Nullable Tensor lse) {
    Checks.present("out", out);
    return MlaPrefillPlan.of(
        settings, qNope, qRope, cKv, kRope, wUk, wUv, out, lse, lse != null, false);
  }

  // ---- decode ---------------------------------------------------------------------------------

  /**
   * Computes absorbed attention for new tokens whose rows are in the cache already. The query
   * carries its rope part in its last channels; {@link #withHeadDims} tells how many.
   *
   * @param q {@code [B, Sq, H, d_c + d_rope]}
   * @param kv {@code [B, Sk, d_c + d_rope]}, or as {@link #withPages} says
   * @return {@code [B, Sq, H, d_c]}, a new dense tensor that the caller closes
   * @throws InvalidArgumentException if shapes, strides, dtypes or options do not fit each other
   * @throws UnsupportedException if there is no kernel for them
   * @throws NativeLibraryException if the C library is not usable here
   */
  public Tensor decode(Tensor q, Tensor kv) {
    return decode(q, null, kv, null, null);
  }

  /**
   * Computes absorbed attention over the sequences of a latent cache; {@link #withHeadDims} tells
   * how many rope channels the query carries.
   *
   * @param q {@code [B, Sq, H, d_c + d_rope]}, whose rows are in the cache already
   * @param batch sequences of a {@link LatentKvCache}
   * @return {@code [B, Sq, H, d_c]}, a new dense tensor that the caller closes
   * @throws InvalidArgumentException if the queries do not fit the cache
   * @throws NativeLibraryException if the C library is not usable here
   */
  public Tensor decode(Tensor q, KvCache.Batch batch) {
    if (!(batch.cache() instanceof LatentKvCache cache)) {
      throw new InvalidArgumentException(
          "batch", "sequences of a paged cache", "sequences of a LatentKvCache");
    }
    return withPages(batch.blockTable(), batch.lengths(), batch.maxLength())
        .decode(q, cache.rows());
  }

  /**
   * Computes absorbed attention, with the weights applied by the kernel or by the caller.
   *
   * @param q with wUk {@code [B, Sq, H, d_nope]}; without, {@code [B, Sq, H, d_c]}, or {@code [B,
   *     Sq, H, d_c + d_rope]} if qRope is null
   * @param qRope {@code [B, Sq, H, d_rope]}; null if there is none or q carries it
   * @param kv {@code [B, Sk, d_c + d_rope]}, UINT8 {@code [B, Sk, 656]}, or as {@link #withPages}
   *     says
   * @param wUk {@code [H, d_c, d_nope]} or as {@link #withWeightLayout} says; null if q is absorbed
   * @param wUv {@code [H, d_c, d_v]} or as {@link #withWeightLayout} says; null for latent results
   * @return {@code [B, Sq, H, d_v]}, or {@code [B, Sq, H, d_c]} without wUv; a new dense tensor
   *     that the caller closes
   * @throws InvalidArgumentException if shapes, strides, dtypes or options do not fit each other
   * @throws UnsupportedException if there is no kernel for them
   * @throws NativeLibraryException if the C library is not usable here
   */
  public Tensor decode(
      Tensor q, @Nullable Tensor qRope, Tensor kv, @Nullable Tensor wUk, @Nullable Tensor wUv) {
    try (MlaDecodePlan plan =
        MlaDecodePlan.of(settings, q, qRope, kv, wUk, wUv, null, null, false, true)) {
      Tensor out = plan.emptyOutput();
      try {
        plan.launch(q, qRope, kv, wUk, wUv, out);
        return out;
      } catch (RuntimeException | Error e) {
        out.close();
        throw e;
      }
    }
  }

  /**
   * Computes absorbed attention and the log-sum-exp of its scores.
   *
   * @param q with wUk {@code [B, Sq, H, d_nope]}; without, {@code [B, Sq, H, d_c]}, or {@code [B,
   *     Sq, H, d_c + d_rope]} if qRope is null
   * @param qRope {@code [B, Sq, H, d_rope]}; null if there is none or q carries it
   * @param kv {@code [B, Sk, d_c + d_rope]}, UINT8 {@code [B, Sk, 656]}, or as {@link #withPages}
   *     says
   * @param wUk {@code [H, d_c, d_nope]} or as {@link #withWeightLayout} says; null if q is absorbed
   * @param wUv {@code [H, d_c, d_v]} or as {@link #withWeightLayout} says; null for latent results
   * @return two new dense tensors that the caller closes
   * @throws InvalidArgumentException if shapes, strides, dtypes or options do not fit each other
   * @throws UnsupportedException if there is no kernel for them
   * @throws NativeLibraryException if the C library is not usable here
   */
  public AttentionOutput decodeWithLse(
      Tensor q, @Nullable Tensor qRope, Tensor kv, @Nullable Tensor wUk, @Nullable Tensor wUv) {
    try (MlaDecodePlan plan =
        MlaDecodePlan.of(settings, q, qRope, kv, wUk, wUv, null, null, true, true)) {
      AttentionOutput result = plan.emptyOutputs();
      try {
        plan.launch(null, q, qRope, kv, wUk, wUv, result.out(), result.lse());
        return result;
      } catch (RuntimeException | Error e) {
        result.close();
        throw e;
      }
    }
  }

  /**
   * Prepares decode for launching many times with tensors that look like these; their content is
   * not read.
   *
   * @param q as for {@link #decode(Tensor, Tensor, Tensor, Tensor, Tensor)}
   * @param qRope as for {@code decode}; may be null
   * @param kv as for {@code decode}
   * @param wUk as for {@code decode}; may be null
   * @param wUv as for {@code decode}; may be null
   * @return a plan that the caller closes
   * @throws InvalidArgumentException if shapes, strides, dtypes or options do not fit each other
   * @throws UnsupportedException if there is no kernel for them
   * @throws NativeLibraryException if the C library is not usable here
   */
  public MlaDecodePlan planDecode(
      Tensor q, @Nullable Tensor qRope, Tensor kv, @Nullable Tensor wUk, @Nullable Tensor wUv) {
    return MlaDecodePlan.of(settings, q, qRope, kv, wUk, wUv, null, null, false, false);
  }

  /**
   * Prepares decode for launching many times, written to an output of any strides, with or without
   * a log-sum-exp.
   *
   * @param q as for {@link #decode(Tensor, Tensor, Tensor, Tensor, Tensor)}
   * @param qRope as for {@code decode}; may be null
   * @param kv as for {@code decode}
   * @param wUk as for {@code decode}; may be null
   * @param wUv as for {@code decode}; may be null
   * @param out where a launch writes
   * @param lse where a launch writes the log-sum-exp, FP32 {@code [B, H, Sq]}; null if not wanted
   * @return a plan that the caller closes
   * @throws InvalidArgumentException if shapes, strides, dtypes or options do not fit each other
   * @throws UnsupportedException if there is no kernel for them
   * @throws NativeLibraryException if the C library is not usable here
   */
  public MlaDecodePlan planDecode(
      Tensor q,
      @Nullable Tensor qRope,
      Tensor kv,
      @Nullable Tensor wUk,
      @Nullable Tensor wUv,
      Tensor out,
      @Nullable Tensor lse) {
    Checks.present("out", out);
    return MlaDecodePlan.of(settings, q, qRope, kv, wUk, wUv, out, lse, lse != null, false);
  }
}
