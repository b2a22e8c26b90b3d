package dev.flare;

import static java.lang.foreign.ValueLayout.ADDRESS;
import static java.lang.foreign.ValueLayout.JAVA_INT;
import static java.lang.foreign.ValueLayout.JAVA_LONG;
import static java.lang.foreign.ValueLayout.JAVA_SHORT;
import static org.assertj.core.api.Assertions.assertThat;
import static org.assertj.core.api.Assertions.assertThatThrownBy;

import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.function.BooleanSupplier;
import java.util.stream.Stream;
import org.junit.jupiter.api.Tag;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.Arguments;
import org.junit.jupiter.params.provider.EnumSource;
import org.junit.jupiter.params.provider.MethodSource;

/** Exchange by DLPack: what changes hands, and who frees it when. */
@RequiresLibrary
@Tag("classpath")
class DLPackTest {
  // Offsets of DLManagedTensorVersioned, whose tensor begins at 32; DLManagedTensor has it at 0.
  private static final long MAJOR = 0;
  private static final long DELETER = 16;
  private static final long FLAGS = 24;
  private static final long DATA = 32;
  private static final long DEVICE_TYPE = 40;
  private static final long RANK = 48;
  private static final long TYPE_CODE = 52;
  private static final long SHAPE = 56;
  private static final long STRIDES = 64;
  private static final long BYTE_OFFSET = 72;
  private static final long SIZE = 80;

  /** Both forms: export, take, release. */
  record Form(boolean versioned) {
    MemorySegment export(Tensor tensor) {
      return versioned ? DLPack.export(tensor) : DLPack.exportLegacy(tensor);
    }

    Tensor take(MemorySegment managed) {
      return versioned ? DLPack.take(managed) : DLPack.takeLegacy(managed);
    }

    void release(MemorySegment managed) {
      if (versioned) {
        DLPack.release(managed);
      } else {
        DLPack.releaseLegacy(managed);
      }
    }

    @Override
    public String toString() {
      return versioned ? "versioned" : "legacy";
    }
  }

  static Stream<Form> forms() {
    return Stream.of(new Form(true), new Form(false));
  }

  static Stream<Arguments> dtypes() {
    return forms().flatMap(f -> Stream.of(DType.values()).map(d -> Arguments.of(f, d)));
  }

  private static void await(String what, BooleanSupplier condition) {
    long end = System.nanoTime() + 5_000_000_000L;
    while (!condition.getAsBoolean()) {
      assertThat(System.nanoTime()).as(what).isLessThan(end);
      Thread.onSpinWait();
    }
  }

  @ParameterizedTest(name = "{0} {1}")
  @MethodSource("dtypes")
  void aRoundTripIsAViewOfTheSameMemory(Form form, DType dtype) {
    try (Tensor ours = Tensor.full(1, dtype, 3, 5, 2);
        Tensor theirs = form.take(form.export(ours.transpose(0, 2).slice(1, 1, 4)))) {
      assertThat(theirs.dtype()).isEqualTo(dtype);
      assertThat(theirs.shape()).isEqualTo(Shape.of(2, 3, 3));
      assertThat(theirs.strides()).containsExactly(1, 2, 10);
      theirs.set(2, 1, 0, 2);
      assertThat(ours.get(2, 1, 1)).isEqualTo(2);
      assertThat(theirs.device()).isEqualTo(Device.cpu());
      assertThat(DLPack.consumers(ours)).isEqualTo(1);
      theirs.close();
      assertThat(DLPack.consumers(ours)).isZero();
    }
  }

  @ParameterizedTest
  @MethodSource("forms")
  void operationsTakeImportedTensors(Form form) {
    try (Tensor q = Tensor.randn(1, DType.BF16, 1, 40, 2, 64);
        Tensor want = FlashAttention.flash(q, q, q);
        Tensor theirs = form.take(form.export(q));
        Tensor got = FlashAttention.flash(theirs, theirs, theirs)) {
      assertThat(got.toFloatArray()).isEqualTo(want.toFloatArray());
    }
  }

  @ParameterizedTest
  @MethodSource("forms")
  void scalarsAndTensorsWithoutElements(Form form) {
    try (Tensor scalar = Tensor.full(3, DType.FP32);
        Tensor empty = Tensor.empty(DType.BF16, 2, 0, 3);
        Tensor same = form.take(form.export(scalar));
        Tensor none = form.take(form.export(empty))) {
      assertThat(same.get()).isEqualTo(3);
      assertThat(none.shape()).isEqualTo(Shape.of(2, 0, 3));
    }
  }

