package dev.flare.testing;

import dev.flare.reference.AttentionOptions;
import dev.flare.reference.AttentionReference;
import dev.flare.reference.AttentionResult;
import dev.flare.reference.Heads;
import dev.flare.reference.KdaInputs;
import dev.flare.reference.KdaOptions;
import dev.flare.reference.KdaReference;
import dev.flare.reference.KdaResult;
import dev.flare.reference.MlaReference;
import dev.flare.reference.Precision;
import dev.flare.reference.Tokens;
import java.util.Arrays;
import java.util.SplittableRandom;
import java.util.function.LongFunction;
import java.util.stream.Stream;
import org.jspecify.annotations.Nullable;

/**
 * Random cases of every operation, as plain arrays: sizes at and around the edges of tiles, every
 * mask and option, inputs already rounded to the case's precision.
 *
 * <p>A case follows from its seed alone, and its name ends in the seed. {@code
 * -Dflare.test.seed=0x...} replaces every stream by that one case. Rows that no query may read
 * (unused page slots, rows beyond a used length) hold NaN, and unused block-table entries a page
 * that does not exist.
 */
public final class Cases {
  private static final int BAD_PAGE = 2_147_480_000;

  /**
   * One of each: nothing, one, the edges of 8, 64, 128 and of two to three tiles, and odd sizes.
   */
  private static final int[] LENGTHS = {
    0, 1, 2, 7, 8, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 383, 384, 385, 1000, 4097
  };

  private static final int[] BOUNDS = {
    AttentionOptions.UNBOUNDED, 0, 1, 7, 63, 64, 65, 127, 128, 129, 1 << 20, Integer.MAX_VALUE
  };

  private Cases() {}

  /** How large cases get. */
  public enum Sizes {
    /** For the references: about 0.1 s each. */
    SMALL(100_000_000, 200),
    /** For a backend against another one: sequences of up to 5000 tokens. */
    LARGE(2_000_000_000, 2000);

    private final long cost; // multiply-adds
    private final int tokens; // of a delta-rule sequence, beyond the edges of chunks

    Sizes(long cost, int tokens) {
      this.cost = cost;
      this.tokens = tokens;
    }

    /** The length of a sequence of keys or queries. */
    private int length(SplittableRandom random) {
      return this == LARGE && random.nextBoolean() ? random.nextInt(5001) : pick(random, LENGTHS);
    }

    /** The length of a delta-rule sequence: one of {@code edges}, or any. */
    private int length(SplittableRandom random, int... edges) {
      return this == LARGE && random.nextInt(3) == 0
          ? random.nextInt(tokens + 1)
          : pick(random, edges);
    }
  }

  /** How keys and values are stored. */
  public enum Storage {
    /** {@code [B, N, ...]}. */
    DENSE,
    /** {@code [T, ...]} with cu_seqlens. */
    PACKED,
    /** {@code [P, page, ...]} with a block table. */
    PAGED
  }

  /**
   * The sequences of one side, as a kernel is told of them.
   *
   * @param tokens what the references take
   * @param storage how rows are stored
   * @param length dense: rows of each sequence; else the longest
   * @param cuSeqlens packed only
   * @param used tokens that count, where that is not all; always with pages
   * @param blockTable {@code [B, pagesPerSequence]}, paged only
   */
  @SuppressWarnings("ArrayRecordComponent")
  public record Side(
      Tokens tokens,
      Storage storage,
      int length,
      int @Nullable [] cuSeqlens,
      int @Nullable [] used,
      int @Nullable [] blockTable,
      int pagesPerSequence,
      int pageSize) {

    /**
     * Extents of token data as it is stored: {@code [B, N, ..]}, {@code [T, ..]} or {@code [P,
     * page, ..]}.
     */
    public long[] dims(long... perToken) {
      long[] lead =
          switch (storage) {
            case DENSE -> new long[] {tokens.batch(), length};
            case PACKED -> new long[] {tokens.rows()};
            case PAGED -> new long[] {tokens.rows() / pageSize, pageSize};
          };
      long[] dims = Arrays.copyOf(lead, lead.length + perToken.length);
      System.arraycopy(perToken, 0, dims, lead.length, perToken.length);
      return dims;
    }

    /** Extents of the LSE of such queries: {@code [B, H, N]} or {@code [H, T]}. */
    public long[] lseDims(long heads) {
      return storage == Storage.PACKED
          ? new long[] {heads, tokens.rows()}
          : new long[] {tokens.batch(), heads, length};
    }
  }

