package dev.flare.cli;

import dev.flare.AttentionPlan;
import dev.flare.Beta;
import dev.flare.DType;
import dev.flare.Device;
import dev.flare.FlashAttention;
import dev.flare.KdaDecodePlan;
import dev.flare.KdaPlan;
import dev.flare.KimiDeltaAttention;
import dev.flare.MlaDecodePlan;
import dev.flare.MlaPrefillPlan;
import dev.flare.MultiHeadLatentAttention;
import dev.flare.Plan;
import dev.flare.Shape;
import dev.flare.SlidingWindowAttention;
import dev.flare.SoftmaxAttention;
import dev.flare.StateLayout;
import dev.flare.Tensor;
import dev.flare.reference.Precision;
import java.util.ArrayDeque;
import java.util.Arrays;
import java.util.Deque;
import java.util.LinkedHashMap;
import java.util.Map;
import org.jspecify.annotations.Nullable;

/**
 * A case on a device: inputs and outputs are there, its plan is made, and it can be launched again
 * and again.
 *
 * <p>Owns its tensors and plan. Not thread safe.
 */
final class PreparedCase implements AutoCloseable {
  private final KernelCase kernelCase;
  private final Device device;
  private final Deque<AutoCloseable> owned = new ArrayDeque<>();
  private final Map<String, Tensor> results = new LinkedHashMap<>();
  private final Plan plan;
  private final Runnable launch;

  private PreparedCase(KernelCase kernelCase, Device device) {
    this.kernelCase = kernelCase;
    this.device = device;
    try {
      Launchable launchable =
          switch (kernelCase.kind()) {
            case ATTENTION, ATTENTION_VARLEN, ATTENTION_PAGED -> attention();
            case MLA -> mla();
            case MLA_ABSORBED_PAGED -> mlaDecode();
            case KDA -> kda();
            case KDA_DECODE -> kdaDecode();
          };
      plan = own(launchable.plan());
      launch = launchable.launch();
    } catch (RuntimeException | Error e) {
      closeAll();
      throw e;
    }
  }

  /** Copies the inputs to {@code device} and plans the call. */
  static PreparedCase of(KernelCase kernelCase, Device device) {
    return new PreparedCase(kernelCase, device);
  }

  private record Launchable(Plan plan, Runnable launch) {}

  String kernelName() {
    return plan.kernelName();
  }

  /** Fills every output with NaN, so that an element that a kernel does not write shows. */
  void poison() {
    results.values().forEach(tensor -> tensor.fill(Double.NaN));
  }

  /** Runs the call and waits for it. */
  void launch() {
    launch.run();
    device.stream().synchronize();
  }

  /** {@return copies of the outputs, by the names of the golden files' format} */
  Map<String, double[]> results() {
    Map<String, double[]> copies = new LinkedHashMap<>();
    results.forEach((name, tensor) -> copies.put(name, tensor.toDoubleArray()));
    return copies;
  }

  // ---- the operations -------------------------------------------------------------------------

  private Launchable attention() {
    int[] window = kernelCase.window();
    boolean causal = kernelCase.flag("causal");
    if (window[0] >= 0 || window[1] >= 0) {
      return attention(SlidingWindowAttention.between(window[0], causal ? 0 : window[1]));
    }
    return attention(causal ? FlashAttention.causal() : FlashAttention.full());
  }

