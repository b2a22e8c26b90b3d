package dev.flare;

import static org.assertj.core.api.Assertions.assertThat;
import static org.assertj.core.api.Assertions.assertThatThrownBy;

import com.sun.management.ThreadMXBean;
import dev.flare.reference.KdaInputs;
import dev.flare.reference.KdaOptions;
import dev.flare.reference.KdaReference;
import dev.flare.reference.KdaResult;
import dev.flare.reference.Precision;
import dev.flare.reference.Tokens;
import dev.flare.reference.Tolerances;
import java.lang.management.ManagementFactory;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.SplittableRandom;
import java.util.stream.Stream;
import org.junit.jupiter.api.Tag;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.MethodSource;

/** Kimi Delta Attention on the CPU against the float64 recurrence. */
@RequiresLibrary
@Tag("device")
class KdaTest {
  private static final int[] LENGTHS = {0, 1, 2, 15, 16, 17, 63, 64, 65, 130};

  static Stream<Long> seeds() {
    return Cases.seeds(0xDE17A, 100);
  }

  /** Sizes, options and inputs of one random case. */
  private static final class Case implements AutoCloseable {
    final SplittableRandom random;
    final DType dtype;
    final DType gateType;
    final int heads;
    final int valueHeads;
    final int keyDim;
    final int valueDim;
    final StateLayout layout;
    KimiDeltaAttention flare;
    KdaOptions options;
    final boolean gated;
    final boolean perChannel;
    final List<Tensor> owned = new ArrayList<>();

    Case(long seed) {
      random = new SplittableRandom(seed);
      dtype = Cases.pick(random, DType.FP32, DType.FP16, DType.BF16);
      gateType = random.nextBoolean() ? dtype : DType.FP32;
      heads = Cases.pick(random, 1, 2, 3);
      valueHeads = heads * Cases.pick(random, 1, 1, 2);
      keyDim = TestDevice.headDim(Cases.pick(random, 1, 8, 32, 64, 72, 128));
      valueDim =
          random.nextInt(3) == 0 ? TestDevice.headDim(Cases.pick(random, 3, 16, 64)) : keyDim;
      layout = random.nextBoolean() ? StateLayout.KV : StateLayout.VK;
      double scale = 1 / Math.sqrt(keyDim);
      options = KdaOptions.logGate(scale);
      switch (random.nextInt(3)) {
        case 0 -> {
          flare = KimiDeltaAttention.bounded(-5);
          options = options.withBoundedGate(-5);
        }
        case 1 -> {
          flare = KimiDeltaAttention.softplus();
          options = options.withSoftplusGate();
        }
        default -> flare = KimiDeltaAttention.logGate();
      }
      gated = options.gate() != KdaOptions.Gate.LOG;
      // Without normalised keys the recurrence grows without bound.
      flare = flare.withQkL2Norm(true);
      options = options.withL2norm(true);
      switch (random.nextInt(3)) {
        case 0 -> {
          flare = flare.withBeta(Beta.RAW);
          options = options.withBeta(KdaOptions.Beta.RAW);
        }
        case 1 -> {
          flare = flare.withBeta(Beta.SIGMOID);
          options = options.withBeta(KdaOptions.Beta.SIGMOID);
        }
        default -> {
          flare = flare.withBeta(Beta.TWICE_SIGMOID);
          options = options.withBeta(KdaOptions.Beta.TWICE_SIGMOID);
        }
      }
      perChannel = random.nextInt(5) == 0;
      options =
          options
              .withPerChannelBeta(perChannel)
              .withStateLayout(
                  layout == StateLayout.KV ? KdaOptions.StateLayout.KV : KdaOptions.StateLayout.VK);
      flare = flare.withStateLayout(layout).withDeterministic(random.nextBoolean());
    }

