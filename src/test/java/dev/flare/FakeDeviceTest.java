package dev.flare;

import static org.assertj.core.api.Assertions.assertThat;
import static org.assertj.core.api.Assertions.assertThatThrownBy;

import java.util.List;
import java.util.concurrent.atomic.AtomicReference;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.Test;

/**
 * The device layer over a driver made up: in which order it calls, and what it does when the driver
 * fails. Kernels run on the CPU.
 */
@RequiresLibrary
class FakeDeviceTest extends DeviceContract {
  private static final int ILLEGAL_ADDRESS = 700;
  private static final int LAUNCH_OUT_OF_RESOURCES = 701;

  private final FakeCuda cuda = new FakeCuda();
  private final Device gpu = Device.of(cuda, FakeCuda.ORDINAL);

  @Override
  Device gpu() {
    return gpu;
  }

  @Override
  void replayable(Tensor... outputs) {
    // Its graphs do nothing: the outputs are those of the capture.
  }

  @AfterEach
  void theDriverHasEverythingBack() {
    if (cuda.usedBytes() > 0) {
      gpu.trim();
    }
    assertThat(cuda.usedBytes()).isZero();
    // Of each device: the default stream, the one for frees, and the event that orders streams.
    assertThat(cuda.openHandles() % 3).isZero();
  }

  private List<String> logOf(Runnable work) {
    gpu.stream();
    cuda.log.clear();
    work.run();
    return List.copyOf(cuda.log);
  }

  private String name(Tensor tensor) {
    return cuda.name(tensor.devicePointer());
  }

  private String name(Stream stream) {
    return cuda.name(stream.handle());
  }

  /** Asks a GPU for more than there is, and prints what flare says; run by TrackingTest. */
  static final class Greedy {
    private Greedy() {}

    public static void main(String[] args) {
      FakeCuda cuda = new FakeCuda();
      cuda.capacity = 1000;
      Device gpu = Device.of(cuda, FakeCuda.ORDINAL);
      Tensor first = Tensor.empty(gpu, DType.UINT8, Shape.of(300));
      Tensor second = Tensor.empty(gpu, DType.UINT8, Shape.of(100));
      try {
        Tensor.empty(gpu, DType.FP32, Shape.of(300)).close();
      } catch (OutOfMemoryException e) {
        System.out.println(e.getMessage());
      }
      first.close();
      System.out.println(gpu.liveSites() + " " + second.isOpen());
    }
  }

  // ---- contexts -------------------------------------------------------------------------------

  @Test
  void theContextIsMadeCurrentWhereItIsNot() throws InterruptedException {
    try (Tensor t = Tensor.zeros(gpu, DType.FP32, Shape.of(4))) {
      assertThat(logOf(() -> t.fill(1))).doesNotContain("set context");
      cuda.forgetContext();
      assertThat(logOf(() -> t.fill(1)).getFirst()).isEqualTo("set context");
      AtomicReference<List<String>> elsewhere = new AtomicReference<>();
      Thread.ofVirtual().start(() -> elsewhere.set(logOf(() -> t.fill(2)))).join();
      assertThat(elsewhere.get().getFirst()).isEqualTo("set context");
      assertThat(t.toFloatArray()).containsOnly(2);
    }
  }

  @Test
  void openingThatFailsLeavesNothing() {
    Device broken = Device.of(cuda, 78);
    cuda.failNext("poolCreate", 801);
    assertThatThrownBy(broken::stream)
        .isInstanceOf(DeviceException.class)
        .hasMessage("cuMemPoolCreate on cuda:78 failed with CUDA_ERROR_801 (801): made up");
    assertThat(cuda.log).contains("release context");
    // The cause may go away.
    assertThat(broken.stream().isIdle()).isTrue();
    broken.memory();
  }

  // ---- freeing --------------------------------------------------------------------------------

