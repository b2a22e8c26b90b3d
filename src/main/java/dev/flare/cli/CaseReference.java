package dev.flare.cli;

import dev.flare.reference.AttentionOptions;
import dev.flare.reference.AttentionReference;
import dev.flare.reference.AttentionResult;
import dev.flare.reference.Heads;
import dev.flare.reference.KdaInputs;
import dev.flare.reference.KdaOptions;
import dev.flare.reference.KdaReference;
import dev.flare.reference.KdaResult;
import dev.flare.reference.MlaReference;
import dev.flare.reference.Tokens;
import java.util.LinkedHashMap;
import java.util.Map;
import org.jspecify.annotations.Nullable;

/** The right results of a case, in float64, by the names of the golden files' format. */
final class CaseReference {
  private CaseReference() {}

  static Map<String, double[]> of(KernelCase c) {
    return switch (c.kind()) {
      case ATTENTION, ATTENTION_VARLEN, ATTENTION_PAGED -> attention(c);
      case MLA -> mla(c);
      case MLA_ABSORBED_PAGED -> mlaAbsorbed(c);
      case KDA -> kda(c);
      case KDA_DECODE -> kdaDecode(c);
    };
  }

  private static Map<String, double[]> attention(KernelCase c) {
    int[] q = c.tensor("q").shape();
    boolean paged = c.kind() == KernelCase.Kind.ATTENTION_PAGED;
    CaseTensor k = c.tensor(paged ? "k_pages" : "k");
    CaseTensor v = c.tensor(paged ? "v_pages" : "v");
    int rank = q.length;
    int[] kShape = k.shape();
    Tokens queries;
    Tokens keys;
    switch (c.kind()) {
      case ATTENTION_VARLEN -> {
        queries = Tokens.packed(c.tensor("cu_seqlens_q").toInts());
        keys = Tokens.packed(c.tensor("cu_seqlens_k").toInts());
      }
      case ATTENTION_PAGED -> {
        queries = Tokens.dense(q[0], q[1]);
        keys = pages(c, kShape);
      }
      default -> {
        queries = Tokens.dense(q[0], q[1]);
        keys = Tokens.dense(kShape[0], kShape[1]);
      }
    }
    int dim = q[rank - 1];
    Heads heads =
        new Heads(q[rank - 2], kShape[kShape.length - 2], dim, v.shape()[v.shape().length - 1]);
    AttentionResult result =
        AttentionReference.attention(
            queries,
            keys,
            heads,
            c.tensor("q").values(),
            k.values(),
            v.values(),
            attentionOptions(c, 1 / Math.sqrt(dim)));
    return named(result);
  }

  private static Map<String, double[]> mla(KernelCase c) {
    int[] q = c.tensor("q_nope").shape();
    int[] latents = c.tensor("c_kv").shape();
    int rope = c.find("k_rope").map(t -> t.shape()[2]).orElse(0);
    MlaReference.Widths widths =
        new MlaReference.Widths(q[2], q[3], rope, latents[2], c.tensor("w_uv").shape()[2]);
    AttentionResult result =
        MlaReference.upProjecting(
            Tokens.dense(q[0], q[1]),
            Tokens.dense(latents[0], latents[1]),
            widths,
            c.tensor("q_nope").values(),
            optional(c, "q_rope"),
            c.tensor("c_kv").values(),
            optional(c, "k_rope"),
            c.tensor("w_uk").values(),
            c.tensor("w_uv").values(),
            attentionOptions(c, widths.defaultScale()));
    return named(result);
  }

  private static Map<String, double[]> mlaAbsorbed(KernelCase c) {
    int[] q = c.tensor("q").shape();
    int latent = (int) c.number("d_c", 512);
    int rope = (int) c.number("d_r", 64);
    AttentionResult result =
        MlaReference.absorbed(
            Tokens.dense(q[0], q[1]),
            pages(c, c.tensor("kv_pages").shape()),
            q[2],
            latent,
            rope,
            c.tensor("q").values(),
            c.tensor("kv_pages").values(),
            attentionOptions(c, 1 / Math.sqrt(latent + rope)));
    return named(result);
  }

