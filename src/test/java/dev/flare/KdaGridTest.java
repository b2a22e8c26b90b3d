package dev.flare;

import static org.assertj.core.api.Assertions.assertThat;

import dev.flare.reference.ErrorMetrics;
import dev.flare.reference.KdaInputs;
import dev.flare.reference.KdaOptions;
import dev.flare.reference.KdaReference;
import dev.flare.reference.KdaResult;
import dev.flare.reference.Tokens;
import dev.flare.reference.Tolerances;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.SplittableRandom;
import java.util.stream.IntStream;
import java.util.stream.Stream;
import org.jspecify.annotations.Nullable;
import org.junit.jupiter.api.Tag;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.MethodSource;

/** Every option of Kimi Delta Attention on the CPU against the float64 reference. */
@RequiresLibrary
@Tag("device")
class KdaGridTest {
  private static final DType[] FLOATS = {DType.FP32, DType.FP16, DType.BF16};
  private static final Beta[] BETAS = {Beta.RAW, Beta.SIGMOID, Beta.TWICE_SIGMOID};
  private static final int[] LENGTHS = {0, 1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129};

  /** A state stored as BF16 is rounded by half an ulp, at most 2^-9 of each element. */
  private static final double BF16_ROUNDING = 0x1p-9;

  static Stream<Long> seeds() {
    return Cases.seeds(0x4DA, 60);
  }

  /** One random case: sizes, strides, gates and options all follow from the seed. */
  private static final class Case implements AutoCloseable {
    final SplittableRandom random;
    final DType dtype;
    final DType gateType;
    final DType betaType;
    final DType stateType;
    final int heads;
    final int valueHeads;
    final int keyDim;
    final int valueDim;
    final boolean perChannelBeta;
    final List<Tensor> owned = new ArrayList<>();
    final KdaOptions options;
    final KimiDeltaAttention kda;