  private <S extends SoftmaxAttention<S>> Launchable attention(S plain) {
    S options = plain;
    if (kernelCase.options().get("scale") != null) {
      options = options.withScale(kernelCase.number("scale", 0));
    }
    if (kernelCase.number("softcap", 0) > 0) {
      options = options.withSoftcap(kernelCase.number("softcap", 0));
    }
    if (kernelCase.find("sink").isPresent()) {
      options = options.withSink(input("sink"));
    }
    if (kernelCase.find("alibi_slopes").isPresent()) {
      options = options.withAlibi(input("alibi_slopes"));
    }
    boolean paged = kernelCase.kind() == KernelCase.Kind.ATTENTION_PAGED;
    if (paged) {
      options = options.withPages(input("block_table"), input("seqlens_k"), longest("seqlens_k"));
    } else if (kernelCase.kind() == KernelCase.Kind.ATTENTION_VARLEN) {
      options =
          options.withVarlen(
              input("cu_seqlens_q"),
              longestGap("cu_seqlens_q"),
              input("cu_seqlens_k"),
              longestGap("cu_seqlens_k"));
    }
    Tensor q = input("q");
    Tensor k = input(paged ? "k_pages" : "k");
    Tensor v = input(paged ? "v_pages" : "v");
    Tensor out = output("out", dataType());
    Tensor lse = output("lse", DType.FP32);
    AttentionPlan made = options.plan(q, k, v, out, lse);
    return new Launchable(made, () -> made.launch(q, k, v, out, lse));
  }

  private Launchable mla() {
    MultiHeadLatentAttention options = mlaOptions();
    Tensor qNope = input("q_nope");
    Tensor qRope = optional("q_rope");
    Tensor cKv = input("c_kv");
    Tensor kRope = optional("k_rope");
    Tensor wUk = input("w_uk");
    Tensor wUv = input("w_uv");
    Tensor out = output("out", dataType());
    Tensor lse = output("lse", DType.FP32);
    MlaPrefillPlan made = options.plan(qNope, qRope, cKv, kRope, wUk, wUv, out, lse);
    return new Launchable(
        made, () -> made.launch(null, qNope, qRope, cKv, kRope, wUk, wUv, out, lse));
  }

  private Launchable mlaDecode() {
    MultiHeadLatentAttention options =
        mlaOptions()
            .withHeadDims(0, (long) kernelCase.number("d_r", 64))
            .withPages(input("block_table"), input("seqlens_k"), longest("seqlens_k"));
    if (kernelCase.options().get("scale") == null) {
      throw new IllegalArgumentException(
          kernelCase.name()
              + ": an absorbed case needs 'scale': its default is that of the widths"
              + " before absorption, which the file does not hold");
    }
    Tensor q = input("q");
    Tensor kv = input("kv_pages");
    Tensor out = output("out", dataType());
    Tensor lse = output("lse", DType.FP32);
    MlaDecodePlan made = options.planDecode(q, null, kv, null, null, out, lse);
    return new Launchable(made, () -> made.launch(null, q, null, kv, null, null, out, lse));
  }

  private MultiHeadLatentAttention mlaOptions() {
    MultiHeadLatentAttention options =
        kernelCase.flag("causal")
            ? MultiHeadLatentAttention.causal()
            : MultiHeadLatentAttention.full();
    return kernelCase.options().get("scale") == null
        ? options
        : options.withScale(kernelCase.number("scale", 0));
  }

  private Launchable kda() {
    KimiDeltaAttention options = kdaOptions();
    if (kernelCase.find("cu_seqlens").isPresent()) {
      options = options.withVarlen(input("cu_seqlens"));
    }
    Tensor q = input("q");
    Tensor k = input("k");
    Tensor v = input("v");
    Tensor g = input("g");
    Tensor beta = input("beta");
    Tensor aLog = optional("A_log");
    Tensor dtBias = optional("dt_bias");
    Tensor initialState = optional("initial_state");
    Tensor out = output("out", dataType());
    Tensor finalState = output("final_state", DType.FP32);
    KdaPlan made =
        options.plan(q, k, v, g, beta, aLog, dtBias, out, initialState, finalState, null);
    return new Launchable(
        made, () -> made.launch(q, k, v, g, beta, aLog, dtBias, out, initialState, finalState));
  }

