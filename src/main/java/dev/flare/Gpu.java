package dev.flare;

import dev.flare.internal.CudaApi;
import dev.flare.internal.HostMemory;
import java.util.List;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.locks.LockSupport;
import org.jspecify.annotations.Nullable;

/**
 * A GPU in use: its primary context, a memory pool, the default stream, and the driver's calls with
 * their statuses checked.
 *
 * <p>Opened when something first needs it and never closed: at the end of the process the driver
 * takes everything back. Thread-safe.
 */
final class Gpu {
  private static final int LIVE_SITES = 5;

  /** How long a virtual thread sleeps between looks at a stream. */
  private static final long POLL_NANOS = 20_000;

  final CudaApi api;
  private final Device device;
  private final long context;
  private final long pool;
  private final Stream stream;

  /** Memory that several streams have used is freed here, once all of them have passed. */
  private final Stream reclaim;

  /** Orders one stream after another; guarded by itself. */
  private final Fence fence;

  private final Set<Integer> peers =
      ConcurrentHashMap.newKeySet(); // that the pool has been opened to
  private final Staging staging = new Staging(this);
  private volatile @Nullable String lost;

  private record Fence(long event) {}

  private Gpu(Device device, CudaApi api) {
    this.device = device;
    this.api = api;
    check(api.deviceGet(device.index()), "cuDeviceGet");
    int handle = (int) api.out();
    check(api.primaryContextRetain(handle), "cuDevicePrimaryCtxRetain");
    context = api.out();
    try {
      enter();
      check(api.poolCreate(device.index()), "cuMemPoolCreate");
      pool = api.out();
      // The pool keeps what is freed until trim(): giving it back at every synchronisation would
      // make the next allocations slow.
      check(
          api.poolSet(pool, CudaApi.POOL_RELEASE_THRESHOLD, Long.MAX_VALUE),
          "cuMemPoolSetAttribute");
      stream = Stream.ofDevice(device, this, createStream());
      reclaim = Stream.ofDevice(device, this, createStream());
      check(api.eventCreate(CudaApi.EVENT_DISABLE_TIMING), "cuEventCreate");
      fence = new Fence(api.out());
    } catch (RuntimeException | Error e) {
      api.primaryContextRelease(handle);
      throw e;
    }
  }

  static Gpu open(Device device, CudaApi api) {
    return new Gpu(device, api);
  }

  Device device() {
    return device;
  }

  /** The stream of calls that name none. */
  Stream stream() {
    return stream;
  }

  long context() {
    return context;
  }

  // ---- calls ----------------------------------------------------------------------------------

  /**
   * Makes the context current; comes before each call that needs one.
   *
   * <p>The driver's own thread-local is asked every time, some 20 ns: one in Java would be wrong
   * for virtual threads, which move between carriers, and where other code changes the context.
   *
   * @throws DeviceException if the GPU is lost
   */
  void enter() {
    requireAlive();
    if (api.contextGetCurrent() != CudaApi.SUCCESS || api.out() != context) {
      check(api.contextSetCurrent(context), "cuCtxSetCurrent");
    }
  }

  void requireAlive() {
    String reason = lost;
    if (reason != null) {
      throw new DeviceException(reason);
    }
  }

  boolean isLost() {
    return lost != null;
  }

  /** From now on every use of the GPU fails with the same reason. */
  void lose(String reason) {
    if (lost == null) {
      lost =
          device
              + " is lost: "
              + reason
              + ". An earlier kernel or the GPU itself failed; nothing on it can be used any more."
              + " Restart the process";
    }
  }

  void check(int status, String call) {
    if (status != CudaApi.SUCCESS) {
      throw failure(status, call);
    }
  }

  DeviceException failure(int status, String call) {
    String text =
        call
            + " on "
            + device
            + " failed with "
            + api.errorName(status)
            + " ("
            + status
            + "): "
            + api.errorText(status);
    if (isSticky(status)) {
      lose(text);
      return new DeviceException(String.valueOf(lost));
    }
    return new DeviceException(text);
  }

  /** Statuses after which the context answers every call with an error. */
  private static boolean isSticky(int status) {
    return switch (status) {
      case 214, // ECC_UNCORRECTABLE
          220, // NVLINK_UNCORRECTABLE
          221, // CONTAINED
          700, // ILLEGAL_ADDRESS
          702, // LAUNCH_TIMEOUT
          709, // CONTEXT_IS_DESTROYED
          710, // ASSERT
          714, // HARDWARE_STACK_ERROR
          715, // ILLEGAL_INSTRUCTION
          716, // MISALIGNED_ADDRESS
          717, // INVALID_ADDRESS_SPACE
          718, // INVALID_PC
          719, // LAUNCH_FAILED
          CudaApi.ERROR_DEINITIALIZED ->
          true;
      default -> false;
    };
  }

