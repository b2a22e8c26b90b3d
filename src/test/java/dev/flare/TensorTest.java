package dev.flare;

import static org.assertj.core.api.Assertions.assertThat;
import static org.assertj.core.api.Assertions.assertThatThrownBy;

import java.io.IOException;
import java.io.RandomAccessFile;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.ValueLayout;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.concurrent.CountDownLatch;
import java.util.stream.IntStream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.EnumSource;

class TensorTest {
  private static float[] counting(int n) {
    float[] x = new float[n];
    for (int i = 0; i < n; i++) {
      x[i] = i;
    }
    return x;
  }

  @Test
  void keepsWhatItWasGiven() {
    try (Tensor t = Tensor.of(counting(6), 2, 3)) {
      assertThat(t.dtype()).isEqualTo(DType.FP32);
      assertThat(t.shape()).isEqualTo(Shape.of(2, 3));
      assertThat(t.strides()).containsExactly(3, 1);
      assertThat(t.toFloatArray()).containsExactly(0, 1, 2, 3, 4, 5);
      assertThat(t.get(1, 2)).isEqualTo(5);
      assertThat(t).hasToString("Tensor[FP32 [2, 3] cpu: 0.0, 1.0, 2.0, 3.0, 4.0, 5.0]");
      t.set(-7, 0, 1);
      assertThat(t.get(0, 1)).isEqualTo(-7);
    }
    try (Tensor t = Tensor.of(new int[] {3, 1, 2})) {
      assertThat(t.dtype()).isEqualTo(DType.INT32);
      assertThat(t.toLongArray()).containsExactly(3, 1, 2);
    }
    try (Tensor t = Tensor.of(new long[] {1L << 60, -1}, 2, 1)) {
      assertThat(t.toLongArray()).containsExactly(1L << 60, -1);
    }
  }

  @Test
  void viewsShareMemory() {
    try (Tensor t = Tensor.of(counting(24), 2, 3, 4)) {
      assertThat(t.transpose(0, 2).shape()).isEqualTo(Shape.of(4, 3, 2));
      assertThat(t.transpose(0, 2).get(3, 1, 0)).isEqualTo(t.get(0, 1, 3));
      assertThat(t.transpose(-1, 0).strides()).containsExactly(1, 4, 12);
      assertThat(t.permute(1, 2, 0).get(2, 3, 1)).isEqualTo(23);
      assertThat(t.slice(1, 1, 3).toFloatArray())
          .containsExactly(4, 5, 6, 7, 8, 9, 10, 11, 16, 17, 18, 19, 20, 21, 22, 23);
      assertThat(t.select(0, 1).select(1, 2).toFloatArray()).containsExactly(14, 18, 22);
      assertThat(t.unsqueeze(1).shape()).isEqualTo(Shape.of(2, 1, 3, 4));
      assertThat(t.slice(0, 0, 1).expand(5, 3, 4).get(4, 2, 3)).isEqualTo(11);
      assertThat(t.reshape(6, -1).shape()).isEqualTo(Shape.of(6, 4));
      t.select(0, 0).set(100, 0, 0);
      assertThat(t.get(0, 0, 0)).isEqualTo(100);
      assertThat(t.slice(0, 1, 1).elements()).isZero();
      assertThat(t.slice(0, 1, 1).toFloatArray()).isEmpty();
    }
  }

  @Test
  void reshapesWhatTheStridesAllow() {
    try (Tensor t = Tensor.of(counting(24), 2, 3, 4)) {
      assertThat(t.slice(2, 0, 2).reshape(6, 2).toFloatArray())
          .containsExactly(0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21);
      assertThat(t.transpose(0, 1).reshape(3, 2, 2, 2).toFloatArray())
          .isEqualTo(t.transpose(0, 1).copy().toFloatArray());
      assertThatThrownBy(() -> t.transpose(0, 1).reshape(6, 4))
          .isInstanceOf(InvalidArgumentException.class)
          .hasMessageContaining("contiguous()");
      assertThatThrownBy(() -> t.reshape(5, -1)).isInstanceOf(InvalidArgumentException.class);
      assertThatThrownBy(() -> t.reshape(23))
          .isInstanceOf(InvalidArgumentException.class)
          .hasMessageContaining("24 elements");
    }
  }

