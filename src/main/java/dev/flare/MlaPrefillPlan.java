package dev.flare;

import dev.flare.internal.CommonParams;
import dev.flare.internal.Kernels.Operation;
import dev.flare.internal.MlaPrefillParams;
import dev.flare.internal.Struct;
import org.jspecify.annotations.Nullable;

/**
 * A plan of {@link MultiHeadLatentAttention} that projects up inside the kernel; see {@link Plan}.
 */
public final class MlaPrefillPlan extends Plan {
  private static final int Q_NOPE = 0;
  private static final int Q_ROPE = 1;
  private static final int C_KV = 2;
  private static final int K_ROPE = 3;
  private static final int W_UK = 4;
  private static final int W_UV = 5;
  private static final int OUT = 6;
  private static final int LSE = 7;

  private MlaPrefillPlan(Launcher launcher) {
    super(launcher);
  }

  /** Sizes of one call. */
  private record Sizes(
      long batch, long rowsQ, long heads, long nope, long rope, long latent, long value) {}

  static MlaPrefillPlan of(
      MlaSettings settings,
      Tensor qNope,
      @Nullable Tensor qRope,
      Tensor cKv,
      @Nullable Tensor kRope,
      Tensor wUk,
      Tensor wUv,
      @Nullable Tensor out,
      @Nullable Tensor lse,
      boolean wantsLse,
      boolean confined) {
    Flare.require();
    Sizes sizes = check(settings, qNope, qRope, cKv, kRope, wUk, wUv);
    boolean packedQ = settings.cuSeqlensQ != null;
    long rows = sizes.rowsQ;
    Layout denseOut =
        Layout.dense(
            settings.outputType(qNope.dtype()),
            packedQ
                ? Shape.of(rows, sizes.heads, sizes.value)
                : Shape.of(sizes.batch, rows, sizes.heads, sizes.value));
    Layout denseLse =
        Layout.dense(
            DType.FP32,
            packedQ ? Shape.of(sizes.heads, rows) : Shape.of(sizes.batch, sizes.heads, rows));
    Device device = qNope.device();
    Layout outLayout =
        out == null ? denseOut : AttentionPlan.outputLike("out", out, device, denseOut);
    Layout lseLayout =
        lse == null ? denseLse : AttentionPlan.outputLike("lse", lse, device, denseLse);
    return Launcher.inArena(
        confined,
        arena -> {
          Launcher.Builder plan =
              new Launcher.Builder(
                  Operation.MLA_PREFILL, device, arena, MlaPrefillParams.allocate(arena));
          plan.input("qNope", MlaPrefillParams.Q_NOPE, qNope);
          plan.input("qRope", MlaPrefillParams.Q_ROPE, qRope);
          plan.input("cKv", MlaPrefillParams.C_KV, cKv);
          plan.input("kRope", MlaPrefillParams.K_ROPE, kRope);
          plan.input("wUk", MlaPrefillParams.W_UK, wUk);
          plan.input("wUv", MlaPrefillParams.W_UV, wUv);
          plan.output("out", MlaPrefillParams.OUT, outLayout, out);
          plan.output("lse", MlaPrefillParams.LSE, wantsLse ? lseLayout : null, lse);
          fill(plan, settings, sizes, qNope, qRope, cKv, kRope, wUk, wUv);
          int packed = packedQ ? 0 : 1;
          plan.params()
              .set(MlaPrefillParams.OUT_STRIDE_B, packedQ ? 0 : outLayout.stride(0))
              .set(MlaPrefillParams.OUT_STRIDE_S, outLayout.stride(packed))
              .set(MlaPrefillParams.OUT_STRIDE_H, outLayout.stride(packed + 1))
              .set(MlaPrefillParams.OUT_DTYPE, outLayout.dtype().code());
          if (wantsLse) {
            plan.params()
                .set(MlaPrefillParams.LSE_STRIDE_B, packedQ ? 0 : lseLayout.stride(0))
                .set(MlaPrefillParams.LSE_STRIDE_H, lseLayout.stride(packed));
          }
          return new MlaPrefillPlan(plan.build());
        });
  }