  /**
   * Softmax attention: {@code q [rows, H, D]}, {@code k [rows, Hk, D]}, {@code v [rows, Hk, Dv]}.
   */
  @SuppressWarnings("ArrayRecordComponent")
  public record Attention(
      String name,
      Precision precision,
      Side queries,
      Side keys,
      Heads heads,
      double[] q,
      double[] k,
      double[] v,
      AttentionOptions options) {

    /** What the kernel should return. */
    public AttentionResult reference() {
      return AttentionReference.attention(queries.tokens(), keys.tokens(), heads, q, k, v, options);
    }

    @Override
    public String toString() {
      return name;
    }
  }

  /**
   * Latent attention with its weights; {@code qRope} and {@code kRope} are null where rope is 0.
   */
  @SuppressWarnings("ArrayRecordComponent")
  public record Mla(
      String name,
      Precision precision,
      Side queries,
      Side keys,
      MlaReference.Widths widths,
      double[] qNope,
      double @Nullable [] qRope,
      double[] latents,
      double @Nullable [] kRope,
      double[] wUk,
      double[] wUv,
      AttentionOptions options) {

    /** What the up-projecting kernel should return. */
    public AttentionResult reference() {
      return MlaReference.upProjecting(
          queries.tokens(), keys.tokens(), widths, qNope, qRope, latents, kRope, wUk, wUv, options);
    }

    /** The cache rows of the absorbed form, {@code [rows, latent + rope]}. */
    public double[] cache() {
      int rows = keys.tokens().rows();
      int rope = widths.rope();
      double[] cache = new double[rows * (widths.latent() + rope)];
      for (int r = 0; r < rows; r++) {
        int at = r * (widths.latent() + rope);
        System.arraycopy(latents, r * widths.latent(), cache, at, widths.latent());
        if (kRope != null) {
          System.arraycopy(kRope, r * rope, cache, at + widths.latent(), rope);
        }
      }
      return cache;
    }

    @Override
    public String toString() {
      return name;
    }
  }

  /** The delta rule over whole sequences. */
  @SuppressWarnings("ArrayRecordComponent")
  public record Kda(
      String name,
      Precision precision,
      Side tokens,
      KdaInputs inputs,
      KdaOptions options,
      double @Nullable [] initialState,
      int checkpointInterval) {

    /** What the kernel should return. */
    public KdaResult reference() {
      return KdaReference.forward(
          tokens.tokens(), inputs, options, initialState, checkpointInterval);
    }

    @Override
    public String toString() {
      return name;
    }
  }

  /** The delta rule over a few tokens and a pool of states, {@code [poolSlots, HV, ...]}. */
  @SuppressWarnings("ArrayRecordComponent")
  public record KdaDecode(
      String name,
      Precision precision,
      Side tokens,
      KdaInputs inputs,
      KdaOptions options,
      double[] pool,
      int poolSlots,
      KdaReference.Slots slots) {

    /** What the kernel should return; the final state is the whole pool. */
    public KdaResult reference() {
      return KdaReference.decode(tokens.tokens(), inputs, options, pool, slots);
    }

    @Override
    public String toString() {
      return name;
    }
  }

  /**
   * The cases of {@code count} seeds from {@code first} on, or of the one seed that the property
   * names.
   */
  public static <C> Stream<C> stream(long first, int count, LongFunction<C> generator) {
    return Seeds.from(first, count).map(generator::apply);
  }

  /** The attention case of a seed. */
  public static Attention attention(long seed) {
    return attention(seed, Sizes.SMALL);
  }