  @Test
  void copiesStridedTensors() {
    try (Tensor t = Tensor.of(counting(24), 2, 3, 4);
        Tensor copy = t.permute(2, 0, 1).copy();
        Tensor target = Tensor.zeros(DType.FP32, 4, 3, 2)) {
      assertThat(copy.isContiguous()).isTrue();
      assertThat(copy.get(3, 1, 2)).isEqualTo(t.get(1, 2, 3));
      target.transpose(1, 2).copyFrom(copy);
      assertThat(target.get(3, 2, 1)).isEqualTo(t.get(1, 2, 3));
      assertThat(t.contiguous().isView()).isTrue();
    }
  }

  @ParameterizedTest
  @EnumSource(names = {"FP32", "FP16", "BF16", "FP8_E4M3"})
  void convertsBetweenFloats(DType dtype) {
    float[] values = {0, -0f, 1, -2.5f, 300, 1e-3f, 0.1f, Float.NaN, 448, -1e-9f};
    try (Tensor t = Tensor.of(values, 2, 5);
        Tensor low = t.to(dtype);
        Tensor transposed = t.transpose(0, 1).to(dtype);
        Tensor back = low.to(DType.FP32);
        Tensor made = Tensor.of(dtype, values, 2, 5)) {
      assertThat(low.dtype()).isEqualTo(dtype);
      assertThat(back.toFloatArray()).isEqualTo(low.toFloatArray());
      assertThat(made.toFloatArray()).isEqualTo(low.toFloatArray());
      assertThat(transposed.transpose(0, 1).toFloatArray()).isEqualTo(low.toFloatArray());
      double unit = Math.scalb(1.0, dtype == DType.FP8_E4M3 ? -4 : dtype == DType.BF16 ? -9 : -11);
      for (int i = 0; i < values.length; i++) {
        float got = low.toFloatArray()[i];
        if (Float.isNaN(values[i])) {
          assertThat(got).isNaN();
        } else {
          assertThat((double) Math.abs(got - values[i]))
              .as("%s in %s", values[i], dtype)
              .isLessThanOrEqualTo(Math.abs(values[i]) * unit + 0x1p-10);
        }
      }
      double[] wide = low.toDoubleArray();
      for (int i = 0; i < values.length; i++) {
        assertThat(Float.compare((float) wide[i], low.toFloatArray()[i])).isZero();
      }
    }
  }

  @Test
  void convertsBetweenIntegers() {
    try (Tensor t = Tensor.of(new int[] {1, -2, Integer.MAX_VALUE});
        Tensor wide = t.to(DType.INT64);
        Tensor narrow = wide.to(DType.INT32);
        Tensor tooBig = Tensor.of(new long[] {1L << 31})) {
      assertThat(wide.toLongArray()).containsExactly(1, -2, Integer.MAX_VALUE);
      assertThat(narrow.toLongArray()).isEqualTo(wide.toLongArray());
      assertThatThrownBy(() -> tooBig.to(DType.INT32))
          .isInstanceOf(InvalidArgumentException.class)
          .hasMessageContaining("2147483648");
      assertThatThrownBy(() -> t.to(DType.FP16)).isInstanceOf(UnsupportedException.class);
    }
  }

  @Test
  void sameDtypeOrDeviceIsAView() {
    try (Tensor t = Tensor.zeros(DType.FP16, 3)) {
      assertThat(t.to(DType.FP16).isView()).isTrue();
      t.to(Device.cpu()).close();
      assertThat(t.isOpen()).isTrue();
    }
  }

  @Test
  void randnIsSeededAndStandardNormal() {
    int n = 1 << 20;
    try (Tensor a = Tensor.randn(1, DType.FP32, n);
        Tensor b = Tensor.randn(1, DType.FP32, 2, n / 2);
        Tensor c = Tensor.randn(2, DType.FP32, n);
        Tensor half = Tensor.randn(1, DType.BF16, n);
        Tensor rounded = a.to(DType.BF16)) {
      float[] x = a.toFloatArray();
      assertThat(b.toFloatArray()).isEqualTo(x);
      assertThat(half.toFloatArray()).isEqualTo(rounded.toFloatArray());
      double mean = 0;
      double square = 0;
      double cross = 0;
      float[] y = c.toFloatArray();
      for (int i = 0; i < n; i++) {
        mean += x[i];
        square += x[i] * x[i];
        cross += x[i] * y[i];
      }
      // Five standard deviations of each estimate.
      assertThat(mean / n).isBetween(-5e-3, 5e-3);
      assertThat(square / n).isBetween(1 - 7e-3, 1 + 7e-3);
      assertThat(cross / n).isBetween(-5e-3, 5e-3);
    }
  }

