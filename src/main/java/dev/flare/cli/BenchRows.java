package dev.flare.cli;

import dev.flare.Beta;
import dev.flare.DType;
import dev.flare.Device;
import dev.flare.FlashAttention;
import dev.flare.KdaDecodePlan;
import dev.flare.KdaPlan;
import dev.flare.Kernel;
import dev.flare.KimiDeltaAttention;
import dev.flare.KvCache;
import dev.flare.LatentKvCache;
import dev.flare.MlaDecodePlan;
import dev.flare.MlaPrefillPlan;
import dev.flare.MultiHeadLatentAttention;
import dev.flare.Plan;
import dev.flare.StateLayout;
import dev.flare.Stream;
import dev.flare.Tensor;
import dev.flare.reference.ErrorMetrics;
import dev.flare.reference.Precision;
import dev.flare.reference.Tolerances;
import dev.flare.reference.Tolerances.Operation;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Locale;
import java.util.SplittableRandom;
import java.util.function.Consumer;
import java.util.function.Supplier;
import org.jspecify.annotations.Nullable;

/**
 * The rows of the grouped benchmark: shapes, work, and a check of a part of each output.
 *
 * <p>Work is counted as the papers do: attention 2 (D + Dv) FLOPs for each visible pair of query
 * and key and each head; MLA decode 2 (2 d_c + d_rope); MLA prefill that of attention and one
 * up-projection, 2 d_c (d_nope + d_v) for each key and head. Bytes are those that must move:
 * inputs, outputs and states, once. A check computes some rows of the output, at full length, with
 * the CPU backend in FP32 precision from the very inputs.
 */
final class BenchRows {
  /**
   * A row that is made when it is its turn.
   *
   * @param group where it belongs
   * @param name the row's, which peers use too
   * @param maker allocates and plans
   */
  record Row(BenchGroup group, String name, Maker maker) {}

  /** Makes what a row needs. */
  interface Maker {
    Prepared make(BenchData data, Kernel kernel);
  }

  /**
   * A row that can be launched.
   *
   * @param plan its plan
   * @param launch one call
   * @param flops of a call; 0 where bytes are what counts
   * @param bytes that a call must move; 0 where FLOPs are what counts
   * @param check compares a part of the output
   */
  record Prepared(
      Plan plan, Consumer<Stream> launch, double flops, double bytes, Supplier<Checked> check) {}

  /**
   * How near to the CPU backend an output is.
   *
   * @param error relative
   * @param tolerance what it may be at most
   * @param what was compared
   */
  record Checked(double error, double tolerance, String what) {
    boolean passed() {
      return error <= tolerance;
    }
  }

  /** How the names of the second pass and of the whole prefill begin; they end alike. */
  static final String TWO_PASS = "two-pass attention ";

  static final String PREFILL = "mla-prefill ";

  /** Rows of an output that a check looks at. */
  private static final int SAMPLE = 64;

  private final boolean quick;
  private final List<Row> rows = new ArrayList<>();

  private BenchRows(boolean quick) {
    this.quick = quick;
    portable();
    attention();
    windows();
    varlen();
    fp8();
    kda();
    kdaDecode();
    mla();
    mlaPrefill();
    decode();
  }

  /** {@return all rows; {@code quick}: small sizes under the same names} */
  static List<Row> all(boolean quick) {
    return List.copyOf(new BenchRows(quick).rows);
  }

  // ---- the tables -----------------------------------------------------------------------------

  private void portable() {
    BenchGroup group = BenchGroup.PORTABLE;
    for (int dim : new int[] {64, 128, 256}) {
      for (int n : new int[] {4096, 16384}) {
        attention(group, DType.BF16, n, dim, false);
        attention(group, DType.BF16, n, dim, true);
      }
    }
    window(group, 1, 16, 16384, 128, 1024);
    twoPassAttention(group, 4096, 16);
    mlaPrefill(group, 1, 4096, 16);
    decode(group, 64, 8192, 32, 8, 64);
    mla(group, 128, 1, 16, 4096, 64, false);
    kda(group, 96, "bounded", 8192);
    kda(group, 96, "bounded", repeated(8, 1024));
    kdaDecode(group, 256);
  }

