package dev.flare;

import dev.flare.internal.CommonParams;
import dev.flare.internal.Kernels.Operation;
import dev.flare.internal.MlaDecodeParams;
import dev.flare.internal.Struct;
import org.jspecify.annotations.Nullable;

/** A plan of absorbed {@link MultiHeadLatentAttention}; see {@link Plan}. */
public final class MlaDecodePlan extends Plan {
  private static final int Q = 0;
  private static final int Q_ROPE = 1;
  private static final int KV = 2;
  private static final int W_UK = 3;
  private static final int W_UV = 4;
  private static final int OUT = 5;
  private static final int LSE = 6;

  private MlaDecodePlan(Launcher launcher) {
    super(launcher);
  }

  /** Sizes of one call. */
  private record Sizes(
      long batch, long rowsQ, long heads, long nope, long rope, long latent, long value) {}

  static MlaDecodePlan of(
      MlaSettings settings,
      Tensor q,
      @Nullable Tensor qRope,
      Tensor kv,
      @Nullable Tensor wUk,
      @Nullable Tensor wUv,
      @Nullable Tensor out,
      @Nullable Tensor lse,
      boolean wantsLse,
      boolean confined) {
    Flare.require();
    Sizes sizes = check(settings, q, qRope, kv, wUk, wUv);
    boolean packedQ = settings.cuSeqlensQ != null;
    long rows = sizes.rowsQ;
    long width = wUv != null ? sizes.value : sizes.latent;
    Layout denseOut =
        Layout.dense(
            settings.outputType(q.dtype()),
            packedQ
                ? Shape.of(rows, sizes.heads, width)
                : Shape.of(sizes.batch, rows, sizes.heads, width));
    Layout denseLse =
        Layout.dense(
            DType.FP32,
            packedQ ? Shape.of(sizes.heads, rows) : Shape.of(sizes.batch, sizes.heads, rows));
    Device device = q.device();
    Layout outLayout =
        out == null ? denseOut : AttentionPlan.outputLike("out", out, device, denseOut);
    Layout lseLayout =
        lse == null ? denseLse : AttentionPlan.outputLike("lse", lse, device, denseLse);
    return Launcher.inArena(
        confined,
        arena -> {
          Launcher.Builder plan =
              new Launcher.Builder(
                  Operation.MLA_DECODE, device, arena, MlaDecodeParams.allocate(arena));
          plan.input("q", MlaDecodeParams.Q, q);
          plan.input("qRope", MlaDecodeParams.Q_ROPE, qRope);
          plan.input("kv", MlaDecodeParams.KV, kv);
          plan.input("wUk", MlaDecodeParams.W_UK, wUk);
          plan.input("wUv", MlaDecodeParams.W_UV, wUv);
          plan.output("out", MlaDecodeParams.OUT, outLayout, out);
          plan.output("lse", MlaDecodeParams.LSE, wantsLse ? lseLayout : null, lse);
          fill(plan, settings, sizes, q, qRope, kv, wUk, wUv);
          int packed = packedQ ? 0 : 1;
          plan.params()
              .set(MlaDecodeParams.OUT_STRIDE_B, packedQ ? 0 : outLayout.stride(0))
              .set(MlaDecodeParams.OUT_STRIDE_S, outLayout.stride(packed))
              .set(MlaDecodeParams.OUT_STRIDE_H, outLayout.stride(packed + 1))
              .set(MlaDecodeParams.OUT_DTYPE, outLayout.dtype().code());
          if (wantsLse) {
            plan.params()
                .set(MlaDecodeParams.LSE_STRIDE_B, packedQ ? 0 : lseLayout.stride(0))
                .set(MlaDecodeParams.LSE_STRIDE_H, lseLayout.stride(packed));
          }
          return new MlaDecodePlan(plan.build());
        });
  }