  /** The attention case of a seed, of a size. */
  public static Attention attention(long seed, Sizes sizes) {
    SplittableRandom random = new SplittableRandom(seed);
    Precision precision = choose(random, Precision.FP32, Precision.FP16, Precision.BF16);
    int dim = pick(random, 8, 40, 64, 64, 72, 80, 96, 112, 128, 128, 160, 192, 224, 256, 1, 33);
    int valueDim = random.nextInt(4) == 0 ? pick(random, 8, 64, 96, 128, 200) : dim;
    int kvHeads = pick(random, 1, 1, 2, 3);
    Heads heads = new Heads(kvHeads * pick(random, 1, 1, 2, 3, 5, 8), kvHeads, dim, valueDim);
    Storage storage = choose(random, Storage.values());
    int batch = storage == Storage.DENSE ? pick(random, 1, 1, 2, 3) : 1 + random.nextInt(5);
    boolean decode = random.nextInt(3) == 0;
    int[] queryLengths = new int[batch];
    int[] keyLengths = new int[batch];
    long cost = sizes.cost / ((long) heads.query() * (dim + valueDim) * batch);
    for (int b = 0; b < batch; b++) {
      do {
        queryLengths[b] = decode ? 1 + random.nextInt(8) : sizes.length(random);
        keyLengths[b] = sizes.length(random);
      } while ((long) queryLengths[b] * keyLengths[b] > cost);
    }
    Side queries =
        storage == Storage.PACKED || (storage == Storage.PAGED && random.nextBoolean())
            ? packed(queryLengths, random)
            : dense(queryLengths, random);
    Side keys =
        switch (storage) {
          case DENSE -> dense(keyLengths, random);
          case PACKED -> packed(keyLengths, random);
          case PAGED -> paged(keyLengths, random);
        };
    AttentionOptions options = AttentionOptions.full(scale(random, dim));
    switch (random.nextInt(4)) {
      case 0 -> {}
      case 1 -> options = options.withCausal(true);
      default -> {
        options = options.withWindow(pick(random, BOUNDS), pick(random, BOUNDS));
        options = options.withCausal(random.nextInt(4) == 0);
      }
    }
    double queryGain = 1;
    if (random.nextInt(5) == 0) {
      options = options.withSoftcap(pick(random, 0.1, 15.0, 30.0, 50.0));
      queryGain = precision == Precision.FP32 ? 3 : 10; // else scores stay where tanh is a line
    }
    if (random.nextInt(5) == 0) {
      int n = random.nextBoolean() ? heads.query() : batch * heads.query();
      double[] slopes = new double[n];
      Arrays.setAll(slopes, i -> Precision.FP32.round(Math.pow(2, -8 * random.nextDouble())));
      options = options.withAlibiSlopes(slopes);
    }
    if (random.nextInt(4) == 0) {
      double[] sink = new double[heads.query()];
      Arrays.setAll(
          sink,
          h ->
              switch (random.nextInt(6)) {
                case 0 -> Double.NEGATIVE_INFINITY;
                // exp(sink - score) overflows in fp32; the out of such a head is 0 in fp32, so not
                // all
                case 1 -> h > 0 ? 100 : 0;
                default -> Precision.FP32.round(2 * random.nextGaussian());
              });
      options = options.withSink(sink);
    }
    double[] q = normals(random, precision, queries, heads.query() * dim, queryGain);
    double[] k = normals(random, precision, keys, kvHeads * dim, 1);
    double[] v = normals(random, precision, keys, kvHeads * valueDim, 1);
    String name =
        "attention %s %s%s heads=%d/%d d=%d/%d sq=%s sk=%s seed=0x%X"
            .formatted(
                precision,
                storage,
                describe(options),
                heads.query(),
                kvHeads,
                dim,
                valueDim,
                Arrays.toString(queryLengths),
                Arrays.toString(keyLengths),
                seed);
    return new Attention(name, precision, queries, keys, heads, q, k, v, options);
  }

  /** The latent-attention case of a seed; half of them are decode shapes. */
  public static Mla mla(long seed) {
    return mla(seed, Sizes.SMALL);
  }