  private void attention() {
    BenchGroup group = BenchGroup.ATTENTION;
    for (int dim : new int[] {64, 128, 256}) {
      for (int n = 512; n <= 16384; n *= 2) {
        attention(group, DType.BF16, n, dim, false);
        attention(group, DType.BF16, n, dim, true);
      }
    }
    attention(
        group, "attention bf16 d192/128 n8192 causal", DType.BF16, 2, 8192, 16, 192, 128, true);
    for (int dim : new int[] {64, 128}) {
      attention(group, DType.FP16, 16384, dim, false);
      attention(group, DType.FP16, 16384, dim, true);
    }
  }

  private void windows() {
    BenchGroup group = BenchGroup.WINDOW;
    window(group, 2, 16, 8192, 128, 1024);
    window(group, 1, 16, 16384, 128, 1024);
    window(group, 1, 16, 16384, 128, 4096);
    window(group, 1, 16, 65536, 128, 4096);
    window(group, 1, 32, 16384, 64, 512);
  }

  private void varlen() {
    int[] full = new int[16];
    SplittableRandom random = new SplittableRandom(0x5EED);
    Arrays.setAll(full, i -> 100 + random.nextInt(3901));
    int[] lengths = Arrays.stream(full).map(this::n).toArray();
    // A batch of equal lengths with as many pairs: what the packed one is held against.
    double squares = Arrays.stream(full).mapToDouble(n -> (double) n * n).sum();
    int equal = (int) Math.round(Math.sqrt(squares / full.length));
    for (boolean causal : new boolean[] {false, true}) {
      String mask = causal ? "causal" : "full";
      rows.add(
          new Row(
              BenchGroup.VARLEN,
              "varlen bf16 d128 16 sequences 100..4000 " + mask,
              (data, kernel) -> packed(data, kernel, lengths, 16, 128, causal)));
      attention(
          BenchGroup.VARLEN,
          "varlen bf16 d128 the same pairs in equal lengths " + mask,
          DType.BF16,
          lengths.length,
          equal,
          16,
          128,
          128,
          causal);
    }
  }

  private void fp8() {
    for (int n : new int[] {4096, 16384}) {
      attention(BenchGroup.FP8, DType.FP8_E4M3, n, 128, false);
      attention(BenchGroup.FP8, DType.FP8_E4M3, n, 128, true);
    }
  }

  private void kda() {
    BenchGroup group = BenchGroup.KDA;
    int[] mixed = {1300, 547, 2048, 963, 271, 3063};
    for (int heads : new int[] {96, 64}) {
      kda(group, heads, "bounded", 8192);
      kda(group, heads, "bounded", mixed);
      kda(group, heads, "bounded", repeated(8, 1024));
    }
    kda(group, 32, "bounded", 8192);
    kda(group, 16, "bounded", 8192);
    kda(group, 32, "bounded", repeated(8, 1024));
    kda(group, 32, "bounded", 65536);
    kda(group, 32, "bounded", repeated(16, 4096));
    kda(group, 32, "bounded", repeated(64, 512));
    kda(group, 96, "softplus", 8192);
    for (int heads : new int[] {8, 4, 1}) {
      kda(group, heads, "bounded", 65536);
    }
    kda(group, 8, "softplus", 65536);
    kda(group, 8, "bounded", 8192);
  }

  private void kdaDecode() {
    for (int batch : new int[] {1, 64, 256}) {
      kdaDecode(BenchGroup.KDA_DECODE, batch);
    }
  }

  private void mla() {
    BenchGroup group = BenchGroup.MLA;
    mla(group, 128, 1, 128, 4096, 64, false);
    mla(group, 128, 1, 128, 8192, 64, false);
    mla(group, 128, 2, 128, 4096, 64, false);
    mla(group, 64, 1, 128, 16384, 64, false);
    mla(group, 128, 1, 64, 4096, 64, false);
    mla(group, 128, 1, 16, 4096, 64, false);
    mla(group, 1, 1, 128, 32768, 64, false);
    mla(group, 8, 1, 128, 32768, 64, false);
    mla(group, 1, 1, 16, 131072, 64, false);
    mla(group, 128, 1, 16, 4096, 64, true);
    mla(group, 128, 1, 16, 4096, 16, false);
    mla(group, 128, 1, 16, 4096, 1, false);
  }

  private void mlaPrefill() {
    BenchGroup group = BenchGroup.MLA_PREFILL;
    twoPassAttention(group, 4096, 16);
    mlaPrefill(group, 1, 4096, 16);
    twoPassAttention(group, 8192, 128);
    mlaPrefill(group, 1, 8192, 128);
  }