  @Test
  void memoryOfOneStreamIsFreedThere() {
    try (Stream stream = Stream.create(gpu)) {
      Tensor t = Tensor.empty(stream, DType.FP32, Shape.of(4));
      t.fill(1, stream);
      String freed = "free " + name(t) + " on " + name(stream);
      assertThat(logOf(t::close)).containsExactly(freed);
    }
    Tensor t = Tensor.empty(gpu, DType.FP32, Shape.of(4));
    String freed = "free " + name(t) + " on " + name(gpu.stream());
    assertThat(logOf(t::close)).containsExactly(freed);
  }

  @Test
  void memoryOfSeveralStreamsIsFreedAfterAllOfThem() {
    try (Stream one = Stream.create(gpu);
        Stream two = Stream.create(gpu);
        Tensor other = Tensor.zeros(gpu, DType.FP32, Shape.of(4))) {
      Tensor t = Tensor.empty(one, DType.FP32, Shape.of(4));
      // The first use elsewhere comes after the making; later ones have no order of their own.
      List<String> first = logOf(() -> t.fill(1, two));
      assertThat(first)
          .containsSubsequence(
              "record e1 on " + name(one),
              name(two) + " waits for e1",
              "fill 4 of 4 on " + name(two));
      assertThat(logOf(() -> t.fill(2, two))).containsExactly("fill 4 of 4 on " + name(two));
      assertThat(logOf(() -> t.fill(3, one))).containsExactly("fill 4 of 4 on " + name(one));
      String memory = name(t);
      List<String> log = logOf(t::close);
      String reclaim = "s2";
      assertThat(log)
          .containsExactly(
              "record e1 on " + name(one),
              reclaim + " waits for e1",
              "record e1 on " + name(two),
              reclaim + " waits for e1",
              "free " + memory + " on " + reclaim);
      assertThat(other.toFloatArray()).containsOnly(0);
    }
  }

  @Test
  void closedStreamsHoldNothingUp() {
    Tensor t;
    try (Stream one = Stream.create(gpu);
        Stream two = Stream.create(gpu)) {
      t = Tensor.empty(one, DType.FP32, Shape.of(4));
      t.fill(1, two);
      String stream = name(two);
      assertThat(logOf(two::close)).containsExactly("synchronize " + stream, "destroy " + stream);
    }
    String freed = "free " + name(t) + " on " + name(gpu.stream());
    assertThat(logOf(t::close)).containsExactly(freed);
  }

  @Test
  void pinnedMemoryWaitsForItsCopies() {
    try (Stream stream = Stream.create(gpu);
        Tensor there = Tensor.empty(stream, DType.FP32, Shape.of(4))) {
      Tensor pinned = Tensor.pinned(gpu, DType.FP32, Shape.of(4));
      pinned.fill(1);
      there.copyFrom(pinned, stream);
      assertThat(logOf(pinned::close)).containsExactly("synchronize " + name(stream), "unpin h1");
    }
  }

  @Test
  void aWorkspaceIsNotUsedByTwoStreamsAtOnce() {
    try (Tensor q = Tensor.randn(gpu, 1, DType.BF16, Shape.of(1, 1, 8, 64));
        Tensor kv = Tensor.randn(gpu, 2, DType.BF16, Shape.of(1, 500, 1, 64));
        AttentionPlan plan = FlashAttention.causal().withSplits(4).plan(q, kv, kv);
        Tensor out = plan.emptyOutput();
        Stream one = Stream.create(gpu);
        Stream two = Stream.create(gpu)) {
      assertThat(plan.workspaceBytes()).isPositive();
      plan.launch(one, q, kv, kv, out, null);
      plan.launch(two, q, kv, kv, out, null);
      // Everything has been used on both by now: the workspace alone makes them wait.
      assertThat(logOf(() -> plan.launch(two, q, kv, kv, out, null))).isEmpty();
      assertThat(logOf(() -> plan.launch(one, q, kv, kv, out, null)))
          .containsExactly("record e1 on " + name(two), name(one) + " waits for e1");
    }
  }

  // ---- waiting --------------------------------------------------------------------------------

