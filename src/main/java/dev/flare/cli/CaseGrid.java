package dev.flare.cli;

import dev.flare.reference.Precision;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.function.Consumer;
import java.util.function.Supplier;
import org.jspecify.annotations.Nullable;

/**
 * The cases of {@code flare verify}: each kernel with each mask or gate and form of input, at sizes
 * around and off the tile edges. Data is normal, seeded by the case's name: two runs see the same.
 */
final class CaseGrid {
  /** The kernels as people name them. */
  enum Group {
    ATTENTION,
    WINDOW,
    MLA,
    KDA;

    String text() {
      return name().toLowerCase(Locale.ROOT);
    }
  }

  /**
   * A case that is made when it is its turn, so that the data of one case at a time is in memory.
   *
   * @param group the kernel
   * @param precision the format of the inputs
   * @param maker makes the case
   */
  record Entry(Group group, Precision precision, Supplier<KernelCase> maker) {}

  private final List<Entry> entries = new ArrayList<>();

  private CaseGrid() {
    for (Precision precision : List.of(Precision.FP32, Precision.FP16, Precision.BF16)) {
      attention(precision);
      window(precision);
      mla(precision);
      kda(precision);
    }
  }

  /** {@return every case, formats outermost} */
  static List<Entry> entries() {
    return List.copyOf(new CaseGrid().entries);
  }

  private void attention(Precision precision) {
    Adder add = new Adder(Group.ATTENTION, precision);
    add.dense("full", 2, 197, 197, 4, 4, 64, 64, c -> {});
    add.dense("causal", 2, 257, 257, 4, 2, 128, 128, c -> c.option("causal", true));
    add.dense("causal", 2, 65, 300, 8, 1, 128, 128, c -> c.option("causal", true));
    add.dense("causal, empty rows", 1, 100, 60, 2, 2, 64, 64, c -> c.option("causal", true));
    add.dense("causal", 1, 130, 130, 2, 2, 192, 128, c -> c.option("causal", true));
    add.dense("full", 1, 130, 130, 2, 1, 256, 256, c -> {});
    add.dense("full", 1, 33, 70, 3, 3, 40, 24, c -> {});
    add.dense(
        "causal, softcap", 1, 129, 129, 2, 2, 96, 96, c -> c.option("causal", true).softcap(20));
    add.dense("causal, ALiBi", 1, 200, 200, 4, 4, 64, 64, c -> c.option("causal", true).alibi(4));
    add.dense("causal, sink", 1, 200, 200, 4, 2, 64, 64, c -> c.option("causal", true).sink(4));
    add.dense("causal", 1, 1024, 1024, 8, 2, 128, 128, c -> c.option("causal", true));
    add.varlen("causal, varlen", 4, 2, 64, new int[] {1, 0, 100, 257, 16}, c -> {});
    add.paged("decode, paged", 1, 8, 2, 128, 16, new int[] {5, 0, 100, 513}, c -> {});
    add.paged("decode, paged", 3, 4, 4, 64, 7, new int[] {3, 64, 129}, c -> {});
  }

  private void window(Precision precision) {
    Adder add = new Adder(Group.WINDOW, precision);
    add.dense("window 15,0", 2, 300, 300, 2, 2, 64, 64, c -> c.window(15, 0));
    add.dense("window 64,64", 1, 400, 400, 2, 1, 128, 128, c -> c.window(64, 64));
    add.dense("window all,10", 1, 150, 150, 2, 2, 64, 64, c -> c.window(-1, 10));
    add.dense("window 0,0", 1, 65, 65, 2, 2, 64, 64, c -> c.window(0, 0));
    add.dense("window 31,0", 1, 40, 200, 4, 2, 128, 128, c -> c.window(31, 0));
    add.dense("window 255,0", 1, 1024, 1024, 4, 2, 128, 128, c -> c.window(255, 0));
    add.varlen("window 127,0 varlen", 4, 2, 64, new int[] {300, 1, 0, 129}, c -> c.window(127, 0));
    add.paged("window 63,0 paged", 1, 8, 2, 128, 16, new int[] {7, 200, 64}, c -> c.window(63, 0));
  }

