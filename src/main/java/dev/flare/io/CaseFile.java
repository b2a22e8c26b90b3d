package dev.flare.io;

import com.fasterxml.jackson.jr.ob.JSON;
import dev.flare.InvalidArgumentException;
import dev.flare.UnsupportedException;
import dev.flare.reference.AttentionOptions;
import dev.flare.reference.KdaOptions;
import java.io.IOException;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.stream.Collectors;
import java.util.stream.IntStream;

/**
 * A case: the inputs of one operation, its options, and perhaps its result, in a safetensors file
 * whose metadata {@code params} is a JSON object. Its {@code kernel} names the operation:
 *
 * <table>
 *   <caption>Tensors of each kernel; those with a question mark may be missing</caption>
 *   <tr><th>kernel<th>inputs<th>result
 *   <tr><td>attention<td>q [B,Nq,H,D], k [B,Nk,Hk,D], v [B,Nk,Hk,Dv], sink? [H], alibi_slopes? [H]
 *       <td>out? [B,Nq,H,Dv], lse? [B,H,Nq]
 *   <tr><td>attention_varlen<td>q [Tq,H,D], k [Tk,Hk,D], v [Tk,Hk,Dv], cu_seqlens_q [B+1],
 *       cu_seqlens_k [B+1], sink?, alibi_slopes?<td>out? [Tq,H,Dv], lse? [H,Tq]
 *   <tr><td>attention_paged<td>q [B,Nq,H,D], k_pages [P,page,Hk,D], v_pages [P,page,Hk,Dv],
 *       block_table [B,pages], seqlens_k [B], sink?, alibi_slopes?
 *       <td>out? [B,Nq,H,Dv], lse? [B,H,Nq]
 *   <tr><td>mla<td>q_nope [B,Nq,H,dn], q_rope? [B,Nq,H,dr], c_kv [B,Nk,dc], k_rope? [B,Nk,dr],
 *       w_uk [H,dc,dn], w_uv [H,dc,dv]<td>out? [B,Nq,H,dv], lse? [B,H,Nq]
 *   <tr><td>mla_absorbed_paged<td>q [B,Nq,H,dc+dr], kv_pages [P,page,dc+dr], block_table [B,pages],
 *       seqlens_k [B]<td>out? [B,Nq,H,dc], lse? [B,H,Nq]
 *   <tr><td>kda<td>q, k [B,T,H,K], v [B,T,HV,V], g [B,T,HV,K], beta [B,T,HV], A_log? [HV], dt_bias?
 *       [HV,K], initial_state? [N,HV,..], cu_seqlens? [N+1]
 *       <td>out? [B,T,HV,V], final_state? [N,HV,..]
 * </table>
 *
 * <p>Missing options have their neutral value; a missing scale is 1 / sqrt of the width of q (of
 * mla: with the rotary part; mla_absorbed_paged must give it). Index tensors are I32 or I64. What
 * they hold is checked too: cumulative lengths start at 0, never fall and end with the tokens;
 * lengths fit the block table, and its entries up to them are pages of the pool.
 *
 * <p>Ownership and threads are those of {@link Safetensors}.
 */
public final class CaseFile implements AutoCloseable {

  /** The options of a case, by operation. */
  public sealed interface Params {}

  /**
   * Options of the three attention kernels.
   *
   * @param options scale, mask, softcap, and sink and slopes from the tensors of these names
   */
  public record Attention(AttentionOptions options) implements Params {}

  /**
   * Options of the up-projecting latent attention.
   *
   * @param options scale and causal flag
   */
  public record Mla(AttentionOptions options) implements Params {}

  /**
   * Options of the absorbed latent attention.
   *
   * @param options scale and causal flag
   * @param latent width of the latent part of a cache row, and of the output
   * @param rope width of the rotary part
   */
  public record AbsorbedMla(AttentionOptions options, int latent, int rope) implements Params {}

  /**
   * Options of Kimi Delta Attention.
   *
   * @param options gates, normalisation, scale, state layout
   */
  public record Kda(KdaOptions options) implements Params {}