    Case(long seed) {
      random = new SplittableRandom(seed);
      dtype = Cases.pick(random, FLOATS);
      gateType = random.nextBoolean() ? dtype : Cases.pick(random, FLOATS);
      betaType = random.nextBoolean() ? dtype : Cases.pick(random, FLOATS);
      stateType = Cases.pick(random, DType.FP32, DType.FP32, DType.BF16);
      heads = Cases.pick(random, 1, 1, 2, 3);
      valueHeads = heads * Cases.pick(random, 1, 1, 2, 4);
      keyDim = TestDevice.headDim(Cases.pick(random, 1, 8, 24, 64, 64, 128));
      valueDim =
          random.nextBoolean() ? keyDim : TestDevice.headDim(Cases.pick(random, 1, 16, 40, 128));
      perChannelBeta = random.nextInt(4) == 0;
      double scale = random.nextBoolean() ? 1 / Math.sqrt(keyDim) : 0.1 + random.nextDouble();
      KdaOptions.StateLayout layout =
          random.nextBoolean() ? KdaOptions.StateLayout.KV : KdaOptions.StateLayout.VK;
      Beta betaUse = BETAS[random.nextInt(BETAS.length)];
      boolean l2norm = random.nextBoolean();
      KdaOptions want = KdaOptions.logGate((float) scale);
      KimiDeltaAttention flare;
      switch (random.nextInt(3)) {
        case 0 -> flare = KimiDeltaAttention.logGate();
        case 1 -> {
          want = want.withSoftplusGate();
          flare = KimiDeltaAttention.softplus();
        }
        default -> {
          double bound = random.nextBoolean() ? -5 : -0.5;
          want = want.withBoundedGate(bound);
          flare = KimiDeltaAttention.bounded(bound);
        }
      }
      options =
          want.withL2norm(l2norm)
              .withBeta(KdaOptions.Beta.valueOf(betaUse.name()))
              .withPerChannelBeta(perChannelBeta)
              .withStateLayout(layout);
      kda =
          flare
              .withScale(scale)
              .withQkL2Norm(l2norm)
              .withBeta(betaUse)
              .withStateLayout(StateLayout.valueOf(layout.name()))
              .withStateType(stateType)
              .withThreads(Cases.pick(random, 0, 1, 2))
              .withDeterministic(random.nextBoolean());
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

    Tensor indices(DType type, int... values) {
      Tensor ints = keep(TestDevice.of(values));
      return type == DType.INT32 ? ints : keep(ints.to(type));
    }

    private double[] numbers(DType type, double factor, long... dims) {
      double[] x = Cases.normals(random, DType.FP32, dims);
      for (int i = 0; i < x.length; i++) {
        x[i] = Cases.precision(type).round(x[i] * factor);
      }
      return x;
    }

    double[] states(int n) {
      return numbers(stateType, 1, n, valueHeads, keyDim, valueDim);
    }

    Shape stateShape(int n) {
      return StateLayout.valueOf(options.stateLayout().name())
          .shape(n, valueHeads, keyDim, valueDim);
    }

    Tensor stateTensor(double[] values, int n) {
      return keep(Cases.dense(stateType, values, stateShape(n).dims()));
    }

    /** The token data of one call, in both worlds. */
    record Data(
        KdaInputs reference,
        Tensor q,
        Tensor k,
        Tensor v,
        Tensor g,
        Tensor beta,
        @Nullable Tensor aLog,
        @Nullable Tensor dtBias) {}

    Data data(int batch, int tokens) {
      // Without the norm, keys longer than 1 would let the state grow beyond all bounds.
      double keyFactor = options.l2norm() ? 1 : 0.8 / Math.sqrt(keyDim);
      double[] q = numbers(dtype, 1, batch, tokens, heads, keyDim);
      double[] k = numbers(dtype, keyFactor, batch, tokens, heads, keyDim);
      double[] v = numbers(dtype, 1, batch, tokens, valueHeads, valueDim);
      double[] g = numbers(gateType, 1, batch, tokens, valueHeads, keyDim);
      boolean log = options.gate() == KdaOptions.Gate.LOG;
      if (log) {
        for (int i = 0; i < g.length; i++) {
          // Mostly slow decay, sometimes none and sometimes all at once.
          int kind = random.nextInt(40);
          double decay = kind == 0 ? 0 : kind == 1 ? 100 : 0.2 * Math.abs(g[i]);
          g[i] = -Cases.precision(gateType).round(decay);
        }
      }
      long[] betaDims =
          perChannelBeta
              ? new long[] {batch, tokens, valueHeads, valueDim}
              : new long[] {batch, tokens, valueHeads};
      double[] beta = numbers(betaType, 1, betaDims);
      if (options.beta() == KdaOptions.Beta.RAW) {
        for (int i = 0; i < beta.length; i++) {
          beta[i] = Cases.precision(betaType).round(1 / (1 + Math.exp(-beta[i])));
        }
      }
      double[] aLog = log || random.nextInt(3) == 0 ? null : numbers(DType.FP32, 1, valueHeads);
      double[] dtBias =
          log || random.nextInt(3) == 0 ? null : numbers(DType.FP32, 1, valueHeads, keyDim);
      return new Data(
          new KdaInputs(heads, valueHeads, keyDim, valueDim, q, k, v, g, beta, aLog, dtBias),
          input(dtype, q, batch, tokens, heads, keyDim),
          input(dtype, k, batch, tokens, heads, keyDim),
          input(dtype, v, batch, tokens, valueHeads, valueDim),
          input(gateType, g, batch, tokens, valueHeads, keyDim),
          input(betaType, beta, betaDims),
          aLog == null ? null : keep(Cases.dense(DType.FP32, aLog, valueHeads)),
          dtBias == null ? null : keep(Cases.dense(DType.FP32, dtBias, valueHeads, keyDim)));
    }

    /** A strided output full of NaN. */
    Tensor poisonedOutput(int batch, int tokens) {
      long[] dims = {batch, tokens, valueHeads, valueDim};
      double[] poison = new double[Math.toIntExact(Shape.of(dims).elements())];
      Arrays.fill(poison, Double.NaN);
      Tensor[] owner = new Tensor[1];
      Tensor out = Cases.padded(dtype, poison, owner, dims);
      keep(owner[0]);
      return out;
    }

    double bound() {
      return Tolerances.relative(Tolerances.Operation.KDA, Cases.precision(dtype));
    }

    double stateBound() {
      return bound() + (stateType == DType.BF16 ? BF16_ROUNDING : 0);
    }

    @Override
    public void close() {
      owned.forEach(Tensor::close);
    }
  }