  private static Map<String, double[]> kda(KernelCase c) {
    int[] q = c.tensor("q").shape();
    Tokens tokens =
        c.find("cu_seqlens")
            .map(cu -> Tokens.packed(cu.toInts()))
            .orElseGet(() -> Tokens.dense(q[0], q[1]));
    KdaResult result =
        KdaReference.forward(tokens, kdaInputs(c), kdaOptions(c), optional(c, "initial_state"), 0);
    Map<String, double[]> named = new LinkedHashMap<>();
    named.put("out", result.out());
    named.put("final_state", result.finalState());
    return named;
  }

  private static Map<String, double[]> kdaDecode(KernelCase c) {
    int[] q = c.tensor("q").shape();
    KdaResult result =
        KdaReference.decode(
            Tokens.dense(q[0], q[1]),
            kdaInputs(c),
            kdaOptions(c),
            c.tensor("initial_state").values(),
            KdaReference.Slots.identity(q[0]));
    Map<String, double[]> named = new LinkedHashMap<>();
    named.put("out", result.out());
    named.put("final_state", result.finalState());
    return named;
  }

  private static KdaInputs kdaInputs(KernelCase c) {
    int[] q = c.tensor("q").shape();
    int[] v = c.tensor("v").shape();
    return new KdaInputs(
        q[2],
        v[2],
        q[3],
        v[3],
        c.tensor("q").values(),
        c.tensor("k").values(),
        c.tensor("v").values(),
        c.tensor("g").values(),
        c.tensor("beta").values(),
        optional(c, "A_log"),
        optional(c, "dt_bias"));
  }

  private static KdaOptions kdaOptions(KernelCase c) {
    double scale = c.number("scale", 1 / Math.sqrt(c.tensor("q").shape()[3]));
    KdaOptions options = KdaOptions.logGate(scale);
    String gate = c.text("gate", "log");
    options =
        switch (gate) {
          case "log" -> options;
          case "softplus" -> options.withSoftplusGate();
          case "bounded" -> options.withBoundedGate(c.number("lower_bound", -5));
          default ->
              throw new IllegalArgumentException(
                  c.name() + ": gate is '" + gate + "', want bounded, softplus or log");
        };
    KdaOptions.Beta beta = KdaOptions.Beta.RAW;
    if (c.flag("beta_sigmoid")) {
      beta = c.flag("allow_neg_eigval") ? KdaOptions.Beta.TWICE_SIGMOID : KdaOptions.Beta.SIGMOID;
    }
    String layout = c.text("state_layout", "K,V");
    return options
        .withL2norm(c.flag("qk_l2norm"))
        .withBeta(beta)
        .withStateLayout(
            switch (layout) {
              case "K,V" -> KdaOptions.StateLayout.KV;
              case "V,K" -> KdaOptions.StateLayout.VK;
              default ->
                  throw new IllegalArgumentException(
                      c.name() + ": state_layout is '" + layout + "', want K,V or V,K");
            });
  }

  private static AttentionOptions attentionOptions(KernelCase c, double defaultScale) {
    int[] window = c.window();
    return AttentionOptions.full(c.number("scale", defaultScale))
        .withCausal(c.flag("causal"))
        .withWindow(window[0], window[1])
        .withSoftcap(c.number("softcap", 0))
        .withSink(optional(c, "sink"))
        .withAlibiSlopes(optional(c, "alibi_slopes"));
  }

  private static Tokens pages(KernelCase c, int[] pool) {
    int[] table = c.tensor("block_table").shape();
    return Tokens.paged(
        pool[0],
        pool[1],
        c.tensor("block_table").toInts(),
        table[1],
        c.tensor("seqlens_k").toInts());
  }

  private static double @Nullable [] optional(KernelCase c, String name) {
    CaseTensor tensor = c.tensors().get(name);
    return tensor == null ? null : tensor.values();
  }

  private static Map<String, double[]> named(AttentionResult result) {
    Map<String, double[]> named = new LinkedHashMap<>();
    named.put("out", result.out());
    named.put("lse", result.lse());
    return named;
  }
}