  @Test
  void virtualThreadsDoNotBlockTheirCarriers() throws InterruptedException {
    gpu.stream();
    cuda.log.clear();
    cuda.failNext("streamQuery", 600);
    cuda.failNext("streamQuery", 600);
    Thread.ofVirtual().start(() -> gpu.stream().synchronize()).join();
    assertThat(cuda.log).filteredOn(line -> line.startsWith("query")).hasSize(3);
    assertThat(cuda.log).noneMatch(line -> line.startsWith("synchronize"));
  }

  @Test
  void copiesToTheHostComeAfterAllStreams() {
    try (Stream one = Stream.create(gpu);
        Tensor t = Tensor.zeros(gpu, DType.FP32, Shape.of(4))) {
      t.fill(1, one);
      List<String> log = logOf(t::toFloatArray);
      assertThat(log)
          .containsExactly(
              "record e1 on " + name(one),
              name(gpu.stream()) + " waits for e1",
              "copy out 16 on " + name(gpu.stream()),
              "synchronize " + name(gpu.stream()));
    }
  }

  @Test
  void largeCopiesOfPageableMemoryGoThroughPinnedBuffers() {
    long bytes = (45L << 20) + 17;
    try (Tensor host = Tensor.empty(DType.UINT8, bytes);
        Tensor there = Tensor.empty(gpu, DType.UINT8, Shape.of(bytes));
        Tensor back = Tensor.zeros(DType.UINT8, bytes)) {
      for (long i = 0; i < bytes; i += 4093) {
        host.segment().set(java.lang.foreign.ValueLayout.JAVA_BYTE, i, (byte) (i * 31));
      }
      List<String> in = logOf(() -> there.copyFrom(host));
      assertThat(in).filteredOn(line -> line.startsWith("copy in")).hasSize(6);
      assertThat(in).filteredOn(line -> line.startsWith("pin")).hasSize(4);
      List<String> out = logOf(() -> back.copyFrom(there));
      assertThat(out).filteredOn(line -> line.startsWith("copy out")).hasSize(6);
      assertThat(out).filteredOn(line -> line.startsWith("pin")).isEmpty();
      assertThat(back.segment().mismatch(host.segment())).isEqualTo(-1);
      assertThat(logOf(gpu::trim)).filteredOn(line -> line.startsWith("unpin")).hasSize(4);
      // Memory that is pinned already needs none.
      try (Tensor pinned = Tensor.pinned(gpu, DType.UINT8, Shape.of(bytes))) {
        assertThat(logOf(() -> pinned.copyFrom(there)))
            .filteredOn(line -> line.startsWith("copy out"))
            .hasSize(1);
      }
    }
  }

  // ---- memory that is not there -----------------------------------------------------------------

  @Test
  void outOfMemoryTellsAskedFreeAndHeld() {
    cuda.capacity = 1000;
    try (Tensor held = Tensor.empty(gpu, DType.UINT8, Shape.of(300))) {
      List<String> log =
          logOf(
              () ->
                  assertThatThrownBy(() -> Tensor.empty(gpu, DType.FP32, Shape.of(200)))
                      .isInstanceOf(OutOfMemoryException.class)
                      .hasMessage(
                          "FP32 [200]: 800 bytes of memory on cuda:77 could not be had; free are 700"
                              + " of 1000, flare holds 300; -Dflare.track=true tells who"));
      assertThat(log).containsSubsequence("synchronize s2", "trim", "allocate 800 on s1");
      assertThat(gpu.liveBytes()).isEqualTo(300);
      assertThat(gpu.memory()).isEqualTo(new Device.Memory(700, 1000));
      assertThat(held.isOpen()).isTrue();
    }
    assertThatThrownBy(() -> Tensor.pinned(gpu, DType.UINT8, Shape.of(2000)))
        .isInstanceOf(OutOfMemoryException.class)
        .hasMessageContaining("2000 bytes of pinned host memory");
  }