  private static Sizes check(
      MlaSettings settings,
      Tensor q,
      @Nullable Tensor qRope,
      Tensor kv,
      @Nullable Tensor wUk,
      @Nullable Tensor wUv) {
    Device device = Checks.present("q", q).device();
    Checks.present("kv", kv, device);
    MlaSettings.activation("q", q);
    boolean packedQ = settings.cuSeqlensQ != null;
    String queryForm = packedQ ? "[total_q, H, " : "[B, Sq, H, ";
    Checks.form("q", q, queryForm + (wUk != null ? "d_nope]" : "d_c + d_rope]"));
    boolean paged = settings.blockTable != null;
    String latentForm = paged ? "[pages, page_size, d_c + d_rope]" : "[B, Sk, d_c + d_rope]";
    Checks.form("kv", kv, latentForm);
    boolean rows656 = MlaSettings.packed("kv", kv, q.dtype());
    long rope = qRope != null ? qRope.dim(-1) : settings.ropeDim;
    long width = rows656 ? MlaSettings.PACKED_LATENT + MlaSettings.PACKED_ROPE : kv.dim(-1);
    long latent = width - rope;
    if (latent < 1) {
      throw new InvalidArgumentException(
          "kv", kv.shape(), latentForm + " with more than the " + rope + " rope channels");
    }
    long batch =
        settings.cuSeqlensQ != null
            ? Checks.sequences("cuSeqlensQ", settings.cuSeqlensQ)
            : q.dim(0);
    if (!paged && settings.indices == null && kv.dim(0) != batch) {
      throw new InvalidArgumentException(
          "kv", kv.shape(), latentForm + " with B = " + batch + ", as q has");
    }
    if (qRope != null) {
      Checks.present("qRope", qRope, device);
      Checks.dtype("qRope", qRope, q.dtype());
      Checks.form("qRope", qRope, queryForm + "d_rope]");
      long[] want = q.shape().dims();
      want[want.length - 1] = rope;
      Checks.shape("qRope", qRope, queryForm + "d_rope] as q", want);
    }
    long heads = q.dim(-2);
    if (wUk == null) {
      long wanted = latent + (qRope == null ? rope : 0);
      if (q.dim(-1) != wanted) {
        throw new InvalidArgumentException(
            "q",
            q.shape(),
            queryForm
                + wanted
                + "], for d_c = "
                + latent
                + " and d_rope = "
                + rope
                + "; withHeadDims() tells d_rope");
      }
    }
    boolean latentFirst = settings.weightLayout == WeightLayout.LATENT_FIRST;
    long nope = settings.nopeDim;
    if (wUk != null) {
      nope = q.dim(-1);
      String form = latentFirst ? "[H, d_c, d_nope]" : "[H, d_nope, d_c]";
      Checks.present("wUk", wUk, device);
      Checks.dtype("wUk", wUk, q.dtype());
      Checks.form("wUk", wUk, form);
      Checks.shape(
          "wUk", wUk, form, heads, latentFirst ? latent : nope, latentFirst ? nope : latent);
    }
    long value = 0;
    if (wUv != null) {
      String form = latentFirst ? "[H, d_c, d_v]" : "[H, d_v, d_c]";
      Checks.present("wUv", wUv, device);
      Checks.dtype("wUv", wUv, q.dtype());
      Checks.form("wUv", wUv, form);
      value = wUv.dim(latentFirst ? 2 : 1);
      Checks.shape(
          "wUv", wUv, form, heads, latentFirst ? latent : value, latentFirst ? value : latent);
    }
    return new Sizes(batch, q.dim(packedQ ? 0 : 1), heads, nope, rope, latent, value);
  }

