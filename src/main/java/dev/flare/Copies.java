package dev.flare;

import dev.flare.internal.CastParams;
import dev.flare.internal.FillParams;
import dev.flare.internal.Kernels.Operation;
import dev.flare.internal.Struct;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.ValueLayout;

/** Copies, casts and fills with a GPU on one side or both, queued on its streams. */
final class Copies {
  /** More calls of the driver than this for one copy are refused, or done in another way. */
  private static final long MAX_CALLS = 4096;

  /** Dimensions that the C library's casts and fills take. */
  private static final int MAX_RANK = 5;

  /** How much more than its elements is read of a tensor with gaps, at most. */
  private static final long MAX_GAPS = 4;

  private Copies() {}

  // ---- copies ---------------------------------------------------------------------------------

  /**
   * Queues a copy of elements.
   *
   * @param to same shape and dtype as {@code from}; an output
   * @param mayWait whether the call may wait for the stream, where the host has to take part
   */
  static void copy(Tensor to, Tensor from, Stream stream, boolean mayWait) {
    if (to.elements() == 0) {
      return;
    }
    StridedCopy plan = StridedCopy.of(to.layout(), from.layout());
    boolean onHost = to.device().isCpu() || from.device().isCpu();
    boolean peers = !onHost && !to.device().equals(from.device());
    long calls = peers ? plan.calls() * plan.rows() : plan.calls();
    if (calls <= MAX_CALLS) {
      queue(to, from, stream, plan);
    } else if (from.device().isCpu()) {
      copyThroughDenseSource(to, from, stream, calls);
    } else if (to.device().isCpu()) {
      copyThroughDenseTarget(to, from, stream, mayWait, calls);
    } else if (!peers && to.dtype().isFloating() && to.rank() <= MAX_RANK) {
      cast(to, from, stream);
    } else {
      throw scattered(to, from, calls);
    }
  }

  private static UnsupportedException scattered(Tensor to, Tensor from, long calls) {
    return new UnsupportedException(
        "copy from "
            + from.device()
            + " "
            + from.layout()
            + " to "
            + to.device()
            + " "
            + to.layout()
            + " would take "
            + calls
            + " copies of "
            + StridedCopy.of(to.layout(), from.layout()).width()
            + " bytes; make both sides dense with contiguous()");
  }

  /** Gathers on the host first. */
  private static void copyThroughDenseSource(Tensor to, Tensor from, Stream stream, long calls) {
    // A capture would read the gathered copy when it is long gone.
    if (from.isContiguous() || stream.isCapturing()) {
      throw scattered(to, from, calls);
    }
    try (Tensor dense = from.copy()) {
      copy(to, dense, stream, true); // the driver has read pageable memory when it returns
    }
  }

  /** Scatters on the host afterwards. */
  private static void copyThroughDenseTarget(
      Tensor to, Tensor from, Stream stream, boolean mayWait, long calls) {
    if (!mayWait) {
      throw scattered(to, from, calls);
    }
    if (!to.isContiguous()) {
      try (Tensor dense = Tensor.empty(Device.cpu(), to.dtype(), to.shape())) {
        copy(dense, from, stream, true);
        stream.synchronize();
        to.copyFrom(dense);
      }
      return;
    }
    if (from.layout().extentBytes() > MAX_GAPS * from.bytes()) {
      throw scattered(to, from, calls);
    }
    // All of it, gaps included, and then the elements.
    try (Tensor image = from.hostImage()) {
      queue(image.allOfIt(), from.allOfIt(), stream, blockOf(from.layout().extentBytes()));
      stream.synchronize();
      to.copyFrom(image);
    }
  }

  private static StridedCopy blockOf(long bytes) {
    Layout block = Layout.dense(DType.UINT8, Shape.of(bytes));
    return StridedCopy.of(block, block);
  }

  private static void queue(Tensor to, Tensor from, Stream stream, StridedCopy plan) {
    Gpu gpu = stream.gpu();
    stream.begin();
    try {
      from.acquire("source", stream);
      try {
        to.acquire("tensor", stream);
        try {
          gpu.enter();
          plan.forEachCall(
              to.address(), from.address(), (t, s) -> call(gpu, to, t, from, s, stream, plan));
          stream.captured();
        } finally {
          to.release();
        }
      } finally {
        from.release();
      }
    } finally {
      stream.end();
    }
  }

