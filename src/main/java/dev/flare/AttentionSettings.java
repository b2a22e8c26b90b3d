package dev.flare;

import dev.flare.internal.AttentionParams;
import dev.flare.internal.CommonParams;
import dev.flare.internal.Struct;
import dev.flare.internal.Struct.Pointer;
import java.util.function.Consumer;
import org.jspecify.annotations.Nullable;

/** The options of softmax attention. Changed only while {@link #with} makes it. */
final class AttentionSettings implements Cloneable {
  static final int MASK_NONE = 0;
  static final int MASK_CAUSAL = 1;
  static final int MASK_WINDOW = 2;
  private static final int FLAG_SCALE = 1;

  int mask;
  long windowLeft;
  long windowRight;
  @Nullable Float scale;
  float softcap;
  @Nullable DType outputType;
  int splits;
  int threads;
  boolean deterministic;
  Kernel kernel = Kernel.AUTO;
  @Nullable Tensor alibi;
  @Nullable Tensor sink;
  @Nullable Tensor queryDescale;
  @Nullable Tensor keyDescale;
  @Nullable Tensor valueDescale;
  @Nullable Tensor cuSeqlensQ;
  @Nullable Tensor cuSeqlensK;
  long maxSeqlenQ;
  long maxSeqlenK;
  @Nullable Tensor usedQ;
  @Nullable Tensor usedK;
  @Nullable Tensor blockTable;

  AttentionSettings with(Consumer<AttentionSettings> change) {
    try {
      AttentionSettings copy = (AttentionSettings) clone();
      change.accept(copy);
      return copy;
    } catch (CloneNotSupportedException e) {
      throw new AssertionError(e);
    }
  }

  /** Sizes of one call. */
  record Sizes(long batch, long rowsQ, long heads, long valueDim, boolean packedQueries) {
    Shape output() {
      return packedQueries
          ? Shape.of(rowsQ, heads, valueDim)
          : Shape.of(batch, rowsQ, heads, valueDim);
    }

    Shape lse() {
      return packedQueries ? Shape.of(heads, rowsQ) : Shape.of(batch, heads, rowsQ);
    }
  }

  /** Checks the inputs against each other and against the options. */
  Sizes check(Tensor q, Tensor k, Tensor v) {
    Device device = Checks.present("q", q).device();
    Checks.present("k", k, device);
    Checks.present("v", v, device);
    Checks.form("q", q, cuSeqlensQ != null ? "[total_q, H, D]" : "[B, Sq, H, D]");
    boolean packedKeys = cuSeqlensK != null;
    String rows =
        blockTable != null
            ? "[pages, page_size, Hk, "
            : packedKeys ? "[total_k, Hk, " : "[B, Sk, Hk, ";
    Checks.form("k", k, rows + "D]");
    Checks.form("v", v, rows + "Dv]");
    if (!q.dtype().isFloating()) {
      throw new InvalidArgumentException("q", q.dtype(), "FP32, FP16, BF16 or FP8_E4M3");
    }
    Checks.dtype("k", k, q.dtype());
    Checks.dtype("v", v, q.dtype());
    long batch = cuSeqlensQ != null ? Checks.sequences("cuSeqlensQ", cuSeqlensQ) : q.dim(0);
    long dim = q.dim(-1);
    if (cuSeqlensK != null) {
      sameBatch("cuSeqlensK", Checks.sequences("cuSeqlensK", cuSeqlensK), batch);
    } else if (blockTable != null) {
      sameBatch("blockTable", blockTable.rank() == 0 ? 0 : blockTable.dim(0), batch);
    } else {
      Checks.shape("k", k, rows + "D]", batch, k.dim(1), k.dim(2), dim);
    }
    long heads = k.dim(-2);
    if (k.dim(-1) != dim) {
      throw new InvalidArgumentException(
          "k", k.shape(), rows + "D] with D = " + dim + ", as q has");
    }
    long[] want = k.shape().dims();
    want[want.length - 1] = v.dim(-1);
    Checks.shape("v", v, rows + "Dv] as k", want);
    if (heads == 0 || q.dim(-2) % heads != 0) {
      throw new InvalidArgumentException(
          "k", heads + " heads", "a divisor of the " + q.dim(-2) + " heads of q");
    }
    return new Sizes(
        batch, q.dim(cuSeqlensQ != null ? 0 : 1), q.dim(-2), v.dim(-1), cuSeqlensQ != null);
  }

  private static void sameBatch(String name, long found, long batch) {
    if (found != batch) {
      throw new InvalidArgumentException(
          name, found + " sequences", batch + ", as the queries have");
    }
  }

  DType outputType(DType inputs) {
    if (outputType != null) {
      return outputType;
    }
    return inputs == DType.FP8_E4M3 ? DType.BF16 : inputs;
  }