  private Launchable kdaDecode() {
    KimiDeltaAttention options = kdaOptions();
    Tensor q = input("q");
    Tensor k = input("k");
    Tensor v = input("v");
    Tensor g = input("g");
    Tensor beta = input("beta");
    Tensor aLog = optional("A_log");
    Tensor dtBias = optional("dt_bias");
    Tensor state = input("initial_state");
    Tensor out = output("out", dataType());
    Tensor stateOut = output("final_state", DType.FP32);
    KdaDecodePlan made = options.planDecode(q, k, v, g, beta, aLog, dtBias, out, state, stateOut);
    return new Launchable(
        made, () -> made.launch(null, q, k, v, g, beta, aLog, dtBias, out, state, stateOut));
  }

  private KimiDeltaAttention kdaOptions() {
    KimiDeltaAttention options =
        switch (kernelCase.text("gate", "log")) {
          case "log" -> KimiDeltaAttention.logGate();
          case "softplus" -> KimiDeltaAttention.softplus();
          case "bounded" -> KimiDeltaAttention.bounded(kernelCase.number("lower_bound", -5));
          default -> throw kernelCase.wrongText("gate", "bounded, softplus or log");
        };
    if (kernelCase.options().get("scale") != null) {
      options = options.withScale(kernelCase.number("scale", 0));
    }
    Beta beta = Beta.RAW;
    if (kernelCase.flag("beta_sigmoid")) {
      beta = kernelCase.flag("allow_neg_eigval") ? Beta.TWICE_SIGMOID : Beta.SIGMOID;
    }
    StateLayout layout =
        switch (kernelCase.text("state_layout", "K,V")) {
          case "K,V" -> StateLayout.KV;
          case "V,K" -> StateLayout.VK;
          default -> throw kernelCase.wrongText("state_layout", "K,V or V,K");
        };
    return options
        .withQkL2Norm(kernelCase.flag("qk_l2norm"))
        .withBeta(beta)
        .withStateLayout(layout);
  }

  // ---- tensors --------------------------------------------------------------------------------

  private Tensor input(String name) {
    CaseTensor tensor = kernelCase.tensor(name);
    long[] shape = Arrays.stream(tensor.shape()).asLongStream().toArray();
    Tensor onHost =
        own(
            tensor.integer()
                ? Tensor.of(tensor.toInts(), shape)
                : Tensor.of(type(tensor.precision()), toFloats(tensor.values()), shape));
    return own(onHost.to(device));
  }

  private @Nullable Tensor optional(String name) {
    return kernelCase.find(name).isPresent() ? input(name) : null;
  }

  private Tensor output(String name, DType dtype) {
    Tensor tensor = own(Tensor.empty(device, dtype, Shape.of(kernelCase.resultShape(name))));
    results.put(name, tensor);
    return tensor;
  }

  private DType dataType() {
    DType dtype = type(kernelCase.precision());
    return dtype == DType.FP8_E4M3 ? DType.BF16 : dtype;
  }

  private long longest(String lengths) {
    return Arrays.stream(kernelCase.tensor(lengths).toInts()).max().orElse(0);
  }

  private long longestGap(String cuSeqlens) {
    int[] starts = kernelCase.tensor(cuSeqlens).toInts();
    int longest = 0;
    for (int b = 1; b < starts.length; b++) {
      longest = Math.max(longest, starts[b] - starts[b - 1]);
    }
    return longest;
  }

  private static DType type(Precision precision) {
    return switch (precision) {
      case FP32 -> DType.FP32;
      case FP16 -> DType.FP16;
      case BF16 -> DType.BF16;
      case FP8_E4M3 -> DType.FP8_E4M3;
    };
  }

  private static float[] toFloats(double[] values) {
    float[] floats = new float[values.length];
    for (int i = 0; i < floats.length; i++) {
      floats[i] = (float) values[i];
    }
    return floats;
  }

  private <T extends AutoCloseable> T own(T resource) {
    owned.push(resource);
    return resource;
  }

  private void closeAll() {
    while (!owned.isEmpty()) {
      try {
        owned.pop().close();
      } catch (Exception e) {
        throw new IllegalStateException(
            "a tensor or plan of " + kernelCase.name() + " is in use", e);
      }
    }
  }

  @Override
  public void close() {
    closeAll();
  }
}