  private void decode() {
    BenchGroup group = BenchGroup.DECODE;
    decode(group, 1, 8192, 32, 8, 64);
    decode(group, 1, 131072, 32, 8, 64);
    decode(group, 16, 8192, 32, 8, 64);
    decode(group, 64, 8192, 32, 8, 64);
    decode(group, 128, 4096, 64, 8, 64);
    decode(group, 64, 8192, 32, 32, 64);
  }

  // ---- attention ------------------------------------------------------------------------------

  /** A cell of the forward table: B N = 16384, H D = 2048. */
  private void attention(BenchGroup group, DType dtype, int n, int dim, boolean causal) {
    String name =
        "attention %s d%d n%d %s".formatted(text(dtype), dim, n, causal ? "causal" : "full");
    attention(group, name, dtype, 16384 / n, n, 2048 / dim, dim, dim, causal);
  }

  private void attention(
      BenchGroup group,
      String name,
      DType dtype,
      int batch,
      int length,
      int heads,
      int dim,
      int valueDim,
      boolean causal) {
    FlashAttention options = causal ? FlashAttention.causal() : FlashAttention.full();
    int n = n(length);
    double pairs = causal ? n * (n + 1.0) / 2 : (double) n * n;
    rows.add(
        new Row(
            group,
            name,
            (data, kernel) ->
                dense(
                    data,
                    options.withKernel(kernel),
                    options,
                    new Dense(dtype, b(batch), n, h(heads), dim, valueDim, causal, pairs))));
  }

  /** The second pass of a prefill that stores K and V: see {@link GroupBench}. */
  private void twoPassAttention(BenchGroup group, int n, int heads) {
    String name = TWO_PASS + "bf16 b1 n%d h%d".formatted(n, heads);
    attention(group, name, DType.BF16, 1, n, heads, 192, 128, true);
  }

  private void window(BenchGroup group, int batch, int heads, int length, int dim, int window) {
    int n = n(length);
    int w = n(window);
    FlashAttention options = FlashAttention.window(w - 1, 0);
    double pairs = (double) n * w - w * (w - 1.0) / 2;
    rows.add(
        new Row(
            group,
            "window bf16 d%d n%d w%d".formatted(dim, length, window),
            (data, kernel) ->
                dense(
                    data,
                    options.withKernel(kernel),
                    options,
                    new Dense(DType.BF16, b(batch), n, h(heads), dim, dim, true, pairs))));
  }

  /** Shapes of dense attention; {@code cut}: a row sees no key after its own. */
  private record Dense(
      DType dtype,
      int batch,
      int length,
      int heads,
      int dim,
      int valueDim,
      boolean cut,
      double pairs) {}

  private static Prepared dense(
      BenchData data, FlashAttention options, FlashAttention onHost, Dense s) {
    Tensor q = data.normal(s.dtype, s.batch, s.length, s.heads, s.dim);
    Tensor k = data.normal(s.dtype, s.batch, s.length, s.heads, s.dim);
    Tensor v = data.normal(s.dtype, s.batch, s.length, s.heads, s.valueDim);
    Tensor out = data.output(outputOf(s.dtype), s.batch, s.length, s.heads, s.valueDim);
    var plan = data.keep(options.plan(q, k, v, out, null));
    return new Prepared(
        plan,
        stream -> plan.launch(stream, q, k, v, out, null),
        2.0 * s.batch * s.heads * s.pairs * (s.dim + s.valueDim),
        0,
        () -> {
          Sampled sampled = new Sampled(Operation.ATTENTION, s.dtype);
          for (int end : new int[] {s.length / 2, s.length}) {
            for (int head : new int[] {0, s.heads - 1}) {
              int first = Math.max(0, end - SAMPLE);
              int keys = s.cut ? end : s.length;
              int b = s.batch - 1;
              sampled.attention(
                  onHost,
                  part(part(q, 0, b, b + 1), 1, first, end).slice(2, head, head + 1),
                  part(part(k, 0, b, b + 1), 1, 0, keys).slice(2, head, head + 1),
                  part(part(v, 0, b, b + 1), 1, 0, keys).slice(2, head, head + 1),
                  part(part(out, 0, b, b + 1), 1, first, end).slice(2, head, head + 1));
            }
          }
          return sampled.checked("64 rows in the middle and at the end, first and last head");
        });
  }