  private final Safetensors tensors;
  private final String kernel;
  private final Params params;

  private CaseFile(Safetensors tensors, String kernel, Params params) {
    this.tensors = tensors;
    this.kernel = kernel;
    this.params = params;
  }

  /**
   * Maps a case file and checks that its tensors fit its kernel and each other.
   *
   * @param file the file
   * @return the open case; close it
   * @throws MalformedFileException if it is not a case file
   * @throws IOException if it cannot be read
   */
  public static CaseFile open(Path file) throws IOException {
    Safetensors tensors = Safetensors.open(file);
    try {
      return new Reader(tensors).read();
    } catch (IOException | RuntimeException | Error e) {
      tensors.close();
      throw e;
    }
  }

  /** {@return the file's path, as it was opened} */
  public Path file() {
    return tensors.file();
  }

  /** {@return the name of the kernel, as in the table above} */
  public String kernel() {
    return kernel;
  }

  /** {@return the options} */
  public Params params() {
    return params;
  }

  /**
   * {@return an input, or a tensor of the result}
   *
   * @param name a name of the table above
   * @throws java.util.NoSuchElementException if the case has none of this name
   */
  public TensorEntry tensor(String name) {
    return tensors.get(name);
  }

  /**
   * {@return a tensor that may be missing}
   *
   * @param name a name of the table above
   */
  public Optional<TensorEntry> find(String name) {
    return tensors.find(name);
  }

  /** {@return the options and tensors as a file} */
  public Safetensors tensors() {
    return tensors;
  }

  /** Closes the file. */
  @Override
  public void close() {
    tensors.close();
  }

  /** {@return the kernel and the path} */
  @Override
  public String toString() {
    return "CaseFile[" + kernel + ", " + file() + "]";
  }

  /** Reads the options and checks the tensors of one file. */
  private static final class Reader {
    private final Safetensors tensors;
    private final Map<String, Object> options;

    /** Batches, tokens and pages; heads and widths are at least 1. */
    private static final Set<String> MAY_BE_ZERO =
        Set.of("B", "Nq", "Nk", "Tq", "Tk", "T", "N", "P", "pages");

    /** Extents of the dimensions named so far. */
    private final Map<String, Long> extents = new HashMap<>();

    Reader(Safetensors tensors) throws MalformedFileException {
      this.tensors = tensors;
      String json = tensors.metadata().get("params");
      if (json == null) {
        throw malformed("__metadata__ has no params");
      }
      Map<String, Object> object;
      try {
        object = JSON.std.with(JSON.Feature.FAIL_ON_DUPLICATE_MAP_KEYS).mapFrom(json);
      } catch (IOException | ClassCastException e) {
        throw new MalformedFileException(
            tensors.file(), "params is not a JSON object: " + e.getMessage(), e);
      }
      if (object == null) {
        throw malformed("params is null, want a JSON object");
      }
      this.options = object;
    }

    CaseFile read() throws MalformedFileException {
      String kernel = text("kernel", "");
      Params params =
          switch (kernel) {
            case "attention" -> dense();
            case "attention_varlen" -> varlen();
            case "attention_paged" -> paged();
            case "mla" -> mla();
            case "mla_absorbed_paged" -> absorbed();
            case "kda" -> kda();
            default -> throw malformed("params.kernel is '" + kernel + "'");
          };
      return new CaseFile(tensors, kernel, params);
    }

    private Params dense() throws MalformedFileException {
      floats("q", "B", "Nq", "H", "D");
      floats("k", "B", "Nk", "Hk", "D");
      floats("v", "B", "Nk", "Hk", "Dv");
      optionalFloats("out", "B", "Nq", "H", "Dv");
      optionalFloats("lse", "B", "H", "Nq");
      return attention();
    }

    private Params varlen() throws MalformedFileException {
      floats("q", "Tq", "H", "D");
      floats("k", "Tk", "Hk", "D");
      floats("v", "Tk", "Hk", "Dv");
      cumulativeLengths("cu_seqlens_q", "B+1", "Tq");
      cumulativeLengths("cu_seqlens_k", "B+1", "Tk");
      optionalFloats("out", "Tq", "H", "Dv");
      optionalFloats("lse", "H", "Tq");
      return attention();
    }

