package dev.flare.cli;

import dev.flare.Shape;
import dev.flare.io.CaseFile;
import dev.flare.io.MalformedFileException;
import dev.flare.io.TensorEntry;
import dev.flare.reference.AttentionOptions;
import dev.flare.reference.KdaOptions;
import dev.flare.reference.Precision;
import java.io.IOException;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;

/**
 * A case file read into memory.
 *
 * @param kernelCase the inputs
 * @param expected the stored results; empty if the file has none
 */
record GoldenFile(KernelCase kernelCase, Map<String, double[]> expected) {
  private static final List<String> RESULTS = List.of("out", "lse", "final_state");

  /**
   * Reads a file.
   *
   * @throws IOException if it cannot be read or is not a case file
   */
  static GoldenFile read(Path path) throws IOException {
    try (CaseFile file = CaseFile.open(path)) {
      KernelCase.Kind kind =
          KernelCase.Kind.of(file.kernel())
              .orElseThrow(
                  () -> new MalformedFileException(path, "no kernel '" + file.kernel() + "'"));
      Map<String, CaseTensor> tensors = new LinkedHashMap<>();
      for (TensorEntry entry : file.tensors().entries()) {
        if (!RESULTS.contains(entry.name())) {
          tensors.put(entry.name(), tensor(path, entry));
        }
      }
      Map<String, double[]> expected = new LinkedHashMap<>();
      for (String result : RESULTS) {
        file.find(result).ifPresent(entry -> expected.put(result, entry.toDoubles()));
      }
      Map<String, Object> options = options(file.params());
      String name = String.valueOf(path.getFileName()).replaceAll("\\.safetensors$", "");
      return new GoldenFile(
          new KernelCase(name, kind, mask(kind, options), options, tensors), expected);
    }
  }

  private static Map<String, Object> options(CaseFile.Params params) {
    Map<String, Object> options = new LinkedHashMap<>();
    switch (params) {
      case CaseFile.Attention attention -> put(options, attention.options());
      case CaseFile.Mla mla -> put(options, mla.options());
      case CaseFile.AbsorbedMla absorbed -> {
        put(options, absorbed.options());
        options.put("d_c", absorbed.latent());
        options.put("d_r", absorbed.rope());
      }
      case CaseFile.Kda kda -> put(options, kda.options());
    }
    return options;
  }

  private static void put(Map<String, Object> options, AttentionOptions attention) {
    options.put("scale", attention.scale());
    options.put("causal", attention.causal());
    if (attention.windowLeft() >= 0 || attention.windowRight() >= 0) {
      options.put("window", List.of(attention.windowLeft(), attention.windowRight()));
    }
    if (attention.softcap() > 0) {
      options.put("softcap", attention.softcap());
    }
  }

  private static void put(Map<String, Object> options, KdaOptions kda) {
    options.put("scale", kda.scale());
    options.put("gate", kda.gate().name().toLowerCase(Locale.ROOT));
    if (kda.gate() == KdaOptions.Gate.BOUNDED) {
      options.put("lower_bound", kda.lowerBound());
    }
    options.put("qk_l2norm", kda.l2norm());
    options.put("beta_sigmoid", kda.beta() != KdaOptions.Beta.RAW);
    options.put("allow_neg_eigval", kda.beta() == KdaOptions.Beta.TWICE_SIGMOID);
    options.put("state_layout", kda.stateLayout() == KdaOptions.StateLayout.KV ? "K,V" : "V,K");
  }

  private static CaseTensor tensor(Path path, TensorEntry entry) throws MalformedFileException {
    Shape extents = entry.shape();
    int[] shape = new int[extents.rank()];
    for (int d = 0; d < shape.length; d++) {
      long extent = extents.dim(d);
      if (extent > Integer.MAX_VALUE) {
        throw new MalformedFileException(
            path, entry.name() + " has " + extent + " rows, more than a case can hold");
      }
      shape[d] = (int) extent;
    }
    return switch (entry.dtype()) {
      case FP32 -> new CaseTensor(Precision.FP32, false, shape, entry.toDoubles());
      case FP16 -> new CaseTensor(Precision.FP16, false, shape, entry.toDoubles());
      case BF16 -> new CaseTensor(Precision.BF16, false, shape, entry.toDoubles());
      case FP8_E4M3 -> new CaseTensor(Precision.FP8_E4M3, false, shape, entry.toDoubles());
      case INT32, INT64 -> CaseTensor.indices(entry.toInts(), shape);
      case UINT8 ->
          throw new MalformedFileException(path, entry.name() + " is U8, want numbers or indices");
    };
  }

  private static String mask(KernelCase.Kind kind, Map<String, Object> options) {
    if (kind == KernelCase.Kind.KDA) {
      return String.valueOf(options.get("gate"));
    }
    List<String> words = new ArrayList<>();
    if (Boolean.TRUE.equals(options.get("causal"))) {
      words.add("causal");
    }
    if (options.get("window") != null) {
      words.add("window " + options.get("window").toString().replaceAll("[\\[\\] ]", ""));
    }
    if (options.get("softcap") != null) {
      words.add("softcap");
    }
    return words.isEmpty() ? "full" : String.join(", ", words);
  }
}