  @Test
  void aPlanWithoutRoomForItsWorkspaceLeavesNothing() {
    try (Tensor q = Tensor.randn(gpu, 1, DType.BF16, Shape.of(1, 1, 8, 64));
        Tensor kv = Tensor.randn(gpu, 2, DType.BF16, Shape.of(1, 500, 1, 64))) {
      cuda.capacity = cuda.usedBytes();
      assertThatThrownBy(() -> FlashAttention.causal().withSplits(4).plan(q, kv, kv))
          .isInstanceOf(OutOfMemoryException.class)
          .hasMessageContaining("workspace");
    }
  }

  // ---- errors ---------------------------------------------------------------------------------

  @Test
  void aFaultLosesTheDevice() {
    Stream stream = Stream.create(gpu);
    Event event = Event.create(gpu);
    Tensor t = Tensor.zeros(gpu, DType.BF16, Shape.of(1, 4, 1, 64));
    Tensor pinned = Tensor.pinned(gpu, DType.FP32, Shape.of(4));
    AttentionPlan plan = FlashAttention.full().plan(t, t, t);
    Tensor out = plan.emptyOutput();
    Graph graph = Graph.capture(stream, () -> plan.launch(stream, t, t, t, out, null));
    cuda.failNext("streamSynchronize", ILLEGAL_ADDRESS);
    String lost =
        "cuda:77 is lost: cuStreamSynchronize on cuda:77 failed with CUDA_ERROR_700 (700): made up."
            + " An earlier kernel or the GPU itself failed; nothing on it can be used any more."
            + " Restart the process";
    List<Runnable> calls =
        List.of(
            stream::synchronize,
            () -> Tensor.empty(gpu, DType.FP32, Shape.of(1)),
            t::toFloatArray,
            () -> t.fill(1),
            () -> plan.launch(stream, t, t, t, out, null),
            () -> plan.launch(t, t, t, out),
            () -> graph.launch(stream),
            () -> event.record(stream),
            () -> Stream.create(gpu),
            () -> gpu.synchronize(),
            () -> gpu.memory(),
            () -> FlashAttention.full().run(t, t, t));
    for (Runnable call : calls) {
      assertThatThrownBy(call::run).isInstanceOf(DeviceException.class).hasMessage(lost);
    }
    assertThat(t.toString()).contains("is lost");
    // Closing is possible, and touches the driver no more.
    cuda.log.clear();
    for (AutoCloseable resource : List.of(graph, plan, out, t, event, stream)) {
      assertThatNoException(resource);
    }
    assertThat(cuda.log).isEmpty();
    assertThatNoException(pinned);
    assertThat(gpu.liveBytes()).isZero();
    cuda.forgetEverything();
  }

  private static void assertThatNoException(AutoCloseable resource) {
    org.assertj.core.api.Assertions.assertThatCode(resource::close).doesNotThrowAnyException();
  }

  @Test
  void otherFailuresDoNot() {
    try (Tensor t = Tensor.zeros(gpu, DType.FP32, Shape.of(4))) {
      cuda.failNext("fill", LAUNCH_OUT_OF_RESOURCES);
      assertThatThrownBy(() -> t.fill(1))
          .isInstanceOf(DeviceException.class)
          .hasMessage("cuMemsetAsync on cuda:77 failed with CUDA_ERROR_701 (701): made up");
      assertThat(t.fill(1).toFloatArray()).containsOnly(1);
    }
  }

  @Test
  void aFreeThatFailsLeavesTheTensorOpen() {
    Tensor t = Tensor.zeros(gpu, DType.FP32, Shape.of(4));
    cuda.failNext("freeAsync", 1);
    assertThatThrownBy(t::close).isInstanceOf(DeviceException.class);
    assertThat(t.isOpen()).isTrue();
    t.close();
  }

