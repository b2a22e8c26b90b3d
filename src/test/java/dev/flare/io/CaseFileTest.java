package dev.flare.io;

import static org.assertj.core.api.Assertions.assertThat;
import static org.assertj.core.api.Assertions.assertThatThrownBy;

import dev.flare.Shape;
import dev.flare.reference.AttentionOptions;
import dev.flare.reference.KdaOptions;
import java.io.IOException;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.stream.Stream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.Arguments;
import org.junit.jupiter.params.provider.MethodSource;
import org.junit.jupiter.params.provider.ValueSource;

/** Reading case files. The golden files themselves are read by the tests that compute them. */
class CaseFileTest {
  @TempDir Path folder;

  private Path file(String params, List<TensorEntry> tensors) throws IOException {
    Path file = folder.resolve("case.safetensors");
    Safetensors.write(file, tensors, Map.of("params", params));
    return file;
  }

  private static TensorEntry floats(String name, long... dims) {
    Shape shape = Shape.of(dims);
    return TensorEntry.ofValues(
        name, ElementType.F32, shape, new double[Math.toIntExact(shape.elements())]);
  }

  private static TensorEntry ints(String name, Shape shape, double... values) {
    return TensorEntry.ofValues(name, ElementType.I32, shape, values);
  }

  private static TensorEntry row(String name, double... values) {
    return ints(name, Shape.of(values.length), values);
  }

  private static List<TensorEntry> dense() {
    return List.of(floats("q", 2, 3, 4, 16), floats("k", 2, 5, 2, 16), floats("v", 2, 5, 2, 8));
  }

  private static List<TensorEntry> with(List<TensorEntry> entries, TensorEntry... more) {
    List<TensorEntry> all = new ArrayList<>(entries);
    for (TensorEntry entry : more) {
      all.removeIf(e -> e.name().equals(entry.name()));
      all.add(entry);
    }
    return all;
  }

  private static List<TensorEntry> varlen(TensorEntry cuQ, TensorEntry cuK) {
    return List.of(floats("q", 3, 2, 8), floats("k", 4, 1, 8), floats("v", 4, 1, 8), cuQ, cuK);
  }

  private static List<TensorEntry> paged(TensorEntry table, TensorEntry lengths) {
    return List.of(
        floats("q", 2, 1, 2, 8),
        floats("k_pages", 3, 4, 1, 8),
        floats("v_pages", 3, 4, 1, 8),
        table,
        lengths);
  }

  private static List<TensorEntry> kda(long heads, long valueHeads) {
    return List.of(
        floats("q", 1, 3, heads, 8),
        floats("k", 1, 3, heads, 8),
        floats("v", 1, 3, valueHeads, 4),
        floats("g", 1, 3, valueHeads, 8),
        floats("beta", 1, 3, valueHeads));
  }

  @Test
  void missingOptionsAreNeutral() throws IOException {
    try (CaseFile c = CaseFile.open(file("{\"kernel\":\"attention\"}", dense()))) {
      assertThat(c.kernel()).isEqualTo("attention");
      AttentionOptions got = ((CaseFile.Attention) c.params()).options();
      assertThat(got).isEqualTo(AttentionOptions.full(0.25));
      assertThat(c.tensor("v").shape()).isEqualTo(Shape.of(2, 5, 2, 8));
      assertThat(c.find("out")).isEmpty();
    }
    try (CaseFile c = CaseFile.open(file("{\"kernel\":\"kda\"}", kda(1, 2)))) {
      assertThat(((CaseFile.Kda) c.params()).options())
          .isEqualTo(KdaOptions.logGate(1 / Math.sqrt(8)));
    }
  }