  private static Sizes check(
      MlaSettings settings,
      Tensor qNope,
      @Nullable Tensor qRope,
      Tensor cKv,
      @Nullable Tensor kRope,
      Tensor wUk,
      Tensor wUv) {
    Device device = Checks.present("qNope", qNope).device();
    Checks.present("cKv", cKv, device);
    Checks.present("wUk", wUk, device);
    Checks.present("wUv", wUv, device);
    MlaSettings.activation("qNope", qNope);
    boolean packedQ = settings.cuSeqlensQ != null;
    boolean packedK = settings.cuSeqlensK != null;
    String queryForm = packedQ ? "[total_q, H, " : "[B, Sq, H, ";
    String latentForm =
        packedK ? "[total_k, " : settings.blockTable != null ? "[pages, page_size, " : "[B, Sk, ";
    Checks.form("qNope", qNope, queryForm + "d_nope]");
    Checks.form("cKv", cKv, latentForm + "d_c]");
    boolean rows656 = MlaSettings.packed("cKv", cKv, qNope.dtype());
    long latent = rows656 ? MlaSettings.PACKED_LATENT : cKv.dim(-1);
    long heads = qNope.dim(-2);
    long nope = qNope.dim(-1);
    long batch =
        settings.cuSeqlensQ != null
            ? Checks.sequences("cuSeqlensQ", settings.cuSeqlensQ)
            : qNope.dim(0);
    if (settings.cuSeqlensK != null) {
      long other = Checks.sequences("cuSeqlensK", settings.cuSeqlensK);
      if (other != batch) {
        throw new InvalidArgumentException(
            "cuSeqlensK", other + " sequences", batch + ", as the queries have");
      }
    } else if (settings.blockTable == null && cKv.dim(0) != batch) {
      throw new InvalidArgumentException(
          "cKv", cKv.shape(), latentForm + "d_c] with B = " + batch + ", as qNope has");
    }
    long rope = 0;
    if (qRope != null) {
      Checks.present("qRope", qRope, device);
      Checks.dtype("qRope", qRope, qNope.dtype());
      Checks.form("qRope", qRope, queryForm + "d_rope]");
      rope = qRope.dim(-1);
      long[] want = qNope.shape().dims();
      want[want.length - 1] = rope;
      Checks.shape("qRope", qRope, queryForm + "d_rope] as qNope", want);
    }
    if (kRope != null) {
      Checks.present("kRope", kRope, device);
      if (rows656) {
        throw new InvalidArgumentException(
            "kRope", kRope.layout(), "null: the rows of cKv carry the rope part");
      }
      Checks.dtype("kRope", kRope, qNope.dtype());
      Checks.form("kRope", kRope, latentForm + "d_rope]");
      long[] want = cKv.shape().dims();
      want[want.length - 1] = rope;
      Checks.shape("kRope", kRope, latentForm + "d_rope] as cKv and qRope", want);
    }
    if (!rows656 && (qRope == null) != (kRope == null)) {
      throw new InvalidArgumentException(
          qRope == null ? "qRope" : "kRope", null, "a tensor, since the other rope part is given");
    }
    long value = checkWeights(settings, wUk, wUv, heads, latent, nope, qNope.dtype());
    return new Sizes(batch, qNope.dim(packedQ ? 0 : 1), heads, nope, rope, latent, value);
  }

