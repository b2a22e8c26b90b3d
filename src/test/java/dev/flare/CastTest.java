package dev.flare;

import static org.assertj.core.api.Assertions.assertThat;

import dev.flare.internal.CastParams;
import dev.flare.internal.CommonParams;
import dev.flare.internal.Kernels.Operation;
import dev.flare.internal.Struct;
import java.lang.foreign.Arena;
import java.lang.foreign.ValueLayout;
import java.util.SplittableRandom;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.EnumSource;

/** The C library's conversions give the same bits as Java's. */
@RequiresLibrary
class CastTest {
  private static Tensor cast(Tensor from, DType to) {
    Tensor result = Tensor.empty(to, from.shape().dims());
    try (Arena arena = Arena.ofConfined()) {
      Struct params =
          CastParams.allocate(arena)
              .set(CommonParams.DEVICE, -1)
              .set(CastParams.SRC_DTYPE, from.dtype().code())
              .set(CastParams.DST_DTYPE, to.code())
              .set(CastParams.RANK, 1)
              .set(CastParams.SHAPE, 0, from.elements())
              .set(CastParams.SRC_STRIDE, 0, 1)
              .set(CastParams.DST_STRIDE, 0, 1);
      Once.run(
          Operation.CAST,
          Device.cpu(),
          null,
          params,
          Once.argument("src", CastParams.SRC, from),
          Once.argument("dst", CastParams.DST, result));
    }
    return result;
  }

  private static void assertSameBits(Tensor from, DType to) {
    try (Tensor c = cast(from, to);
        Tensor java = from.to(to)) {
      assertThat(c.segment().mismatch(java.segment()))
          .as("first byte where %s to %s differs", from.dtype(), to)
          .isEqualTo(-1);
    }
  }

  @ParameterizedTest
  @EnumSource(names = {"FP16", "BF16", "FP8_E4M3"})
  void narrowingRandomFloats(DType to) {
    SplittableRandom random = new SplittableRandom(0xCA57);
    float[] x = new float[1 << 20];
    for (int i = 0; i < x.length; i++) {
      // All bit patterns, NaNs too, and as many around the ranges of the small formats.
      x[i] =
          (i & 1) == 0
              ? Float.intBitsToFloat(random.nextInt())
              : (float) Math.scalb(random.nextDouble() - 0.5, random.nextInt(-28, 20));
    }
    try (Tensor from = Tensor.of(x)) {
      assertSameBits(from, to);
    }
  }

  @ParameterizedTest
  @EnumSource(names = {"FP16", "BF16"})
  void wideningEveryPattern(DType from) {
    try (Tensor all = Tensor.empty(from, 1 << 16)) {
      for (int i = 0; i < 1 << 16; i++) {
        all.segment().setAtIndex(ValueLayout.JAVA_SHORT, i, (short) i);
      }
      assertSameBits(all, DType.FP32);
      assertSameBits(all, from == DType.FP16 ? DType.BF16 : DType.FP16);
      assertSameBits(all, DType.FP8_E4M3);
    }
  }

  @ParameterizedTest
  @EnumSource(names = {"FP32", "FP16", "BF16"})
  void widening8Bits(DType to) {
    try (Tensor all = Tensor.empty(DType.FP8_E4M3, 256)) {
      for (int i = 0; i < 256; i++) {
        all.segment().set(ValueLayout.JAVA_BYTE, i, (byte) i);
      }
      assertSameBits(all, to);
    }
  }
}