  private static int[] cumulative(SplittableRandom random, int batch, int... lengths) {
    int[] sums = new int[batch + 1];
    for (int n = 0; n < batch; n++) {
      sums[n + 1] = sums[n] + Cases.pick(random, lengths);
    }
    return sums;
  }

  /** Different slots of a pool, in random order. */
  private static int[] slots(SplittableRandom random, int pool, int count) {
    int[] order = IntStream.range(0, pool).toArray();
    for (int i = pool - 1; i > 0; i--) {
      int j = random.nextInt(i + 1);
      int swap = order[i];
      order[i] = order[j];
      order[j] = swap;
    }
    return Arrays.copyOf(order, count);
  }

  // ---- forward --------------------------------------------------------------------------------

  @ParameterizedTest(name = "seed {0}")
  @MethodSource("seeds")
  void dense(long seed) {
    try (Case c = new Case(seed)) {
      int batch = Cases.pick(c.random, 0, 1, 2, 3);
      int tokens = Cases.pick(c.random, LENGTHS);
      Case.Data x = c.data(batch, tokens);
      double[] initial = c.random.nextBoolean() ? c.states(batch) : null;
      KdaResult want =
          KdaReference.forward(Tokens.dense(batch, tokens), x.reference(), c.options, initial, 64);
      Tensor start = initial == null ? null : c.stateTensor(initial, batch);
      forward(c, c.kda.withCheckpoints(64), x, start, want);
      if (start == null) {
        try (Tensor once = c.kda.run(x.q(), x.k(), x.v(), x.g(), x.beta(), x.aLog(), x.dtBias())) {
          Cases.assertRelative("run()", once, want.out(), c.bound());
        }
      }
    }
  }

  @ParameterizedTest(name = "seed {0}")
  @MethodSource("seeds")
  void varlen(long seed) {
    try (Case c = new Case(seed)) {
      int sequences = Cases.pick(c.random, 0, 1, 3, 6);
      int[] starts = cumulative(c.random, sequences, LENGTHS);
      Case.Data x = c.data(1, starts[sequences]);
      double[] initial = c.random.nextBoolean() ? c.states(sequences) : null;
      KdaResult want =
          KdaReference.forward(Tokens.packed(starts), x.reference(), c.options, initial, 64);
      DType index = Cases.pick(c.random, DType.INT32, DType.INT64);
      forward(
          c,
          c.kda
              .withVarlen(c.indices(index, starts))
              .withCheckpoints(64, c.indices(index, want.cuCheckpoints())),
          x,
          initial == null ? null : c.stateTensor(initial, sequences),
          want);
    }
  }