  private static void fill(
      Launcher.Builder plan,
      MlaSettings settings,
      Sizes sizes,
      Tensor q,
      @Nullable Tensor qRope,
      Tensor kv,
      @Nullable Tensor wUk,
      @Nullable Tensor wUv) {
    Struct p = plan.params();
    boolean packedQ = settings.cuSeqlensQ != null;
    boolean paged = settings.blockTable != null;
    int sq = packedQ ? 0 : 1;
    p.set(CommonParams.KERNEL, settings.kernel.code())
        .set(CommonParams.NUM_THREADS, settings.threads)
        .set(MlaDecodeParams.DETERMINISTIC, settings.deterministic ? 1 : 0)
        .set(MlaDecodeParams.DTYPE, q.dtype().code())
        .set(MlaDecodeParams.KV_DTYPE, kv.dtype().code())
        .set(MlaDecodeParams.WEIGHT_LAYOUT, settings.weightLayout.code())
        .set(MlaDecodeParams.MASK, settings.causal ? 1 : 0)
        .set(MlaDecodeParams.NUM_SPLITS, settings.splits)
        .set(MlaDecodeParams.BATCH, sizes.batch)
        .set(MlaDecodeParams.SEQLEN_Q, packedQ ? settings.maxSeqlenQ : q.dim(1))
        .set(MlaDecodeParams.SEQLEN_K, paged ? settings.maxSeqlenK : kv.dim(1))
        .set(MlaDecodeParams.HEADS, sizes.heads)
        .set(MlaDecodeParams.D_C, sizes.latent)
        .set(MlaDecodeParams.D_ROPE, sizes.rope)
        .set(MlaDecodeParams.D_NOPE, sizes.nope)
        .set(MlaDecodeParams.D_V, sizes.value)
        .set(MlaDecodeParams.TOTAL_Q, packedQ ? q.dim(0) : 0)
        .set(MlaDecodeParams.Q_STRIDE_B, packedQ ? 0 : q.layout().stride(0))
        .set(MlaDecodeParams.Q_STRIDE_S, q.layout().stride(sq))
        .set(MlaDecodeParams.Q_STRIDE_H, q.layout().stride(sq + 1))
        .set(MlaDecodeParams.KV_STRIDE_B, kv.layout().stride(0))
        .set(MlaDecodeParams.KV_STRIDE_S, kv.layout().stride(1));
    if (settings.scale != null) {
      p.set(CommonParams.FLAGS, MlaSettings.FLAG_SCALE).set(MlaDecodeParams.SCALE, settings.scale);
    }
    if (qRope != null) {
      p.set(MlaDecodeParams.Q_ROPE_STRIDE_B, packedQ ? 0 : qRope.layout().stride(0))
          .set(MlaDecodeParams.Q_ROPE_STRIDE_S, qRope.layout().stride(sq))
          .set(MlaDecodeParams.Q_ROPE_STRIDE_H, qRope.layout().stride(sq + 1));
    }
    if (wUk != null) {
      p.set(MlaDecodeParams.W_UK_STRIDE_H, wUk.layout().stride(0))
          .set(MlaDecodeParams.W_UK_STRIDE_R, wUk.layout().stride(1));
    }
    if (wUv != null) {
      p.set(MlaDecodeParams.W_UV_STRIDE_H, wUv.layout().stride(0))
          .set(MlaDecodeParams.W_UV_STRIDE_R, wUv.layout().stride(1));
    }
    IndexTensors index = new IndexTensors(plan);
    index.add("cuSeqlensQ", MlaDecodeParams.CU_SEQLENS_Q, settings.cuSeqlensQ);
    index.lengths(
        paged ? "lengths" : "usedK", MlaDecodeParams.SEQLENS_K, settings.usedK, sizes.batch);
    index.add("blockTable", MlaDecodeParams.BLOCK_TABLE, settings.blockTable);
    fillSparse(plan, index, settings, sizes);
    index.dtype(MlaDecodeParams.INDEX_DTYPE);
    if (paged || settings.indices != null) {
      p.set(MlaDecodeParams.PAGE_SIZE, kv.dim(1)).set(MlaDecodeParams.NUM_PAGES, kv.dim(0));
    }
    if (settings.blockTable != null) {
      Checks.pages(settings.blockTable, sizes.batch, "kv", kv, settings.maxSeqlenK);
      p.set(MlaDecodeParams.BLOCK_TABLE_STRIDE_B, settings.blockTable.layout().stride(0));
    }
    if (settings.sink != null) {
      Checks.vector("sink", settings.sink, DType.FP32, "[H]", sizes.heads);
      plan.fixed("sink", MlaDecodeParams.SINK, settings.sink);
    }
  }