  /** The latent-attention case of a seed, of a size; half of them are decode shapes. */
  public static Mla mla(long seed, Sizes sizes) {
    SplittableRandom random = new SplittableRandom(seed);
    Precision precision = choose(random, Precision.FP32, Precision.FP16, Precision.BF16);
    int[][] widths = {
      {128, 64, 512, 128}, {128, 0, 512, 128}, {64, 64, 256, 128}, {64, 0, 128, 64}, {24, 8, 40, 16}
    };
    int[] w = widths[random.nextInt(widths.length)];
    int heads = pick(random, 1, 2, 3, 8, 16);
    boolean decode = random.nextBoolean();
    int batch = 1 + random.nextInt(4);
    Storage storage = choose(random, Storage.values());
    int[] queryLengths = new int[batch];
    int[] keyLengths = new int[batch];
    long cost = sizes.cost / ((long) heads * w[2] * (w[0] + w[3]) * batch);
    for (int b = 0; b < batch; b++) {
      do {
        queryLengths[b] = decode ? 1 + random.nextInt(4) : sizes.length(random);
        keyLengths[b] = sizes.length(random);
      } while (keyLengths[b] > cost || (long) queryLengths[b] * keyLengths[b] > 100 * cost);
    }
    Side queries =
        storage == Storage.PACKED ? packed(queryLengths, random) : dense(queryLengths, random);
    Side keys =
        switch (storage) {
          case DENSE -> dense(keyLengths, random);
          case PACKED -> packed(keyLengths, random);
          case PAGED -> paged(keyLengths, random);
        };
    MlaReference.Widths shape = new MlaReference.Widths(heads, w[0], w[1], w[2], w[3]);
    // The bounds of lse take scores of unit variance: no scale above the default.
    double scale = Precision.FP32.round(shape.defaultScale() * (random.nextInt(3) == 0 ? 0.87 : 1));
    AttentionOptions options = AttentionOptions.full(scale).withCausal(random.nextBoolean());
    double gain = 1 / Math.sqrt(shape.latent()); // keeps keys and values at unit variance
    double[] qNope = normals(random, precision, queries, heads * shape.nope(), 1);
    double[] latents = normals(random, precision, keys, shape.latent(), 1);
    double[] qRope = null;
    double[] kRope = null;
    if (shape.rope() > 0) {
      qRope = normals(random, precision, queries, heads * shape.rope(), 1);
      kRope = normals(random, precision, keys, shape.rope(), 1);
    }
    double[] wUk = normals(random, precision, heads * shape.latent() * shape.nope(), gain);
    double[] wUv = normals(random, precision, heads * shape.latent() * shape.value(), gain);
    String name =
        "mla %s %s%s heads=%d widths=%s sq=%s sk=%s seed=0x%X"
            .formatted(
                precision,
                storage,
                describe(options),
                heads,
                Arrays.toString(w),
                Arrays.toString(queryLengths),
                Arrays.toString(keyLengths),
                seed);
    return new Mla(
        name, precision, queries, keys, shape, qNope, qRope, latents, kRope, wUk, wUv, options);
  }

  /** The delta-rule case of a seed. */
  public static Kda kda(long seed) {
    return kda(seed, Sizes.SMALL);
  }

  /** The delta-rule case of a seed, of a size. */
  public static Kda kda(long seed, Sizes sizes) {
    SplittableRandom random = new SplittableRandom(seed);
    Precision precision = choose(random, Precision.FP32, Precision.FP16, Precision.BF16);
    boolean packed = random.nextBoolean();
    int sequences = packed ? 1 + random.nextInt(6) : pick(random, 1, 2, 3);
    int[] lengths = new int[sequences];
    int length =
        sizes.length(random, 0, 1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 200, 300);
    for (int n = 0; n < sequences; n++) {
      lengths[n] =
          packed
              ? sizes.length(random, 0, 0, 1, 1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 129, 130)
              : length;
    }
    Side tokens = packed ? packed(lengths, null) : dense(lengths, null);
    KdaInputs inputs = kdaInputs(random, precision, tokens);
    KdaOptions options = kdaOptions(random, inputs);
    inputs = fit(random, precision, inputs, options);
    int stateSize = inputs.valueHeads() * inputs.keyDim() * inputs.valueDim();
    double[] initial =
        random.nextBoolean() ? normals(random, Precision.FP32, sequences * stateSize, 1) : null;
    int interval = pick(random, 0, 0, 64, 128);
    String name =
        "kda %s %s %s H=%d/%d K=%d V=%d T=%s initial=%b checkpoints=%d seed=0x%X"
            .formatted(
                precision,
                packed ? Storage.PACKED : Storage.DENSE,
                describe(options),
                inputs.heads(),
                inputs.valueHeads(),
                inputs.keyDim(),
                inputs.valueDim(),
                Arrays.toString(lengths),
                initial != null,
                interval,
                seed);
    return new Kda(name, precision, tokens, inputs, options, initial, interval);
  }