    private Params paged() throws MalformedFileException {
      floats("q", "B", "Nq", "H", "D");
      floats("k_pages", "P", "page", "Hk", "D");
      floats("v_pages", "P", "page", "Hk", "Dv");
      pages();
      optionalFloats("out", "B", "Nq", "H", "Dv");
      optionalFloats("lse", "B", "H", "Nq");
      return attention();
    }

    private Params attention() throws MalformedFileException {
      allow("kernel", "layout", "scale", "causal", "window", "softcap");
      multiple("H", "Hk");
      double softcap = number("softcap", 0);
      if (softcap < 0) {
        throw malformed("params.softcap is " + softcap + ", want 0 (none) or more");
      }
      optionalFloats("sink", "H");
      optionalFloats("alibi_slopes", "H");
      int[] window = window();
      return new Attention(
          AttentionOptions.full(number("scale", 1 / Math.sqrt((double) extent("D"))))
              .withCausal(flag("causal"))
              .withWindow(window[0], window[1])
              .withSoftcap(softcap)
              .withSink(tensors.find("sink").map(TensorEntry::toDoubles).orElse(null))
              .withAlibiSlopes(
                  tensors.find("alibi_slopes").map(TensorEntry::toDoubles).orElse(null)));
    }

    private Params mla() throws MalformedFileException {
      allow("kernel", "layout", "scale", "causal");
      floats("q_nope", "B", "Nq", "H", "dn");
      floats("c_kv", "B", "Nk", "dc");
      floats("w_uk", "H", "dc", "dn");
      floats("w_uv", "H", "dc", "dv");
      if (tensors.find("q_rope").isPresent() || tensors.find("k_rope").isPresent()) {
        floats("q_rope", "B", "Nq", "H", "dr");
        floats("k_rope", "B", "Nk", "dr");
      }
      optionalFloats("out", "B", "Nq", "H", "dv");
      optionalFloats("lse", "B", "H", "Nq");
      long width = extent("dn") + extents.getOrDefault("dr", 0L);
      double scale = number("scale", 1 / Math.sqrt((double) width));
      return new Mla(AttentionOptions.full(scale).withCausal(flag("causal")));
    }

    private Params absorbed() throws MalformedFileException {
      allow("kernel", "layout", "scale", "causal", "d_c", "d_r");
      int latent = whole("d_c");
      int rope = whole("d_r");
      if (latent == 0) {
        throw malformed("params.d_c is 0");
      }
      extents.put("dc", (long) latent);
      extents.put("dc+dr", (long) latent + rope);
      floats("q", "B", "Nq", "H", "dc+dr");
      floats("kv_pages", "P", "page", "dc+dr");
      pages();
      optionalFloats("out", "B", "Nq", "H", "dc");
      optionalFloats("lse", "B", "H", "Nq");
      double scale = number("scale", Double.NaN);
      if (Double.isNaN(scale)) {
        throw malformed("params.scale is missing: the widths of the absorbed form do not tell it");
      }
      return new AbsorbedMla(AttentionOptions.full(scale).withCausal(flag("causal")), latent, rope);
    }

    private Params kda() throws MalformedFileException {
      allow(
          "kernel",
          "layout",
          "gate",
          "lower_bound",
          "qk_l2norm",
          "beta_sigmoid",
          "allow_neg_eigval",
          "state_layout",
          "scale");
      floats("q", "B", "T", "H", "K");
      floats("k", "B", "T", "H", "K");
      floats("v", "B", "T", "HV", "V");
      floats("g", "B", "T", "HV", "K");
      floats("beta", "B", "T", "HV");
      multiple("HV", "H");
      optionalFloats("A_log", "HV");
      optionalFloats("dt_bias", "HV", "K");
      optionalFloats("out", "B", "T", "HV", "V");
      KdaOptions result =
          KdaOptions.logGate(number("scale", 1 / Math.sqrt((double) extent("K"))))
              .withL2norm(flag("qk_l2norm"))
              .withBeta(beta())
              .withStateLayout(stateLayout());
      result =
          switch (text("gate", "log")) {
            case "log" -> result;
            case "softplus" -> result.withSoftplusGate();
            case "bounded" -> result.withBoundedGate(lowerBound());
            default -> throw malformed("params.gate is " + options.get("gate"));
          };
      states();
      return new Kda(result);
    }