  /** Through a plan, into poisoned memory, twice; then in one line. */
  private static void forward(
      Case c, KimiDeltaAttention kda, Case.Data x, @Nullable Tensor start, KdaResult want) {
    int batch = (int) x.q().dim(0);
    int tokens = (int) x.q().dim(1);
    int sequences = want.cuCheckpoints().length - 1;
    int checkpoints = want.cuCheckpoints()[sequences];
    Tensor out = c.poisonedOutput(batch, tokens);
    Tensor last = c.keep(TestDevice.zeros(c.stateType, c.stateShape(sequences)));
    last.fill(Double.NaN);
    // Room for what one long sequence would need.
    int room = Math.max(checkpoints, batch * (tokens / 64));
    Tensor passed = c.keep(TestDevice.zeros(c.stateType, c.stateShape(room)));
    passed.fill(Double.NaN);
    try (KdaPlan plan =
        kda.plan(
            x.q(), x.k(), x.v(), x.g(), x.beta(), x.aLog(), x.dtBias(), out, start, last, passed)) {
      TestDevice.assertRanOn(plan.kernelName());
      for (int launch = 0; launch < 2; launch++) {
        double[] before = launch == 0 ? null : out.toDoubleArray();
        plan.launch(
            null,
            x.q(),
            x.k(),
            x.v(),
            x.g(),
            x.beta(),
            x.aLog(),
            x.dtBias(),
            out,
            start,
            last,
            passed);
        if (before != null) {
          assertThat(out.toDoubleArray()).as("second launch").isEqualTo(before);
        }
      }
    }
    Cases.assertRelative("out", out, want.out(), c.bound());
    Cases.assertRelative("final state", last, want.finalState(), c.stateBound());
    Cases.assertRelative(
        "checkpoints", passed.slice(0, 0, checkpoints), want.checkpoints(), c.stateBound());
    if (room > checkpoints) {
      assertThat(passed.slice(0, checkpoints, room).copy().toFloatArray())
          .as("rows behind the checkpoints")
          .containsOnly(Float.NaN);
    }
    try (DeltaOutput got =
        kda.runWithState(x.q(), x.k(), x.v(), x.g(), x.beta(), x.aLog(), x.dtBias(), start)) {
      assertThat(got.out().toFloatArray()).isEqualTo(out.toFloatArray());
      assertThat(got.state().toFloatArray()).isEqualTo(last.toFloatArray());
    }
  }

  @ParameterizedTest(name = "seed {0}")
  @MethodSource("seeds")
  void pooledStates(long seed) {
    try (Case c = new Case(seed)) {
      int batch = Cases.pick(c.random, 1, 2, 4);
      int tokens = Cases.pick(c.random, 1, 17, 64, 65);
      int poolSize = batch + 2;
      Case.Data x = c.data(batch, tokens);
      double[] pool = c.states(poolSize);
      int[] slots = slots(c.random, poolSize, batch);
      slots[c.random.nextInt(batch)] = -1;
      int width = pool.length / poolSize;
      double[] initial = new double[batch * width];
      for (int n = 0; n < batch; n++) {
        if (slots[n] >= 0) {
          System.arraycopy(pool, slots[n] * width, initial, n * width, width);
        }
      }
      KdaResult want =
          KdaReference.forward(Tokens.dense(batch, tokens), x.reference(), c.options, initial, 0);
      double[] after = pool.clone();
      for (int n = 0; n < batch; n++) {
        if (slots[n] >= 0) {
          System.arraycopy(want.finalState(), n * width, after, slots[n] * width, width);
        }
      }
      Tensor states = c.stateTensor(pool, poolSize);
      Tensor out = c.poisonedOutput(batch, tokens);
      DType index = Cases.pick(c.random, DType.INT32, DType.INT64);
      try (KdaPlan plan =
          c.kda
              .withSlots(c.indices(index, slots), -1)
              .plan(
                  x.q(),
                  x.k(),
                  x.v(),
                  x.g(),
                  x.beta(),
                  x.aLog(),
                  x.dtBias(),
                  out,
                  states,
                  states,
                  null)) {
        plan.launch(
            x.q(), x.k(), x.v(), x.g(), x.beta(), x.aLog(), x.dtBias(), out, states, states);
      }
      Cases.assertRelative("out", out, want.out(), c.bound());
      assertPool(c, states, pool, after, slots);
    }
  }

  /** Slots in use are near to the reference, all others have kept their bits. */
  private static void assertPool(
      Case c, Tensor states, double[] before, double[] want, int... used) {
    double[] got = states.toDoubleArray();
    int width = got.length / (int) states.dim(0);
    for (int slot = 0; slot < states.dim(0); slot++) {
      int from = slot * width;
      double[] gotSlot = Arrays.copyOfRange(got, from, from + width);
      int number = slot;
      if (Arrays.stream(used).anyMatch(s -> s == number)) {
        ErrorMetrics error = ErrorMetrics.of(gotSlot, Arrays.copyOfRange(want, from, from + width));
        assertThat(error.relativeWithin(c.stateBound())).as("slot %d: %s", slot, error).isTrue();
      } else {
        assertThat(gotSlot)
            .as("slot %d", slot)
            .isEqualTo(Arrays.copyOfRange(before, from, from + width));
      }
    }
  }