  /** The decode case of a seed: a pool with more slots than sequences, some sequences padding. */
  public static KdaDecode kdaDecode(long seed) {
    SplittableRandom random = new SplittableRandom(seed);
    Precision precision = choose(random, Precision.FP32, Precision.FP16, Precision.BF16);
    int sequences = 1 + random.nextInt(6);
    int length = pick(random, 1, 1, 2, 4, 8);
    int[] lengths = new int[sequences];
    boolean packed = random.nextInt(3) == 0;
    for (int n = 0; n < sequences; n++) {
      lengths[n] = packed ? random.nextInt(length + 1) : length;
    }
    Side tokens = packed ? packed(lengths, null) : dense(lengths, null);
    KdaInputs inputs = kdaInputs(random, precision, tokens);
    KdaOptions options = kdaOptions(random, inputs);
    inputs = fit(random, precision, inputs, options);
    int perSequence = length > 1 && random.nextBoolean() ? length : 1;
    int poolSlots = 2 * sequences * perSequence + 1;
    int padding = -1;
    int[] order = permutation(random, poolSlots);
    int[] slots = Arrays.copyOf(order, sequences * perSequence);
    for (int i = 0; i < slots.length; i++) {
      if (random.nextInt(6) == 0) {
        slots[i] = padding;
      }
    }
    int[] accepted = null;
    if (perSequence > 1 && random.nextBoolean()) {
      accepted = new int[sequences];
      Arrays.setAll(accepted, n -> 1 + random.nextInt(perSequence));
    }
    int stateSize = inputs.valueHeads() * inputs.keyDim() * inputs.valueDim();
    double[] pool = normals(random, Precision.FP32, poolSlots * stateSize, 1);
    String name =
        "kda decode %s %s H=%d/%d K=%d V=%d T=%s slots=%s accepted=%s seed=0x%X"
            .formatted(
                precision,
                describe(options),
                inputs.heads(),
                inputs.valueHeads(),
                inputs.keyDim(),
                inputs.valueDim(),
                Arrays.toString(lengths),
                Arrays.toString(slots),
                Arrays.toString(accepted),
                seed);
    return new KdaDecode(
        name,
        precision,
        tokens,
        inputs,
        options,
        pool,
        poolSlots,
        new KdaReference.Slots(slots, perSequence, padding, accepted));
  }

  // Pieces of cases.

  private static double scale(SplittableRandom random, int dim) {
    return Precision.FP32.round(
        switch (random.nextInt(8)) {
          case 0 -> 1 / Math.sqrt(1.125 * dim); // a model's own
          case 1 -> 0;
          case 2 -> -1 / Math.sqrt(dim);
          default -> 1 / Math.sqrt(dim);
        });
  }

  private static KdaInputs kdaInputs(SplittableRandom random, Precision precision, Side tokens) {
    int rows = tokens.tokens().rows();
    int heads = pick(random, 1, 1, 2, 3);
    int valueHeads = heads * pick(random, 1, 1, 2, 4);
    int keyDim = pick(random, 64, 128, 128, 60, 8, 1);
    int valueDim = random.nextBoolean() ? keyDim : pick(random, 64, 128, 33);
    double[] q = normals(random, precision, rows * heads * keyDim, 1);
    double[] k = keys(random, precision, rows, heads * keyDim);
    double[] v = normals(random, precision, rows * valueHeads * valueDim, 1);
    double[] g = normals(random, precision, rows * valueHeads * keyDim, 1);
    double[] beta = normals(random, precision, rows * valueHeads, 1);
    double[] aLog = null;
    double[] dtBias = null;
    if (random.nextInt(4) > 0) {
      aLog = new double[valueHeads];
      Arrays.setAll(aLog, h -> Precision.FP32.round(random.nextDouble(-1, 1)));
      dtBias = normals(random, Precision.FP32, valueHeads * keyDim, 1);
    }
    return new KdaInputs(heads, valueHeads, keyDim, valueDim, q, k, v, g, beta, aLog, dtBias);
  }