  @Test
  void smallSeedsBeginWithOrdinaryNumbers() {
    for (long seed = -10; seed <= 10; seed++) {
      try (Tensor t = Tensor.randn(seed, DType.FP32, 8)) {
        for (float x : t.toFloatArray()) {
          assertThat(Math.abs(x)).as("seed %d: %s", seed, t).isBetween(1e-4f, 5f);
        }
      }
    }
  }

  @Test
  void fillsAndZeros() {
    try (Tensor t = Tensor.full(2.5, DType.BF16, 3, 4)) {
      assertThat(t.toFloatArray()).containsOnly(2.5f);
      t.select(1, 0).fill(-1);
      assertThat(t.select(1, 0).toFloatArray()).containsOnly(-1f);
      assertThat(t.get(2, 1)).isEqualTo(2.5);
    }
    try (Tensor t = Tensor.zeros(DType.INT64, 1000)) {
      assertThat(t.toLongArray()).containsOnly(0L);
    }
  }

  @Test
  void scalarsAndEmptyTensorsWork() {
    try (Tensor scalar = Tensor.full(3, DType.FP32);
        Tensor half = scalar.to(DType.FP16);
        Tensor empty = Tensor.empty(DType.BF16, 4, 0, 2);
        Tensor converted = empty.to(DType.FP32)) {
      assertThat(scalar.get()).isEqualTo(3);
      assertThat(half.toFloatArray()).containsExactly(3);
      assertThat(converted.shape()).isEqualTo(Shape.of(4, 0, 2));
      assertThat(empty.toFloatArray()).isEmpty();
      assertThat(empty.reshape(0, 9).elements()).isZero();
      assertThat(empty.copy().bytes()).isZero();
    }
  }