  @Test
  void constructorsThatFailFreeWhatTheyTook() {
    cuda.failNext("fill", 1);
    assertThatThrownBy(() -> Tensor.zeros(gpu, DType.FP32, Shape.of(4)))
        .isInstanceOf(DeviceException.class);
    cuda.failNext("copy", 1);
    try (Tensor host = Tensor.zeros(DType.FP32, 4)) {
      assertThatThrownBy(() -> host.to(gpu)).isInstanceOf(DeviceException.class);
    }
    assertThat(gpu.liveBytes()).isZero();
  }

  // ---- graphs ---------------------------------------------------------------------------------

  @Test
  void capturesThatFailLetGo() {
    try (Stream stream = Stream.create(gpu);
        Tensor t = Tensor.zeros(gpu, DType.FP32, Shape.of(4))) {
      for (String call : List.of("captureBegin", "captureEnd", "graphInstantiate")) {
        cuda.failNext(call, 1);
        assertThatThrownBy(() -> Graph.capture(stream, () -> t.fill(1, stream)))
            .as(call)
            .isInstanceOf(DeviceException.class);
        assertThat(t.fill(2).toFloatArray()).as(call).containsOnly(2);
        t.fill(3, stream);
        stream.synchronize();
      }
    }
  }

  @Test
  void updatesThatDifferAreBuiltAnew() {
    try (Stream stream = Stream.create(gpu);
        Tensor t = Tensor.zeros(gpu, DType.FP32, Shape.of(4));
        Graph graph = Graph.capture(stream, () -> t.fill(1, stream))) {
      assertThat(graph.update(stream, () -> t.fill(2, stream))).isTrue();
      cuda.graphsDiffer = true;
      List<String> log =
          logOf(() -> assertThat(graph.update(stream, () -> t.fill(3, stream))).isFalse());
      assertThat(log).containsSubsequence("instantiate g3", "destroy x1", "destroy g3");
      cuda.failNext("graphUpdate", 1);
      assertThatThrownBy(() -> graph.update(stream, () -> t.fill(4, stream)))
          .isInstanceOf(DeviceException.class);
      graph.launch(stream);
      assertThat(logOf(() -> graph.launch(stream))).containsExactly("launch x2 on " + name(stream));
    }
  }

  @Test
  void aReplayMakesTheStreamAUser() {
    try (Stream capture = Stream.create(gpu);
        Stream replay = Stream.create(gpu)) {
      Tensor t = Tensor.zeros(gpu, DType.FP32, Shape.of(4));
      try (Graph graph = Graph.capture(capture, () -> t.fill(1, capture))) {
        // What the tensor was made with comes first.
        assertThat(logOf(() -> graph.launch(replay)))
            .containsExactly(
                "record e1 on " + name(gpu.stream()),
                name(replay) + " waits for e1",
                "launch x1 on " + name(replay));
      }
      assertThat(logOf(t::close)).contains("record e1 on " + name(replay));
    }
  }

  // ---- two GPUs -------------------------------------------------------------------------------

  @Test
  void copiesBetweenGpus() {
    Device second = Device.of(cuda, 79);
    try (Tensor here = Tensor.randn(gpu, 1, DType.FP32, Shape.of(3, 5))) {
      try (Tensor there = here.to(second);
          Tensor back = there.to(gpu)) {
        assertThat(there.device()).isEqualTo(second).isNotEqualTo(gpu);
        // Without the host in between, both ways.
        assertThat(cuda.log)
            .contains("copy across 60 on " + name(second.stream()))
            .containsOnlyOnce("open pool1 to 79", "open pool2 to 77");
        assertThat(back.toFloatArray()).isEqualTo(here.toFloatArray());
        there.slice(1, 1, 3).copyFrom(here.slice(1, 2, 4));
        assertThat(there.get(2, 1)).isEqualTo(here.get(2, 2));
        assertThatThrownBy(() -> there.fill(1, gpu.stream()))
            .isInstanceOf(InvalidArgumentException.class)
            .hasMessageContaining("want a stream of cuda:79");
      }
      assertThat(gpu.canAccess(second)).isTrue();
    }
  }
}