    KdaInputs inputs(int batch, int tokens) {
      double[] g = Cases.normals(random, DType.FP32, batch, tokens, valueHeads, keyDim);
      for (int i = 0; i < g.length; i++) {
        double x = gated ? g[i] - 1 : -Math.abs(g[i]) * 0.3;
        g[i] = Cases.precision(gateType).round(x);
      }
      long[] betaDims =
          perChannel
              ? new long[] {batch, tokens, valueHeads, valueDim}
              : new long[] {batch, tokens, valueHeads};
      double[] beta = Cases.normals(random, DType.FP32, betaDims);
      for (int i = 0; i < beta.length; i++) {
        double x = options.beta() == KdaOptions.Beta.RAW ? random.nextDouble() : beta[i];
        beta[i] = Cases.precision(dtype).round(x);
      }
      boolean weights = gated && random.nextInt(4) != 0;
      double[] aLog = null;
      double[] dtBias = null;
      if (weights) {
        aLog = new double[valueHeads];
        Arrays.setAll(aLog, i -> (float) (random.nextDouble() - 0.5));
        dtBias = Cases.normals(random, DType.FP32, valueHeads, keyDim);
      }
      return new KdaInputs(
          heads,
          valueHeads,
          keyDim,
          valueDim,
          Cases.normals(random, dtype, batch, tokens, heads, keyDim),
          Cases.normals(random, dtype, batch, tokens, heads, keyDim),
          Cases.normals(random, dtype, batch, tokens, valueHeads, valueDim),
          g,
          beta,
          aLog,
          dtBias);
    }

    Tensor keep(Tensor tensor) {
      owned.add(tensor);
      return tensor;
    }

    Tensor input(DType type, double[] values, long... dims) {
      if (random.nextBoolean()) {
        return keep(Cases.dense(type, values, dims));
      }
      Tensor[] owner = new Tensor[1];
      Tensor view = Cases.padded(type, values, owner, dims);
      keep(owner[0]);
      return view;
    }

    Shape stateShape(int n) {
      return layout.shape(n, valueHeads, keyDim, valueDim);
    }

    double bound() {
      return Tolerances.relative(Tolerances.Operation.KDA, Cases.precision(dtype));
    }

    @Override
    public void close() {
      owned.forEach(Tensor::close);
    }
  }

  /** The tensors of one call. */
  private record Args(
      Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor aLog, Tensor dtBias) {
    static Args of(Case c, KdaInputs x, int batch, int tokens) {
      long[] betaDims =
          c.perChannel
              ? new long[] {batch, tokens, c.valueHeads, c.valueDim}
              : new long[] {batch, tokens, c.valueHeads};
      return new Args(
          c.input(c.dtype, x.q(), batch, tokens, c.heads, c.keyDim),
          c.input(c.dtype, x.k(), batch, tokens, c.heads, c.keyDim),
          c.input(c.dtype, x.v(), batch, tokens, c.valueHeads, c.valueDim),
          c.input(c.gateType, x.g(), batch, tokens, c.valueHeads, c.keyDim),
          c.input(c.dtype, x.beta(), betaDims),
          x.aLog() == null ? null : c.keep(Cases.dense(DType.FP32, x.aLog(), c.valueHeads)),
          x.dtBias() == null
              ? null
              : c.keep(Cases.dense(DType.FP32, x.dtBias(), c.valueHeads, c.keyDim)));
    }
  }

  @ParameterizedTest(name = "seed {0}")
  @MethodSource("seeds")
  void forward(long seed) {
    try (Case c = new Case(seed)) {
      int batch = Cases.pick(c.random, 0, 1, 2);
      int tokens = Cases.pick(c.random, LENGTHS);
      KdaInputs x = c.inputs(batch, tokens);
      double[] initial = null;
      Tensor initialTensor = null;
      if (c.random.nextBoolean()) {
        initial = Cases.normals(c.random, DType.FP32, c.stateShape(batch).dims());
        initialTensor = c.keep(Cases.dense(DType.FP32, initial, c.stateShape(batch).dims()));
      }
      KdaResult want = KdaReference.forward(Tokens.dense(batch, tokens), x, c.options, initial, 64);
      Args a = Args.of(c, x, batch, tokens);
      try (DeltaOutput got =
          c.flare
              .withCheckpoints(64)
              .runWithState(a.q, a.k, a.v, a.g, a.beta, a.aLog, a.dtBias, initialTensor)) {
        Cases.assertRelative("out", got.out(), want.out(), c.bound());
        Cases.assertRelative("state", got.state(), want.finalState(), c.bound());
        Cases.assertRelative("checkpoints", got.checkpoints(), want.checkpoints(), c.bound());
        if (initialTensor == null) {
          try (Tensor out = c.flare.run(a.q, a.k, a.v, a.g, a.beta, a.aLog, a.dtBias)) {
            assertThat(out.toDoubleArray()).isEqualTo(got.out().toDoubleArray());
          }
        }
      }
    }
  }