  @ParameterizedTest
  @MethodSource("forms")
  void memoryStaysUntilTheLastConsumerIsDone(Form form) {
    long before = Device.cpu().liveBytes();
    Tensor ours = Tensor.full(7, DType.FP32, 1000);
    MemorySegment first = form.export(ours);
    MemorySegment second = form.export(ours.slice(0, 10, 20));
    ours.close();
    ours.close();
    assertThat(ours.isOpen()).isFalse();
    assertThatThrownBy(() -> ours.get(0)).isInstanceOf(ClosedException.class);
    assertThatThrownBy(() -> form.export(ours)).isInstanceOf(ClosedException.class);
    assertThat(DLPack.consumers(ours)).isEqualTo(2);
    try (Tensor theirs = form.take(second)) {
      form.release(first);
      assertThat(Device.cpu().liveBytes()).isEqualTo(before + 4000);
      assertThat(theirs.toFloatArray()).containsOnly(7);
    }
    await("freed", () -> Device.cpu().liveBytes() == before);
    assertThat(DLPack.consumers(ours)).isZero();
  }

  @ParameterizedTest
  @MethodSource("forms")
  void consumersOnOtherThreadsMayOutliveTheTensor(Form form) throws InterruptedException {
    long before = Device.cpu().liveBytes();
    List<Thread> threads = new ArrayList<>();
    for (int t = 0; t < 4; t++) {
      threads.add(
          Thread.ofPlatform()
              .start(
                  () -> {
                    for (int i = 0; i < 200; i++) {
                      Tensor ours = Tensor.full(i, DType.INT64, 64);
                      MemorySegment managed = form.export(ours);
                      Thread closing = Thread.ofVirtual().start(ours::close);
                      try (Tensor theirs = form.take(managed)) {
                        assertThat(theirs.get(63)).isEqualTo(i);
                      }
                      join(closing);
                    }
                  }));
    }
    for (Thread thread : threads) {
      thread.join();
    }
    await("freed", () -> Device.cpu().liveBytes() == before);
  }

  private static void join(Thread thread) {
    try {
      thread.join();
    } catch (InterruptedException e) {
      throw new AssertionError(e);
    }
  }

  @Test
  void anImportedTensorCanBeExportedAgain() {
    long before = Device.cpu().liveBytes();
    Tensor ours = Tensor.full(4, DType.FP16, 16);
    Tensor theirs = DLPack.take(DLPack.export(ours));
    Tensor last = DLPack.take(DLPack.export(theirs));
    theirs.close();
    ours.close();
    assertThat(last.toFloatArray()).containsOnly(4);
    assertThat(DLPack.consumers(ours)).isEqualTo(1);
    last.close();
    await("freed", () -> Device.cpu().liveBytes() == before); // a little after it was handed back
    assertThat(DLPack.consumers(ours)).isZero();
  }

  @Test
  void closingTwiceCallsTheDeleterOnce() {
    try (Tensor ours = Tensor.full(1, DType.FP32, 4)) {
      MemorySegment kept = DLPack.export(ours);
      Tensor theirs = DLPack.take(DLPack.export(ours));
      assertThat(DLPack.consumers(ours)).isEqualTo(2);
      theirs.close();
      theirs.close();
      assertThat(DLPack.consumers(ours)).isEqualTo(1);
      assertThatThrownBy(theirs::toFloatArray).isInstanceOf(ClosedException.class);
      DLPack.release(kept);
      assertThat(DLPack.consumers(ours)).isZero();
    }
  }

  @Test
  void readOnlyMemoryStaysReadOnly(@TempDir Path folder) throws Exception {
    Path file = Files.write(folder.resolve("x"), new byte[64]);
    try (Tensor mapped = Tensor.map(file, 0, DType.FP32, Shape.of(16))) {
      assertThatThrownBy(() -> DLPack.exportLegacy(mapped))
          .isInstanceOf(UnsupportedException.class)
          .hasMessageContaining("read-only");
      try (Tensor theirs = DLPack.take(DLPack.export(mapped))) {
        assertThat(theirs.isReadOnly()).isTrue();
        assertThat(theirs.get(3)).isZero();
        assertThatThrownBy(() -> theirs.set(1, 0)).isInstanceOf(InvalidArgumentException.class);
      }
      assertThat(DLPack.consumers(mapped)).isZero();
    }
  }

  @Test
  void tooManyDimensionsAreRefused() {
    try (Tensor deep = Tensor.zeros(DType.FP32, 1, 1, 1, 1, 1, 1, 1, 1, 2)) {
      assertThatThrownBy(() -> DLPack.export(deep))
          .isInstanceOf(UnsupportedException.class)
          .hasMessageContaining("9 dimensions");
      assertThat(DLPack.consumers(deep)).isZero();
    }
  }

  /** A producer that is not flare: its managed tensor has no deleter and lies in an arena. */
  private static MemorySegment foreign(Arena arena, MemorySegment data, long... shape) {
    MemorySegment managed = arena.allocate(SIZE, 8);
    managed.set(JAVA_INT, MAJOR, 1);
    managed.set(ADDRESS, DATA, data);
    managed.set(JAVA_INT, DEVICE_TYPE, 1);
    managed.set(JAVA_INT, RANK, shape.length);
    managed.set(JAVA_SHORT, TYPE_CODE, (short) (2 | 32 << 8)); // float32
    managed.set(JAVA_SHORT, TYPE_CODE + 2, (short) 1);
    managed.set(ADDRESS, SHAPE, arena.allocateFrom(JAVA_LONG, shape));
    return managed;
  }

