package dev.flare;

import static org.assertj.core.api.Assertions.assertThat;
import static org.junit.jupiter.api.Assumptions.assumeTrue;

import dev.flare.reference.AttentionResult;
import dev.flare.reference.KdaResult;
import dev.flare.testing.Cases.Attention;
import dev.flare.testing.Cases.Kda;
import dev.flare.testing.Cases.KdaDecode;
import dev.flare.testing.Cases.Mla;
import java.util.function.Supplier;
import java.util.stream.Stream;
import org.junit.jupiter.api.Tag;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.MethodSource;

/**
 * Random cases through the API against the references, on the CPU or on the device that {@code
 * -Dflare.test.device=cuda:N} names; {@code -Dflare.test.cases=N} runs more of them.
 */
@RequiresLibrary
@Tag("device")
class RandomCasesTest {
  private static final Device DEVICE = TestDevice.chosen();
  private static final int CASES = Integer.getInteger("flare.test.cases", 60);

  static Stream<Attention> attention() {
    return dev.flare.testing.Cases.stream(0xA77, CASES, dev.flare.testing.Cases::attention);
  }

  static Stream<Mla> mla() {
    return dev.flare.testing.Cases.stream(0x31A, CASES / 2, dev.flare.testing.Cases::mla);
  }

  static Stream<Kda> kda() {
    return dev.flare.testing.Cases.stream(0xDA, CASES / 2, dev.flare.testing.Cases::kda);
  }

  static Stream<KdaDecode> kdaDecode() {
    return dev.flare.testing.Cases.stream(0xDE, CASES / 2, dev.flare.testing.Cases::kdaDecode);
  }

  @ParameterizedTest(name = "{0}")
  @MethodSource("attention")
  void softmaxAttention(Attention c) {
    AttentionResult want = c.reference();
    CaseRun.Result got =
        run(c.heads().dim(), c.heads().valueDim(), () -> CaseRun.attention(DEVICE, c));
    assertThat(got.misses(want.out(), want.lse())).as(got.kernel()).isEmpty();
  }

  @ParameterizedTest(name = "{0}")
  @MethodSource("mla")
  void latentAttention(Mla c) {
    AttentionResult want = c.reference();
    CaseRun.Result got = CaseRun.mla(DEVICE, c);
    assertThat(got.misses(want.out(), want.lse())).as(got.kernel()).isEmpty();
  }

  @ParameterizedTest(name = "{0}")
  @MethodSource("kda")
  void deltaAttention(Kda c) {
    KdaResult want = c.reference();
    CaseRun.Result got =
        run(c.inputs().keyDim(), c.inputs().valueDim(), () -> CaseRun.kda(DEVICE, c));
    assertThat(got.misses(want.out(), want.finalState())).as(got.kernel()).isEmpty();
  }

  @ParameterizedTest(name = "{0}")
  @MethodSource("kdaDecode")
  void deltaDecode(KdaDecode c) {
    KdaResult want = c.reference();
    CaseRun.Result got =
        run(c.inputs().keyDim(), c.inputs().valueDim(), () -> CaseRun.kdaDecode(DEVICE, c));
    assertThat(got.misses(want.out(), want.finalState())).as(got.kernel()).isEmpty();
  }

  /** A GPU need not have a kernel for head dimensions that are no multiples of 8. */
  private static CaseRun.Result run(int dim, int valueDim, Supplier<CaseRun.Result> call) {
    try {
      return call.get();
    } catch (UnsupportedException e) {
      boolean required = DEVICE.isCpu() || (dim % 8 == 0 && valueDim % 8 == 0);
      assumeTrue(required, e::getMessage);
      throw e;
    }
  }
}