  private Prepared packed(
      BenchData data, Kernel kernel, int[] lengths, int fullHeads, int dim, boolean causal) {
    int heads = h(fullHeads);
    int[] starts = new int[lengths.length + 1];
    double pairs = 0;
    for (int i = 0; i < lengths.length; i++) {
      starts[i + 1] = starts[i] + lengths[i];
      pairs += causal ? lengths[i] * (lengths[i] + 1.0) / 2 : (double) lengths[i] * lengths[i];
    }
    int total = starts[lengths.length];
    int longest = Arrays.stream(lengths).max().orElse(0);
    Tensor q = data.normal(DType.BF16, total, heads, dim);
    Tensor k = data.normal(DType.BF16, total, heads, dim);
    Tensor v = data.normal(DType.BF16, total, heads, dim);
    Tensor out = data.output(DType.BF16, total, heads, dim);
    Tensor cu = data.ints(starts, starts.length);
    FlashAttention onHost = causal ? FlashAttention.causal() : FlashAttention.full();
    FlashAttention options = onHost.withKernel(kernel).withVarlen(cu, longest, cu, longest);
    var plan = data.keep(options.plan(q, k, v, out, null));
    return new Prepared(
        plan,
        stream -> plan.launch(stream, q, k, v, out, null),
        4.0 * heads * pairs * dim,
        0,
        () -> {
          Sampled sampled = new Sampled(Operation.ATTENTION, DType.BF16);
          for (int i : new int[] {0, 7, 15}) {
            int first = Math.max(starts[i], starts[i + 1] - SAMPLE);
            sampled.attention(
                onHost,
                q.slice(0, first, starts[i + 1]).slice(1, 0, 1).unsqueeze(0),
                k.slice(0, starts[i], starts[i + 1]).slice(1, 0, 1).unsqueeze(0),
                v.slice(0, starts[i], starts[i + 1]).slice(1, 0, 1).unsqueeze(0),
                out.slice(0, first, starts[i + 1]).slice(1, 0, 1).unsqueeze(0));
          }
          return sampled.checked("the last 64 rows of sequences 0, 7 and 15, head 0");
        });
  }

  private void decode(
      BenchGroup group, int batch, int length, int heads, int kvHeads, int pageSize) {
    String name =
        "decode bf16 b%d n%d h%d/%d page%d".formatted(batch, length, heads, kvHeads, pageSize);
    int dim = 128;
    int n = n(length);
    rows.add(
        new Row(
            group,
            name,
            (data, kernel) -> {
              int b = b(batch);
              Pages pages = new Pages(data, b, n, pageSize);
              Tensor q = data.normal(DType.BF16, b, 1, heads, dim);
              Tensor k = data.normal(DType.BF16, pages.count, pageSize, kvHeads, dim);
              Tensor v = data.normal(DType.BF16, pages.count, pageSize, kvHeads, dim);
              Tensor out = data.output(DType.BF16, b, 1, heads, dim);
              FlashAttention onHost = FlashAttention.causal();
              FlashAttention options =
                  onHost.withKernel(kernel).withPages(pages.table, pages.lengths, n);
              var plan = data.keep(options.plan(q, k, v, out, null));
              return new Prepared(
                  plan,
                  stream -> plan.launch(stream, q, k, v, out, null),
                  0,
                  2.0 * b * ((double) n * kvHeads * 2 + heads * 2) * dim,
                  () -> {
                    Sampled sampled = new Sampled(Operation.ATTENTION, DType.BF16);
                    for (int i : new int[] {0, b - 1}) {
                      try (Tensor keys = pages.gather(k, i);
                          Tensor values = pages.gather(v, i)) {
                        sampled.attention(
                            onHost, q.slice(0, i, i + 1), keys, values, out.slice(0, i, i + 1));
                      }
                    }
                    return sampled.checked("first and last sequence, all heads");
                  });
            }));
  }

  /** Pages of equally long sequences, in random order. */
  private static final class Pages {
    final Tensor table;
    final Tensor lengths;
    final int count;
    private final int[] order;
    private final int perSequence;
    private final int length;
    private final int pageSize;

    Pages(BenchData data, int batch, int length, int pageSize) {
      this.length = length;
      this.pageSize = pageSize;
      perSequence = Math.ceilDiv(length, pageSize);
      count = batch * perSequence;
      order = new int[count];
      SplittableRandom random = new SplittableRandom(0xBA6E5);
      for (int i = 0; i < count; i++) {
        int j = random.nextInt(i + 1);
        order[i] = order[j];
        order[j] = i;
      }
      table = data.ints(order, batch, perSequence);
      int[] all = new int[batch];
      Arrays.fill(all, length);
      lengths = data.ints(all, batch);
    }

