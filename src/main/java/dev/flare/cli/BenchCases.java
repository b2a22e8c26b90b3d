package dev.flare.cli;

import dev.flare.reference.Precision;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.function.Consumer;

/**
 * The cases of {@code flare bench}: what a prefill and a decode step ask of each kernel.
 *
 * <p>Work is counted as in the papers: attention 2 (D + Dv) per visible pair of query and key and
 * head; MLA prefill that plus one up-projection, 2 d_c (d_nope + d_v) per key and head; KDA 6 K V +
 * 16 (4 K + 4 V) + 12 x 16^2 per token and head, the chunked form with 16 tokens a chunk. Decode is
 * counted in bytes: the cache or states that must be read, and the states written.
 */
final class BenchCases {
  /**
   * A case with the work that it is.
   *
   * @param kernel what the table calls it
   * @param kernelCase inputs and options
   * @param work FLOPs, or bytes
   * @param bytes whether {@code work} is in bytes
   */
  record Entry(String kernel, KernelCase kernelCase, double work, boolean bytes) {}

  /** Makes a case when it is its turn, so that one case at a time is in memory. */
  interface Maker {
    Entry make();
  }

  private final boolean quick;
  private final List<Maker> makers = new ArrayList<>();

  private BenchCases(boolean quick) {
    this.quick = quick;
    for (Precision precision : List.of(Precision.FP32, Precision.BF16)) {
      attention(precision, "full", false);
      attention(precision, "causal", true);
    }
    window(Precision.BF16);
    decode(Precision.BF16);
    mla(Precision.BF16);
    mlaDecode(Precision.BF16);
    kda(Precision.BF16, "bounded");
    kda(Precision.BF16, "softplus");
    kdaDecode(Precision.BF16);
  }

  /** {@return the makers of all cases; {@code quick}: sizes that take a few seconds in all} */
  static List<Maker> all(boolean quick) {
    return List.copyOf(new BenchCases(quick).makers);
  }

  private void attention(Precision precision, String mask, boolean causal) {
    int n = quick ? 256 : 2048;
    int heads = 4;
    int dim = 128;
    makers.add(
        () -> {
          CaseBuilder c = new CaseBuilder(precision, "bench attention " + mask);
          c.option("causal", causal);
          c.normal("q", 1, n, heads, dim);
          c.normal("k", 1, n, heads, dim);
          c.normal("v", 1, n, heads, dim);
          double pairs = causal ? n * (n + 1.0) / 2 : (double) n * n;
          KernelCase made = c.build("attention", KernelCase.Kind.ATTENTION, mask);
          return new Entry("attention", made, 4 * pairs * heads * dim, false);
        });
  }

  private void window(Precision precision) {
    int n = quick ? 1024 : 16384;
    int width = 256;
    int heads = 2;
    int dim = 128;
    makers.add(
        () -> {
          CaseBuilder c = new CaseBuilder(precision, "bench window");
          c.option("causal", true).window(width - 1, 0);
          c.normal("q", 1, n, heads, dim);
          c.normal("k", 1, n, heads, dim);
          c.normal("v", 1, n, heads, dim);
          double pairs = (double) n * width - width * (width - 1.0) / 2;
          KernelCase made =
              c.build("window", KernelCase.Kind.ATTENTION, "window " + (width - 1) + ",0");
          return new Entry("sliding window", made, 4 * pairs * heads * dim, false);
        });
  }

  private void decode(Precision precision) {
    int[] lengths = lengths(4, quick ? 256 : 4096);
    int heads = 32;
    int kvHeads = 8;
    int dim = 128;
    makers.add(
        paged(
            "attention decode",
            precision,
            KernelCase.Kind.ATTENTION_PAGED,
            lengths,
            2.0 * kvHeads * dim,
            c -> {
              c.normal("q", lengths.length, 1, heads, dim);
              c.pages(
                  64,
                  lengths,
                  Map.of("k_pages", new int[] {kvHeads, dim}, "v_pages", new int[] {kvHeads, dim}));
            }));
  }