  private void mla(Precision precision) {
    Adder add = new Adder(Group.MLA, precision);
    add.mla("full", 1, 100, 100, 4, 64, 0, 128, 64, false);
    add.mla("causal", 2, 70, 70, 4, 64, 0, 128, 64, true);
    add.mla("causal, rope", 1, 129, 129, 4, 128, 64, 512, 128, true);
    add.mla("causal, rope", 1, 33, 200, 2, 128, 64, 512, 128, true);
    add.absorbed("decode, paged", 1, 16, 512, 64, 64, 3, 65, 300);
    add.absorbed("decode, paged", 3, 8, 512, 64, 16, 3, 100);
    add.absorbed("decode, paged", 1, 128, 512, 64, 61, 257);
    add.absorbed("decode, no rope", 1, 5, 256, 0, 64, 128, 0);
  }

  private void kda(Precision precision) {
    Adder add = new Adder(Group.KDA, precision);
    add.kda("bounded", 2, 130, 2, 2, 128, 128, null, false, c -> {});
    add.kda("softplus", 1, 200, 2, 2, 128, 128, null, false, c -> c.option("gate", "softplus"));
    add.kda("log decay", 2, 65, 2, 2, 64, 64, null, false, c -> c.option("gate", "log"));
    add.kda(
        "softplus, 2 sigmoid",
        1,
        100,
        2,
        2,
        64,
        64,
        null,
        false,
        c -> c.option("gate", "softplus").option("allow_neg_eigval", true));
    add.kda(
        "bounded, varlen",
        1,
        113,
        2,
        4,
        128,
        128,
        new int[] {0, 0, 15, 16, 80, 113},
        true,
        c -> {});
    add.kda(
        "bounded, state V,K",
        2,
        64,
        2,
        2,
        64,
        128,
        null,
        true,
        c -> c.option("state_layout", "V,K"));
    add.kda("bounded", 1, 1024, 4, 4, 128, 128, null, false, c -> {});
    add.kdaDecode("decode", 8, 1, 4, 4, 128);
    add.kdaDecode("decode", 3, 4, 2, 4, 64);
  }

  /** Adds the cases of one kernel and format. */
  private final class Adder {
    private final Group group;
    private final Precision precision;
    private int index;

    Adder(Group group, Precision precision) {
      this.group = group;
      this.precision = precision;
    }

    private void add(String mask, KernelCase.Kind kind, Consumer<CaseBuilder> fill) {
      String name = group.text() + " " + index++ + " " + mask;
      Supplier<KernelCase> maker =
          () -> {
            CaseBuilder builder = new CaseBuilder(precision, name);
            fill.accept(builder);
            return builder.build(name, kind, mask);
          };
      entries.add(new Entry(group, precision, maker));
    }

    void dense(
        String mask,
        int batch,
        int nq,
        int nk,
        int heads,
        int kvHeads,
        int dim,
        int valueDim,
        Consumer<CaseBuilder> options) {
      add(
          mask,
          KernelCase.Kind.ATTENTION,
          c -> {
            options.accept(c);
            c.normal("q", batch, nq, heads, dim);
            c.normal("k", batch, nk, kvHeads, dim);
            c.normal("v", batch, nk, kvHeads, valueDim);
          });
    }