    /** A sequence's rows on the host, {@code [1, length, ...]}. */
    Tensor gather(Tensor pool, int sequence) {
      long[] dims = pool.shape().dims();
      dims[0] = 1;
      dims[1] = length;
      Tensor rows = Tensor.empty(pool.dtype(), dims);
      for (int p = 0; p < perSequence; p++) {
        int page = order[sequence * perSequence + p];
        int from = p * pageSize;
        int to = Math.min(length, from + pageSize);
        rows.slice(1, from, to).copyFrom(pool.slice(0, page, page + 1).slice(1, 0, to - from));
      }
      return rows;
    }
  }

  // ---- MLA ------------------------------------------------------------------------------------

  private void mla(
      BenchGroup group,
      int batch,
      int queries,
      int heads,
      int length,
      int pageSize,
      boolean packedRows) {
    int latent = 512;
    int rope = 64;
    int width = latent + rope;
    String name =
        "mla %s b%d sq%d h%d n%d page%d"
            .formatted(packedRows ? "fp8" : "bf16", batch, queries, heads, length, pageSize);
    int n = n(length);
    rows.add(
        new Row(
            group,
            name,
            (data, kernel) -> {
              int b = b(batch);
              Pages pages = new Pages(data, b, n, pageSize);
              Tensor q = data.scaled(DType.BF16, 0.5, b, queries, heads, width);
              Tensor kv =
                  packedRows
                      ? packedRows(data, pages.count, pageSize)
                      : data.normal(DType.BF16, pages.count, pageSize, width);
              Tensor out = data.output(DType.BF16, b, queries, heads, latent);
              MultiHeadLatentAttention onHost =
                  MultiHeadLatentAttention.causal()
                      .withScale(1 / Math.sqrt(192))
                      .withHeadDims(0, rope);
              MultiHeadLatentAttention options =
                  onHost.withKernel(kernel).withPages(pages.table, pages.lengths, n);
              MlaDecodePlan plan =
                  data.keep(options.planDecode(q, null, kv, null, null, out, null));
              double pairs = b * (queries * (double) n - queries * (queries - 1.0) / 2);
              double rowBytes = packedRows ? 656 : 2.0 * width;
              return new Prepared(
                  plan,
                  stream -> plan.launch(stream, q, null, kv, null, null, out, null),
                  2 * pairs * heads * (latent + width),
                  b * (n * rowBytes + 2.0 * queries * heads * (latent + width)),
                  () -> {
                    Sampled sampled = new Sampled(Operation.MLA, DType.BF16);
                    for (int i : new int[] {0, b - 1}) {
                      try (Tensor rowsOnHost = pages.gather(kv, i)) {
                        sampled.absorbed(
                            onHost, q.slice(0, i, i + 1), rowsOnHost, out.slice(0, i, i + 1));
                      }
                    }
                    return sampled.checked("first and last sequence, all heads");
                  });
            }));
  }

  /** Pages of 656-byte rows: a few rows that the cache has quantised, again and again. */
  private static Tensor packedRows(BenchData data, int pages, int pageSize) {
    int distinct = Math.min(pages, Math.max(1, 4096 / pageSize));
    try (LatentKvCache cache =
            LatentKvCache.create(Device.cpu(), DType.UINT8, 512, 64, pageSize, distinct);
        Tensor latents = Tensor.randn(1, DType.BF16, (long) distinct * pageSize, 512);
        Tensor ropes = Tensor.randn(2, DType.BF16, (long) distinct * pageSize, 64);
        KvCache.Sequence sequence = cache.open()) {
      cache.append(sequence, latents, ropes);
      Tensor pool = data.empty(DType.UINT8, pages, pageSize, 656);
      for (int from = 0; from < pages; from += distinct) {
        int n = Math.min(distinct, pages - from);
        pool.slice(0, from, from + n).copyFrom(cache.rows().slice(0, 0, n));
      }
      return pool;
    }
  }

