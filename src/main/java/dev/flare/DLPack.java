package dev.flare;

import dev.flare.internal.Allocation;
import dev.flare.internal.DlpackTensor;
import dev.flare.internal.HostMemory;
import dev.flare.internal.Kernels;
import dev.flare.internal.Struct;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import org.jspecify.annotations.Nullable;

/**
 * Exchange of tensors with other libraries of the process, without a copy, by <a
 * href="https://dmlc.github.io/dlpack/latest/">DLPack</a>: PyTorch, JAX, CuPy, ONNX Runtime and
 * others take and give such tensors.
 *
 * <pre>{@code
 * MemorySegment managed = DLPack.export(tensor);   // a DLManagedTensorVersioned*
 * consumer.take(managed);                          // calls its deleter when done, from any thread
 * tensor.close();                                  // the memory stays until then
 *
 * try (Tensor theirs = DLPack.take(producer.give())) {
 *   ...                                            // close() calls the producer's deleter
 * }
 * }</pre>
 *
 * <p><b>Ownership.</b> An exported tensor keeps its memory until every consumer has called its
 * deleter, also when the tensor is closed before: closing then ends its use in Java, and the memory
 * is freed a few milliseconds after the last deleter. The deleter is a C function and never calls
 * Java. Memory that is borrowed ({@link Tensor#of(MemorySegment, DType, long...)}) is its lender's
 * affair: he must wait for the consumers ({@link #consumers}). An imported tensor owns the
 * producer's tensor: closing calls its deleter, once, after all work that flare has queued with it.
 *
 * <p><b>Order of work on a GPU.</b> DLPack has no streams. What flare has queued that writes an
 * exported tensor must be done, or the consumer's stream must wait for it: {@code
 * Stream.foreign(device, theirs).waitFor(ours)}; for an imported tensor the other way round. A
 * consumer calls its deleter when its own work is done or ordered before flare's.
 *
 * <p><b>Threads.</b> Any thread may call these methods.
 */
public final class DLPack {
  private DLPack() {}

  /**
   * Gives a tensor to a consumer that takes DLPack 1.x.
   *
   * @param tensor any tensor of at most 8 dimensions, views included
   * @return the address of a {@code DLManagedTensorVersioned}, which the consumer ends by its
   *     deleter; {@link #release} does it for one that nobody took
   * @throws ClosedException if the tensor is closed
   * @throws UnsupportedException if it has more dimensions than 8
   * @throws NativeLibraryException if the C library is not usable here
   */
  public static MemorySegment export(Tensor tensor) {
    return export(tensor, Kernels.DLPACK_VERSIONED);
  }

  /**
   * Gives a tensor to a consumer that takes the form before DLPack 1.0.
   *
   * @param tensor any tensor of at most 8 dimensions that may be written to
   * @return the address of a {@code DLManagedTensor}, which the consumer ends by its deleter;
   *     {@link #releaseLegacy} does it for one that nobody took
   * @throws ClosedException if the tensor is closed
   * @throws UnsupportedException if it has more dimensions than 8, or is read-only, which this form
   *     can't tell
   * @throws NativeLibraryException if the C library is not usable here
   */
  public static MemorySegment exportLegacy(Tensor tensor) {
    return export(tensor, Kernels.DLPACK_LEGACY);
  }

  /**
   * Takes a tensor of another library, as a view of its memory.
   *
   * <p>If this throws, nothing was taken: the producer's tensor still is the caller's, who ends it
   * by {@link #release} or another consumer.
   *
   * @param managed the address of a {@code DLManagedTensorVersioned} of version 1.x
   * @return a tensor whose {@code close()} calls the producer's deleter; read-only if the producer
   *     says so
   * @throws InvalidArgumentException if it makes no sense: data that is not aligned to its element
   *     (on a GPU to 16 bytes), negative strides, memory that is not the GPU's
   * @throws UnsupportedException if flare has no such dtype or device, or knows no such version; or
   *     if it is a GPU's and read-only
   * @throws DeviceException if its GPU is not usable here
   * @throws NativeLibraryException if the C library is not usable here
   */
  public static Tensor take(MemorySegment managed) {
    return take(managed, Kernels.DLPACK_VERSIONED);
  }

  /**
   * Takes a tensor of another library in the form before DLPack 1.0, as {@link #take} does.
   *
   * @param managed the address of a {@code DLManagedTensor}
   * @return a tensor whose {@code close()} calls the producer's deleter
   * @throws InvalidArgumentException as {@link #take}
   * @throws UnsupportedException as {@link #take}
   * @throws DeviceException if its GPU is not usable here
   * @throws NativeLibraryException if the C library is not usable here
   */
  public static Tensor takeLegacy(MemorySegment managed) {
    return take(managed, Kernels.DLPACK_LEGACY);
  }

  /**
   * Calls the deleter of a {@code DLManagedTensorVersioned} that nobody has taken.
   *
   * @param managed its address; not to be used any more
   * @throws NativeLibraryException if the C library is not usable here
   */
  public static void release(MemorySegment managed) {
    release(managed, Kernels.DLPACK_VERSIONED);
  }