  @Test
  void optionsAreTyped() throws IOException {
    String params =
        "{\"kernel\":\"attention\",\"scale\":2,\"causal\":true,\"window\":[7,-1],\"softcap\":20.0}";
    TensorEntry sink = TensorEntry.ofValues("sink", ElementType.F32, Shape.of(4), 1, 2, 3, 4);
    try (CaseFile c = CaseFile.open(file(params, with(dense(), sink)))) {
      AttentionOptions got = ((CaseFile.Attention) c.params()).options();
      assertThat(got.scale()).isEqualTo(2);
      assertThat(got.causal()).isTrue();
      assertThat(got.windowLeft()).isEqualTo(7);
      assertThat(got.windowRight()).isEqualTo(AttentionOptions.UNBOUNDED);
      assertThat(got.softcap()).isEqualTo(20);
      assertThat(got.sink()).containsExactly(1, 2, 3, 4);
      assertThat(got.alibiSlopes()).isNull();
    }
    params =
        """
        {"kernel":"kda","gate":"bounded","lower_bound":-5,"qk_l2norm":true,"beta_sigmoid":true,
         "allow_neg_eigval":true,"state_layout":"V,K","scale":0.5}""";
    TensorEntry state = floats("initial_state", 1, 2, 4, 8);
    try (CaseFile c = CaseFile.open(file(params, with(kda(1, 2), state)))) {
      assertThat(((CaseFile.Kda) c.params()).options())
          .isEqualTo(
              KdaOptions.logGate(0.5)
                  .withBoundedGate(-5)
                  .withL2norm(true)
                  .withBeta(KdaOptions.Beta.TWICE_SIGMOID)
                  .withStateLayout(KdaOptions.StateLayout.VK));
    }
  }

  @ParameterizedTest
  @ValueSource(
      strings = {
        "",
        "null",
        "[]",
        "1",
        "{",
        "{\"kernel\":1}",
        "{}",
        "{\"kernel\":\"conv\"}",
        "{\"kernel\":\"attention\",\"kernel\":\"attention\"}",
        "{\"kernel\":\"attention\",\"chunk\":1}",
        "{\"kernel\":\"attention\",\"causal\":1}",
        "{\"kernel\":\"attention\",\"scale\":\"1\"}",
        "{\"kernel\":\"attention\",\"scale\":1e999}",
        "{\"kernel\":\"attention\",\"softcap\":-1}",
        "{\"kernel\":\"attention\",\"window\":7}",
        "{\"kernel\":\"attention\",\"window\":[1]}",
        "{\"kernel\":\"attention\",\"window\":[1,-2]}",
        "{\"kernel\":\"attention\",\"window\":[1,99999999999]}",
        "{\"kernel\":\"attention\",\"window\":[1,0.5]}"
      })
  void badOptionsAreRefused(String params) throws IOException {
    Path file = file(params, dense());
    assertThatThrownBy(() -> CaseFile.open(file))
        .isInstanceOf(MalformedFileException.class)
        .hasMessageContainingAll(file.toString(), "params");
  }

  @Test
  void metadataMustHaveParams() throws IOException {
    Path file = folder.resolve("plain.safetensors");
    Safetensors.write(file, dense(), Map.of("format", "pt"));
    assertThatThrownBy(() -> CaseFile.open(file))
        .isInstanceOf(MalformedFileException.class)
        .hasMessageContaining("__metadata__ has no params");
  }