  /** Checks both weights and returns d_v. */
  private static long checkWeights(
      MlaSettings settings,
      Tensor wUk,
      Tensor wUv,
      long heads,
      long latent,
      long nope,
      DType dtype) {
    boolean latentFirst = settings.weightLayout == WeightLayout.LATENT_FIRST;
    String keyForm = latentFirst ? "[H, d_c, d_nope]" : "[H, d_nope, d_c]";
    String valueForm = latentFirst ? "[H, d_c, d_v]" : "[H, d_v, d_c]";
    Checks.dtype("wUk", wUk, dtype);
    Checks.dtype("wUv", wUv, dtype);
    Checks.form("wUk", wUk, keyForm);
    Checks.form("wUv", wUv, valueForm);
    Checks.shape(
        "wUk", wUk, keyForm, heads, latentFirst ? latent : nope, latentFirst ? nope : latent);
    long value = wUv.dim(latentFirst ? 2 : 1);
    Checks.shape(
        "wUv", wUv, valueForm, heads, latentFirst ? latent : value, latentFirst ? value : latent);
    return value;
  }

  private static void fill(
      Launcher.Builder plan,
      MlaSettings settings,
      Sizes sizes,
      Tensor qNope,
      @Nullable Tensor qRope,
      Tensor cKv,
      @Nullable Tensor kRope,
      Tensor wUk,
      Tensor wUv) {
    Struct p = plan.params();
    boolean packedQ = settings.cuSeqlensQ != null;
    boolean packedK = settings.cuSeqlensK != null;
    boolean paged = settings.blockTable != null;
    int sq = packedQ ? 0 : 1;
    p.set(CommonParams.KERNEL, settings.kernel.code())
        .set(CommonParams.NUM_THREADS, settings.threads)
        .set(MlaPrefillParams.DETERMINISTIC, settings.deterministic ? 1 : 0)
        .set(MlaPrefillParams.DTYPE, qNope.dtype().code())
        .set(MlaPrefillParams.LATENT_DTYPE, cKv.dtype().code())
        .set(MlaPrefillParams.WEIGHT_LAYOUT, settings.weightLayout.code())
        .set(MlaPrefillParams.MASK, settings.causal ? 1 : 0)
        .set(MlaPrefillParams.BATCH, sizes.batch)
        .set(MlaPrefillParams.SEQLEN_Q, packedQ ? settings.maxSeqlenQ : qNope.dim(1))
        .set(MlaPrefillParams.SEQLEN_K, packedK || paged ? settings.maxSeqlenK : cKv.dim(1))
        .set(MlaPrefillParams.HEADS, sizes.heads)
        .set(MlaPrefillParams.D_NOPE, sizes.nope)
        .set(MlaPrefillParams.D_ROPE, sizes.rope)
        .set(MlaPrefillParams.D_C, sizes.latent)
        .set(MlaPrefillParams.D_V, sizes.value)
        .set(MlaPrefillParams.TOTAL_Q, packedQ ? qNope.dim(0) : 0)
        .set(MlaPrefillParams.TOTAL_K, packedK ? cKv.dim(0) : 0)
        .set(MlaPrefillParams.Q_NOPE_STRIDE_B, packedQ ? 0 : qNope.layout().stride(0))
        .set(MlaPrefillParams.Q_NOPE_STRIDE_S, qNope.layout().stride(sq))
        .set(MlaPrefillParams.Q_NOPE_STRIDE_H, qNope.layout().stride(sq + 1))
        .set(MlaPrefillParams.C_KV_STRIDE_B, packedK ? 0 : cKv.layout().stride(0))
        .set(MlaPrefillParams.C_KV_STRIDE_S, cKv.layout().stride(packedK ? 0 : 1))
        .set(MlaPrefillParams.W_UK_STRIDE_H, wUk.layout().stride(0))
        .set(MlaPrefillParams.W_UK_STRIDE_R, wUk.layout().stride(1))
        .set(MlaPrefillParams.W_UV_STRIDE_H, wUv.layout().stride(0))
        .set(MlaPrefillParams.W_UV_STRIDE_R, wUv.layout().stride(1));
    if (settings.scale != null) {
      p.set(CommonParams.FLAGS, MlaSettings.FLAG_SCALE).set(MlaPrefillParams.SCALE, settings.scale);
    }
    if (qRope != null) {
      p.set(MlaPrefillParams.Q_ROPE_STRIDE_B, packedQ ? 0 : qRope.layout().stride(0))
          .set(MlaPrefillParams.Q_ROPE_STRIDE_S, qRope.layout().stride(sq))
          .set(MlaPrefillParams.Q_ROPE_STRIDE_H, qRope.layout().stride(sq + 1));
    }
    if (kRope != null) {
      p.set(MlaPrefillParams.K_ROPE_STRIDE_B, packedK ? 0 : kRope.layout().stride(0))
          .set(MlaPrefillParams.K_ROPE_STRIDE_S, kRope.layout().stride(packedK ? 0 : 1));
    }
    IndexTensors index = new IndexTensors(plan);
    index.add("cuSeqlensQ", MlaPrefillParams.CU_SEQLENS_Q, settings.cuSeqlensQ);
    index.add("cuSeqlensK", MlaPrefillParams.CU_SEQLENS_K, settings.cuSeqlensK);
    index.lengths("usedQ", MlaPrefillParams.SEQUSED_Q, settings.usedQ, sizes.batch);
    index.lengths(
        paged ? "lengths" : "usedK", MlaPrefillParams.SEQUSED_K, settings.usedK, sizes.batch);
    index.add("blockTable", MlaPrefillParams.BLOCK_TABLE, settings.blockTable);
    index.dtype(MlaPrefillParams.INDEX_DTYPE);
    if (settings.blockTable != null) {
      p.set(
              MlaPrefillParams.PAGE_SIZE,
              Checks.pages(settings.blockTable, sizes.batch, "cKv", cKv, settings.maxSeqlenK))
          .set(MlaPrefillParams.NUM_PAGES, cKv.dim(0))
          .set(MlaPrefillParams.BLOCK_TABLE_STRIDE_B, settings.blockTable.layout().stride(0));
    }
  }