  /**
   * Calls the deleter of a {@code DLManagedTensor} that nobody has taken.
   *
   * @param managed its address; not to be used any more
   * @throws NativeLibraryException if the C library is not usable here
   */
  public static void releaseLegacy(MemorySegment managed) {
    release(managed, Kernels.DLPACK_LEGACY);
  }

  /**
   * Tells how many consumers hold the memory of a tensor, views of it included.
   *
   * @param tensor open or closed
   * @return exports whose deleter has not been called
   */
  public static long consumers(Tensor tensor) {
    return tensor.memory().consumers();
  }

  private static MemorySegment export(Tensor tensor, int kind) {
    Flare.require();
    tensor.acquire("tensor");
    try (Arena arena = Arena.ofConfined()) {
      Device device = tensor.device();
      Struct struct = DlpackTensor.allocate(arena);
      int flags = tensor.isReadOnly() ? Kernels.DLPACK_READ_ONLY : 0;
      flags |= tensor.isPinned() ? Kernels.DLPACK_HOST_PINNED : 0;
      struct
          .set(DlpackTensor.FLAGS, flags)
          .set(DlpackTensor.DEVICE, device.index())
          .set(DlpackTensor.DTYPE, tensor.dtype().code())
          .set(DlpackTensor.RANK, tensor.rank())
          .set(DlpackTensor.DATA, tensor.address());
      if (tensor.rank() <= Kernels.DLPACK_MAX_RANK) {
        for (int i = 0; i < tensor.rank(); i++) {
          struct
              .set(DlpackTensor.SHAPE, i, tensor.dim(i))
              .set(DlpackTensor.STRIDE, i, tensor.layout().stride(i));
        }
      }
      GpuMemory onGpu = tensor.onGpu();
      long holds = tensor.memory().lend(onGpu == null ? () -> {} : onGpu.gpu.device()::synchronize);
      int status = Kernels.dlpackExport(struct.segment(), kind, holds);
      if (status != 0) {
        throw Failures.of("DLPack export", status);
      }
      return Kernels.dlpackExported();
    } finally {
      tensor.release();
    }
  }

  private static Tensor take(MemorySegment managed, int kind) {
    Flare.require();
    try (Arena arena = Arena.ofConfined()) {
      Struct struct = DlpackTensor.allocate(arena);
      int status = Kernels.dlpackImport(managed, kind, struct.segment());
      if (status != 0) {
        throw Failures.of("DLPack import", status);
      }
      int rank = struct.get(DlpackTensor.RANK);
      long[] dims = new long[rank];
      long[] strides = new long[rank];
      for (int i = 0; i < rank; i++) {
        dims[i] = struct.get(DlpackTensor.SHAPE, i);
        strides[i] = struct.get(DlpackTensor.STRIDE, i);
      }
      Shape shape = Shape.of(dims);
      DType dtype = DType.of(struct.get(DlpackTensor.DTYPE));
      Layout layout = Layout.strided(dtype, shape, nonNegative(shape, strides));
      boolean readOnly = (struct.get(DlpackTensor.FLAGS) & Kernels.DLPACK_READ_ONLY) != 0;
      Runnable release = () -> Kernels.dlpackRelease(managed, kind);
      int device = struct.get(DlpackTensor.DEVICE);
      long data = struct.get(DlpackTensor.DATA);
      if (device == Device.cpu().index()) {
        return Tensor.lent(onHost(data, layout, readOnly, release), layout);
      }
      if (readOnly) {
        throw new UnsupportedException(
            "DLPack import: the producer's tensor is read-only, which flare can't keep up on a GPU;"
                + " ask it for a copy");
      }
      return Tensor.foreign(Device.cuda(device), data, release, dtype, shape, layout.strides());
    }
  }

  /**
   * Where there is at most one element along an axis, its stride says nothing and may be anything.
   */
  private static long[] nonNegative(Shape shape, long[] strides) {
    for (int i = 0; i < strides.length; i++) {
      if (shape.at(i) <= 1 || shape.elements() == 0) {
        strides[i] = Math.max(0, strides[i]);
      }
    }
    return strides;
  }

  private static Allocation onHost(
      long address, Layout layout, boolean readOnly, Runnable release) {
    HostMemory.Pinned memory = HostMemory.at(address, layout.extentBytes());
    MemorySegment segment = memory.segment();
    return Allocation.lent(
        readOnly ? segment.asReadOnly() : segment,
        () -> {
          if (!memory.close()) {
            return false;
          }
          release.run();
          return true;
        });
  }

  private static void release(@Nullable MemorySegment managed, int kind) {
    Flare.require();
    int status = Kernels.dlpackRelease(managed == null ? MemorySegment.NULL : managed, kind);
    if (status != 0) {
      throw Failures.of("DLPack release", status);
    }
  }
}