  // ---- decode ---------------------------------------------------------------------------------

  @ParameterizedTest(name = "seed {0}")
  @MethodSource("seeds")
  void decode(long seed) {
    try (Case c = new Case(seed)) {
      boolean packed = c.random.nextBoolean();
      int sequences = Cases.pick(c.random, 1, 2, 5);
      int tokens = Cases.pick(c.random, 1, 1, 1, 2, 4);
      int[] starts =
          packed
              ? cumulative(c.random, sequences, 0, 1, tokens)
              : IntStream.rangeClosed(0, sequences).map(n -> n * tokens).toArray();
      Case.Data x = packed ? c.data(1, starts[sequences]) : c.data(sequences, tokens);
      Tokens layout = packed ? Tokens.packed(starts) : Tokens.dense(sequences, tokens);
      DType index = Cases.pick(c.random, DType.INT32, DType.INT64);
      KimiDeltaAttention kda = c.kda;
      if (packed) {
        kda = kda.withVarlen(c.indices(index, starts));
      }
      int perSequence = 1;
      int poolSize = sequences;
      KdaReference.Slots slots = KdaReference.Slots.identity(sequences);
      switch (c.random.nextInt(3)) {
        case 0 -> {} // sequence n has row n
        case 1 -> {
          poolSize = sequences + 3;
          int[] numbers = slots(c.random, poolSize, sequences);
          if (c.random.nextBoolean()) {
            numbers[c.random.nextInt(sequences)] = -1;
          }
          slots = new KdaReference.Slots(numbers, 1, -1, null);
          kda = kda.withSlots(c.indices(index, numbers), -1);
        }
        default -> {
          perSequence = tokens;
          poolSize = sequences * tokens + 2;
          int[] numbers = slots(c.random, poolSize, sequences * tokens);
          boolean counted = tokens > 1 && c.random.nextBoolean();
          int[] accepted =
              IntStream.range(0, sequences).map(n -> 1 + c.random.nextInt(tokens)).toArray();
          slots = new KdaReference.Slots(numbers, tokens, -1, counted ? accepted : null);
          kda = kda.withSlots(c.indices(index, numbers).reshape(sequences, tokens), -1);
          if (counted) {
            kda = kda.withAccepted(c.indices(index, accepted));
          }
        }
      }
      double[] pool = c.states(poolSize);
      KdaResult want = KdaReference.decode(layout, x.reference(), c.options, pool, slots);
      int[] used = written(starts, slots, perSequence);
      Tensor states = c.stateTensor(pool, poolSize);
      try (Tensor got =
          kda.decode(x.q(), x.k(), x.v(), x.g(), x.beta(), x.aLog(), x.dtBias(), states)) {
        Cases.assertRelative("out", got, want.out(), c.bound());
        assertPool(c, states, pool, want.finalState(), used);
        intoOtherStates(c, kda, x, pool, poolSize, used, got, states);
      }
    }
  }

  /** The slots that a decode writes; a sequence without tokens keeps its state. */
  private static int[] written(int[] starts, KdaReference.Slots slots, int perSequence) {
    IntStream.Builder used = IntStream.builder();
    for (int n = 0; n + 1 < starts.length; n++) {
      int count = Math.min(perSequence, starts[n + 1] - starts[n]);
      for (int t = 0; t < count; t++) {
        used.add(slots.slots()[n * perSequence + t]);
      }
    }
    return used.build().toArray();
  }