  /** Writes everything but the addresses of the launch's own tensors. */
  void fill(Launcher.Builder plan, Sizes sizes, Tensor q, Tensor k, Tensor v) {
    Struct p = plan.params();
    p.set(CommonParams.KERNEL, kernel.code())
        .set(CommonParams.NUM_THREADS, threads)
        .set(AttentionParams.DETERMINISTIC, deterministic ? 1 : 0)
        .set(AttentionParams.DTYPE, q.dtype().code())
        .set(AttentionParams.OUT_DTYPE, outputType(q.dtype()).code())
        .set(AttentionParams.NUM_SPLITS, splits)
        .set(AttentionParams.BATCH, sizes.batch())
        .set(AttentionParams.HEADS_Q, sizes.heads())
        .set(AttentionParams.HEADS_KV, k.dim(-2))
        .set(AttentionParams.HEAD_DIM_QK, q.dim(-1))
        .set(AttentionParams.HEAD_DIM_V, sizes.valueDim())
        .set(AttentionParams.SOFTCAP, softcap)
        .set(AttentionParams.MASK, mask)
        .set(AttentionParams.WINDOW_LEFT, windowLeft)
        .set(AttentionParams.WINDOW_RIGHT, windowRight);
    if (scale != null) {
      p.set(CommonParams.FLAGS, FLAG_SCALE).set(AttentionParams.SCALE, scale);
    }
    boolean packedQ = cuSeqlensQ != null;
    boolean packedK = cuSeqlensK != null;
    p.set(AttentionParams.SEQLEN_Q, packedQ ? maxSeqlenQ : q.dim(1))
        .set(AttentionParams.SEQLEN_K, packedK || blockTable != null ? maxSeqlenK : k.dim(1))
        .set(AttentionParams.TOTAL_Q, packedQ ? q.dim(0) : 0)
        .set(AttentionParams.TOTAL_K, packedK ? k.dim(0) : 0)
        .set(AttentionParams.Q_STRIDE_B, packedQ ? 0 : q.layout().stride(0))
        .set(AttentionParams.Q_STRIDE_S, q.layout().stride(packedQ ? 0 : 1))
        .set(AttentionParams.Q_STRIDE_H, q.layout().stride(packedQ ? 1 : 2))
        .set(AttentionParams.K_STRIDE_B, packedK ? 0 : k.layout().stride(0))
        .set(AttentionParams.K_STRIDE_S, k.layout().stride(packedK ? 0 : 1))
        .set(AttentionParams.K_STRIDE_H, k.layout().stride(packedK ? 1 : 2))
        .set(AttentionParams.V_STRIDE_B, packedK ? 0 : v.layout().stride(0))
        .set(AttentionParams.V_STRIDE_S, v.layout().stride(packedK ? 0 : 1))
        .set(AttentionParams.V_STRIDE_H, v.layout().stride(packedK ? 1 : 2));
    fillLengths(plan, sizes);
    fillBiases(plan, sizes, k);
  }

  private void fillLengths(Launcher.Builder plan, Sizes sizes) {
    IndexTensors index = new IndexTensors(plan);
    index.add("cuSeqlensQ", AttentionParams.CU_SEQLENS_Q, cuSeqlensQ);
    index.add("cuSeqlensK", AttentionParams.CU_SEQLENS_K, cuSeqlensK);
    index.lengths("usedQ", AttentionParams.SEQUSED_Q, usedQ, sizes.batch());
    index.lengths(
        blockTable != null ? "lengths" : "usedK", AttentionParams.SEQUSED_K, usedK, sizes.batch());
    index.add("blockTable", AttentionParams.BLOCK_TABLE, blockTable);
    index.dtype(AttentionParams.INDEX_DTYPE);
  }

  private void fillBiases(Launcher.Builder plan, Sizes sizes, Tensor k) {
    Struct p = plan.params();
    if (blockTable != null) {
      p.set(AttentionParams.BLOCK_TABLE_STRIDE_B, blockTable.layout().stride(0))
          .set(
              AttentionParams.PAGE_SIZE,
              Checks.pages(blockTable, sizes.batch(), "k", k, maxSeqlenK))
          .set(AttentionParams.NUM_PAGES, k.dim(0));
    }
    if (sink != null) {
      Checks.vector("sink", sink, DType.FP32, "[H]", sizes.heads());
    }
    if (alibi != null) {
      Checks.dtype("alibi", alibi, DType.FP32);
      if (alibi.rank() == 2) {
        Checks.form("alibi", alibi, "[B, H]");
        Checks.shape("alibi", alibi, "[B, H]", sizes.batch(), sizes.heads());
        p.set(AttentionParams.ALIBI_STRIDE_B, alibi.layout().stride(0));
      } else {
        Checks.vector("alibi", alibi, DType.FP32, "[H]", sizes.heads());
      }
    }
    plan.fixed("sink", AttentionParams.SINK, sink);
    plan.fixed("alibi", AttentionParams.ALIBI_SLOPES, alibi);
    Tensor descale = null;
    descale =
        descale(plan, "queryDescale", AttentionParams.Q_DESCALE, queryDescale, descale, sizes, k);
    descale = descale(plan, "keyDescale", AttentionParams.K_DESCALE, keyDescale, descale, sizes, k);
    descale =
        descale(plan, "valueDescale", AttentionParams.V_DESCALE, valueDescale, descale, sizes, k);
    if (descale != null) {
      p.set(AttentionParams.DESCALE_STRIDE_B, descale.layout().stride(0))
          .set(AttentionParams.DESCALE_STRIDE_H, descale.layout().stride(1));
    }
  }

  private static @Nullable Tensor descale(
      Launcher.Builder plan,
      String name,
      Pointer field,
      @Nullable Tensor tensor,
      @Nullable Tensor others,
      Sizes sizes,
      Tensor k) {
    if (tensor == null) {
      return others;
    }
    Checks.dtype(name, tensor, DType.FP32);
    Checks.shape(name, tensor, "[B, Hk]", sizes.batch(), k.dim(-2));
    if (others != null && !others.layout().equals(tensor.layout())) {
      throw new InvalidArgumentException(
          name, tensor.layout(), others.layout() + " like the other descales");
    }
    plan.fixed(name, field, tensor);
    return tensor;
  }
}