  /**
   * Keys as they come, the same one again and again, nearly the same, two in turn, or with zeros.
   */
  private static double[] keys(SplittableRandom random, Precision precision, int rows, int width) {
    double[] k = normals(random, precision, rows * width, 1);
    int kind = random.nextInt(8);
    for (int r = 0; r < rows; r++) {
      for (int c = 0; c < width; c++) {
        int at = r * width + c;
        switch (kind) {
          case 0 -> k[at] = k[c];
          case 1 -> k[at] = precision.round(k[c] + (r == 0 ? 0 : 1e-3 * random.nextGaussian()));
          case 2 -> k[at] = k[Math.min(r, r % 2) * width + c];
          case 3 -> k[at] = r % 3 == 0 ? 0 : k[at];
          default -> {}
        }
      }
    }
    return k;
  }

  private static KdaOptions kdaOptions(SplittableRandom random, KdaInputs inputs) {
    KdaOptions options =
        KdaOptions.logGate(Precision.FP32.round(1 / Math.sqrt(inputs.keyDim())))
            .withL2norm(random.nextInt(4) > 0)
            .withBeta(choose(random, KdaOptions.Beta.values()))
            .withStateLayout(choose(random, KdaOptions.StateLayout.values()));
    return switch (random.nextInt(4)) {
      case 0 -> options;
      case 1 -> options.withSoftplusGate();
      default -> options.withBoundedGate(pick(random, -5.0, -5.0, -1.0, -0x1p-10));
    };
  }

  /**
   * Brings the inputs into the range that the options want: log decays at most 0, raw betas in [0,
   * 1], keys shorter than 1 where they are not normalised; and drives some gates to their ends.
   */
  private static KdaInputs fit(
      SplittableRandom random, Precision precision, KdaInputs x, KdaOptions options) {
    int kind = random.nextInt(6);
    for (int i = 0; i < x.g().length; i++) {
      double g = x.g()[i];
      x.g()[i] =
          switch (options.gate()) {
            case LOG ->
                switch (kind) {
                  case 0 -> 0;
                  case 1 -> i % 7 == 0 ? -1000 : -Math.abs(g);
                  default -> precision.round(-Math.abs(g) / 8);
                };
            case SOFTPLUS ->
                switch (kind) {
                  case 0 -> -8;
                  case 1 -> i % 5 == 0 ? 1000 : g;
                  default -> g;
                };
            case BOUNDED ->
                switch (kind) {
                  case 0 -> -8;
                  case 1 -> i % 2 == 0 ? 50 : -50;
                  default -> g;
                };
          };
    }
    for (int i = 0; i < x.beta().length; i++) {
      if (options.beta() == KdaOptions.Beta.RAW) {
        x.beta()[i] = Math.min(1, precision.round(Math.abs(x.beta()[i]) / 2));
      } else if (random.nextInt(8) == 0) {
        x.beta()[i] = pick(random, -50, 0, 50);
      }
    }
    if (!options.l2norm()) {
      double gain = 0.5 / Math.sqrt(x.keyDim());
      Arrays.setAll(x.k(), i -> precision.round(gain * x.k()[i]));
    }
    boolean raw = options.gate() != KdaOptions.Gate.LOG; // a log decay has no rate and no bias
    return new KdaInputs(
        x.heads(),
        x.valueHeads(),
        x.keyDim(),
        x.valueDim(),
        x.q(),
        x.k(),
        x.v(),
        x.g(),
        x.beta(),
        raw ? x.aLog() : null,
        raw ? x.dtBias() : null);
  }

  private static Side dense(int[] lengths, @Nullable SplittableRandom random) {
    int longest = Arrays.stream(lengths).max().orElse(0);
    Tokens tokens = Tokens.dense(lengths.length, longest);
    boolean ragged = Arrays.stream(lengths).anyMatch(n -> n != longest);
    int[] used = ragged && random != null ? lengths.clone() : null;
    return new Side(
        used == null ? tokens : tokens.used(used), Storage.DENSE, longest, null, used, null, 0, 0);
  }

