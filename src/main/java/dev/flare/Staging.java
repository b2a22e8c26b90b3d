package dev.flare;

import dev.flare.internal.CudaApi;
import dev.flare.internal.HostMemory;
import java.lang.foreign.MemorySegment;
import java.util.concurrent.locks.ReentrantLock;
import java.util.stream.LongStream;
import org.jspecify.annotations.Nullable;

/**
 * Pinned buffers through which large copies of pageable host memory go in pieces: all cores move
 * one piece, page faults of mapped files included, while the GPU moves another.
 *
 * <p>The driver does the same with one core. One copy at a time; thread-safe.
 */
final class Staging {
  /** Fewer bytes are left to the driver. */
  static final long WORTH_IT = 4L << 20;

  private static final long PIECE = 8L << 20;
  private static final int BUFFERS = 4;

  /** What a core copies at a time. */
  private static final long GRAIN = 512L << 10;

  private final Gpu gpu;
  private final ReentrantLock lock =
      new ReentrantLock(); // held while waiting, also by virtual threads
  private final @Nullable Buffer[] buffers = new @Nullable Buffer[BUFFERS];

  private record Buffer(HostMemory.Pinned memory, long event) {
    MemorySegment segment() {
      return memory.segment();
    }
  }

  Staging(Gpu gpu) {
    this.gpu = gpu;
  }

  /** Queues a copy; {@code from} has been read when the call returns. */
  void toDevice(long to, MemorySegment from, Stream stream) {
    lock.lock();
    try {
      long bytes = from.byteSize();
      for (long at = 0; at < bytes; at += PIECE) {
        Buffer buffer = buffer(at);
        long n = Math.min(PIECE, bytes - at);
        gpu.awaitEvent(buffer.event);
        copy(from.asSlice(at, n), buffer.segment());
        gpu.enter();
        gpu.check(
            gpu.api.copyHostToDevice(to + at, buffer.segment().address(), n, stream.handle()),
            "cuMemcpyHtoDAsync");
        gpu.check(gpu.api.eventRecord(buffer.event, stream.handle()), "cuEventRecord");
      }
    } finally {
      lock.unlock();
    }
  }

  /** Copies after what is queued on the stream; {@code to} is written when the call returns. */
  void toHost(MemorySegment to, long from, Stream stream) {
    lock.lock();
    try {
      long bytes = to.byteSize();
      long queued = 0;
      for (long at = 0; at < bytes; at += PIECE) {
        // As many pieces under way as there are buffers.
        for (; queued < bytes && queued < at + BUFFERS * PIECE; queued += PIECE) {
          Buffer buffer = buffer(queued);
          long n = Math.min(PIECE, bytes - queued);
          gpu.enter();
          if (queued < BUFFERS * PIECE) {
            gpu.awaitEvent(buffer.event); // an earlier copy may still read it
          }
          gpu.check(
              gpu.api.copyDeviceToHost(
                  buffer.segment().address(), from + queued, n, stream.handle()),
              "cuMemcpyDtoHAsync");
          gpu.check(gpu.api.eventRecord(buffer.event, stream.handle()), "cuEventRecord");
        }
        Buffer buffer = buffer(at);
        gpu.awaitEvent(buffer.event);
        long n = Math.min(PIECE, bytes - at);
        copy(buffer.segment().asSlice(0, n), to.asSlice(at, n));
      }
    } finally {
      lock.unlock();
    }
  }

  private Buffer buffer(long at) {
    int i = (int) (at / PIECE % BUFFERS);
    Buffer buffer = buffers[i];
    if (buffer == null) {
      buffer = open();
      buffers[i] = buffer;
    }
    return buffer;
  }

  private Buffer open() {
    gpu.enter();
    gpu.check(gpu.api.eventCreate(CudaApi.EVENT_DISABLE_TIMING), "cuEventCreate");
    long event = gpu.api.out();
    int status = gpu.api.hostAllocate(PIECE, CudaApi.MEMHOSTALLOC_PORTABLE);
    if (status != CudaApi.SUCCESS) {
      gpu.api.eventDestroy(event);
      throw gpu.failure(status, "cuMemHostAlloc");
    }
    return new Buffer(HostMemory.at(gpu.api.out(), PIECE), event);
  }

  /** Gives the buffers back. */
  void trim() {
    lock.lock();
    try {
      for (int i = 0; i < BUFFERS; i++) {
        Buffer buffer = buffers[i];
        if (buffer != null) {
          gpu.awaitEvent(buffer.event);
          buffers[i] = null;
          long address = buffer.segment().address();
          buffer.memory.close();
          gpu.check(gpu.api.hostFree(address), "cuMemFreeHost");
          gpu.check(gpu.api.eventDestroy(buffer.event), "cuEventDestroy");
        }
      }
    } finally {
      lock.unlock();
    }
  }

  private static void copy(MemorySegment from, MemorySegment to) {
    long bytes = from.byteSize();
    LongStream grains = LongStream.range(0, (bytes + GRAIN - 1) / GRAIN);
    // Memory of a confined arena stays with its thread.
    boolean shared = Elements.isShared(from) && Elements.isShared(to);
    (shared ? grains.parallel() : grains)
        .forEach(
            grain -> {
              long at = grain * GRAIN;
              MemorySegment.copy(from, at, to, at, Math.min(GRAIN, bytes - at));
            });
  }
}