  private void mlaPrefill(BenchGroup group, int batch, int length, int fullHeads) {
    int nope = 128;
    int rope = 64;
    int latent = 512;
    int n = n(length);
    rows.add(
        new Row(
            group,
            PREFILL + "bf16 b%d n%d h%d".formatted(batch, length, fullHeads),
            (data, kernel) -> {
              int b = b(batch);
              int heads = h(fullHeads);
              Tensor qNope = data.normal(DType.BF16, b, n, heads, nope);
              Tensor qRope = data.normal(DType.BF16, b, n, heads, rope);
              Tensor cKv = data.normal(DType.BF16, b, n, latent);
              Tensor kRope = data.normal(DType.BF16, b, n, rope);
              double gain = 1 / Math.sqrt(latent);
              Tensor wUk = data.scaled(DType.BF16, gain, heads, latent, nope);
              Tensor wUv = data.scaled(DType.BF16, gain, heads, latent, nope);
              Tensor out = data.output(DType.BF16, b, n, heads, nope);
              MultiHeadLatentAttention onHost = MultiHeadLatentAttention.causal();
              MlaPrefillPlan plan =
                  data.keep(
                      onHost
                          .withKernel(kernel)
                          .plan(qNope, qRope, cKv, kRope, wUk, wUv, out, null));
              double pairs = b * n * (n + 1.0) / 2;
              return new Prepared(
                  plan,
                  stream -> plan.launch(stream, qNope, qRope, cKv, kRope, wUk, wUv, out, null),
                  2 * heads * (pairs * (nope + rope + nope) + (double) b * n * latent * 2 * nope),
                  0,
                  () -> {
                    Sampled sampled = new Sampled(Operation.MLA, DType.BF16);
                    for (int head : new int[] {0, heads - 1}) {
                      sampled.upProjected(
                          onHost,
                          part(part(qNope, 0, 0, 1), 1, n - SAMPLE, n).slice(2, head, head + 1),
                          part(part(qRope, 0, 0, 1), 1, n - SAMPLE, n).slice(2, head, head + 1),
                          part(cKv, 0, 0, 1),
                          part(kRope, 0, 0, 1),
                          wUk.slice(0, head, head + 1),
                          wUv.slice(0, head, head + 1),
                          part(part(out, 0, 0, 1), 1, n - SAMPLE, n).slice(2, head, head + 1));
                    }
                    return sampled.checked("the last 64 rows, first and last head");
                  });
            }));
  }

  // ---- KDA ------------------------------------------------------------------------------------

  private void kda(BenchGroup group, int fullHeads, String gate, int... sequences) {
    int total = Arrays.stream(sequences).sum();
    boolean equal = Arrays.stream(sequences).allMatch(n -> n == sequences[0]);
    String shape =
        sequences.length == 1
            ? "1 sequence"
            : equal ? sequences.length + "x" + sequences[0] : sequences.length + " sequences";
    int[] lengths = Arrays.stream(sequences).map(this::n).toArray();
    rows.add(
        new Row(
            group,
            "kda bf16 %s t%d h%d %s".formatted(gate, total, fullHeads, shape),
            (data, kernel) -> kda(data, kernel, h(fullHeads), gate, lengths)));
  }

  private static Prepared kda(
      BenchData data, Kernel kernel, int heads, String gate, int[] lengths) {
    int dim = 128;
    int[] starts = new int[lengths.length + 1];
    for (int i = 0; i < lengths.length; i++) {
      starts[i + 1] = starts[i] + lengths[i];
    }
    int total = starts[lengths.length];
    int sequences = lengths.length;
    KdaInputs x = new KdaInputs(data, 1, total, heads, dim);
    Tensor initial = data.scaled(DType.FP32, 0.1, sequences, heads, dim, dim);
    Tensor out = data.output(DType.BF16, 1, total, heads, dim);
    Tensor state = data.output(DType.FP32, sequences, heads, dim, dim);
    KimiDeltaAttention onHost = kdaOptions(gate);
    KimiDeltaAttention options = onHost.withKernel(kernel);
    if (sequences > 1) {
      options = options.withVarlen(data.ints(starts, starts.length));
    }
    KdaPlan plan =
        data.keep(
            options.plan(x.q, x.k, x.v, x.g, x.beta, x.aLog, x.dtBias, out, initial, state, null));
    double tokens = 2.0 * total * heads * (5 * dim + 1);
    double states = 2.0 * sequences * heads * dim * dim * Float.BYTES;
    return new Prepared(
        plan,
        stream ->
            plan.launch(
                stream, x.q, x.k, x.v, x.g, x.beta, x.aLog, x.dtBias, out, initial, state, null),
        0,
        tokens + states,
        () -> {
          Sampled sampled = new Sampled(Operation.KDA, DType.BF16);
          int last = sequences - 1;
          sampled.delta(
              onHost,
              x.part(starts[last], starts[last + 1], heads - 1),
              part(out, 1, starts[last], starts[last + 1]).slice(2, heads - 1, heads),
              initial.slice(0, last, last + 1).slice(1, heads - 1, heads),
              state.slice(0, last, last + 1).slice(1, heads - 1, heads));
          return sampled.checked("last head of the last sequence, out and final state");
        });
  }

