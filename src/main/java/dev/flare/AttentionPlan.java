package dev.flare;

import dev.flare.internal.AttentionParams;
import dev.flare.internal.Kernels.Operation;
import dev.flare.internal.Struct;
import org.jspecify.annotations.Nullable;

/** A plan of {@link FlashAttention} or {@link SlidingWindowAttention}; see {@link Plan}. */
public final class AttentionPlan extends Plan {
  private static final int Q = 0;
  private static final int K = 1;
  private static final int V = 2;
  private static final int OUT = 3;
  private static final int LSE = 4;

  private AttentionPlan(Launcher launcher) {
    super(launcher);
  }

  static AttentionPlan of(
      AttentionSettings settings,
      Tensor q,
      Tensor k,
      Tensor v,
      @Nullable Tensor out,
      @Nullable Tensor lse,
      boolean wantsLse,
      boolean confined) {
    Flare.require();
    AttentionSettings.Sizes sizes = settings.check(q, k, v);
    DType outputType = settings.outputType(q.dtype());
    Layout outLayout = Layout.dense(outputType, sizes.output());
    Layout lseLayout = wantsLse ? Layout.dense(DType.FP32, sizes.lse()) : null;
    if (out != null) {
      outLayout = outputLike("out", out, q.device(), outLayout);
    }
    if (lse != null && lseLayout != null) {
      lseLayout = outputLike("lse", lse, q.device(), lseLayout);
    }
    Layout finalOut = outLayout;
    Layout finalLse = lseLayout;
    return Launcher.inArena(
        confined,
        arena -> {
          Launcher.Builder plan =
              new Launcher.Builder(
                  Operation.ATTENTION_FORWARD, q.device(), arena, AttentionParams.allocate(arena));
          plan.input("q", AttentionParams.Q, q);
          plan.input("k", AttentionParams.K, k);
          plan.input("v", AttentionParams.V, v);
          plan.output("out", AttentionParams.OUT, finalOut, out);
          plan.output("lse", AttentionParams.LSE, finalLse, lse);
          settings.fill(plan, sizes, q, k, v);
          int packed = sizes.packedQueries() ? 0 : 1;
          Struct p = plan.params();
          p.set(AttentionParams.OUT_STRIDE_B, packed == 0 ? 0 : finalOut.stride(0))
              .set(AttentionParams.OUT_STRIDE_S, finalOut.stride(packed))
              .set(AttentionParams.OUT_STRIDE_H, finalOut.stride(packed + 1));
          if (finalLse != null) {
            p.set(AttentionParams.LSE_STRIDE_B, packed == 0 ? 0 : finalLse.stride(0))
                .set(AttentionParams.LSE_STRIDE_H, finalLse.stride(packed));
          }
          return new AttentionPlan(plan.build());
        });
  }

  /** The layout of a caller's output, once it is what {@code dense} is but for the strides. */
  static Layout outputLike(String name, Tensor tensor, Device device, Layout dense) {
    Checks.present(name, tensor, device);
    Checks.dtype(name, tensor, dense.dtype());
    Checks.shape(name, tensor, "the result", dense.shape().dims());
    int last = dense.rank() - 1;
    if (dense.dim(last) > 1 && tensor.layout().stride(last) != 1) {
      throw new InvalidArgumentException(
          name, tensor.layout(), "stride 1 along the last dimension");
    }
    return tensor.layout();
  }

  /**
   * Computes attention.
   *
   * @param q queries
   * @param k keys
   * @param v values
   * @param out is overwritten; must not overlap the inputs
   * @throws InvalidArgumentException if a tensor does not look like the plan's, or out overlaps
   * @throws ClosedException if a tensor or the plan is closed
   * @throws InUseException if another launch of this plan is under way
   */
  public void launch(Tensor q, Tensor k, Tensor v, Tensor out) {
    launch(null, q, k, v, out, null);
  }

  /**
   * Computes attention and its log-sum-exp.
   *
   * @param q queries
   * @param k keys
   * @param v values
   * @param out is overwritten; must not overlap the inputs
   * @param lse is overwritten; null if the plan was made without
   * @throws InvalidArgumentException if a tensor does not look like the plan's, or outputs overlap
   * @throws ClosedException if a tensor or the plan is closed
   * @throws InUseException if another launch of this plan is under way
   */
  public void launch(Tensor q, Tensor k, Tensor v, Tensor out, @Nullable Tensor lse) {
    launch(null, q, k, v, out, lse);
  }

  /**
   * Queues attention on a stream.
   *
   * @param stream of the plan's device; null for its default stream
   * @param q queries
   * @param k keys
   * @param v values
   * @param out is overwritten; must not overlap the inputs
   * @param lse is overwritten; null if the plan was made without
   * @throws InvalidArgumentException if a tensor does not look like the plan's, or outputs overlap
   * @throws ClosedException if a tensor or the plan is closed
   * @throws InUseException if another launch of this plan is under way
   */
  public void launch(
      @Nullable Stream stream, Tensor q, Tensor k, Tensor v, Tensor out, @Nullable Tensor lse) {
    launcher.begin(stream);
    try {
      launcher.bind(Q, q);
      launcher.bind(K, k);
      launcher.bind(V, v);
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

  /**
   * Allocates a log-sum-exp for a launch.
   *
   * @return a dense tensor that the caller closes
   * @throws InvalidArgumentException if the plan was made without
   */
  public Tensor emptyLse() {
    return launcher.empty(LSE);
  }

  @Override
  public AttentionPlan fork() {
    return new AttentionPlan(launcher.fork());
  }
}
