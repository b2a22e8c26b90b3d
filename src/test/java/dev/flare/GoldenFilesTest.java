package dev.flare;

import static org.assertj.core.api.Assertions.assertThat;

import dev.flare.io.CaseFile;
import dev.flare.io.TensorEntry;
import dev.flare.reference.AttentionOptions;
import dev.flare.reference.ErrorMetrics;
import dev.flare.reference.KdaOptions;
import dev.flare.reference.Precision;
import dev.flare.reference.Tolerances;
import dev.flare.reference.Tolerances.Operation;
import dev.flare.testing.Golden;
import java.io.IOException;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import org.jspecify.annotations.Nullable;
import org.junit.jupiter.api.Tag;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.MethodSource;

/**
 * Every golden file through the public API on the CPU, from tensors that are views of the mapped
 * file, within the acceptance table of the golden files.
 */
@RequiresLibrary
@Tag("device")
class GoldenFilesTest {
  static List<Path> files() {
    return Golden.files();
  }

  @ParameterizedTest
  @MethodSource("files")
  void isWithinTheAcceptanceTable(Path file) throws IOException {
    try (CaseFile c = CaseFile.open(file);
        Run run = new Run(c)) {
      switch (c.params()) {
        case CaseFile.Attention p -> run.attention(p.options());
        case CaseFile.Mla p -> run.mla(p.options());
        case CaseFile.AbsorbedMla p -> run.absorbed(p);
        case CaseFile.Kda p -> run.kda(p.options());
      }
    }
  }

  /** One case: its tensors, and the comparison of what comes out. */
  private static final class Run implements AutoCloseable {
    private final CaseFile c;
    private final List<Tensor> opened = new ArrayList<>();

    Run(CaseFile c) {
      this.c = c;
    }

    Tensor tensor(String name) {
      Tensor view = c.tensor(name).tensor();
      assertThat(view.isReadOnly()).as("%s is a view of the file", name).isTrue();
      Tensor there = view.to(TestDevice.chosen());
      opened.add(there);
      return there;
    }

    @Nullable Tensor optional(String name) {
      return c.find(name).isPresent() ? tensor(name) : null;
    }

    private static int longest(TensorEntry cumulative) {
      int[] starts = cumulative.toInts();
      int longest = 0;
      for (int b = 1; b < starts.length; b++) {
        longest = Math.max(longest, starts[b] - starts[b - 1]);
      }
      return longest;
    }

    private int longestPaged() {
      return Arrays.stream(c.tensor("seqlens_k").toInts()).max().orElse(0);
    }

    void attention(AttentionOptions options) {
      boolean window = options.windowLeft() >= 0 || options.windowRight() >= 0;
      FlashAttention flash =
          window
              ? FlashAttention.window(
                  options.windowLeft(), options.causal() ? 0 : options.windowRight())
              : options.causal() ? FlashAttention.causal() : FlashAttention.full();
      flash = flash.withScale(options.scale());
      if (options.softcap() > 0) {
        flash = flash.withSoftcap(options.softcap());
      }
      Tensor sink = optional("sink");
      if (sink != null) {
        flash = flash.withSink(sink);
      }
      Tensor slopes = optional("alibi_slopes");
      if (slopes != null) {
        flash = flash.withAlibi(slopes);
      }
      Tensor q = tensor("q");
      AttentionOutput got =
          switch (c.kernel()) {
            case "attention" -> flash.runWithLse(q, tensor("k"), tensor("v"));
            case "attention_varlen" ->
                flash
                    .withVarlen(
                        tensor("cu_seqlens_q"),
                        longest(c.tensor("cu_seqlens_q")),
                        tensor("cu_seqlens_k"),
                        longest(c.tensor("cu_seqlens_k")))
                    .runWithLse(q, tensor("k"), tensor("v"));
            default ->
                flash
                    .withPages(tensor("block_table"), tensor("seqlens_k"), longestPaged())
                    .runWithLse(q, tensor("k_pages"), tensor("v_pages"));
          };
      check(got, Operation.ATTENTION, q.dtype());
    }

    private static MultiHeadLatentAttention latent(AttentionOptions options) {
      return (options.causal()
              ? MultiHeadLatentAttention.causal()
              : MultiHeadLatentAttention.full())
          .withScale(options.scale());
    }

    void mla(AttentionOptions options) {
      Tensor qNope = tensor("q_nope");
      AttentionOutput got =
          latent(options)
              .runWithLse(
                  qNope,
                  optional("q_rope"),
                  tensor("c_kv"),
                  optional("k_rope"),
                  tensor("w_uk"),
                  tensor("w_uv"));
      check(got, Operation.MLA, qNope.dtype());
    }

    void absorbed(CaseFile.AbsorbedMla p) {
      Tensor q = tensor("q");
      AttentionOutput got =
          latent(p.options())
              .withHeadDims(0, p.rope())
              .withPages(tensor("block_table"), tensor("seqlens_k"), longestPaged())
              .decodeWithLse(q, null, tensor("kv_pages"), null, null);
      check(got, Operation.MLA, q.dtype());
    }

    void kda(KdaOptions options) {
      KimiDeltaAttention kda =
          switch (options.gate()) {
            case LOG -> KimiDeltaAttention.logGate();
            case SOFTPLUS -> KimiDeltaAttention.softplus();
            case BOUNDED -> KimiDeltaAttention.bounded(options.lowerBound());
          };
      kda =
          kda.withScale(options.scale())
              .withQkL2Norm(options.l2norm())
              .withBeta(Beta.valueOf(options.beta().name()))
              .withStateLayout(StateLayout.valueOf(options.stateLayout().name()));
      Tensor starts = optional("cu_seqlens");
      if (starts != null) {
        kda = kda.withVarlen(starts);
      }
      Tensor q = tensor("q");
      Path name = c.file().getFileName();
      boolean collinear = name != null && name.toString().startsWith("kda_collinear");
      double bound =
          Tolerances.relative(
              collinear ? Operation.KDA_COLLINEAR : Operation.KDA, precision(q.dtype()));
      try (DeltaOutput got =
          kda.runWithState(
              q,
              tensor("k"),
              tensor("v"),
              tensor("g"),
              tensor("beta"),
              optional("A_log"),
              optional("dt_bias"),
              optional("initial_state"))) {
        relative("out", got.out(), bound);
        relative("final_state", got.state(), bound);
      }
    }

    private static Precision precision(DType dtype) {
      return Precision.valueOf(dtype.name());
    }

    private void check(AttentionOutput output, Operation operation, DType dtype) {
      try (output) {
        relative("out", output.out(), Tolerances.relative(operation, precision(dtype)));
        double bound = Tolerances.lse(precision(dtype));
        ErrorMetrics error = errors("lse", output.lse());
        assertThat(error.absoluteWithin(bound)).as("lse: %s, want %s", error, bound).isTrue();
      }
    }

    private void relative(String name, Tensor got, double bound) {
      ErrorMetrics error = errors(name, got);
      assertThat(error.relativeWithin(bound)).as("%s: %s, want %s", name, error, bound).isTrue();
    }

    private ErrorMetrics errors(String name, Tensor got) {
      assertThat(got.shape()).as(name).isEqualTo(c.tensor(name).shape());
      return ErrorMetrics.of(got.toDoubleArray(), c.tensor(name).toDoubles());
    }

    @Override
    public void close() {
      opened.forEach(Tensor::close);
    }
  }
}