  private static void fillSparse(
      Launcher.Builder plan, IndexTensors index, MlaSettings settings, Sizes sizes) {
    Tensor indices = settings.indices;
    if (indices == null) {
      return;
    }
    Checks.form("indices", indices, "[B, Sq, topk]");
    Checks.shape("indices", indices, "[B, Sq, topk]", sizes.batch, sizes.rowsQ, indices.dim(2));
    index.add("indices", MlaDecodeParams.INDICES, indices);
    plan.params()
        .set(MlaDecodeParams.INDICES_STRIDE_B, indices.layout().stride(0))
        .set(MlaDecodeParams.INDICES_STRIDE_S, indices.layout().stride(1))
        .set(MlaDecodeParams.TOPK, indices.dim(2));
    Tensor counts = settings.topkLength;
    if (counts != null) {
      Checks.shape("counts", counts, "[B, Sq]", sizes.batch, sizes.rowsQ);
      index.add("counts", MlaDecodeParams.TOPK_LENGTH, counts);
      plan.params()
          .set(MlaDecodeParams.TOPK_LENGTH_STRIDE_B, counts.layout().stride(0))
          .set(MlaDecodeParams.TOPK_LENGTH_STRIDE_S, counts.layout().stride(1));
    }
  }

  /**
   * Computes attention.
   *
   * @param q queries
   * @param qRope queries with position; null if the plan was made without
   * @param kv latent rows
   * @param wUk up-projection of keys; null if the plan was made without
   * @param wUv up-projection of values; null if the plan was made without
   * @param out is overwritten; must not overlap the inputs
   * @throws InvalidArgumentException if a tensor does not look like the plan's, or out overlaps
   * @throws ClosedException if a tensor or the plan is closed
   * @throws InUseException if another launch of this plan is under way
   */
  public void launch(
      Tensor q,
      @Nullable Tensor qRope,
      Tensor kv,
      @Nullable Tensor wUk,
      @Nullable Tensor wUv,
      Tensor out) {
    launch(null, q, qRope, kv, wUk, wUv, out, null);
  }

  /**
   * Queues attention on a stream.
   *
   * @param stream of the plan's device; null for its default stream
   * @param q queries
   * @param qRope queries with position; null if the plan was made without
   * @param kv latent rows
   * @param wUk up-projection of keys; null if the plan was made without
   * @param wUv up-projection of values; null if the plan was made without
   * @param out is overwritten; must not overlap the inputs
   * @param lse is overwritten; null if the plan was made without
   * @throws InvalidArgumentException if a tensor does not look like the plan's, or outputs overlap
   * @throws ClosedException if a tensor or the plan is closed
   * @throws InUseException if another launch of this plan is under way
   */
  public void launch(
      @Nullable Stream stream,
      Tensor q,
      @Nullable Tensor qRope,
      Tensor kv,
      @Nullable Tensor wUk,
      @Nullable Tensor wUv,
      Tensor out,
      @Nullable Tensor lse) {
    launcher.begin(stream);
    try {
      launcher.bind(Q, q);
      launcher.bind(Q_ROPE, qRope);
      launcher.bind(KV, kv);
      launcher.bind(W_UK, wUk);
      launcher.bind(W_UV, wUv);
      launcher.bind(OUT, out);
      launcher.bind(LSE, lse);
      launcher.run();
    } finally {
      launcher.end();
    }
  }

  /**
   * Allocates an output for a launch.
   *
   * @return a dense tensor that the caller closes
   */
  public Tensor emptyOutput() {
    return launcher.empty(OUT);
  }

  AttentionOutput emptyOutputs() {
    return AttentionOutput.empty(device(), launcher.layout(OUT), launcher.layout(LSE).shape());
  }

  @Override
  public MlaDecodePlan fork() {
    return new MlaDecodePlan(launcher.fork());
  }
}