  /**
   * Computes attention.
   *
   * @param qNope queries without position
   * @param qRope queries with position; null if the plan was made without
   * @param cKv latent rows
   * @param kRope keys with position; null if the plan was made without
   * @param wUk up-projection of keys
   * @param wUv up-projection of values
   * @param out is overwritten; must not overlap the inputs
   * @throws InvalidArgumentException if a tensor does not look like the plan's, or out overlaps
   * @throws ClosedException if a tensor or the plan is closed
   * @throws InUseException if another launch of this plan is under way
   */
  public void launch(
      Tensor qNope,
      @Nullable Tensor qRope,
      Tensor cKv,
      @Nullable Tensor kRope,
      Tensor wUk,
      Tensor wUv,
      Tensor out) {
    launch(null, qNope, qRope, cKv, kRope, wUk, wUv, out, null);
  }

  /**
   * Queues attention on a stream.
   *
   * @param stream of the plan's device; null for its default stream
   * @param qNope queries without position
   * @param qRope queries with position; null if the plan was made without
   * @param cKv latent rows
   * @param kRope keys with position; null if the plan was made without
   * @param wUk up-projection of keys
   * @param wUv up-projection of values
   * @param out is overwritten; must not overlap the inputs
   * @param lse is overwritten; null if the plan was made without
   * @throws InvalidArgumentException if a tensor does not look like the plan's, or outputs overlap
   * @throws ClosedException if a tensor or the plan is closed
   * @throws InUseException if another launch of this plan is under way
   */
  public void launch(
      @Nullable Stream stream,
      Tensor qNope,
      @Nullable Tensor qRope,
      Tensor cKv,
      @Nullable Tensor kRope,
      Tensor wUk,
      Tensor wUv,
      Tensor out,
      @Nullable Tensor lse) {
    launcher.begin(stream);
    try {
      launcher.bind(Q_NOPE, qNope);
      launcher.bind(Q_ROPE, qRope);
      launcher.bind(C_KV, cKv);
      launcher.bind(K_ROPE, kRope);
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
  public MlaPrefillPlan fork() {
    return new MlaPrefillPlan(launcher.fork());
  }
}
