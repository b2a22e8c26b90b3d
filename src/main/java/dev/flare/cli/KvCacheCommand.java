package dev.flare.cli;

import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import picocli.CommandLine.Command;
import picocli.CommandLine.Option;

/** Prints how much memory one sequence's cache takes with multi-head attention and with MLA. */
@Command(
    name = "kv-cache",
    description = {
      "How much memory the latent cache of MLA saves over the keys and values of multi-head"
          + " attention, for one sequence.",
      "A token of MHA takes heads x dim keys and as many values; a token of MLA takes the latent"
          + " and the shared rope key, once for all heads."
    },
    footer = {
      "%nDeepSeek-V2 and V3: --heads 128 --dim 128 --latent 512 --rope 64 --layers 60 (V2), 61 (V3)"
    })
final class KvCacheCommand extends BaseCommand {
  /** Contexts of the table, in units of 1024 tokens. */
  private static final int[] CONTEXTS = {1, 4, 16, 64, 128, 256, 512, 1024};

  private static final int TOKENS_PER_K = 1024;

  /** Latent channels that share one fp32 scale in the fp8 row. */
  private static final int FP8_GROUP = 128;

  /** Element types of a cache. */
  enum CacheType {
    FP32(4),
    FP16(2),
    BF16(2),
    FP8(1);

    private final int bytes;

    CacheType(int bytes) {
      this.bytes = bytes;
    }
  }

  @Option(names = "--heads", paramLabel = "N", description = "Attention heads (${DEFAULT-VALUE}).")
  private int heads = 128;

  @Option(names = "--dim", paramLabel = "N", description = "Head dimension (${DEFAULT-VALUE}).")
  private int dim = 128;

  @Option(
      names = "--latent",
      paramLabel = "N",
      description = "Latent channels of MLA, d_c (${DEFAULT-VALUE}).")
  private int latent = 512;

  @Option(
      names = "--rope",
      paramLabel = "N",
      description = "Channels of MLA's shared rope key, d_r (${DEFAULT-VALUE}).")
  private int rope;

  @Option(names = "--layers", paramLabel = "N", description = "Layers (${DEFAULT-VALUE}).")
  private int layers = 1;

  @Option(
      names = "--dtype",
      paramLabel = "TYPE",
      description = {
        "fp32, fp16, bf16 or fp8 (${DEFAULT-VALUE}). With fp8 a latent row holds e4m3 values, one"
            + " fp32 scale for each 128 of them, and the rope key in bf16."
      })
  private CacheType dtype = CacheType.BF16;

  @Option(
      names = "--digits",
      paramLabel = "N",
      description = "Decimals of the figures (1; 3 with --rope).")
  private int digits = -1;

  @Override
  public Integer call() {
    // Bounds far beyond any model, for which no product below overflows.
    require("--heads", heads, 1, 1 << 14);
    require("--dim", dim, 1, 1 << 14);
    require("--latent", latent, 1, 1 << 24);
    require("--rope", rope, 0, 1 << 14);
    require("--layers", layers, 1, 1 << 10);
    require("--digits", digits, -1, 9);
    int decimals = digits >= 0 ? digits : rope > 0 ? 3 : 1;

    long mha = 2L * heads * dim * dtype.bytes;
    long mhaWithRope = mha + (long) heads * rope * dtype.bytes;
    long mla = latentRowBytes();
    out()
        .printf(
            Locale.ROOT,
            "Cache of one sequence, %s, %s. K = 1024 tokens, MB = 10^6 bytes.%n",
            layers == 1 ? "one layer" : layers + " layers",
            dtype.name().toLowerCase(Locale.ROOT));
    out()
        .printf(
            Locale.ROOT,
            "MHA  %,d bytes a token and layer: keys and values of %d heads x %d.%n",
            mha,
            heads,
            dim);
    out()
        .printf(
            Locale.ROOT,
            "MLA  %,d bytes a token and layer: %d latent channels%s.%n%n",
            mla,
            latent,
            rope > 0 ? " and a rope key of " + rope : "");

    TextTable table =
        new TextTable(false)
            .column("context", 7, TextTable.Align.RIGHT)
            .column("MHA MB", 12, TextTable.Align.RIGHT)
            .column("MLA MB", 10, TextTable.Align.RIGHT)
            .column("saving", 8, TextTable.Align.RIGHT);
    table.printHeader(out());
    for (int context : CONTEXTS) {
      long tokens = (long) context * TOKENS_PER_K * layers;
      List<String> cells = new ArrayList<>();
      cells.add(context < 1024 ? context + "K" : context / 1024 + "M");
      cells.add(megabytes(mha * tokens, decimals));
      cells.add(megabytes(mla * tokens, decimals));
      cells.add(saving(mha, mla, decimals));
      table.row(out(), cells.toArray(String[]::new));
    }
    out().println();
    out()
        .printf(
            Locale.ROOT,
            "A context %.1f times as long fits into the same memory.%n",
            (double) mha / mla);
    if (rope > 0) {
      out()
          .printf(
              Locale.ROOT,
              "Against an MHA whose keys carry the rope channels too (%,d bytes): %s saved, %.1f"
                  + " times.%n",
              mhaWithRope,
              saving(mhaWithRope, mla, decimals),
              (double) mhaWithRope / mla);
    }
    return OK;
  }

  private long latentRowBytes() {
    if (dtype == CacheType.FP8) {
      long scales = (latent + FP8_GROUP - 1L) / FP8_GROUP;
      return latent + scales * Float.BYTES + (long) rope * CacheType.BF16.bytes;
    }
    return ((long) latent + rope) * dtype.bytes;
  }

  private static String megabytes(long bytes, int decimals) {
    return String.format(Locale.ROOT, "%,." + decimals + "f", bytes / 1e6);
  }

  private static String saving(long whole, long part, int decimals) {
    return String.format(Locale.ROOT, "%." + decimals + "f %%", 100.0 * (whole - part) / whole);
  }

  private void require(String option, int value, int least, int most) {
    if (value < least || value > most) {
      throw usage(
          option + " must be from " + Math.max(0, least) + " to " + most + ", not " + value);
    }
  }
}