  // ---- streams --------------------------------------------------------------------------------

  long createStream() {
    enter();
    check(api.streamCreate(CudaApi.STREAM_NON_BLOCKING), "cuStreamCreate");
    return api.out();
  }

  /** Work queued on {@code second} from now on runs after all that is queued on {@code first}. */
  void order(Stream first, Stream second) {
    if (first == second) {
      return;
    }
    if (!first.tryBegin()) {
      first.awaitClosed(); // then it has nothing left to wait for
      return;
    }
    try {
      if (first.isCapturing()) {
        throw new InUseException(
            "a graph is being captured on " + first + ": nothing outside can wait for it");
      }
      synchronized (fence) {
        enter();
        check(api.eventRecord(fence.event, first.handle()), "cuEventRecord");
        check(api.streamWaitEvent(second.handle(), fence.event), "cuStreamWaitEvent");
      }
    } finally {
      first.end();
    }
  }

  /** Waits for a stream; a virtual thread leaves its carrier meanwhile. */
  void awaitStream(long handle) {
    enter();
    if (Thread.currentThread().isVirtual()) {
      int status = api.streamQuery(handle);
      while (status == CudaApi.ERROR_NOT_READY) {
        LockSupport.parkNanos(POLL_NANOS);
        enter();
        status = api.streamQuery(handle);
      }
      check(status, "cuStreamQuery");
    } else {
      check(api.streamSynchronize(handle), "cuStreamSynchronize");
    }
  }

  /** The same for an event. */
  void awaitEvent(long handle) {
    enter();
    if (Thread.currentThread().isVirtual()) {
      int status = api.eventQuery(handle);
      while (status == CudaApi.ERROR_NOT_READY) {
        LockSupport.parkNanos(POLL_NANOS);
        enter();
        status = api.eventQuery(handle);
      }
      check(status, "cuEventQuery");
    } else {
      check(api.eventSynchronize(handle), "cuEventSynchronize");
    }
  }

  void synchronize() {
    Capture.refuse("synchronize");
    enter();
    check(api.contextSynchronize(), "cuCtxSynchronize");
  }

  // ---- memory ---------------------------------------------------------------------------------

  /**
   * Allocates memory that work on {@code on}, and what is ordered after it, may use.
   *
   * @throws OutOfMemoryException telling asked, free and held bytes
   */
  GpuMemory allocate(String what, long bytes, Stream on) {
    Capture.refuse("allocating memory on " + device);
    long size = Math.max(bytes, 1); // the driver has no empty allocations
    on.begin();
    try {
      enter();
      int status = api.allocateAsync(size, pool, on.handle());
      if (status == CudaApi.ERROR_OUT_OF_MEMORY) {
        // What waits to be freed, and what the pool holds back, may be enough.
        awaitStream(reclaim.handle());
        awaitStream(on.handle());
        trimPool();
        status = api.allocateAsync(size, pool, on.handle());
      }
      if (status == CudaApi.ERROR_OUT_OF_MEMORY) {
        throw outOfMemory(what, bytes);
      }
      check(status, "cuMemAllocFromPoolAsync");
      return GpuMemory.pooled(this, api.out(), bytes, on);
    } finally {
      on.end();
    }
  }

  private OutOfMemoryException outOfMemory(String what, long bytes) {
    Device.Memory memory = memory();
    StringBuilder text = new StringBuilder();
    text.append(what)
        .append(": ")
        .append(bytes)
        .append(" bytes of memory on ")
        .append(device)
        .append(" could not be had; free are ")
        .append(memory.freeBytes())
        .append(" of ")
        .append(memory.totalBytes())
        .append(", flare holds ")
        .append(device.liveBytes());
    List<String> sites = device.liveSites();
    if (sites.isEmpty()) {
      text.append("; -Dflare.track=true tells who");
    } else {
      text.append(":");
      sites.stream().limit(LIVE_SITES).forEach(site -> text.append("\n  ").append(site));
    }
    return new OutOfMemoryException(text.toString());
  }