    private KdaOptions.Beta beta() throws MalformedFileException {
      boolean twice = flag("allow_neg_eigval");
      if (!flag("beta_sigmoid")) {
        if (twice) {
          throw malformed("params.allow_neg_eigval needs beta_sigmoid");
        }
        return KdaOptions.Beta.RAW;
      }
      return twice ? KdaOptions.Beta.TWICE_SIGMOID : KdaOptions.Beta.SIGMOID;
    }

    private double lowerBound() throws MalformedFileException {
      double bound = number("lower_bound", 0);
      if (!(bound < 0)) {
        throw malformed("params.lower_bound is " + bound + ", the bounded gate wants one below 0");
      }
      return bound;
    }

    private KdaOptions.StateLayout stateLayout() throws MalformedFileException {
      return switch (text("state_layout", "K,V")) {
        case "K,V" -> KdaOptions.StateLayout.KV;
        case "V,K" -> KdaOptions.StateLayout.VK;
        default -> throw malformed("params.state_layout is " + options.get("state_layout"));
      };
    }

    private void states() throws MalformedFileException {
      if (tensors.find("cu_seqlens").isPresent()) {
        cumulativeLengths("cu_seqlens", "N+1", "T");
        extents.put("N", extent("N+1") - 1);
        if (extent("B") != 1) {
          throw malformed("q has batch " + extent("B") + ", with cu_seqlens it must be 1");
        }
      } else {
        extents.put("N", extent("B"));
      }
      String[] state =
          stateLayout() == KdaOptions.StateLayout.KV
              ? new String[] {"N", "HV", "K", "V"}
              : new String[] {"N", "HV", "V", "K"};
      optionalFloats("initial_state", state);
      optionalFloats("final_state", state);
    }

    // Tensors.

    private void floats(String name, String... dims) throws MalformedFileException {
      TensorEntry entry = required(name);
      switch (entry.type()) {
        case F32, F16, BF16, F8_E4M3 -> shape(entry, dims);
        default -> throw malformed(entry + ": want F32, F16, BF16 or F8_E4M3");
      }
    }

    private void optionalFloats(String name, String... dims) throws MalformedFileException {
      if (tensors.find(name).isPresent()) {
        floats(name, dims);
      }
    }

    private void indices(String name, String... dims) throws MalformedFileException {
      TensorEntry entry = required(name);
      switch (entry.type()) {
        case I32, I64 -> shape(entry, dims);
        default -> throw malformed(entry + ": want I32 or I64");
      }
    }

    private void cumulativeLengths(String name, String dim, String tokens)
        throws MalformedFileException {
      indices(name, dim);
      int[] starts = ints(name);
      boolean rising = IntStream.range(1, starts.length).allMatch(i -> starts[i - 1] <= starts[i]);
      if (!rising || starts[0] != 0 || starts[starts.length - 1] != extent(tokens)) {
        throw malformed(
            required(name)
                + ": want lengths summed up from 0 to "
                + tokens
                + " = "
                + extent(tokens));
      }
    }

    private void pages() throws MalformedFileException {
      indices("block_table", "B", "pages");
      indices("seqlens_k", "B");
      int[] table = ints("block_table");
      int[] lengths = ints("seqlens_k");
      int width = lengths.length == 0 ? 0 : table.length / lengths.length;
      long page =
          Math.min(extent("page"), Integer.MAX_VALUE); // of an empty pool it may be anything
      for (int b = 0; b < lengths.length; b++) {
        if (lengths[b] < 0 || lengths[b] > width * page) {
          throw malformed(
              "seqlens_k[%d] is %d, want 0 to %d".formatted(b, lengths[b], width * page));
        }
        for (int p = 0; p < Math.ceilDiv(lengths[b], page); p++) {
          int found = table[b * width + p];
          if (found < 0 || found >= extent("P")) {
            throw malformed(
                "block_table[%d][%d] is %d, want a page below %d"
                    .formatted(b, p, found, extent("P")));
          }
        }
      }
    }