  @Test
  void borrowsSegments() {
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment segment = arena.allocateFrom(ValueLayout.JAVA_FLOAT, counting(12));
      Tensor t = Tensor.of(segment, DType.FP32, Shape.of(2, 2), 6, 2);
      assertThat(t.toFloatArray()).containsExactly(0, 2, 6, 8);
      assertThat(t.segment().address()).isEqualTo(segment.address());
      assertThat(t.isReadOnly()).isFalse();
      t.close();
      assertThatThrownBy(() -> t.get(0, 0)).isInstanceOf(ClosedException.class);
      assertThat(segment.get(ValueLayout.JAVA_FLOAT, 0)).isZero();

      Tensor readOnly = Tensor.of(segment.asReadOnly(), DType.FP32, 12);
      assertThat(readOnly.isReadOnly()).isTrue();
      assertThatThrownBy(() -> readOnly.fill(1))
          .isInstanceOf(InvalidArgumentException.class)
          .hasMessageContaining("read-only");
      // Large enough for the parallel path, which other threads may not take here.
      MemorySegment large = arena.allocate(4L << 20, 4);
      assertThat(Tensor.of(large, DType.FP32, 1 << 20).toFloatArray()).containsOnly(0f);
    }
  }

  @Test
  void borrowedMemoryThatIsGoneIsClosed() {
    Tensor t;
    try (Arena arena = Arena.ofShared()) {
      t = Tensor.of(arena.allocate(16, 4), DType.FP32, 4);
      assertThat(t.isOpen()).isTrue();
    }
    assertThat(t.isOpen()).isFalse();
    assertThatThrownBy(t::toFloatArray).isInstanceOf(ClosedException.class);
    assertThatThrownBy(t::segment).isInstanceOf(ClosedException.class);
    assertThat(t.toString()).contains("closed");
  }

  @Test
  void refusesBadSegments() {
    assertThatThrownBy(() -> Tensor.of(MemorySegment.ofArray(new float[4]), DType.FP32, 4))
        .isInstanceOf(InvalidArgumentException.class)
        .hasMessageContaining("Java array");
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment segment = arena.allocate(16, 8);
      assertThatThrownBy(() -> Tensor.of(segment.asSlice(2), DType.FP32, 1))
          .isInstanceOf(InvalidArgumentException.class)
          .hasMessageContaining("aligned");
      assertThatThrownBy(() -> Tensor.of(segment, DType.FP32, 5))
          .isInstanceOf(InvalidArgumentException.class)
          .hasMessageContaining("16 bytes")
          .hasMessageContaining("at least 20");
      assertThatThrownBy(() -> Tensor.of(segment, DType.FP32, Shape.of(2, 2), 3, 1))
          .isInstanceOf(InvalidArgumentException.class);
      assertThatThrownBy(() -> Tensor.of(segment, DType.FP32, Shape.of(2), 1, 1))
          .isInstanceOf(InvalidArgumentException.class)
          .hasMessageContaining("strides");
      assertThatThrownBy(() -> Tensor.of(segment, DType.FP32, Shape.of(2), -1))
          .isInstanceOf(InvalidArgumentException.class);
      assertThatThrownBy(
              () -> Tensor.of(segment, DType.FP32, Shape.of(1L << 40, 1L << 20), 1L << 40, 1))
          .isInstanceOf(InvalidArgumentException.class)
          .hasMessageContaining("2^63");
    }
  }

  @Test
  void mapsFiles(@TempDir Path folder) throws IOException {
    Path file = folder.resolve("x.bin");
    ByteBuffer bytes = ByteBuffer.allocate(24).order(ByteOrder.LITTLE_ENDIAN);
    for (int i = 0; i < 6; i++) {
      bytes.putFloat(i);
    }
    Files.write(file, bytes.array());
    try (Tensor t = Tensor.map(file, 8, DType.FP32, Shape.of(2, 2))) {
      assertThat(t.toFloatArray()).containsExactly(2, 3, 4, 5);
      assertThat(t.isReadOnly()).isTrue();
      assertThatThrownBy(() -> t.set(1, 0, 0)).isInstanceOf(InvalidArgumentException.class);
    }
    assertThatThrownBy(() -> Tensor.map(file, 8, DType.FP32, Shape.of(5)))
        .hasMessageContaining("24 bytes");
    assertThatThrownBy(() -> Tensor.map(file, 2, DType.FP32, Shape.of(1)))
        .isInstanceOf(InvalidArgumentException.class);
    try (Tensor empty = Tensor.map(file, 24, DType.FP32, Shape.of(0))) {
      assertThat(empty.elements()).isZero();
    }
  }

  @Test
  void closeIsIdempotentAndFinal() {
    Tensor t = Tensor.of(counting(4));
    Tensor view = t.slice(0, 1, 2);
    view.close();
    assertThat(view.get(0)).isEqualTo(1);
    t.close();
    t.close();
    assertThat(t.isOpen()).isFalse();
    assertThat(view.isOpen()).isFalse();
    assertThatThrownBy(() -> view.get(0))
        .isInstanceOf(ClosedException.class)
        .hasMessageContaining("Tensor[FP32 [1]]");
    assertThatThrownBy(() -> t.reshape(2, 2)).isInstanceOf(ClosedException.class);
    assertThatThrownBy(t::copy).isInstanceOf(ClosedException.class);
    assertThatThrownBy(t::segment).isInstanceOf(ClosedException.class);
    assertThat(t.toString()).isEqualTo("Tensor[FP32 [4] cpu, closed]");
  }

  @Test
  void closingInUseThrowsAndFreesNothing() throws InterruptedException {
    Tensor t = Tensor.of(counting(4));
    CountDownLatch acquired = new CountDownLatch(1);
    CountDownLatch done = new CountDownLatch(1);
    Thread user =
        Thread.ofPlatform()
            .start(
                () -> {
                  t.acquire("q");
                  acquired.countDown();
                  try {
                    done.await();
                  } catch (InterruptedException e) {
                    Thread.currentThread().interrupt();
                  } finally {
                    t.release();
                  }
                });
    acquired.await();
    assertThatThrownBy(t::close)
        .isInstanceOf(InUseException.class)
        .hasMessageContaining("1 call(s)");
    assertThat(t.get(3)).isEqualTo(3);
    done.countDown();
    user.join();
    t.close();
    assertThat(t.isOpen()).isFalse();
  }

  @Test
  void concurrentCloseFreesOnce() throws InterruptedException {
    for (int round = 0; round < 200; round++) {
      Tensor t = Tensor.of(counting(4));
      Thread[] threads =
          IntStream.range(0, 4)
              .mapToObj(i -> Thread.ofPlatform().start(t::close))
              .toArray(Thread[]::new);
      for (Thread thread : threads) {
        thread.join();
      }
      assertThat(t.isOpen()).isFalse();
    }
  }

  @Test
  void refusesWhatCannotBe() {
    assertThatThrownBy(() -> Tensor.empty(DType.FP32, 1L << 62))
        .isInstanceOf(InvalidArgumentException.class)
        .hasMessageContaining("2^63-1 bytes");
    assertThatThrownBy(() -> Tensor.empty(DType.FP32, 1L << 60))
        .isInstanceOf(OutOfMemoryException.class)
        .hasMessageContaining(Long.toString(1L << 62));
    assertThatThrownBy(() -> Tensor.empty(DType.UINT8, Long.MAX_VALUE))
        .isInstanceOf(OutOfMemoryException.class);
    assertThatThrownBy(() -> Tensor.of(counting(5), 2, 3))
        .isInstanceOf(InvalidArgumentException.class)
        .hasMessageContaining("5 values");
    assertThatThrownBy(() -> Tensor.randn(0, DType.INT32, 2))
        .isInstanceOf(InvalidArgumentException.class);
    try (Tensor t = Tensor.zeros(DType.FP32, 2, 3);
        Tensor other = Tensor.zeros(DType.FP16, 2, 3)) {
      assertThatThrownBy(() -> t.get(2, 0)).hasMessageContaining("index: got [2, 0]");
      assertThatThrownBy(() -> t.get(0)).isInstanceOf(InvalidArgumentException.class);
      assertThatThrownBy(() -> t.slice(0, 1, 3)).hasMessageContaining("range: got 1..3");
      assertThatThrownBy(() -> t.select(1, 3)).hasMessageContaining("index: got 3");
      assertThatThrownBy(() -> t.permute(0, 0)).hasMessageContaining("axes: got [0, 0]");
      assertThatThrownBy(() -> t.expand(4, 3)).isInstanceOf(InvalidArgumentException.class);
      assertThatThrownBy(() -> t.unsqueeze(3)).isInstanceOf(InvalidArgumentException.class);
      assertThatThrownBy(() -> t.copyFrom(other)).hasMessageContaining("FP16 [2, 3]");
      assertThatThrownBy(() -> t.slice(0, 0, 1).expand(2, 3).fill(1))
          .hasMessageContaining("a place of its own");
    }
  }

  @Test
  void allocationsAreAligned() {
    for (int n : new int[] {0, 1, 63, 1000, 1 << 20}) {
      try (Tensor t = Tensor.empty(DType.FP16, n)) {
        assertThat(t.segment().address() % 256).isZero();
      }
    }
  }

  @Test
  void arraysOfEveryLengthSurviveTheParallelPath() {
    int n = 300_007;
    float[] x = counting(n);
    try (Tensor t = Tensor.of(x);
        Tensor wide = Tensor.zeros(DType.FP32, n, 2)) {
      assertThat(t.toFloatArray()).isEqualTo(x);
      wide.select(1, 1).copyFrom(t);
      assertThat(wide.select(1, 1).toFloatArray()).isEqualTo(x);
      assertThat(Arrays.stream(wide.select(1, 0).toDoubleArray()).max().orElseThrow()).isZero();
    }
  }

  @Test
  void indicesBeyond32Bits() {
    long n = (1L << 31) + 100; // pages that nobody touches cost nothing
    try (Tensor t = Tensor.zeros(DType.UINT8, n)) {
      t.set(7, n - 1);
      t.slice(0, n - 10, n - 5).fill(3);
      try (Tensor tail = t.slice(0, n - 10, n).copy()) {
        assertThat(tail.toLongArray()).containsExactly(3, 3, 3, 3, 3, 0, 0, 0, 0, 7);
      }
      assertThat(t.reshape(2, n / 2).get(1, n / 2 - 1)).isEqualTo(7);
      assertThatThrownBy(t::toFloatArray)
          .isInstanceOf(InvalidArgumentException.class)
          .hasMessageContaining("2^31");
    }
  }

  @Test
  void mapsFilesBeyond2GiB(@TempDir Path folder) throws IOException {
    Path file = folder.resolve("sparse.bin");
    long n = (3L << 30) / 2;
    try (RandomAccessFile sparse = new RandomAccessFile(file.toFile(), "rw")) {
      sparse.setLength(2 * n);
      sparse.seek(2 * n - 2);
      sparse.write(new byte[] {(byte) 0x80, 0x3f}); // 1 in BF16
    }
    try (Tensor t = Tensor.map(file, 0, DType.BF16, Shape.of(n))) {
      assertThat(t.get(n - 1)).isEqualTo(1);
      assertThat(t.get(0)).isZero();
    }
  }
}