  private void kdaDecode(BenchGroup group, int batch) {
    int dim = 128;
    rows.add(
        new Row(
            group,
            "kda-decode bf16 b%d h32".formatted(batch),
            (data, kernel) -> {
              int heads = 32;
              int b = b(batch);
              KdaInputs x = new KdaInputs(data, b, 1, heads, dim);
              Tensor out = data.output(DType.BF16, b, 1, heads, dim);
              Tensor state = data.normal(DType.FP32, b, heads, dim, dim);
              Tensor moved = data.output(DType.FP32, b, heads, dim, dim);
              KimiDeltaAttention onHost = kdaOptions("bounded");
              KdaDecodePlan plan =
                  data.keep(
                      onHost
                          .withKernel(kernel)
                          .planDecode(
                              x.q, x.k, x.v, x.g, x.beta, x.aLog, x.dtBias, out, state, moved));
              return new Prepared(
                  plan,
                  stream ->
                      plan.launch(
                          stream, x.q, x.k, x.v, x.g, x.beta, x.aLog, x.dtBias, out, state, moved),
                  0,
                  b * heads * (2.0 * dim * dim * Float.BYTES + 2 * (5 * dim + 1)),
                  () -> {
                    Sampled sampled = new Sampled(Operation.KDA, DType.BF16);
                    sampled.deltaDecode(
                        onHost,
                        x.sequence(b - 1),
                        out.slice(0, b - 1, b),
                        state.slice(0, b - 1, b),
                        moved.slice(0, b - 1, b));
                    return sampled.checked("last sequence, out and state");
                  });
            }));
  }

  private static KimiDeltaAttention kdaOptions(String gate) {
    KimiDeltaAttention kda =
        gate.equals("softplus") ? KimiDeltaAttention.softplus() : KimiDeltaAttention.bounded(-5);
    return kda.withQkL2Norm(true).withBeta(Beta.SIGMOID).withStateLayout(StateLayout.KV);
  }

  /** Token data of KDA, one query/key head a value head. */
  private record KdaInputs(
      Tensor q,
      Tensor k,
      Tensor v,
      Tensor g,
      Tensor beta,
      @Nullable Tensor aLog,
      @Nullable Tensor dtBias) {

    KdaInputs(BenchData data, int batch, int tokens, int heads, int dim) {
      this(
          data.normal(DType.BF16, batch, tokens, heads, dim),
          data.normal(DType.BF16, batch, tokens, heads, dim),
          data.normal(DType.BF16, batch, tokens, heads, dim),
          data.normal(DType.BF16, batch, tokens, heads, dim),
          data.normal(DType.BF16, batch, tokens, heads),
          data.scaled(DType.FP32, 0.5, heads),
          data.scaled(DType.FP32, 1, heads, dim));
    }

    /** One head of some tokens. */
    KdaInputs part(int from, int to, int head) {
      return new KdaInputs(
          BenchRows.part(q, 1, from, to).slice(2, head, head + 1),
          BenchRows.part(k, 1, from, to).slice(2, head, head + 1),
          BenchRows.part(v, 1, from, to).slice(2, head, head + 1),
          BenchRows.part(g, 1, from, to).slice(2, head, head + 1),
          BenchRows.part(beta, 1, from, to).slice(2, head, head + 1),
          aLog == null ? null : aLog.slice(0, head, head + 1),
          dtBias == null ? null : dtBias.slice(0, head, head + 1));
    }

    /** One sequence of a batch. */
    KdaInputs sequence(int b) {
      return new KdaInputs(
          q.slice(0, b, b + 1),
          k.slice(0, b, b + 1),
          v.slice(0, b, b + 1),
          g.slice(0, b, b + 1),
          beta.slice(0, b, b + 1),
          aLog,
          dtBias);
    }
  }

  // ---- checks ---------------------------------------------------------------------------------

  /** Parts of an output, and what the CPU backend makes of the same inputs. */
  private static final class Sampled {
    private final Operation operation;
    private final DType dtype;
    private double worst;