  @Test
  void takesDenseRowsWithoutStridesAndByteOffsets() {
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment data = arena.allocateFrom(java.lang.foreign.ValueLayout.JAVA_FLOAT, 1, 2, 3, 4);
      MemorySegment managed = foreign(arena, data, 1, 3);
      managed.set(JAVA_LONG, BYTE_OFFSET, 4);
      try (Tensor theirs = DLPack.take(managed)) {
        assertThat(theirs.toFloatArray()).containsExactly(2, 3, 4);
        assertThat(managed.get(ADDRESS, DELETER)).isEqualTo(MemorySegment.NULL);
      }
    }
  }

  /** What a foreign tensor can have that flare does not take. */
  enum Oddity {
    MAJOR_VERSION("DLPack 3"),
    DEVICE("device type 12"),
    DTYPE("code 6"),
    LANES("2 lanes"),
    ALIGNMENT("multiple of the 4 bytes"),
    NEGATIVE_STRIDE("stride[0] is -1"),
    NO_DATA("data is NULL"),
    RANK_OF_NINE("9 dimensions");

    private final String words;

    Oddity(String words) {
      this.words = words;
    }
  }

  @ParameterizedTest
  @EnumSource
  void refusesWhatItCannotTake(Oddity oddity) {
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment managed = foreign(arena, arena.allocate(64, 16), 3, 2);
      switch (oddity) {
        case MAJOR_VERSION -> managed.set(JAVA_INT, MAJOR, 3);
        case DEVICE -> managed.set(JAVA_INT, DEVICE_TYPE, 12);
        case DTYPE -> managed.set(JAVA_SHORT, TYPE_CODE, (short) (6 | 8 << 8)); // bool
        case LANES -> managed.set(JAVA_SHORT, TYPE_CODE + 2, (short) 2);
        case ALIGNMENT -> managed.set(JAVA_LONG, BYTE_OFFSET, 2);
        case NEGATIVE_STRIDE -> managed.set(ADDRESS, STRIDES, arena.allocateFrom(JAVA_LONG, -1, 1));
        case NO_DATA -> managed.set(ADDRESS, DATA, MemorySegment.NULL);
        case RANK_OF_NINE -> managed.set(JAVA_INT, RANK, 9);
      }
      managed.set(JAVA_LONG, FLAGS, 0);
      assertThatThrownBy(() -> DLPack.take(managed))
          .isInstanceOf(FlareException.class)
          .hasMessageContaining(oddity.words)
          .hasMessageContaining("DLPack import");
    }
  }

  @Test
  void aGpuThatIsNotThereIsToldAndNothingIsTaken() {
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment managed = foreign(arena, MemorySegment.ofAddress(4096), 4);
      managed.set(JAVA_INT, DEVICE_TYPE, 2);
      managed.set(JAVA_INT, DEVICE_TYPE + 4, 4321);
      assertThatThrownBy(() -> DLPack.take(managed))
          .isInstanceOf(DeviceException.class)
          .hasMessageContaining("cuda(4321)");
    }
  }

  // ---- on a GPU -------------------------------------------------------------------------------

  @GpuTest
  @ParameterizedTest
  @MethodSource("forms")
  void deviceTensorsKeepTheirMemoryToo(Form form) {
    Device gpu = TestDevice.gpu();
    gpu.synchronize();
    long before = gpu.liveBytes();
    Tensor ours = Tensor.randn(gpu, 5, DType.BF16, Shape.of(1, 64, 2, 64));
    float[] values = ours.toFloatArray();
    MemorySegment managed = form.export(ours);
    ours.close();
    try (Tensor theirs = form.take(managed);
        Tensor noise = Tensor.full(gpu, 9, DType.BF16, Shape.of(1, 64, 2, 64))) {
      noise.fill(8);
      assertThat(theirs.device()).isEqualTo(gpu);
      assertThat(theirs.toFloatArray()).isEqualTo(values);
      try (Tensor out = FlashAttention.flash(theirs, theirs, theirs)) {
        assertThat(out.toFloatArray()).doesNotContain(Float.NaN);
      }
    }
    await("freed", () -> gpu.liveBytes() == before);
  }

  @GpuTest
  @Test
  void deviceMemoryHasItsRules() {
    Device gpu = TestDevice.gpu();
    try (Tensor ours = Tensor.zeros(gpu, DType.BF16, Shape.of(64))) {
      MemorySegment odd = DLPack.export(ours.slice(0, 1, 33));
      assertThatThrownBy(() -> DLPack.take(odd))
          .isInstanceOf(InvalidArgumentException.class)
          .hasMessageContaining("16 bytes");
      assertThat(DLPack.consumers(ours)).isEqualTo(1);
      DLPack.release(odd);
      assertThat(DLPack.consumers(ours)).isZero();
    }
    try (Tensor pinned = Tensor.pinned(gpu, DType.FP32, Shape.of(8));
        Tensor theirs = DLPack.take(DLPack.export(pinned.fill(2)))) {
      assertThat(theirs.device()).isEqualTo(Device.cpu());
      assertThat(theirs.toFloatArray()).containsOnly(2);
    }
  }
}