    void varlen(
        String mask,
        int heads,
        int kvHeads,
        int dim,
        int[] lengths,
        Consumer<CaseBuilder> options) {
      int[] cuSeqlens = new int[lengths.length + 1];
      for (int b = 0; b < lengths.length; b++) {
        cuSeqlens[b + 1] = cuSeqlens[b] + lengths[b];
      }
      int total = cuSeqlens[lengths.length];
      add(
          mask,
          KernelCase.Kind.ATTENTION_VARLEN,
          c -> {
            c.option("causal", true);
            options.accept(c);
            c.normal("q", total, heads, dim);
            c.normal("k", total, kvHeads, dim);
            c.normal("v", total, kvHeads, dim);
            c.indices("cu_seqlens_q", cuSeqlens);
            c.indices("cu_seqlens_k", cuSeqlens);
          });
    }

    void paged(
        String mask,
        int nq,
        int heads,
        int kvHeads,
        int dim,
        int pageSize,
        int[] lengths,
        Consumer<CaseBuilder> options) {
      add(
          mask,
          KernelCase.Kind.ATTENTION_PAGED,
          c -> {
            c.option("causal", true);
            options.accept(c);
            c.normal("q", lengths.length, nq, heads, dim);
            Map<String, int[]> pools = new LinkedHashMap<>();
            pools.put("k_pages", new int[] {kvHeads, dim});
            pools.put("v_pages", new int[] {kvHeads, dim});
            c.pages(pageSize, lengths, pools);
          });
    }

    void mla(
        String mask,
        int batch,
        int nq,
        int nk,
        int heads,
        int nope,
        int rope,
        int latent,
        int value,
        boolean causal) {
      add(
          mask,
          KernelCase.Kind.MLA,
          c -> {
            c.option("causal", causal).option("scale", 1 / Math.sqrt(nope + rope));
            c.normal("q_nope", batch, nq, heads, nope);
            c.normal("c_kv", batch, nk, latent);
            if (rope > 0) {
              c.normal("q_rope", batch, nq, heads, rope);
              c.normal("k_rope", batch, nk, rope);
            }
            // Keys and values of unit variance, as the bounds of fp32 assume.
            double deviation = 1 / Math.sqrt(latent);
            c.scaled("w_uk", deviation, heads, latent, nope);
            c.scaled("w_uv", deviation, heads, latent, value);
          });
    }

    void absorbed(
        String mask, int nq, int heads, int latent, int rope, int pageSize, int... lengths) {
      add(
          mask,
          KernelCase.Kind.MLA_ABSORBED_PAGED,
          c -> {
            c.option("causal", true).option("d_c", latent).option("d_r", rope);
            c.option("scale", 1 / Math.sqrt(128 + rope));
            // Queries absorbed by random weights are about as long as the latents.
            int width = latent + rope;
            double deviation = Math.sqrt(128.0 / latent);
            c.scaled("q", deviation, lengths.length, nq, heads, width);
            c.pages(pageSize, lengths, Map.of("kv_pages", new int[] {width}));
          });
    }

    void kda(
        String gate,
        int batch,
        int tokens,
        int heads,
        int valueHeads,
        int keyDim,
        int valueDim,
        int @Nullable [] cuSeqlens,
        boolean initialState,
        Consumer<CaseBuilder> options) {
      add(
          gate,
          KernelCase.Kind.KDA,
          c -> {
            c.kdaTokens(batch, tokens, heads, valueHeads, keyDim, valueDim);
            options.accept(c);
            c.kdaGate(batch, tokens, valueHeads, keyDim);
            int sequences = batch;
            if (cuSeqlens != null) {
              c.indices("cu_seqlens", cuSeqlens);
              sequences = cuSeqlens.length - 1;
            }
            if (initialState) {
              c.state(sequences, valueHeads, keyDim, valueDim);
            }
          });
    }

    void kdaDecode(String gate, int batch, int tokens, int heads, int valueHeads, int dim) {
      add(
          gate,
          KernelCase.Kind.KDA_DECODE,
          c -> {
            c.kdaTokens(batch, tokens, heads, valueHeads, dim, dim);
            c.kdaGate(batch, tokens, valueHeads, dim);
            c.state(batch, valueHeads, dim, dim);
          });
    }
  }
}