  static Stream<Arguments> misfits() {
    String attention = "{\"kernel\":\"attention\"}";
    String varlen = "{\"kernel\":\"attention_varlen\"}";
    String paged = "{\"kernel\":\"attention_paged\"}";
    String kda = "{\"kernel\":\"kda\"}";
    TensorEntry cuQ = row("cu_seqlens_q", 0, 3);
    TensorEntry cuK = row("cu_seqlens_k", 0, 4);
    TensorEntry table = ints("block_table", Shape.of(2, 2), 0, 1, 2, -9);
    return Stream.of(
        Arguments.of(attention, List.of(floats("q", 1, 1, 1, 8)), "'k' is missing"),
        Arguments.of(attention, with(dense(), floats("k", 2, 5, 16)), "want [B, Nk, Hk, D]"),
        Arguments.of(attention, with(dense(), floats("k", 2, 5, 2, 8)), "D is 8, elsewhere 16"),
        Arguments.of(attention, with(dense(), floats("v", 2, 6, 2, 8)), "Nk is 6, elsewhere 5"),
        Arguments.of(attention, with(dense(), floats("q", 2, 3, 3, 16)), "H is 3, want a multiple"),
        Arguments.of(attention, with(dense(), floats("q", 2, 3, 0, 16)), "H is 0"),
        Arguments.of(attention, with(dense(), floats("sink", 3)), "H is 3, elsewhere 4"),
        Arguments.of(attention, with(dense(), floats("lse", 2, 3, 4)), "H is 3, elsewhere 4"),
        Arguments.of(
            attention, with(dense(), ints("q", Shape.of(1, 1, 1, 1), 1)), "want F32, F16, BF16"),
        Arguments.of(varlen, varlen(row("cu_seqlens_q", 1, 3), cuK), "summed up from 0 to Tq = 3"),
        Arguments.of(varlen, varlen(row("cu_seqlens_q", 0, 2), cuK), "summed up from 0 to Tq = 3"),
        Arguments.of(varlen, varlen(row("cu_seqlens_q"), row("cu_seqlens_k")), "B+1 is 0"),
        Arguments.of(
            varlen,
            varlen(row("cu_seqlens_q", 0, 2, 3), row("cu_seqlens_k", 0, 5, 4)),
            "cu_seqlens_k I32 [3]: want lengths"),
        Arguments.of(varlen, varlen(cuQ, row("cu_seqlens_k", 0, 2, 4)), "B+1 is 3, elsewhere 2"),
        Arguments.of(varlen, varlen(cuQ, floats("cu_seqlens_k", 2)), "want I32 or I64"),
        Arguments.of(
            varlen,
            varlen(
                TensorEntry.ofValues(
                    "cu_seqlens_q", ElementType.I64, Shape.of(2), 0, (1L << 32) + 3),
                cuK),
            "32 bits"),
        Arguments.of(paged, paged(table, row("seqlens_k", 0, -1)), "seqlens_k[1] is -1"),
        Arguments.of(paged, paged(table, row("seqlens_k", 9, 0)), "seqlens_k[0] is 9, want 0 to 8"),
        Arguments.of(paged, paged(table, row("seqlens_k", 8, 5)), "block_table[1][1] is -9"),
        Arguments.of(
            paged,
            paged(ints("block_table", Shape.of(2, 1), 3, 0), row("seqlens_k", 1, 1)),
            "block_table[0][0] is 3, want a page below 3"),
        Arguments.of(kda, kda(2, 3), "HV is 3, want a multiple of H = 2"),
        Arguments.of(kda, with(kda(1, 1), row("cu_seqlens", 0, 2)), "summed up from 0 to T = 3"),
        Arguments.of(
            kda, with(kda(1, 1), floats("initial_state", 1, 1, 4, 8)), "K is 4, elsewhere 8"),
        Arguments.of("{\"kernel\":\"kda\",\"gate\":\"bounded\"}", kda(1, 1), "lower_bound is 0.0"),
        Arguments.of("{\"kernel\":\"kda\",\"gate\":\"sigmoid\"}", kda(1, 1), "gate is sigmoid"),
        Arguments.of(
            "{\"kernel\":\"kda\",\"allow_neg_eigval\":true}", kda(1, 1), "needs beta_sigmoid"),
        Arguments.of("{\"kernel\":\"kda\",\"state_layout\":\"K\"}", kda(1, 1), "state_layout is K"),
        Arguments.of("{\"kernel\":\"mla_absorbed_paged\"}", List.of(), "d_c is null"),
        Arguments.of(
            "{\"kernel\":\"mla_absorbed_paged\",\"d_c\":0,\"d_r\":0}", List.of(), "d_c is 0"),
        Arguments.of("{\"kernel\":\"mla\"}", dense(), "'q_nope' is missing"));
  }

  @ParameterizedTest(name = "{2}")
  @MethodSource("misfits")
  void tensorsThatDoNotFitAreRefused(String params, List<TensorEntry> tensors, String message)
      throws IOException {
    Path file = file(params, tensors);
    assertThatThrownBy(() -> CaseFile.open(file))
        .isInstanceOf(MalformedFileException.class)
        .hasMessageContainingAll(file.toString(), message);
  }

  @Test
  void pagesBeyondTheLengthMayBeAnything() throws IOException {
    TensorEntry table = ints("block_table", Shape.of(2, 2), 2, -9, 999, 999);
    List<TensorEntry> tensors = paged(table, row("seqlens_k", 4, 0));
    try (CaseFile c = CaseFile.open(file("{\"kernel\":\"attention_paged\"}", tensors))) {
      assertThat(c.tensor("block_table").toInts()).containsExactly(2, -9, 999, 999);
    }
  }
}