  private void mla(Precision precision) {
    int n = quick ? 128 : 1024;
    int heads = 8;
    int nope = 128;
    int rope = 64;
    int latent = 512;
    makers.add(
        () -> {
          CaseBuilder c = new CaseBuilder(precision, "bench mla");
          c.option("causal", true).option("scale", 1 / Math.sqrt(nope + rope));
          c.normal("q_nope", 1, n, heads, nope);
          c.normal("q_rope", 1, n, heads, rope);
          c.normal("c_kv", 1, n, latent);
          c.normal("k_rope", 1, n, rope);
          c.scaled("w_uk", 1 / Math.sqrt(latent), heads, latent, nope);
          c.scaled("w_uv", 1 / Math.sqrt(latent), heads, latent, nope);
          double pairs = n * (n + 1.0) / 2;
          double up = 2.0 * latent * (nope + nope) * n * heads;
          double attention = 2.0 * (nope + rope + nope) * pairs * heads;
          KernelCase made = c.build("mla", KernelCase.Kind.MLA, "causal");
          return new Entry("MLA prefill", made, up + attention, false);
        });
  }

  private void mlaDecode(Precision precision) {
    int[] lengths = lengths(4, quick ? 256 : 4096);
    int heads = 16;
    makers.add(
        paged(
            "MLA decode",
            precision,
            KernelCase.Kind.MLA_ABSORBED_PAGED,
            lengths,
            576,
            c -> {
              c.option("d_c", 512).option("d_r", 64).option("scale", 1 / Math.sqrt(192));
              c.scaled("q", 0.5, lengths.length, 1, heads, 576);
              c.pages(64, lengths, Map.of("kv_pages", new int[] {576}));
            }));
  }

  private void kda(Precision precision, String gate) {
    int tokens = quick ? 256 : 4096;
    int heads = 8;
    int dim = 128;
    makers.add(
        () -> {
          CaseBuilder c = new CaseBuilder(precision, "bench kda " + gate);
          c.kdaTokens(1, tokens, heads, heads, dim, dim);
          c.option("gate", gate);
          c.kdaGate(1, tokens, heads, dim);
          double perToken = 6.0 * dim * dim + 16 * 8.0 * dim + 12 * 16 * 16;
          KernelCase made = c.build("kda", KernelCase.Kind.KDA, gate);
          return new Entry("KDA", made, perToken * tokens * heads, false);
        });
  }

  private void kdaDecode(Precision precision) {
    int batch = quick ? 2 : 16;
    int heads = 32;
    int dim = 128;
    makers.add(
        () -> {
          CaseBuilder c = new CaseBuilder(precision, "bench kda decode");
          c.kdaTokens(batch, 1, heads, heads, dim, dim);
          c.kdaGate(batch, 1, heads, dim);
          c.state(batch, heads, dim, dim);
          double states = 2.0 * batch * heads * dim * dim * Float.BYTES;
          KernelCase made = c.build("kda decode", KernelCase.Kind.KDA_DECODE, "bounded");
          return new Entry("KDA decode", made, states, true);
        });
  }

  private Maker paged(
      String kernel,
      Precision precision,
      KernelCase.Kind kind,
      int[] lengths,
      double elementsPerToken,
      Consumer<CaseBuilder> fill) {
    return () -> {
      CaseBuilder c = new CaseBuilder(precision, "bench " + kernel);
      c.option("causal", true);
      fill.accept(c);
      double tokens = 0;
      for (int length : lengths) {
        tokens += length;
      }
      double bytes = tokens * elementsPerToken * precision.byteSize();
      return new Entry(kernel, c.build(kernel, kind, "causal"), bytes, true);
    };
  }

  private static int[] lengths(int batch, int length) {
    int[] lengths = new int[batch];
    Arrays.fill(lengths, length);
    return lengths;
  }
}
