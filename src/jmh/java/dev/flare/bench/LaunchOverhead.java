package dev.flare.bench;

import dev.flare.AttentionPlan;
import dev.flare.DType;
import dev.flare.FlashAttention;
import dev.flare.Tensor;
import dev.flare.internal.AttentionParams;
import dev.flare.internal.CommonParams;
import dev.flare.internal.Kernels;
import dev.flare.internal.Kernels.Operation;
import dev.flare.internal.NativeLibrary;
import dev.flare.internal.Struct;
import java.lang.foreign.Arena;
import java.util.concurrent.TimeUnit;
import org.openjdk.jmh.annotations.Benchmark;
import org.openjdk.jmh.annotations.BenchmarkMode;
import org.openjdk.jmh.annotations.Fork;
import org.openjdk.jmh.annotations.Measurement;
import org.openjdk.jmh.annotations.Mode;
import org.openjdk.jmh.annotations.OutputTimeUnit;
import org.openjdk.jmh.annotations.Scope;
import org.openjdk.jmh.annotations.Setup;
import org.openjdk.jmh.annotations.State;
import org.openjdk.jmh.annotations.TearDown;
import org.openjdk.jmh.annotations.Warmup;

/**
 * What a launch costs besides the kernel: attention on an empty batch, where the C library checks
 * its params and has nothing to compute.
 *
 * <p>{@code plan} is {@link AttentionPlan#launch}; {@code bareCall} the same C call on the same
 * struct, through FFM alone; {@code run} the one-liner. The C side's own loop tells what is left of
 * it without Java.
 */
@State(Scope.Benchmark)
@BenchmarkMode(Mode.AverageTime)
@OutputTimeUnit(TimeUnit.NANOSECONDS)
@Warmup(iterations = 5, time = 1)
@Measurement(iterations = 5, time = 1)
@Fork(value = 3, jvmArgsAppend = "--enable-native-access=ALL-UNNAMED")
public class LaunchOverhead {
  private Tensor q;
  private Tensor out;
  private AttentionPlan plan;
  private Arena arena;
  private Struct params;

  /** Makes a plan, and a struct with the same content. */
  @SuppressWarnings("MustBeClosedChecker") // close() does
  @Setup
  public void open() {
    q = Tensor.empty(DType.BF16, 0, 128, 8, 64);
    plan = FlashAttention.causal().plan(q, q, q);
    out = plan.emptyOutput();
    plan.launch(q, q, q, out);
    if (!(NativeLibrary.status() instanceof NativeLibrary.Ready)) {
      throw new IllegalStateException(NativeLibrary.status().toString());
    }
    arena = Arena.ofShared();
    params =
        AttentionParams.allocate(arena)
            .set(CommonParams.DEVICE, -1)
            .set(AttentionParams.DTYPE, 3)
            .set(AttentionParams.SEQLEN_Q, 128)
            .set(AttentionParams.SEQLEN_K, 128)
            .set(AttentionParams.HEADS_Q, 8)
            .set(AttentionParams.HEADS_KV, 8)
            .set(AttentionParams.HEAD_DIM_QK, 64)
            .set(AttentionParams.HEAD_DIM_V, 64)
            .set(AttentionParams.MASK, 1)
            .set(AttentionParams.Q_STRIDE_S, 512)
            .set(AttentionParams.Q_STRIDE_H, 64)
            .set(AttentionParams.K_STRIDE_S, 512)
            .set(AttentionParams.K_STRIDE_H, 64)
            .set(AttentionParams.V_STRIDE_S, 512)
            .set(AttentionParams.V_STRIDE_H, 64)
            .set(AttentionParams.OUT_STRIDE_S, 512)
            .set(AttentionParams.OUT_STRIDE_H, 64);
    if (bareCall() != 0) {
      throw new IllegalStateException(Kernels.lastError());
    }
  }

  /** Through the plan. */
  @Benchmark
  public void plan() {
    plan.launch(q, q, q, out);
  }

  /** Plan, allocation, launch and close in one line. */
  @Benchmark
  public void run() {
    FlashAttention.causal().run(q, q, q).close();
  }

  /** The C call alone. */
  @Benchmark
  public int bareCall() {
    return Kernels.run(Operation.ATTENTION_FORWARD, params.segment());
  }

  /** Frees everything. */
  @TearDown
  public void close() {
    plan.close();
    out.close();
    q.close();
    arena.close();
  }
}