  /** Allocates host memory that copies reach without staging. */
  GpuMemory allocatePinned(String what, long bytes) {
    Capture.refuse("allocating pinned memory");
    enter();
    int status = api.hostAllocate(Math.max(bytes, 1), CudaApi.MEMHOSTALLOC_PORTABLE);
    if (status == CudaApi.ERROR_OUT_OF_MEMORY) {
      throw new OutOfMemoryException(
          what
              + ": "
              + bytes
              + " bytes of pinned host memory could not be had; flare holds "
              + Device.cpu().liveBytes()
              + " of host memory, free are "
              + Device.cpu().memory().freeBytes());
    }
    check(status, "cuMemHostAlloc");
    return GpuMemory.pinned(this, HostMemory.at(api.out(), bytes));
  }

  /**
   * Takes memory that somebody else allocated on this GPU.
   *
   * @throws InvalidArgumentException if the driver does not know it as this GPU's, or as too small
   */
  GpuMemory borrow(long pointer, long bytes, @Nullable Runnable release) {
    enter();
    if (bytes > 0) {
      long type = attribute(CudaApi.POINTER_MEMORY_TYPE, pointer);
      if (type != CudaApi.MEMORY_TYPE_DEVICE) {
        throw new InvalidArgumentException(
            "pointer", "an address that is no device memory", "device memory of " + device);
      }
      long owner = attribute(CudaApi.POINTER_DEVICE_ORDINAL, pointer);
      if (owner != device.index()) {
        throw new InvalidArgumentException(
            "pointer", "memory of cuda:" + owner, "memory of " + device);
      }
      long start = attribute(CudaApi.POINTER_RANGE_START, pointer);
      long size = attribute(CudaApi.POINTER_RANGE_SIZE, pointer);
      if (start >= 0 && size >= 0 && bytes > start + size - pointer) {
        throw new InvalidArgumentException(
            "pointer",
            (start + size - pointer) + " bytes up to the end of its allocation",
            "at least " + bytes);
      }
    }
    return GpuMemory.foreign(this, pointer, bytes, release);
  }

  /** Whether the driver knows an address as pinned host memory, somebody else's too. */
  boolean isPinned(long pointer) {
    return attribute(CudaApi.POINTER_MEMORY_TYPE, pointer) == CudaApi.MEMORY_TYPE_HOST;
  }

  Staging staging() {
    return staging;
  }

  /** An attribute of a pointer; -1 if the driver does not tell. */
  private long attribute(int attribute, long pointer) {
    int status = api.pointerAttribute(attribute, pointer);
    if (status == CudaApi.ERROR_INVALID_VALUE) {
      return -1;
    }
    check(status, "cuPointerGetAttribute");
    return api.out();
  }

  /** Frees pooled memory after all that {@code users} have queued, without waiting for it. */
  void free(long address, List<Stream> users) {
    Stream on = reclaim;
    if (users.isEmpty()) {
      on = stream;
    } else if (users.size() == 1 && users.getFirst().gpu() == this) {
      on = users.getFirst();
    } else {
      for (Stream user : users) {
        user.gpu().order(user, reclaim);
      }
    }
    on.begin();
    try {
      enter();
      check(api.freeAsync(address, on.handle()), "cuMemFreeAsync");
    } finally {
      on.end();
    }
  }

  /**
   * Lets another GPU reach the pool, so that copies between the two need not go through the host.
   * Where that can't be, they do.
   */
  void openTo(Gpu peer) {
    int ordinal = peer.device.index();
    if (peers.add(ordinal) && device.canAccess(peer.device)) {
      enter();
      api.poolOpenTo(pool, ordinal);
    }
  }

  Device.Memory memory() {
    enter();
    check(api.memoryInfo(), "cuMemGetInfo");
    return new Device.Memory(api.out(), api.out2());
  }

  /** Gives memory that is held for later back to the driver. */
  void trim() {
    enter();
    staging.trim();
    trimPool();
  }

  private void trimPool() {
    check(api.poolTrim(pool, 0), "cuMemPoolTrimTo");
  }

  Device.Pool pool() {
    enter();
    return new Device.Pool(
        poolGet(CudaApi.POOL_USED_CURRENT),
        poolGet(CudaApi.POOL_USED_HIGH),
        poolGet(CudaApi.POOL_RESERVED_CURRENT),
        poolGet(CudaApi.POOL_RESERVED_HIGH));
  }

  private long poolGet(int attribute) {
    check(api.poolGet(pool, attribute), "cuMemPoolGetAttribute");
    return api.out();
  }

  /** Where memory of this GPU counts. */
  int space() {
    return device.index();
  }
}