  /** The same, written beside the states instead of over them, by a plan. */
  private static void intoOtherStates(
      Case c,
      KimiDeltaAttention kda,
      Case.Data x,
      double[] pool,
      int poolSize,
      int[] used,
      Tensor want,
      Tensor wantStates) {
    Tensor from = c.stateTensor(pool, poolSize);
    Tensor to = c.stateTensor(pool, poolSize);
    Tensor out = c.poisonedOutput((int) x.q().dim(0), (int) x.q().dim(1));
    try (KdaDecodePlan plan =
        kda.planDecode(x.q(), x.k(), x.v(), x.g(), x.beta(), x.aLog(), x.dtBias(), out, from, to)) {
      TestDevice.assertRanOn(plan.kernelName());
      plan.launch(null, x.q(), x.k(), x.v(), x.g(), x.beta(), x.aLog(), x.dtBias(), out, from, to);
    }
    assertThat(out.toFloatArray()).isEqualTo(want.toFloatArray());
    assertThat(from.toDoubleArray()).as("states read").isEqualTo(pool);
    double[] got = to.toDoubleArray();
    double[] inPlace = wantStates.toDoubleArray();
    int width = got.length / poolSize;
    for (int slot : used) {
      if (slot >= 0) {
        assertThat(Arrays.copyOfRange(got, slot * width, (slot + 1) * width))
            .as("slot %d", slot)
            .isEqualTo(Arrays.copyOfRange(inPlace, slot * width, (slot + 1) * width));
      }
    }
  }

  // ---- identities -----------------------------------------------------------------------------

  @ParameterizedTest(name = "seed {0}")
  @MethodSource("fewSeeds")
  void aCarriedStateIsOneCall(long seed) {
    try (Case c = new Case(seed)) {
      int tokens = 150;
      Case.Data x = c.data(1, tokens);
      KimiDeltaAttention kda = c.kda.withStateType(DType.FP32);
      try (DeltaOutput whole =
          kda.runWithState(x.q(), x.k(), x.v(), x.g(), x.beta(), x.aLog(), x.dtBias(), null)) {
        for (int cut : new int[] {0, 1, 64, 77, tokens}) {
          try (DeltaOutput head = part(kda, x, 0, cut, null);
              DeltaOutput tail = part(kda, x, cut, tokens, head.state())) {
            Cases.assertRelative(
                "state after a cut at " + cut,
                tail.state(),
                whole.state().toDoubleArray(),
                c.bound());
            Cases.assertRelative(
                "out after a cut at " + cut,
                tail.out(),
                whole.out().slice(1, cut, tokens).toDoubleArray(),
                c.bound());
          }
        }
      }
    }
  }

  static Stream<Long> fewSeeds() {
    return Cases.seeds(0xCA4, 6);
  }

  private static DeltaOutput part(
      KimiDeltaAttention kda, Case.Data x, int from, int to, @Nullable Tensor state) {
    return kda.runWithState(
        x.q().slice(1, from, to),
        x.k().slice(1, from, to),
        x.v().slice(1, from, to),
        x.g().slice(1, from, to),
        x.beta().slice(1, from, to),
        x.aLog(),
        x.dtBias(),
        state);
  }

  @Test
  void aBadTokenSpoilsNoOtherSequence() {
    try (Case c = new Case(11)) {
      int tokens = 70;
      Case.Data x = c.data(2, tokens);
      try (Tensor clean = c.kda.run(x.q(), x.k(), x.v(), x.g(), x.beta(), x.aLog(), x.dtBias())) {
        x.v().slice(0, 1, 2).slice(1, 40, 41).fill(Double.NaN);
        try (Tensor spoiled =
            c.kda.run(x.q(), x.k(), x.v(), x.g(), x.beta(), x.aLog(), x.dtBias())) {
          assertThat(spoiled.slice(0, 0, 1).toFloatArray())
              .as("the other sequence")
              .isEqualTo(clean.slice(0, 0, 1).toFloatArray());
          assertThat(spoiled.slice(0, 1, 2).slice(1, 0, 40).toFloatArray())
              .as("earlier tokens")
              .isEqualTo(clean.slice(0, 1, 2).slice(1, 0, 40).toFloatArray());
        }
      }
    }
  }
}