  /** With a source of randomness, storage is sometimes longer than what is used. */
  private static Side packed(int[] lengths, @Nullable SplittableRandom random) {
    boolean spare = random != null && random.nextInt(3) == 0;
    int[] cu = new int[lengths.length + 1];
    for (int b = 0; b < lengths.length; b++) {
      cu[b + 1] = cu[b] + lengths[b] + (spare ? b % 3 : 0);
    }
    Tokens tokens = Tokens.packed(cu);
    int longest = 0;
    for (int b = 0; b < lengths.length; b++) {
      longest = Math.max(longest, cu[b + 1] - cu[b]);
    }
    return new Side(
        spare ? tokens.used(lengths) : tokens,
        Storage.PACKED,
        longest,
        cu,
        spare ? lengths.clone() : null,
        null,
        0,
        0);
  }

  private static Side paged(int[] lengths, SplittableRandom random) {
    int pageSize = pick(random, 1, 2, 3, 16, 61, 64, 128, 256);
    int longest = Arrays.stream(lengths).max().orElse(0);
    int perSequence = Math.ceilDiv(longest, pageSize) + random.nextInt(2);
    int needed = Arrays.stream(lengths).map(n -> Math.ceilDiv(n, pageSize)).sum();
    int pages = needed + 1 + random.nextInt(3);
    int[] order = permutation(random, pages);
    int[] table = new int[lengths.length * perSequence];
    Arrays.fill(table, BAD_PAGE);
    int next = 0;
    for (int b = 0; b < lengths.length; b++) {
      for (int p = 0; p < Math.ceilDiv(lengths[b], pageSize); p++) {
        table[b * perSequence + p] = order[next++];
      }
    }
    return new Side(
        Tokens.paged(pages, pageSize, table, perSequence, lengths),
        Storage.PAGED,
        longest,
        null,
        lengths.clone(),
        table,
        perSequence,
        pageSize);
  }

  private static int[] permutation(SplittableRandom random, int n) {
    int[] order = new int[n];
    for (int i = 0; i < n; i++) {
      int j = random.nextInt(i + 1);
      order[i] = order[j];
      order[j] = i;
    }
    return order;
  }

  /** Normal numbers for every row that counts, NaN elsewhere. */
  private static double[] normals(
      SplittableRandom random, Precision precision, Side side, int width, double gain) {
    Tokens tokens = side.tokens();
    double[] x = new double[Math.multiplyExact(tokens.rows(), width)];
    Arrays.fill(x, Double.NaN);
    for (int b = 0; b < tokens.batch(); b++) {
      for (int t = 0; t < tokens.length(b); t++) {
        int at = tokens.row(b, t) * width;
        for (int c = 0; c < width; c++) {
          x[at + c] = precision.round(gain * random.nextGaussian());
        }
      }
    }
    return x;
  }

  /** Normal numbers times {@code gain}, rounded. */
  public static double[] normals(
      SplittableRandom random, Precision precision, int count, double gain) {
    double[] x = new double[count];
    for (int i = 0; i < count; i++) {
      x[i] = precision.round(gain * random.nextGaussian());
    }
    return x;
  }

  @SafeVarargs
  private static <T> T choose(SplittableRandom random, T... choices) {
    return choices[random.nextInt(choices.length)];
  }

  private static double pick(SplittableRandom random, double... choices) {
    return choices[random.nextInt(choices.length)];
  }

  private static int pick(SplittableRandom random, int... choices) {
    return choices[random.nextInt(choices.length)];
  }

  private static String describe(AttentionOptions o) {
    return (o.causal() ? " causal" : "")
        + (o.windowLeft() < 0 && o.windowRight() < 0
            ? ""
            : " window=" + o.windowLeft() + "," + o.windowRight())
        + (o.softcap() > 0 ? " softcap=" + o.softcap() : "")
        + (o.sink() == null ? "" : " sink")
        + (o.alibiSlopes() == null ? "" : " alibi")
        + (o.scale() > 0 ? "" : " scale=" + o.scale());
  }

  private static String describe(KdaOptions o) {
    return o.gate()
        + (o.l2norm() ? " l2norm" : "")
        + (o.gate() == KdaOptions.Gate.BOUNDED ? "(" + o.lowerBound() + ")" : "")
        + " beta="
        + o.beta()
        + " state="
        + o.stateLayout();
  }
}