    private int[] ints(String name) throws MalformedFileException {
      try {
        return required(name).toInts();
      } catch (InvalidArgumentException | UnsupportedException e) {
        throw new MalformedFileException(tensors.file(), name + ": " + e.getMessage(), e);
      }
    }

    private TensorEntry required(String name) throws MalformedFileException {
      return tensors.find(name).orElseThrow(() -> malformed("tensor '" + name + "' is missing"));
    }

    /** Names the dimensions of a tensor; a name stands for the same extent everywhere. */
    private void shape(TensorEntry entry, String... dims) throws MalformedFileException {
      if (entry.shape().rank() != dims.length) {
        throw malformed(entry + ": want " + Arrays.toString(dims));
      }
      for (int axis = 0; axis < dims.length; axis++) {
        long found = entry.shape().dim(axis);
        if (found == 0 && !MAY_BE_ZERO.contains(dims[axis])) {
          throw malformed(entry + ": " + dims[axis] + " is 0");
        }
        Long known = extents.putIfAbsent(dims[axis], found);
        if (known != null && known != found) {
          throw malformed(entry + ": " + dims[axis] + " is " + found + ", elsewhere " + known);
        }
      }
    }

    private void multiple(String heads, String of) throws MalformedFileException {
      if (extent(heads) % extent(of) != 0) {
        throw malformed(
            heads + " is " + extent(heads) + ", want a multiple of " + of + " = " + extent(of));
      }
    }

    private long extent(String dim) {
      Long extent = extents.get(dim);
      if (extent == null) {
        throw new IllegalStateException("no tensor has a dimension " + dim);
      }
      return extent;
    }

    // Options.

    private void allow(String... names) throws MalformedFileException {
      String unknown =
          options.keySet().stream()
              .filter(name -> !List.of(names).contains(name))
              .collect(Collectors.joining(", "));
      if (!unknown.isEmpty()) {
        throw malformed("params has " + unknown + ", this kernel knows " + List.of(names));
      }
    }

    private String text(String name, String missing) throws MalformedFileException {
      return switch (options.get(name)) {
        case null -> missing;
        case String text -> text;
        case Object other -> throw malformed("params." + name + " is " + other + ", want text");
      };
    }

    private boolean flag(String name) throws MalformedFileException {
      return switch (options.get(name)) {
        case null -> false;
        case Boolean value -> value;
        case Object other ->
            throw malformed("params." + name + " is " + other + ", want true or false");
      };
    }

    private double number(String name, double missing) throws MalformedFileException {
      return switch (options.get(name)) {
        case null -> missing;
        case Number value when Float.isFinite(value.floatValue()) -> value.doubleValue();
        case Object other ->
            throw malformed("params." + name + " is " + other + ", want a finite number");
      };
    }

    private int whole(String name) throws MalformedFileException {
      if (options.get(name) instanceof Integer value && value >= 0) {
        return value;
      }
      throw malformed("params." + name + " is " + options.get(name) + ", want a whole number");
    }

    private int[] window() throws MalformedFileException {
      return switch (options.get("window")) {
        case null -> new int[] {AttentionOptions.UNBOUNDED, AttentionOptions.UNBOUNDED};
        case List<?> sides
            when sides.size() == 2
                && sides.get(0) instanceof Integer left
                && sides.get(1) instanceof Integer right
                && Math.min(left, right) >= AttentionOptions.UNBOUNDED ->
            new int[] {left, right};
        case Object other ->
            throw malformed("params.window is " + other + ", want [left, right], -1: none");
      };
    }

    private MalformedFileException malformed(String what) {
      return new MalformedFileException(tensors.file(), what);
    }
  }
}