  @ParameterizedTest(name = "seed {0}")
  @MethodSource("seeds")
  void varlenOnAPool(long seed) {
    try (Case c = new Case(seed)) {
      int sequences = Cases.pick(c.random, 1, 2, 4);
      int[] cu = new int[sequences + 1];
      for (int n = 0; n < sequences; n++) {
        cu[n + 1] = cu[n] + Cases.pick(c.random, LENGTHS);
      }
      int tokens = cu[sequences];
      KdaInputs x = c.inputs(1, tokens);
      int slotCount = sequences + 3;
      int[] slots = new int[sequences];
      Arrays.setAll(slots, n -> slotCount - 1 - n);
      boolean padding = c.random.nextBoolean();
      if (padding) {
        slots[0] = -1;
      }
      double[] pool = Cases.normals(c.random, DType.FP32, c.stateShape(slotCount).dims());
      int stateSize = c.valueHeads * c.keyDim * c.valueDim;
      double[] initial = new double[sequences * stateSize];
      for (int n = 0; n < sequences; n++) {
        if (slots[n] >= 0) {
          System.arraycopy(pool, slots[n] * stateSize, initial, n * stateSize, stateSize);
        }
      }
      KdaResult want = KdaReference.forward(Tokens.packed(cu), x, c.options, initial, 0);
      double[] wantPool = pool.clone();
      for (int n = 0; n < sequences; n++) {
        if (slots[n] >= 0) {
          System.arraycopy(
              want.finalState(), n * stateSize, wantPool, slots[n] * stateSize, stateSize);
        }
      }
      Args a = Args.of(c, x, 1, tokens);
      Tensor states = c.keep(Cases.dense(DType.FP32, pool, c.stateShape(slotCount).dims()));
      Tensor out =
          c.keep(TestDevice.full(Double.NaN, c.dtype, 1, tokens, c.valueHeads, c.valueDim));
      KimiDeltaAttention kda =
          c.flare.withVarlen(c.keep(TestDevice.of(cu))).withSlots(c.keep(TestDevice.of(slots)), -1);
      try (KdaPlan plan =
          kda.plan(a.q, a.k, a.v, a.g, a.beta, a.aLog, a.dtBias, out, states, states, null)) {
        TestDevice.assertRanOn(plan.kernelName());
        plan.launch(a.q, a.k, a.v, a.g, a.beta, a.aLog, a.dtBias, out, states, states);
      }
      Cases.assertRelative("out", out, want.out(), c.bound());
      Cases.assertRelative("pool", states, wantPool, c.bound());
    }
  }

  @ParameterizedTest(name = "seed {0}")
  @MethodSource("seeds")
  void decodeMovesStatesOn(long seed) {
    try (Case c = new Case(seed)) {
      int sequences = Cases.pick(c.random, 1, 3);
      int tokens = Cases.pick(c.random, 1, 1, 4);
      KdaInputs x = c.inputs(sequences, tokens);
      DType stateType = Cases.pick(c.random, DType.FP32, DType.BF16);
      double[] initial = Cases.normals(c.random, stateType, c.stateShape(sequences).dims());
      KdaResult want =
          KdaReference.forward(Tokens.dense(sequences, tokens), x, c.options, initial, 0);
      Args a = Args.of(c, x, sequences, tokens);
      Tensor state = c.keep(Cases.dense(stateType, initial, c.stateShape(sequences).dims()));
      try (Tensor out = c.flare.decode(a.q, a.k, a.v, a.g, a.beta, a.aLog, a.dtBias, state)) {
        Cases.assertRelative("out", out, want.out(), c.bound());
        double bound =
            stateType == DType.BF16
                ? Tolerances.relative(Tolerances.Operation.KDA, Precision.BF16)
                : c.bound();
        Cases.assertRelative("state", state, want.finalState(), bound);
      }
    }
  }

