package dev.flare.cli;

import dev.flare.reference.Precision;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.SplittableRandom;

/**
 * Builds the options and inputs of one case from a seed: normal numbers, shuffled pages.
 *
 * <p>Used once. Not thread safe.
 */
final class CaseBuilder {
  private final Precision precision;
  private final SplittableRandom random;
  private final Map<String, Object> options = new LinkedHashMap<>();
  private final Map<String, CaseTensor> tensors = new LinkedHashMap<>();

  CaseBuilder(Precision precision, String seed) {
    this.precision = precision;
    this.random = new SplittableRandom(seed.hashCode());
  }

  CaseBuilder option(String name, Object value) {
    options.put(name, value);
    return this;
  }

  CaseBuilder window(int left, int right) {
    return option("window", List.of(left, right));
  }

  CaseBuilder softcap(double cap) {
    return option("softcap", cap);
  }

  CaseBuilder alibi(int heads) {
    double[] slopes = new double[heads];
    for (int h = 0; h < heads; h++) {
      slopes[h] = Math.pow(2, -8.0 * (h + 1) / heads);
    }
    tensors.put("alibi_slopes", CaseTensor.of(Precision.FP32, slopes, heads));
    return this;
  }

  CaseBuilder sink(int heads) {
    tensors.put("sink", CaseTensor.of(Precision.FP32, normal(1, heads), heads));
    return this;
  }

  void normal(String name, int... shape) {
    tensors.put(name, CaseTensor.of(precision, normal(1, shape), shape));
  }

  double[] normal(double deviation, int... shape) {
    int count = 1;
    for (int extent : shape) {
      count = Math.multiplyExact(count, extent);
    }
    double[] values = new double[count];
    for (int i = 0; i < count; i++) {
      values[i] = deviation * random.nextGaussian();
    }
    return values;
  }

  /**
   * A pool of pages in shuffled order; slots that no sequence uses hold NaN, which must never reach
   * a result.
   */
  void pages(int pageSize, int[] lengths, Map<String, int[]> pools) {
    int widest = 1;
    int pages = 1;
    for (int length : lengths) {
      int used = Math.ceilDiv(length, pageSize);
      widest = Math.max(widest, used);
      pages += used;
    }
    int[] order = new int[pages];
    for (int p = 0; p < pages; p++) {
      int other = random.nextInt(p + 1);
      order[p] = order[other];
      order[other] = p;
    }
    int[] table = new int[lengths.length * widest];
    boolean[] live = new boolean[pages * pageSize];
    int next = 0;
    for (int b = 0; b < lengths.length; b++) {
      for (int p = 0; p < Math.ceilDiv(lengths[b], pageSize); p++) {
        int page = order[next++];
        table[b * widest + p] = page;
        for (int t = 0; t < Math.min(pageSize, lengths[b] - p * pageSize); t++) {
          live[page * pageSize + t] = true;
        }
      }
    }
    for (Map.Entry<String, int[]> pool : pools.entrySet()) {
      int width = 1;
      int[] row = pool.getValue();
      int[] shape = new int[row.length + 2];
      shape[0] = pages;
      shape[1] = pageSize;
      for (int d = 0; d < row.length; d++) {
        shape[d + 2] = row[d];
        width *= row[d];
      }
      double[] values = normal(1, shape);
      for (int slot = 0; slot < live.length; slot++) {
        for (int i = 0; !live[slot] && i < width; i++) {
          values[slot * width + i] = Double.NaN;
        }
      }
      tensors.put(pool.getKey(), CaseTensor.of(precision, values, shape));
    }
    tensors.put("block_table", CaseTensor.indices(table, lengths.length, widest));
    tensors.put("seqlens_k", CaseTensor.indices(lengths, lengths.length));
  }

  /** Numbers of another deviation. */
  void scaled(String name, double deviation, int... shape) {
    tensors.put(name, CaseTensor.of(precision, normal(deviation, shape), shape));
  }

  void indices(String name, int... values) {
    tensors.put(name, CaseTensor.indices(values, values.length));
  }

  /** Token data of KDA with the bounded gate, to be changed by {@link #option}. */
  void kdaTokens(int batch, int tokens, int heads, int valueHeads, int keyDim, int valueDim) {
    option("gate", "bounded").option("lower_bound", -5.0).option("qk_l2norm", true);
    option("beta_sigmoid", true).option("state_layout", "K,V");
    normal("q", batch, tokens, heads, keyDim);
    normal("k", batch, tokens, heads, keyDim);
    normal("v", batch, tokens, valueHeads, valueDim);
    normal("beta", batch, tokens, valueHeads);
  }

  /** The gate's inputs, as the option {@code gate} wants them. */
  void kdaGate(int batch, int tokens, int valueHeads, int keyDim) {
    double[] g = normal(1, batch, tokens, valueHeads, keyDim);
    if ("log".equals(options.get("gate"))) {
      options.remove("lower_bound");
      for (int i = 0; i < g.length; i++) {
        g[i] = -Math.log1p(Math.exp(g[i] - 2)); // about -0.13: memory of some ten tokens
      }
    } else {
      double[] aLog = normal(0.5, valueHeads);
      tensors.put("A_log", CaseTensor.of(Precision.FP32, aLog, valueHeads));
      double[] bias = normal(0.5, valueHeads, keyDim);
      tensors.put("dt_bias", CaseTensor.of(Precision.FP32, bias, valueHeads, keyDim));
    }
    tensors.put("g", CaseTensor.of(precision, g, batch, tokens, valueHeads, keyDim));
  }

  /** An fp32 initial state in the layout that the options name. */
  void state(int sequences, int valueHeads, int keyDim, int valueDim) {
    boolean valueFirst = "V,K".equals(options.get("state_layout"));
    int[] shape = {
      sequences, valueHeads, valueFirst ? valueDim : keyDim, valueFirst ? keyDim : valueDim
    };
    tensors.put("initial_state", CaseTensor.of(Precision.FP32, normal(0.1, shape), shape));
  }

  KernelCase build(String name, KernelCase.Kind kind, String mask) {
    return new KernelCase(name, kind, mask, options, tensors);
  }
}
