package dev.flare.testing;

import dev.flare.io.CaseFile;
import dev.flare.io.TensorEntry;
import dev.flare.reference.AttentionReference;
import dev.flare.reference.AttentionResult;
import dev.flare.reference.Heads;
import dev.flare.reference.KdaInputs;
import dev.flare.reference.KdaReference;
import dev.flare.reference.KdaResult;
import dev.flare.reference.MlaReference;
import dev.flare.reference.Tokens;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.net.URI;
import java.net.URISyntaxException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import java.util.Map;
import java.util.stream.Stream;
import org.jspecify.annotations.Nullable;

/**
 * The golden case files, and what the references say about a case.
 *
 * <p>The files are looked for in the folder {@code -Dflare.golden} (the bundle sets it), else among
 * the test resources.
 */
public final class Golden {
  private Golden() {}

  /** The folder of the golden files. */
  public static Path folder() {
    String property = System.getProperty("flare.golden");
    if (property != null) {
      return Path.of(property);
    }
    try {
      URI readme = Golden.class.getResource("/golden/README.md").toURI();
      return Path.of(readme).getParent();
    } catch (URISyntaxException e) {
      throw new AssertionError(e);
    }
  }

  /** Every golden case, by name. */
  public static List<Path> files() {
    try (Stream<Path> files = Files.list(folder())) {
      return files.filter(file -> file.toString().endsWith(".safetensors")).sorted().toList();
    } catch (IOException e) {
      throw new UncheckedIOException(e);
    }
  }

  /** What the references compute for a case: by the name of the stored result. */
  public static Map<String, double[]> reference(CaseFile c) {
    return switch (c.params()) {
      case CaseFile.Attention p ->
          switch (c.kernel()) {
            case "attention" -> dense(c, p);
            case "attention_varlen" -> varlen(c, p);
            default -> paged(c, p);
          };
      case CaseFile.Mla p -> mla(c, p);
      case CaseFile.AbsorbedMla p -> absorbed(c, p);
      case CaseFile.Kda p -> kda(c, p);
    };
  }

  private static Map<String, double[]> dense(CaseFile c, CaseFile.Attention p) {
    Heads heads = new Heads(dim(c, "q", 2), dim(c, "k", 2), dim(c, "q", 3), dim(c, "v", 3));
    return results(
        AttentionReference.attention(
            Tokens.dense(dim(c, "q", 0), dim(c, "q", 1)),
            Tokens.dense(dim(c, "k", 0), dim(c, "k", 1)),
            heads,
            values(c, "q"),
            values(c, "k"),
            values(c, "v"),
            p.options()));
  }

  private static Map<String, double[]> varlen(CaseFile c, CaseFile.Attention p) {
    Heads heads = new Heads(dim(c, "q", 1), dim(c, "k", 1), dim(c, "q", 2), dim(c, "v", 2));
    return results(
        AttentionReference.attention(
            Tokens.packed(c.tensor("cu_seqlens_q").toInts()),
            Tokens.packed(c.tensor("cu_seqlens_k").toInts()),
            heads,
            values(c, "q"),
            values(c, "k"),
            values(c, "v"),
            p.options()));
  }

  private static Map<String, double[]> paged(CaseFile c, CaseFile.Attention p) {
    Heads heads =
        new Heads(dim(c, "q", 2), dim(c, "k_pages", 2), dim(c, "q", 3), dim(c, "v_pages", 3));
    return results(
        AttentionReference.attention(
            Tokens.dense(dim(c, "q", 0), dim(c, "q", 1)),
            pages(c, "k_pages"),
            heads,
            values(c, "q"),
            values(c, "k_pages"),
            values(c, "v_pages"),
            p.options()));
  }

  private static Map<String, double[]> mla(CaseFile c, CaseFile.Mla p) {
    int rope = c.find("q_rope").isPresent() ? dim(c, "q_rope", 3) : 0;
    MlaReference.Widths widths =
        new MlaReference.Widths(
            dim(c, "q_nope", 2), dim(c, "q_nope", 3), rope, dim(c, "c_kv", 2), dim(c, "w_uv", 2));
    return results(
        MlaReference.upProjecting(
            Tokens.dense(dim(c, "q_nope", 0), dim(c, "q_nope", 1)),
            Tokens.dense(dim(c, "c_kv", 0), dim(c, "c_kv", 1)),
            widths,
            values(c, "q_nope"),
            optional(c, "q_rope"),
            values(c, "c_kv"),
            optional(c, "k_rope"),
            values(c, "w_uk"),
            values(c, "w_uv"),
            p.options()));
  }

  private static Map<String, double[]> absorbed(CaseFile c, CaseFile.AbsorbedMla p) {
    return results(
        MlaReference.absorbed(
            Tokens.dense(dim(c, "q", 0), dim(c, "q", 1)),
            pages(c, "kv_pages"),
            dim(c, "q", 2),
            p.latent(),
            p.rope(),
            values(c, "q"),
            values(c, "kv_pages"),
            p.options()));
  }

  private static Map<String, double[]> kda(CaseFile c, CaseFile.Kda p) {
    KdaInputs inputs =
        new KdaInputs(
            dim(c, "q", 2),
            dim(c, "v", 2),
            dim(c, "q", 3),
            dim(c, "v", 3),
            values(c, "q"),
            values(c, "k"),
            values(c, "v"),
            values(c, "g"),
            values(c, "beta"),
            optional(c, "A_log"),
            optional(c, "dt_bias"));
    Tokens tokens =
        c.find("cu_seqlens")
            .map(cu -> Tokens.packed(cu.toInts()))
            .orElseGet(() -> Tokens.dense(dim(c, "q", 0), dim(c, "q", 1)));
    KdaResult result =
        KdaReference.forward(tokens, inputs, p.options(), optional(c, "initial_state"), 0);
    return Map.of("out", result.out(), "final_state", result.finalState());
  }

  private static Map<String, double[]> results(AttentionResult result) {
    return Map.of("out", result.out(), "lse", result.lse());
  }

  private static Tokens pages(CaseFile c, String name) {
    return Tokens.paged(
        dim(c, name, 0),
        dim(c, name, 1),
        c.tensor("block_table").toInts(),
        dim(c, "block_table", 1),
        c.tensor("seqlens_k").toInts());
  }

  private static int dim(CaseFile c, String name, int axis) {
    return Math.toIntExact(c.tensor(name).shape().dim(axis));
  }

  private static double[] values(CaseFile c, String name) {
    return c.tensor(name).toDoubles();
  }

  private static double @Nullable [] optional(CaseFile c, String name) {
    return c.find(name).map(TensorEntry::toDoubles).orElse(null);
  }
}