  @ParameterizedTest(name = "seed {0}")
  @MethodSource("seeds")
  void speculativeDecodeKeepsEveryState(long seed) {
    try (Case c = new Case(seed)) {
      int sequences = Cases.pick(c.random, 1, 2);
      int tokens = 4;
      KdaInputs x = c.inputs(sequences, tokens);
      int[] slots = new int[sequences * tokens];
      Arrays.setAll(slots, i -> slots.length - 1 - i);
      int[] accepted = new int[sequences];
      Arrays.setAll(accepted, n -> 1 + c.random.nextInt(tokens));
      double[] pool = Cases.normals(c.random, DType.FP32, c.stateShape(slots.length).dims());
      int stateSize = c.valueHeads * c.keyDim * c.valueDim;
      double[] initial = new double[sequences * stateSize];
      for (int n = 0; n < sequences; n++) {
        int slot = slots[n * tokens + accepted[n] - 1];
        System.arraycopy(pool, slot * stateSize, initial, n * stateSize, stateSize);
      }
      KdaResult want =
          KdaReference.forward(Tokens.dense(sequences, tokens), x, c.options, initial, 1);
      double[] wantPool = pool.clone();
      for (int i = 0; i < slots.length; i++) {
        System.arraycopy(
            want.checkpoints(), i * stateSize, wantPool, slots[i] * stateSize, stateSize);
      }
      Args a = Args.of(c, x, sequences, tokens);
      Tensor states = c.keep(Cases.dense(DType.FP32, pool, c.stateShape(slots.length).dims()));
      KimiDeltaAttention kda =
          c.flare
              .withSlots(c.keep(TestDevice.of(slots)).reshape(sequences, tokens), -1)
              .withAccepted(c.keep(TestDevice.of(accepted)));
      try (Tensor out = kda.decode(a.q, a.k, a.v, a.g, a.beta, a.aLog, a.dtBias, states)) {
        Cases.assertRelative("out", out, want.out(), c.bound());
        Cases.assertRelative("pool", states, wantPool, c.bound());
      }
    }
  }

  @Test
  void statesInAPoolServeTwoRequests() {
    KimiDeltaAttention kda = KimiDeltaAttention.bounded(-5);
    try (DeltaState states =
            DeltaState.create(TestDevice.chosen(), DType.FP32, StateLayout.VK, 4, 4, 32, 32);
        DeltaState.Sequence first = states.open();
        DeltaState.Sequence second = states.open();
        DeltaState.Batch both = states.batch(second, first);
        DeltaState.Batch one = states.batch(first);
        Tensor q = TestDevice.randn(1, DType.FP32, 2, 70, 2, 32);
        Tensor k = TestDevice.randn(2, DType.FP32, 2, 70, 2, 32);
        Tensor v = TestDevice.randn(3, DType.FP32, 2, 70, 4, 32);
        Tensor g = TestDevice.randn(4, DType.FP32, 2, 70, 4, 32);
        Tensor beta = TestDevice.randn(5, DType.FP32, 2, 70, 4);
        DeltaOutput whole =
            kda.withStateLayout(StateLayout.VK).runWithState(q, k, v, g, beta, null, null, null)) {
      // The prompt in one piece, then the last three tokens one by one; a fork keeps what was.
      Tensor[] head = {
        q.slice(1, 0, 67),
        k.slice(1, 0, 67),
        v.slice(1, 0, 67),
        g.slice(1, 0, 67),
        beta.slice(1, 0, 67)
      };
      kda.run(head[0], head[1], head[2], head[3], head[4], null, null, both).close();
      try (DeltaState.Sequence kept = first.fork()) {
        for (int t = 67; t < 70; t++) {
          try (Tensor out =
              kda.decode(
                  q.slice(1, t, t + 1),
                  k.slice(1, t, t + 1),
                  v.slice(1, t, t + 1),
                  g.slice(1, t, t + 1),
                  beta.slice(1, t, t + 1),
                  null,
                  null,
                  both)) {
            Cases.assertRelative(
                "token " + t, out, whole.out().slice(1, t, t + 1).toDoubleArray(), 1e-5);
          }
        }
        Cases.assertRelative(
            "state", first.state(), whole.state().select(0, 1).toDoubleArray(), 1e-5);
        assertThat(kept.state().toFloatArray()).isNotEqualTo(first.state().toFloatArray());
      }
      assertThat(one.slots().toLongArray()).containsExactly(0);
    }
  }