  private static void call(
      Gpu gpu, Tensor to, long target, Tensor from, long source, Stream stream, StridedCopy plan) {
    boolean toHost = to.device().isCpu();
    boolean fromHost = from.device().isCpu();
    long on = stream.handle();
    if (!toHost && !fromHost && !to.device().equals(from.device())) {
      Gpu toGpu = to.device().gpu();
      Gpu fromGpu = from.device().gpu();
      toGpu.openTo(fromGpu);
      fromGpu.openTo(toGpu);
      gpu.enter();
      for (long row = 0; row < plan.rows(); row++) {
        gpu.check(
            gpu.api.copyPeer(
                target + row * plan.targetPitch(),
                toGpu.context(),
                source + row * plan.sourcePitch(),
                fromGpu.context(),
                plan.width(),
                on),
            "cuMemcpyPeerAsync");
      }
    } else if (plan.rows() > 1) {
      gpu.check(
          gpu.api.copy2d(
              toHost,
              target,
              plan.targetPitch(),
              fromHost,
              source,
              plan.sourcePitch(),
              plan.width(),
              plan.rows(),
              on),
          "cuMemcpy2DAsync");
    } else if (fromHost && isStaged(gpu, from, stream, plan)) {
      gpu.staging().toDevice(target, hostBytes(from, source, plan.width()), stream);
    } else if (toHost && isStaged(gpu, to, stream, plan)) {
      gpu.staging().toHost(hostBytes(to, target, plan.width()), source, stream);
    } else if (fromHost) {
      gpu.check(gpu.api.copyHostToDevice(target, source, plan.width(), on), "cuMemcpyHtoDAsync");
    } else if (toHost) {
      gpu.check(gpu.api.copyDeviceToHost(target, source, plan.width(), on), "cuMemcpyDtoHAsync");
    } else {
      gpu.check(gpu.api.copyDeviceToDevice(target, source, plan.width(), on), "cuMemcpyDtoDAsync");
    }
  }

  /** Whether a piece of host memory is worth staging: large, and not pinned by anybody. */
  private static boolean isStaged(Gpu gpu, Tensor host, Stream stream, StridedCopy plan) {
    return plan.width() >= Staging.WORTH_IT
        && !stream.isCapturing()
        && !host.isPinned()
        && !gpu.isPinned(host.address());
  }

  private static MemorySegment hostBytes(Tensor host, long address, long bytes) {
    return host.memory().segment().asSlice(address - host.memory().address(), bytes);
  }

  // ---- cast and fill --------------------------------------------------------------------------

  /** Queues a conversion between floating-point tensors of one shape on one GPU. */
  static void cast(Tensor to, Tensor from, Stream stream) {
    requireRank("cast", to);
    try (Arena arena = Arena.ofConfined()) {
      Struct params =
          CastParams.allocate(arena)
              .set(CastParams.SRC_DTYPE, from.dtype().code())
              .set(CastParams.DST_DTYPE, to.dtype().code())
              .set(CastParams.RANK, to.rank());
      for (int i = 0; i < to.rank(); i++) {
        params
            .set(CastParams.SHAPE, i, to.layout().dim(i))
            .set(CastParams.SRC_STRIDE, i, from.layout().stride(i))
            .set(CastParams.DST_STRIDE, i, to.layout().stride(i));
      }
      Once.run(
          Operation.CAST,
          to.device(),
          stream,
          params,
          Once.argument("source", CastParams.SRC, from),
          Once.argument("tensor", CastParams.DST, to));
    }
  }

  /** Queues a fill of a tensor on a GPU. */
  static void fill(Tensor to, double value, Stream stream) {
    if (to.elements() == 0) {
      return;
    }
    long[] bits = new long[1];
    Elements.set(MemorySegment.ofArray(bits), to.dtype(), 0, value);
    int bytes = to.dtype().bytes();
    boolean halves = bytes == Long.BYTES && (int) bits[0] == (int) (bits[0] >>> Integer.SIZE);
    if (to.layout().isGapless() && (bytes <= Integer.BYTES || halves)) {
      long count = to.elements() * bytes / Math.min(bytes, Integer.BYTES);
      int pattern = MemorySegment.ofArray(bits).get(ValueLayout.JAVA_INT, 0);
      memset(to, Math.min(bytes, Integer.BYTES), pattern, count, stream);
      return;
    }
    requireRank("fill", to);
    try (Arena arena = Arena.ofConfined()) {
      Struct params =
          FillParams.allocate(arena)
              .set(FillParams.DTYPE, to.dtype().code())
              .set(FillParams.RANK, to.rank())
              .set(FillParams.VALUE, value);
      for (int i = 0; i < to.rank(); i++) {
        params
            .set(FillParams.SHAPE, i, to.layout().dim(i))
            .set(FillParams.DST_STRIDE, i, to.layout().stride(i));
      }
      Once.run(
          Operation.FILL, to.device(), stream, params, Once.argument("tensor", FillParams.DST, to));
    }
  }

  private static void memset(Tensor to, int bytes, int pattern, long count, Stream stream) {
    Gpu gpu = stream.gpu();
    stream.begin();
    try {
      to.acquire("tensor", stream);
      try {
        gpu.enter();
        gpu.check(
            gpu.api.fill(to.address(), bytes, pattern, count, stream.handle()), "cuMemsetAsync");
        stream.captured();
      } finally {
        to.release();
      }
    } finally {
      stream.end();
    }
  }

  private static void requireRank(String call, Tensor tensor) {
    if (tensor.rank() > MAX_RANK) {
      throw new UnsupportedException(
          call
              + ": "
              + tensor.rank()
              + " dimensions on "
              + tensor.device()
              + "; reshape() to at most "
              + MAX_RANK);
    }
  }
}