    Sampled(Operation operation, DType dtype) {
      this.operation = operation;
      this.dtype = dtype;
    }

    void attention(FlashAttention options, Tensor q, Tensor k, Tensor v, Tensor out) {
      try (HostCopies host = new HostCopies()) {
        compare(
            out,
            host.keep(options.withOutputType(DType.FP32).run(host.of(q), host.of(k), host.of(v))));
      }
    }

    void absorbed(MultiHeadLatentAttention options, Tensor q, Tensor kv, Tensor out) {
      try (HostCopies host = new HostCopies()) {
        compare(out, host.keep(options.withOutputType(DType.FP32).decode(host.of(q), host.of(kv))));
      }
    }

    void upProjected(
        MultiHeadLatentAttention options,
        Tensor qNope,
        Tensor qRope,
        Tensor cKv,
        Tensor kRope,
        Tensor wUk,
        Tensor wUv,
        Tensor out) {
      try (HostCopies host = new HostCopies()) {
        compare(
            out,
            host.keep(
                options
                    .withOutputType(DType.FP32)
                    .run(
                        host.of(qNope),
                        host.of(qRope),
                        host.of(cKv),
                        host.of(kRope),
                        host.of(wUk),
                        host.of(wUv))));
      }
    }

    void delta(KimiDeltaAttention options, KdaInputs x, Tensor out, Tensor initial, Tensor state) {
      try (HostCopies host = new HostCopies()) {
        var want =
            options.runWithState(
                host.of(x.q),
                host.of(x.k),
                host.of(x.v),
                host.of(x.g),
                host.of(x.beta),
                host.orNull(x.aLog),
                host.orNull(x.dtBias),
                host.of(initial));
        host.keep(want);
        compare(out, want.out());
        compare(state, want.state());
      }
    }

    void deltaDecode(
        KimiDeltaAttention options, KdaInputs x, Tensor out, Tensor before, Tensor after) {
      try (HostCopies host = new HostCopies()) {
        Tensor state = host.keep(host.of(before).copy());
        compare(
            out,
            host.keep(
                options.decode(
                    host.of(x.q),
                    host.of(x.k),
                    host.of(x.v),
                    host.of(x.g),
                    host.of(x.beta),
                    host.orNull(x.aLog),
                    host.orNull(x.dtBias),
                    state)));
        compare(after, state);
      }
    }

    private void compare(Tensor got, Tensor want) {
      double error = ErrorMetrics.of(got.toDoubleArray(), want.toDoubleArray()).relative();
      worst = Math.max(worst, error);
    }

    Checked checked(String what) {
      double tolerance = Tolerances.relative(operation, Precision.valueOf(dtype.name()));
      return new Checked(worst, tolerance, "CPU backend: " + what);
    }
  }

  /** Dense copies in host memory. */
  private static final class HostCopies implements AutoCloseable {
    private final List<AutoCloseable> copies = new ArrayList<>();

    Tensor of(Tensor tensor) {
      return keep(Tensor.empty(tensor.dtype(), tensor.shape().dims()).copyFrom(tensor));
    }

    @Nullable Tensor orNull(@Nullable Tensor tensor) {
      return tensor == null ? null : of(tensor);
    }

    <T extends AutoCloseable> T keep(T resource) {
      copies.add(resource);
      return resource;
    }

    @Override
    public void close() {
      for (AutoCloseable copy : copies) {
        try {
          copy.close();
        } catch (Exception e) {
          throw new IllegalStateException("a copy is in use", e);
        }
      }
    }
  }

  // ---- sizes ----------------------------------------------------------------------------------

  private static Tensor part(Tensor tensor, int axis, int from, int to) {
    return tensor.slice(axis, Math.max(0, from), to);
  }

  private int n(int full) {
    return quick ? Math.max(1, full / 64) : full;
  }

  private int b(int full) {
    return quick ? Math.min(full, 2) : full;
  }

  private int h(int full) {
    return quick ? Math.min(full, 2) : full;
  }

  private static int[] repeated(int count, int length) {
    int[] lengths = new int[count];
    Arrays.fill(lengths, length);
    return lengths;
  }

  private static String text(DType dtype) {
    return dtype == DType.FP8_E4M3 ? "fp8" : dtype.name().toLowerCase(Locale.ROOT);
  }

  private static DType outputOf(DType dtype) {
    return dtype == DType.FP8_E4M3 ? DType.BF16 : dtype;
  }
}