  @Test
  void launchesAllocateNothing() {
    var threads = (ThreadMXBean) ManagementFactory.getThreadMXBean();
    try (Tensor q = TestDevice.empty(DType.BF16, 0, 1, 4, 64);
        Tensor beta = TestDevice.empty(DType.BF16, 0, 1, 4);
        Tensor state = TestDevice.empty(DType.FP32, 0, 4, 64, 64);
        KdaDecodePlan plan =
            KimiDeltaAttention.bounded(-5)
                .withStateLayout(StateLayout.KV)
                .planDecode(q, q, q, q, beta, null, null, state);
        Tensor out = plan.emptyOutput()) {
      long least = Long.MAX_VALUE;
      for (int stretch = 0; stretch < 6 && least != 0; stretch++) {
        long before = threads.getCurrentThreadAllocatedBytes();
        long asking = threads.getCurrentThreadAllocatedBytes() - before;
        before = threads.getCurrentThreadAllocatedBytes();
        for (int i = 0; i < 300_000; i++) {
          plan.launch(q, q, q, q, beta, null, null, out, state);
        }
        least = Math.min(least, threads.getCurrentThreadAllocatedBytes() - before - asking);
      }
      assertThat(least).as("bytes over 300,000 launches").isZero();
    }
  }

  @Test
  void aSplitSequenceGivesTheSameBits() {
    KimiDeltaAttention kda =
        KimiDeltaAttention.softplus().withStateLayout(StateLayout.KV).withDeterministic(true);
    try (Tensor q = TestDevice.randn(1, DType.BF16, 1, 200, 2, 64);
        Tensor v = TestDevice.randn(3, DType.BF16, 1, 200, 2, 64);
        Tensor g = TestDevice.randn(4, DType.BF16, 1, 200, 2, 64);
        Tensor beta = TestDevice.randn(5, DType.BF16, 1, 200, 2);
        DeltaOutput whole = kda.runWithState(q, q, v, g, beta, null, null, null);
        DeltaOutput first =
            kda.runWithState(
                q.slice(1, 0, 128),
                q.slice(1, 0, 128),
                v.slice(1, 0, 128),
                g.slice(1, 0, 128),
                beta.slice(1, 0, 128),
                null,
                null,
                null);
        DeltaOutput rest =
            kda.runWithState(
                q.slice(1, 128, 200),
                q.slice(1, 128, 200),
                v.slice(1, 128, 200),
                g.slice(1, 128, 200),
                beta.slice(1, 128, 200),
                null,
                null,
                first.state())) {
      assertThat(first.out().toFloatArray()).isEqualTo(whole.out().slice(1, 0, 128).toFloatArray());
      assertThat(rest.out().toFloatArray())
          .isEqualTo(whole.out().slice(1, 128, 200).toFloatArray());
      assertThat(rest.state().toFloatArray()).isEqualTo(whole.state().toFloatArray());
    }
  }

  @Test
  void packedCheckpointsStayInTheirTensor() {
    KimiDeltaAttention kda = KimiDeltaAttention.bounded(-5).withStateLayout(StateLayout.KV);
    try (Tensor q = TestDevice.randn(1, DType.FP32, 1, 300, 1, 16);
        Tensor beta = TestDevice.randn(2, DType.FP32, 1, 300, 1);
        Tensor cu = TestDevice.of(new int[] {0, 130, 130, 300});
        Tensor starts = TestDevice.of(new int[] {0, 2, 2, 4});
        Tensor tooFar = TestDevice.of(new int[] {0, 2, 1000, 1002});
        Tensor all = TestDevice.zeros(DType.FP32, 4, 1, 16, 16);
        DeltaOutput whole =
            kda.withVarlen(cu)
                .withCheckpoints(64, starts)
                .runWithState(q, q, q, q, beta, null, null, null);
        DeltaOutput last =
            kda.withCheckpoints(64)
                .runWithState(
                    q.slice(1, 130, 300),
                    q.slice(1, 130, 300),
                    q.slice(1, 130, 300),
                    q.slice(1, 130, 300),
                    beta.slice(1, 130, 300),
                    null,
                    null,
                    null);
        Tensor out = q.copy()) {
      Cases.assertRelative(
          "checkpoints",
          whole.checkpoints().slice(0, 2, 4),
          last.checkpoints().toDoubleArray(),
          1e-5);
      if (!TestDevice.chosen().isCpu()) {
        return; // a GPU's indices are the caller's responsibility
      }
      try (KdaPlan plan =
          kda.withVarlen(cu)
              .withCheckpoints(64, tooFar)
              .plan(q, q, q, q, beta, null, null, out, null, null, all)) {
        assertThatThrownBy(
                () -> plan.launch(null, q, q, q, q, beta, null, null, out, null, null, all))
            .isInstanceOf(InvalidArgumentException.class)
            .hasMessageContaining("cuCheckpoints: got rows up to 1002 for sequence 2");
      }
    }
  }
}
