package dev.flare;

import static java.lang.foreign.ValueLayout.JAVA_INT;
import static java.lang.foreign.ValueLayout.JAVA_LONG;

import dev.flare.internal.Allocation;
import dev.flare.internal.HostMemory;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.lang.foreign.MemorySegment;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.Objects;
import java.util.StringJoiner;
import org.jspecify.annotations.Nullable;

/**
 * An n-dimensional, strided array of numbers over memory outside the Java heap.
 *
 * <p><b>Ownership.</b> A tensor made by {@code empty}, {@code zeros}, {@code full}, {@code randn},
 * {@code of(float[]...)}, {@code map}, {@code copy} or returned by an operation owns its memory:
 * close it, best with try-with-resources. A tensor over a {@link MemorySegment} of yours borrows
 * it, and so does a view ({@link #transpose}, {@link #slice}, {@link #reshape} ...): a view ends
 * with the tensor it was made from, and closing a view does nothing, so that code need not know
 * which one it got.
 *
 * <p><b>Closing.</b> {@code close()} may be called again without effect. While a call on another
 * thread uses the memory it throws {@link InUseException} and frees nothing. Use after close throws
 * {@link ClosedException}. Nothing is freed by the garbage collector.
 *
 * <p><b>Threads.</b> Any thread may use or close a tensor; flare does not order accesses to the
 * elements. Memory borrowed from a confined arena stays with that arena's thread.
 *
 * <p>Strides are counted in elements and are never negative; one of 0 repeats an element ({@link
 * #expand}).
 */
public final class Tensor implements AutoCloseable {
  private static final int PREVIEW = 6;

  /** What CUDA kernels load at once. */
  private static final int GPU_ALIGNMENT = 16;

  private final Device device;
  private final Allocation memory;
  private final @Nullable GpuMemory onGpu; // memory that streams use: a GPU's, or pinned
  private final long offset; // bytes from the start of memory
  private final Layout layout;
  private final boolean view;

  private Tensor(
      Device device,
      Allocation memory,
      @Nullable GpuMemory onGpu,
      long offset,
      Layout layout,
      boolean view) {
    this.device = device;
    this.memory = memory;
    this.onGpu = onGpu;
    this.offset = offset;
    this.layout = layout;
    this.view = view;
  }

  /** A tensor over all of some host memory. */
  private static Tensor onHost(Allocation memory, Layout layout) {
    return new Tensor(Device.cpu(), memory, null, 0, layout, false);
  }

  /** A tensor over all of some memory of a GPU. */
  private static Tensor onGpu(Device device, GpuMemory memory, Layout layout) {
    return new Tensor(device, memory.allocation(), memory, 0, layout, false);
  }

  // ---- making ---------------------------------------------------------------------------------

  /**
   * Allocates a tensor whose elements are undefined.
   *
   * @param device where
   * @param dtype element type
   * @param shape extents
   * @return a dense tensor that the caller closes
   * @throws OutOfMemoryException if there is not that much memory
   */
  public static Tensor empty(Device device, DType dtype, Shape shape) {
    return allocate(device, dtype, shape, false);
  }

  /**
   * Allocates a tensor whose elements are undefined, for work on a stream: memory that has been
   * closed after use on the same stream is taken without waiting.
   *
   * @param stream where it is used first
   * @param dtype element type
   * @param shape extents
   * @return a dense tensor on the stream's device, that the caller closes
   * @throws OutOfMemoryException if there is not that much memory
   * @throws InUseException if this thread is capturing a graph
   */
  public static Tensor empty(Stream stream, DType dtype, Shape shape) {
    if (stream.device().isCpu()) {
      return empty(stream.device(), dtype, shape);
    }
    return allocate(stream, Layout.dense(dtype, shape));
  }

  /**
   * Allocates a tensor on the CPU whose elements are undefined.
   *
   * @param dtype element type
   * @param dims extents, outermost first
   * @return a dense tensor that the caller closes
   * @throws OutOfMemoryException if there is not that much memory
   */
  public static Tensor empty(DType dtype, long... dims) {
    return empty(Device.cpu(), dtype, Shape.of(dims));
  }

  /**
   * Allocates a tensor of zeros.
   *
   * @param device where
   * @param dtype element type
   * @param shape extents
   * @return a dense tensor that the caller closes
   * @throws OutOfMemoryException if there is not that much memory
   */
  public static Tensor zeros(Device device, DType dtype, Shape shape) {
    return allocate(device, dtype, shape, true);
  }

  /**
   * Allocates a tensor of zeros on the CPU.
   *
   * @param dtype element type
   * @param dims extents, outermost first
   * @return a dense tensor that the caller closes
   * @throws OutOfMemoryException if there is not that much memory
   */
  public static Tensor zeros(DType dtype, long... dims) {
    return zeros(Device.cpu(), dtype, Shape.of(dims));
  }

  /**
   * Allocates a tensor on the CPU with one value everywhere.
   *
   * @param value rounded to the dtype as by {@link #to(DType)}
   * @param dtype element type
   * @param dims extents, outermost first
   * @return a dense tensor that the caller closes
   * @throws OutOfMemoryException if there is not that much memory
   */
  public static Tensor full(double value, DType dtype, long... dims) {
    return full(Device.cpu(), value, dtype, Shape.of(dims));
  }

  /**
   * Allocates a tensor with one value everywhere.
   *
   * @param device where
   * @param value rounded to the dtype as by {@link #to(DType)}
   * @param dtype element type
   * @param shape extents
   * @return a dense tensor that the caller closes
   * @throws OutOfMemoryException if there is not that much memory
   */
  public static Tensor full(Device device, double value, DType dtype, Shape shape) {
    return filled(empty(device, dtype, shape), t -> t.fill(value));
  }

  /**
   * Allocates a tensor on the CPU with standard normal numbers (mean 0, variance 1).
   *
   * <p>Element i depends on the seed and on i alone, so that equal calls give equal tensors, and
   * the dtype only rounds.
   *
   * @param seed the same seed gives the same numbers
   * @param dtype a floating-point type
   * @param dims extents, outermost first
   * @return a dense tensor that the caller closes
   * @throws InvalidArgumentException if {@code dtype} is not a floating-point type
   * @throws OutOfMemoryException if there is not that much memory
   */
  public static Tensor randn(long seed, DType dtype, long... dims) {
    if (!dtype.isFloating()) {
      throw new InvalidArgumentException("dtype", dtype, "a floating-point type");
    }
    return filled(
        empty(dtype, dims),
        t ->
            Elements.forEachRun(
                t.layout,
                true,
                (ordinal, at, n) -> {
                  float[] run = new float[n];
                  for (int i = 0; i < n; i++) {
                    run[i] = Elements.normal(seed, ordinal + i);
                  }
                  Elements.write(t.memory.segment(), dtype, at, 1, run, 0, n);
                }));
  }

  /**
   * Allocates a tensor with standard normal numbers, the same on every device.
   *
   * @param device where
   * @param seed the same seed gives the same numbers
   * @param dtype a floating-point type
   * @param shape extents
   * @return a dense tensor that the caller closes
   * @throws InvalidArgumentException if {@code dtype} is not a floating-point type
   * @throws OutOfMemoryException if there is not that much memory
   */
  public static Tensor randn(Device device, long seed, DType dtype, Shape shape) {
    Tensor onHost = randn(seed, dtype, shape.dims());
    if (device.isCpu()) {
      return onHost;
    }
    try (onHost) {
      return onHost.to(device);
    }
  }

  /**
   * Allocates pinned host memory: copies between it and GPUs run at full speed, and beside the
   * thread that queued them.
   *
   * <p>It is a host tensor in every other way. Pinning takes milliseconds and takes memory from the
   * whole machine: keep and reuse such tensors. Closing waits for the copies that use it.
   *
   * @param gpu any GPU of this process
   * @param dtype element type
   * @param shape extents
   * @return a dense tensor on the CPU that the caller closes; its elements are undefined
   * @throws UnsupportedException if {@code gpu} is the CPU
   * @throws OutOfMemoryException if there is not that much memory to pin
   */
  public static Tensor pinned(Device gpu, DType dtype, Shape shape) {
    Layout layout = Layout.dense(dtype, shape);
    GpuMemory memory = gpu.gpu().allocatePinned(layout.toString(), layout.bytes());
    return onGpu(Device.cpu(), memory, layout);
  }

  /**
   * Makes a tensor over a GPU's memory of somebody else, without copying.
   *
   * <p>What its owner has queued on streams of its own must be done, or ordered before flare's by
   * {@link Stream#foreign} and events. Closing the tensor frees nothing.
   *
   * @param gpu where the memory is
   * @param pointer the first element's address, aligned to 16 bytes
   * @param release runs once when the tensor is closed, after waiting for all work that flare has
   *     queued on it; null to do nothing: then the owner waits before it frees the memory
   * @param dtype element type
   * @param shape extents
   * @param strides distance in elements between neighbours along each axis; none for dense
   * @return a tensor that borrows the memory
   * @throws InvalidArgumentException if the driver does not know such memory on that GPU, or if it
   *     is too small
   */
  public static Tensor foreign(
      Device gpu,
      long pointer,
      @Nullable Runnable release,
      DType dtype,
      Shape shape,
      long... strides) {
    Layout layout =
        strides.length == 0 ? Layout.dense(dtype, shape) : Layout.strided(dtype, shape, strides);
    if (pointer % GPU_ALIGNMENT != 0) {
      throw new InvalidArgumentException(
          "pointer", Long.toHexString(pointer), "one aligned to " + GPU_ALIGNMENT + " bytes");
    }
    return onGpu(gpu, gpu.gpu().borrow(pointer, layout.extentBytes(), release), layout);
  }

  /**
   * Copies numbers into a new tensor on the CPU.
   *
   * @param dtype element type; floats are rounded to it as by {@link #to(DType)}
   * @param values row-major; as many as the shape has elements
   * @param dims extents, outermost first; none means one dimension of all values
   * @return a dense tensor that the caller closes
   * @throws InvalidArgumentException if the number of values is not the shape's
   */
  public static Tensor of(DType dtype, float[] values, long... dims) {
    Shape shape = shapeOf(values.length, dims);
    return filled(
        empty(Device.cpu(), dtype, shape),
        t -> Elements.write(t.memory.segment(), dtype, 0, 1, values, 0, values.length));
  }

  /**
   * Copies numbers into a new FP32 tensor on the CPU.
   *
   * @param values row-major; as many as the shape has elements
   * @param dims extents, outermost first; none means one dimension of all values
   * @return a dense tensor that the caller closes
   * @throws InvalidArgumentException if the number of values is not the shape's
   */
  public static Tensor of(float[] values, long... dims) {
    return of(DType.FP32, values, dims);
  }

  /**
   * Copies numbers into a new INT32 tensor on the CPU: lengths, offsets, block tables, slots.
   *
   * @param values row-major; as many as the shape has elements
   * @param dims extents, outermost first; none means one dimension of all values
   * @return a dense tensor that the caller closes
   * @throws InvalidArgumentException if the number of values is not the shape's
   */
  public static Tensor of(int[] values, long... dims) {
    Shape shape = shapeOf(values.length, dims);
    return filled(
        empty(Device.cpu(), DType.INT32, shape),
        t -> MemorySegment.copy(values, 0, t.memory.segment(), JAVA_INT, 0, values.length));
  }

  /**
   * Copies numbers into a new INT64 tensor on the CPU.
   *
   * @param values row-major; as many as the shape has elements
   * @param dims extents, outermost first; none means one dimension of all values
   * @return a dense tensor that the caller closes
   * @throws InvalidArgumentException if the number of values is not the shape's
   */
  public static Tensor of(long[] values, long... dims) {
    Shape shape = shapeOf(values.length, dims);
    return filled(
        empty(Device.cpu(), DType.INT64, shape),
        t -> MemorySegment.copy(values, 0, t.memory.segment(), JAVA_LONG, 0, values.length));
  }

  /**
   * Makes a dense tensor over memory of yours, without copying.
   *
   * <p>The segment must outlive every use of the tensor; closing the tensor does not free it. A
   * read-only segment makes a tensor that can be an input only.
   *
   * @param segment native memory (not a Java array's), aligned to the element
   * @param dtype element type
   * @param dims extents, outermost first
   * @return a tensor that borrows the memory
   * @throws InvalidArgumentException if the segment is on the heap, misaligned or too small
   */
  public static Tensor of(MemorySegment segment, DType dtype, long... dims) {
    return borrow(segment, Layout.dense(dtype, Shape.of(dims)));
  }

  /**
   * Makes a strided tensor over memory of yours, without copying.
   *
   * <p>The segment must outlive every use of the tensor; closing the tensor does not free it. A
   * read-only segment makes a tensor that can be an input only.
   *
   * @param segment native memory (not a Java array's), aligned to the element
   * @param dtype element type
   * @param shape extents
   * @param strides distance in elements between neighbours along each axis, zero or more
   * @return a tensor that borrows the memory
   * @throws InvalidArgumentException if the segment is on the heap, misaligned or too small, or if
   *     the strides do not fit the shape
   */
  public static Tensor of(MemorySegment segment, DType dtype, Shape shape, long... strides) {
    return borrow(segment, Layout.strided(dtype, shape, strides));
  }

  /**
   * Maps a dense, little-endian tensor of a file into memory, read-only: pages are read when
   * touched.
   *
   * <p>The file must keep its length while the tensor is open; cutting it off ends the process with
   * a bus error, as with any mapping.
   *
   * @param file the file
   * @param byteOffset where the first element is; a multiple of the element's size
   * @param dtype element type
   * @param shape extents
   * @return a tensor that the caller closes, which unmaps it
   * @throws InvalidArgumentException if the offset is negative or not aligned to the element
   * @throws UncheckedIOException if the file cannot be read or is too short
   */
  public static Tensor map(Path file, long byteOffset, DType dtype, Shape shape) {
    if (byteOffset < 0 || byteOffset % dtype.bytes() != 0) {
      throw new InvalidArgumentException(
          "byteOffset", byteOffset, "a multiple of " + dtype.bytes() + ", zero or more");
    }
    Layout layout = Layout.dense(dtype, shape);
    try {
      return onHost(HostMemory.map(file, byteOffset, layout.bytes()), layout);
    } catch (IOException e) {
      throw new UncheckedIOException(e);
    }
  }

  private static Tensor allocate(Device device, DType dtype, Shape shape, boolean zeroed) {
    Layout layout = Layout.dense(dtype, shape);
    if (!device.isCpu()) {
      return filled(
          allocate(device.stream(), layout),
          t -> {
            if (zeroed) {
              t.fill(0);
            }
          });
    }
    Allocation memory = HostMemory.allocate(layout.bytes(), zeroed);
    if (memory == null) {
      throw new OutOfMemoryException(
          layout
              + ": "
              + layout.bytes()
              + " bytes of host memory could not be had; flare holds "
              + device.liveBytes()
              + ", free are "
              + device.memory().freeBytes());
    }
    return onHost(memory, layout);
  }

  /** Memory of a GPU, first used on {@code stream}. */
  private static Tensor allocate(Stream stream, Layout layout) {
    GpuMemory memory = stream.gpu().allocate(layout.toString(), layout.bytes(), stream);
    return onGpu(stream.device(), memory, layout);
  }

  private interface Fill {
    void accept(Tensor tensor);
  }

  /** Fills a new tensor; if that fails, it leaves nothing behind. */
  private static Tensor filled(Tensor tensor, Fill fill) {
    try {
      fill.accept(tensor);
      return tensor;
    } catch (RuntimeException | Error e) {
      tensor.close();
      throw e;
    }
  }

  private static Shape shapeOf(int length, long... dims) {
    Shape shape = dims.length == 0 ? Shape.of(length) : Shape.of(dims);
    if (shape.elements() != length) {
      throw new InvalidArgumentException(
          "values", length + " values", shape.elements() + " for shape " + shape);
    }
    return shape;
  }

  private static Tensor borrow(MemorySegment segment, Layout layout) {
    if (!segment.isNative()) {
      throw new InvalidArgumentException(
          "segment", "a Java array's memory", "native memory, or of(float[] ...), which copies");
    }
    if (segment.address() % layout.dtype().bytes() != 0) {
      throw new InvalidArgumentException(
          "segment",
          "an address that is not a multiple of " + layout.dtype().bytes(),
          "one aligned to " + layout.dtype() + " elements");
    }
    if (segment.byteSize() < layout.extentBytes()) {
      throw new InvalidArgumentException(
          "segment",
          segment.byteSize() + " bytes",
          "at least " + layout.extentBytes() + " for " + layout);
    }
    return onHost(Allocation.borrowed(segment), layout);
  }

  // ---- what it is -----------------------------------------------------------------------------

  /**
   * Returns where the memory is.
   *
   * @return the device
   */
  public Device device() {
    return device;
  }

  /**
   * Returns the element type.
   *
   * @return the dtype
   */
  public DType dtype() {
    return layout.dtype();
  }

  /**
   * Returns the extents.
   *
   * @return the shape
   */
  public Shape shape() {
    return layout.shape();
  }

  /**
   * Returns the number of dimensions.
   *
   * @return zero for a scalar
   */
  public int rank() {
    return layout.rank();
  }

  /**
   * Returns one extent.
   *
   * @param axis 0 is the outermost; negative values count from the end
   * @return elements along that axis
   * @throws InvalidArgumentException if there is no such axis
   */
  public long dim(int axis) {
    return layout.shape().dim(axis);
  }

  /**
   * Returns the strides.
   *
   * @return a new array: distance in elements between neighbours along each axis
   */
  public long[] strides() {
    return layout.strides();
  }

  /**
   * Returns the number of elements.
   *
   * @return the product of all extents
   */
  public long elements() {
    return layout.shape().elements();
  }

  /**
   * Returns the size of the elements, without gaps between them.
   *
   * @return bytes
   */
  public long bytes() {
    return layout.bytes();
  }

  /**
   * Tells whether the elements lie row-major without gaps.
   *
   * @return true for what {@code empty} makes
   */
  public boolean isContiguous() {
    return layout.isContiguous();
  }

  /**
   * Tells whether this tensor was made from another one and borrows its memory.
   *
   * @return true for what {@code slice} makes
   */
  public boolean isView() {
    return view;
  }

  /**
   * Tells whether the elements can be read only: a mapped file, or a read-only segment.
   *
   * @return true if this tensor can't be an output
   */
  public boolean isReadOnly() {
    return memory.isReadOnly();
  }

  /**
   * Tells whether this is pinned host memory.
   *
   * @return true for what {@link #pinned} makes
   */
  public boolean isPinned() {
    return device.isCpu() && onGpu != null;
  }

  /**
   * Tells whether the memory is still there.
   *
   * @return false once this tensor, or the one it is a view of, or a borrowed arena is closed
   */
  public boolean isOpen() {
    return memory.isOpen();
  }

  /**
   * Returns the memory from the first to past the last element, without copying.
   *
   * <p>It is valid while the tensor is open; a later access throws {@link IllegalStateException}.
   *
   * @return a segment of {@link #bytes()} bytes, more if there are gaps
   * @throws ClosedException if the tensor is closed
   * @throws UnsupportedException if the memory is a GPU's: Java can't reach it, copy it with {@code
   *     to(Device.cpu())}
   */
  public MemorySegment segment() {
    if (!memory.isOpen()) {
      throw closed();
    }
    if (!device.isCpu()) {
      throw new UnsupportedException(
          "segment: " + describe() + " is out of Java's reach; copy it with to(Device.cpu())");
    }
    return slice();
  }

  /**
   * Returns where a GPU has the first element, for other libraries. Java must not follow it.
   *
   * <p>flare does not know what others do with it: their work must be done, or ordered by events,
   * before the tensor is closed.
   *
   * @return a {@code CUdeviceptr}, valid while the tensor is open
   * @throws ClosedException if the tensor is closed
   * @throws UnsupportedException on the CPU; see {@link #segment}
   */
  public long devicePointer() {
    if (!memory.isOpen()) {
      throw closed();
    }
    if (device.isCpu()) {
      throw new UnsupportedException("devicePointer: " + describe() + " is in host memory");
    }
    return address();
  }

  // ---- views ----------------------------------------------------------------------------------

  /**
   * Swaps two dimensions, without copying: turns {@code [B, H, N, D]} into {@code [B, N, H, D]}.
   *
   * @param a an axis; negative values count from the end
   * @param b another axis
   * @return a view
   * @throws InvalidArgumentException if there is no such axis
   * @throws ClosedException if the tensor is closed
   */
  public Tensor transpose(int a, int b) {
    int[] order = new int[rank()];
    Arrays.setAll(order, i -> i);
    int first = shape().axis(a);
    int second = shape().axis(b);
    order[first] = second;
    order[second] = first;
    return permute(order);
  }

  /**
   * Reorders the dimensions, without copying.
   *
   * @param axes for each new dimension the old one; each exactly once
   * @return a view
   * @throws InvalidArgumentException if {@code axes} is not a permutation
   * @throws ClosedException if the tensor is closed
   */
  public Tensor permute(int... axes) {
    int rank = rank();
    boolean[] seen = new boolean[rank];
    boolean valid = axes.length == rank;
    for (int i = 0; valid && i < rank; i++) {
      int axis = shape().axis(axes[i]);
      valid = !seen[axis];
      seen[axis] = true;
    }
    if (!valid) {
      throw new InvalidArgumentException(
          "axes", Arrays.toString(axes), "each of the " + rank + " axes of " + shape() + " once");
    }
    long[] dims = new long[rank];
    long[] strides = new long[rank];
    for (int i = 0; i < rank; i++) {
      int axis = shape().axis(axes[i]);
      dims[i] = layout.dim(axis);
      strides[i] = layout.stride(axis);
    }
    return view(0, dims, strides);
  }

  /**
   * Takes a range of one dimension, without copying.
   *
   * @param axis 0 is the outermost; negative values count from the end
   * @param from first index
   * @param to past the last index
   * @return a view with {@code to - from} elements along {@code axis}
   * @throws InvalidArgumentException if the range is not within the dimension
   * @throws ClosedException if the tensor is closed
   */
  public Tensor slice(int axis, long from, long to) {
    int a = shape().axis(axis);
    if (from < 0 || to < from || to > layout.dim(a)) {
      throw new InvalidArgumentException(
          "range", from + ".." + to, "a range within 0.." + layout.dim(a) + " of " + shape());
    }
    long[] dims = shape().dims();
    dims[a] = to - from;
    return view(from * layout.stride(a), dims, layout.strides());
  }

  /**
   * Takes one index of one dimension, without copying.
   *
   * @param axis 0 is the outermost; negative values count from the end
   * @param index which one
   * @return a view that lacks the dimension
   * @throws InvalidArgumentException if there is no such index
   * @throws ClosedException if the tensor is closed
   */
  public Tensor select(int axis, long index) {
    int a = shape().axis(axis);
    if (index < 0 || index >= layout.dim(a)) {
      throw new InvalidArgumentException(
          "index", index, "one within 0.." + (layout.dim(a) - 1) + " of " + shape());
    }
    return view(index * layout.stride(a), without(shape().dims(), a), without(layout.strides(), a));
  }

  /**
   * Adds a dimension of one element, without copying.
   *
   * @param axis where it will be, 0 to rank
   * @return a view
   * @throws InvalidArgumentException if {@code axis} is beyond the rank
   * @throws ClosedException if the tensor is closed
   */
  public Tensor unsqueeze(int axis) {
    int rank = rank();
    if (axis < 0 || axis > rank) {
      throw new InvalidArgumentException("axis", axis, "0.." + rank);
    }
    long[] dims = new long[rank + 1];
    long[] strides = new long[rank + 1];
    for (int i = 0; i <= rank; i++) {
      dims[i] = i == axis ? 1 : layout.dim(i < axis ? i : i - 1);
      strides[i] = i == axis ? 1 : layout.stride(i < axis ? i : i - 1);
    }
    return view(0, dims, strides);
  }

  /**
   * Repeats dimensions of one element, without copying.
   *
   * @param dims the new extents; each old dimension keeps its extent or has one element
   * @return a view with stride 0 along the repeated dimensions: an input, never an output
   * @throws InvalidArgumentException if a dimension of more than one element would change
   * @throws ClosedException if the tensor is closed
   */
  public Tensor expand(long... dims) {
    long[] strides = layout.strides();
    boolean valid = dims.length == rank();
    for (int i = 0; valid && i < dims.length; i++) {
      if (dims[i] != layout.dim(i)) {
        valid = layout.dim(i) == 1;
        strides[i] = 0;
      }
    }
    if (!valid) {
      throw new InvalidArgumentException(
          "dims",
          Arrays.toString(dims),
          "the extents of " + shape() + ", where only those of 1 may change");
    }
    return view(0, dims, strides);
  }

  /**
   * Gives the same elements another shape, without copying.
   *
   * @param dims the new extents; one of them may be -1: what is left
   * @return a view
   * @throws InvalidArgumentException if the number of elements would change, or if the strides do
   *     not allow it: {@code contiguous()} first copies them
   * @throws ClosedException if the tensor is closed
   */
  public Tensor reshape(long... dims) {
    Shape to = inferred(dims);
    if (to.elements() != elements()) {
      throw new InvalidArgumentException(
          "dims", Arrays.toString(dims), elements() + " elements, as " + shape() + " has");
    }
    if (elements() == 0) {
      return view(0, to.dims(), to.contiguousStrides());
    }
    long[] strides = reshapedStrides(to);
    if (strides == null) {
      throw new InvalidArgumentException(
          "dims",
          Arrays.toString(dims),
          "a shape that the strides of " + layout + " allow; copy with contiguous() first");
    }
    return view(0, to.dims(), strides);
  }

  private Shape inferred(long... dims) {
    long[] result = dims.clone();
    int open = -1;
    long known = 1;
    for (int i = 0; i < dims.length; i++) {
      if (dims[i] == -1 && open < 0) {
        open = i;
      } else {
        known *= dims[i];
      }
    }
    if (open >= 0) {
      result[open] = known > 0 && elements() % known == 0 ? elements() / known : -1;
    }
    return Shape.of(result);
  }

  /** Strides for {@code to}, dimension by dimension; null if old dimensions can't be joined. */
  @SuppressWarnings("ReturnsNullCollection")
  private long @Nullable [] reshapedStrides(Shape to) {
    long[] strides = new long[to.rank()];
    int from = rank() - 1;
    long step = 1; // stride of the innermost part of the old dimension under way
    long left = 1; // elements of it not yet used
    for (int i = to.rank() - 1; i >= 0; i--) {
      long dim = to.at(i);
      if (dim == 1) {
        strides[i] = 1;
        continue;
      }
      while (left == 1 && from >= 0) {
        left = layout.dim(from);
        step = layout.stride(from);
        from--;
      }
      strides[i] = step;
      while (dim > left) {
        // The new dimension spans the next old one too: only if that continues where this ends.
        if (dim % left != 0 || from < 0) {
          return null;
        }
        if (layout.dim(from) == 1) {
          from--;
          continue;
        }
        if (layout.stride(from) != step * left) {
          return null;
        }
        left *= layout.dim(from);
        from--;
      }
      if (left % dim != 0) {
        return null;
      }
      left /= dim;
      step *= dim;
    }
    return strides;
  }

  private Tensor view(long elementOffset, long[] dims, long... strides) {
    if (!memory.isOpen()) {
      throw closed();
    }
    Layout to = Layout.strided(layout.dtype(), Shape.of(dims), strides);
    long bytes = to.shape().elements() == 0 ? 0 : elementOffset * layout.dtype().bytes();
    return new Tensor(device, memory, onGpu, offset + bytes, to, true);
  }

  private static long[] without(long[] values, int index) {
    long[] result = new long[values.length - 1];
    System.arraycopy(values, 0, result, 0, index);
    System.arraycopy(values, index + 1, result, index, result.length - index);
    return result;
  }

  // ---- copies ---------------------------------------------------------------------------------

  /**
   * Copies the elements into a new dense tensor.
   *
   * @return a tensor that the caller closes
   * @throws ClosedException if the tensor is closed
   */
  public Tensor copy() {
    return filled(empty(device(), dtype(), shape()), t -> t.copyFrom(this));
  }

  /**
   * Returns a dense tensor with these elements.
   *
   * @return a view of this tensor if it is dense, else a copy; closing it is right in both cases
   * @throws ClosedException if the tensor is closed
   */
  public Tensor contiguous() {
    return isContiguous() ? view(0, shape().dims(), shape().contiguousStrides()) : copy();
  }

  /**
   * Converts the elements to another dtype.
   *
   * <p>Floating-point values are rounded to nearest, ties to even; NaN stays NaN (quiet, sign
   * kept); FP8_E4M3 saturates at ±448. Between INT32 and INT64 a value that does not fit is an
   * error.
   *
   * @param dtype the new element type
   * @return a view of this tensor if it has that dtype, else a new dense tensor; closing it is
   *     right in both cases
   * @throws ClosedException if the tensor is closed
   * @throws UnsupportedException between integers and floating-point numbers
   * @throws InvalidArgumentException if an INT64 value does not fit in INT32
   */
  public Tensor to(DType dtype) {
    Objects.requireNonNull(dtype, "dtype");
    if (dtype == dtype()) {
      return view(0, shape().dims(), layout.strides());
    }
    boolean integers = isIndex(dtype) && isIndex(dtype());
    if (!integers && !(dtype.isFloating() && dtype().isFloating())) {
      throw new UnsupportedException(
          "to: no conversion from " + dtype() + " to " + dtype + "; go through toFloatArray()");
    }
    if (!device.isCpu()) {
      return integers ? convertedOnHost(dtype) : to(dtype, null);
    }
    return filled(
        empty(device(), dtype, shape()),
        t -> {
          MemorySegment from = open();
          try {
            if (integers) {
              convertIntegers(from, t);
            } else if (elements() > 0) {
              Elements.convert(from, atLeast1d(), t.memory.segment(), t.atLeast1d());
            }
          } finally {
            memory.release();
          }
        });
  }

  /**
   * Queues a conversion to another floating-point dtype on a stream.
   *
   * @param dtype the new element type, rounded to as by {@link #to(DType)}
   * @param stream of the tensor's device; null for its default stream
   * @return a view of this tensor if it has that dtype, else a new dense tensor; closing it is
   *     right in both cases
   * @throws ClosedException if the tensor is closed
   * @throws UnsupportedException if one of the two is an integer type
   * @throws InUseException if this thread is capturing a graph
   */
  public Tensor to(DType dtype, @Nullable Stream stream) {
    Stream on = Stream.of(stream, device);
    if (on == null || dtype == dtype()) {
      return to(dtype);
    }
    if (!dtype.isFloating() || !dtype().isFloating()) {
      throw new UnsupportedException(
          "to: no conversion from " + dtype() + " to " + dtype + " on " + device);
    }
    return filled(
        empty(on, dtype, shape()),
        t -> {
          boolean shared = stream == null && orderAfterUses(on);
          Copies.cast(t, this, on);
          finish(on, shared);
        });
  }

  /** Integers: few, and seldom. */
  private Tensor convertedOnHost(DType dtype) {
    try (Tensor onHost = to(Device.cpu());
        Tensor converted = onHost.to(dtype)) {
      return converted.to(device);
    }
  }

  private static boolean isIndex(DType dtype) {
    return dtype == DType.INT32 || dtype == DType.INT64;
  }

  private void convertIntegers(MemorySegment from, Tensor to) {
    MemorySegment target = to.memory.segment();
    long innerStride = Elements.innerStride(layout);
    Elements.forEachRun(
        layout,
        false,
        (ordinal, at, n) -> {
          for (int i = 0; i < n; i++) {
            long source = at + i * innerStride;
            if (dtype() == DType.INT32) {
              target.setAtIndex(JAVA_LONG, ordinal + i, from.getAtIndex(JAVA_INT, source));
            } else {
              long value = from.getAtIndex(JAVA_LONG, source);
              if ((int) value != value) {
                throw new InvalidArgumentException("value", value, "one that fits in INT32");
              }
              target.setAtIndex(JAVA_INT, ordinal + i, (int) value);
            }
          }
        });
  }

  /**
   * Moves the elements to another device, after all work that flare has queued on this tensor. To
   * and from the CPU it is done when the call returns.
   *
   * @param device where to
   * @return a view of this tensor if it is there, else a new dense tensor; closing it is right in
   *     both cases
   * @throws ClosedException if the tensor is closed
   * @throws OutOfMemoryException if there is not that much memory
   */
  public Tensor to(Device device) {
    if (device.equals(device())) {
      return view(0, shape().dims(), layout.strides());
    }
    return filled(empty(device, dtype(), shape()), t -> t.copyFrom(this));
  }

  /**
   * Queues a copy of the elements to another device.
   *
   * <p>Host memory must stay as it is until the stream has passed the copy, and what is copied to
   * the host is there only then.
   *
   * @param device where to
   * @param stream of one of the two devices
   * @return a view of this tensor if it is there, else a new dense tensor; closing it is right in
   *     both cases
   * @throws ClosedException if the tensor is closed
   * @throws OutOfMemoryException if there is not that much memory
   * @throws InUseException if this thread is capturing a graph
   */
  public Tensor to(Device device, Stream stream) {
    if (device.equals(device())) {
      return view(0, shape().dims(), layout.strides());
    }
    Tensor target =
        stream.device().equals(device)
            ? empty(stream, dtype(), shape())
            : empty(device, dtype(), shape());
    return filled(target, t -> t.copyFrom(this, stream));
  }

  /**
   * Overwrites all elements with those of another tensor, after all work that flare has queued on
   * the two. Where one of them is on the CPU, it is done when the call returns.
   *
   * @param source same shape and dtype, on any device; must not overlap this tensor
   * @return this tensor
   * @throws ClosedException if one of the two is closed
   * @throws InvalidArgumentException if shape or dtype differ, or if this tensor is read-only or
   *     repeats elements
   * @throws UnsupportedException if a GPU is involved, and strides that scatter the elements too
   *     much
   */
  public Tensor copyFrom(Tensor source) {
    requireCopy(source);
    if (!device.isCpu() || !source.device.isCpu()) {
      Stream on = Stream.of(null, device.isCpu() ? source.device : device);
      if (on != null) {
        boolean sourceShared = source.orderAfterUses(on);
        boolean shared = orderAfterUses(on) || sourceShared;
        Copies.copy(this, source, on, true);
        finish(on, shared || device.isCpu() || source.device.isCpu());
      }
      return this;
    }
    if (elements() == 0) {
      return this;
    }
    MemorySegment to = open();
    try {
      MemorySegment from = source.open();
      try {
        Elements.copy(from, source.atLeast1d(), to, atLeast1d());
      } finally {
        source.memory.release();
      }
    } finally {
      memory.release();
    }
    return this;
  }

  /**
   * Queues a copy of another tensor's elements.
   *
   * <p>From or to pinned memory the call returns at once: host memory must stay as it is until the
   * stream has passed the copy, and what is copied to the host is there only then. Other host
   * memory goes through buffers while the call waits. A captured copy reads host memory at each
   * replay.
   *
   * @param source same shape and dtype, on any device; must not overlap this tensor
   * @param stream of one of the two tensors' devices
   * @return this tensor
   * @throws ClosedException if one of the two, or the stream, is closed
   * @throws InvalidArgumentException if shape or dtype differ, or if this tensor is read-only or
   *     repeats elements
   * @throws UnsupportedException if strides scatter the elements too much
   */
  public Tensor copyFrom(Tensor source, Stream stream) {
    if (device.isCpu() && source.device.isCpu()) {
      return copyFrom(source);
    }
    requireCopy(source);
    if (stream.device().isCpu()
        || !(stream.device().equals(device) || stream.device().equals(source.device))) {
      throw new InvalidArgumentException(
          "stream", stream, "a stream of " + (device.isCpu() ? source.device : device));
    }
    Copies.copy(this, source, stream, false);
    return this;
  }

  /** Overwrites a dense INT32 tensor; queued on {@code stream}, if that is given. */
  void overwrite(int[] values, @Nullable Stream stream) {
    if (device.isCpu()) {
      MemorySegment to = open();
      try {
        MemorySegment.copy(values, 0, to, JAVA_INT, 0, values.length);
      } finally {
        memory.release();
      }
      return;
    }
    try (Tensor source = of(values, shape().dims())) {
      if (stream == null) {
        copyFrom(source);
      } else {
        copyFrom(source, stream); // the driver has read pageable memory when it returns
      }
    }
  }

  private void requireCopy(Tensor source) {
    if (!source.shape().equals(shape()) || source.dtype() != dtype()) {
      throw new InvalidArgumentException(
          "source", source.dtype() + " " + source.shape(), dtype() + " " + shape());
    }
    requireOutput("tensor");
  }

  /**
   * Orders the default stream after all others that use this memory.
   *
   * @return true if there are others: later work there is not ordered after what comes now
   */
  private boolean orderAfterUses(Stream on) {
    return onGpu != null && onGpu.orderAfterUsers(on);
  }

  private static void finish(Stream on, boolean wait) {
    if (wait) {
      on.synchronize();
    }
  }

  /**
   * Overwrites all elements with one value.
   *
   * @param value rounded to the dtype as by {@link #to(DType)}
   * @return this tensor
   * @throws ClosedException if the tensor is closed
   * @throws InvalidArgumentException if the tensor is read-only or repeats elements
   */
  public Tensor fill(double value) {
    return fill(value, null);
  }

  /**
   * Overwrites all elements with one value, on a stream.
   *
   * @param value rounded to the dtype as by {@link #to(DType)}
   * @param stream of the tensor's device; null for its default stream, after all work that flare
   *     has queued on this tensor
   * @return this tensor
   * @throws ClosedException if the tensor or the stream is closed
   * @throws InvalidArgumentException if the tensor is read-only or repeats elements
   */
  public Tensor fill(double value, @Nullable Stream stream) {
    requireOutput("tensor");
    Stream on = Stream.of(stream, device);
    if (on != null) {
      boolean shared = stream == null && orderAfterUses(on);
      Copies.fill(this, value, on);
      finish(on, shared);
      return this;
    }
    MemorySegment to = open();
    try {
      long innerStride = Elements.innerStride(layout);
      Elements.forEachRun(
          layout,
          Elements.isShared(to),
          (ordinal, at, n) -> {
            for (int i = 0; i < n; i++) {
              Elements.set(to, dtype(), at + i * innerStride, value);
            }
          });
    } finally {
      memory.release();
    }
    return this;
  }

  // ---- elements -------------------------------------------------------------------------------

  /**
   * Reads one element; for looking, not for loops.
   *
   * @param index one number for each dimension
   * @return the value
   * @throws ClosedException if the tensor is closed
   * @throws InvalidArgumentException if the index is not within the shape
   */
  public double get(long... index) {
    long at = at(index);
    if (!device.isCpu()) {
      try (Tensor onHost = element(at).to(Device.cpu())) {
        return onHost.get(0);
      }
    }
    MemorySegment from = open();
    try {
      return Elements.get(from, dtype(), at);
    } finally {
      memory.release();
    }
  }

  /**
   * Writes one element; for trying out, not for loops.
   *
   * @param value rounded to the dtype as by {@link #to(DType)}
   * @param index one number for each dimension
   * @throws ClosedException if the tensor is closed
   * @throws InvalidArgumentException if the index is not within the shape, or the tensor is
   *     read-only
   */
  public void set(double value, long... index) {
    long at = at(index);
    requireOutput("tensor");
    if (!device.isCpu()) {
      try (Tensor onHost = full(value, dtype(), 1)) {
        element(at).copyFrom(onHost);
      }
      return;
    }
    MemorySegment to = open();
    try {
      Elements.set(to, dtype(), at, value);
    } finally {
      memory.release();
    }
  }

  private Tensor element(long at) {
    return view(at, new long[] {1}, 1);
  }

  private long at(long... index) {
    boolean valid = index.length == rank();
    long at = 0;
    for (int i = 0; valid && i < index.length; i++) {
      valid = index[i] >= 0 && index[i] < layout.dim(i);
      at += index[i] * layout.stride(i);
    }
    if (!valid) {
      throw new InvalidArgumentException(
          "index", Arrays.toString(index), "one within the shape " + shape());
    }
    return at;
  }

  /**
   * Copies the elements into an array, row-major.
   *
   * @return exact values, except integers beyond 2^24
   * @throws ClosedException if the tensor is closed
   * @throws InvalidArgumentException if there are more elements than an array can have
   */
  public float[] toFloatArray() {
    if (!device.isCpu()) {
      arrayLength();
      try (Tensor onHost = to(Device.cpu())) {
        return onHost.toFloatArray();
      }
    }
    float[] result = new float[arrayLength()];
    MemorySegment from = open();
    try {
      long innerStride = Elements.innerStride(layout);
      Elements.forEachRun(
          layout,
          Elements.isShared(from),
          (ordinal, at, n) ->
              Elements.read(from, dtype(), at, innerStride, result, (int) ordinal, n));
    } finally {
      memory.release();
    }
    return result;
  }

  /**
   * Copies the elements into an array, row-major.
   *
   * @return exact values, except integers beyond 2^53
   * @throws ClosedException if the tensor is closed
   * @throws InvalidArgumentException if there are more elements than an array can have
   */
  public double[] toDoubleArray() {
    if (!device.isCpu()) {
      arrayLength();
      try (Tensor onHost = to(Device.cpu())) {
        return onHost.toDoubleArray();
      }
    }
    double[] result = new double[arrayLength()];
    MemorySegment from = open();
    try {
      long innerStride = Elements.innerStride(layout);
      Elements.forEachRun(
          layout,
          Elements.isShared(from),
          (ordinal, at, n) -> {
            for (int i = 0; i < n; i++) {
              result[(int) ordinal + i] = Elements.get(from, dtype(), at + i * innerStride);
            }
          });
    } finally {
      memory.release();
    }
    return result;
  }

  /**
   * Copies integers into an array, row-major.
   *
   * @return the elements
   * @throws ClosedException if the tensor is closed
   * @throws InvalidArgumentException if the elements are not integers, or if there are more than an
   *     array can have
   */
  public long[] toLongArray() {
    if (dtype().isFloating()) {
      throw new InvalidArgumentException("dtype", dtype(), "integers; or call toFloatArray()");
    }
    long[] result = new long[arrayLength()];
    if (!device.isCpu()) {
      try (Tensor onHost = to(Device.cpu())) {
        return onHost.toLongArray();
      }
    }
    MemorySegment from = open();
    try {
      long innerStride = Elements.innerStride(layout);
      Elements.forEachRun(
          layout,
          false,
          (ordinal, at, n) -> {
            for (int i = 0; i < n; i++) {
              long source = at + i * innerStride;
              result[(int) ordinal + i] =
                  dtype() == DType.INT64
                      ? from.getAtIndex(JAVA_LONG, source)
                      : (long) Elements.get(from, dtype(), source);
            }
          });
    } finally {
      memory.release();
    }
    return result;
  }

  private int arrayLength() {
    if (elements() > Integer.MAX_VALUE - 8) {
      throw new InvalidArgumentException(
          "tensor", elements() + " elements", "at most 2^31-9 for an array; slice it first");
    }
    return (int) elements();
  }

  // ---- lifetime -------------------------------------------------------------------------------

  /**
   * Frees the memory if this tensor owns it, and ends its use in any case; does nothing on a view
   * or when called again.
   *
   * @throws InUseException if a call on another thread uses the memory now
   */
  @Override
  public void close() {
    if (view) {
      return;
    }
    int uses = memory.close();
    if (uses > 0 && memory.graphs() > 0) {
      throw new InUseException(
          "close: "
              + describe()
              + " is used by "
              + memory.graphs()
              + " graph(s); close them first");
    }
    if (uses > 0) {
      throw new InUseException(
          "close: "
              + describe()
              + " is in use by "
              + uses
              + " call(s) on other threads; close it after they return");
    }
  }

  /** The layout, for checks of this package. */
  Layout layout() {
    return layout;
  }

  /** The address of the first element; valid between {@link #acquire} and {@link #release}. */
  long address() {
    return memory.address() + offset;
  }

  /** A tensor over all of some memory that another library lends. */
  static Tensor lent(Allocation memory, Layout layout) {
    return onHost(memory, layout);
  }

  /** The memory, which views share. */
  Allocation memory() {
    return memory;
  }

  /** The same as what streams use; null for ordinary host memory. */
  @Nullable GpuMemory onGpu() {
    return onGpu;
  }

  /** A host tensor of the same layout, gaps included. */
  Tensor hostImage() {
    Allocation image = HostMemory.allocate(layout.extentBytes(), false);
    if (image == null) {
      throw new OutOfMemoryException(
          layout + ": " + layout.extentBytes() + " bytes of host memory could not be had");
    }
    return onHost(image, layout);
  }

  /** A view of all bytes from the first to past the last element. */
  Tensor allOfIt() {
    Layout all = Layout.dense(DType.UINT8, Shape.of(layout.extentBytes()));
    return new Tensor(device, memory, onGpu, offset, all, true);
  }

  /**
   * Enters a call that queues work with this tensor.
   *
   * @param stream where to; null on the CPU
   */
  void acquire(String name, @Nullable Stream stream) {
    acquire(name);
    if (stream != null) {
      try {
        note(stream);
      } catch (RuntimeException | Error e) {
        release();
        throw e;
      }
    }
  }

  private void note(Stream stream) {
    Capture capture = stream.capture();
    if (capture != null) {
      capture.keep(this);
    } else if (onGpu != null) {
      onGpu.use(stream);
    }
  }

  /** Enters a native call with this tensor as its argument {@code name}. */
  void acquire(String name) {
    if (!memory.acquire()) {
      throw closed(name + ": " + describe() + " is closed");
    }
  }

  void release() {
    memory.release();
  }

  /** Refuses what can't be written to. */
  void requireOutput(String name) {
    if (isReadOnly()) {
      throw new InvalidArgumentException(name, "read-only memory", "memory that can be written");
    }
    if (!layout.isInjective()) {
      throw new InvalidArgumentException(
          name, layout, "strides that give each element a place of its own");
    }
  }

  private MemorySegment open() {
    acquire("tensor");
    return slice();
  }

  private MemorySegment slice() {
    return memory.segment().asSlice(offset, layout.extentBytes());
  }

  /** A scalar as a vector of one: loops want an innermost dimension. */
  private Layout atLeast1d() {
    return rank() > 0 ? layout : Layout.dense(dtype(), Shape.of(1));
  }

  private ClosedException closed() {
    return closed(describe() + " is closed");
  }

  private ClosedException closed(String text) {
    Throwable site = memory.closeSite();
    return site == null ? new ClosedException(text) : new ClosedException(text, site);
  }

  private String describe() {
    return "Tensor[" + layout + (device.isCpu() ? "" : " " + device) + "]";
  }

  /**
   * Returns dtype, shape, device and the first values, for people.
   *
   * @return for example {@code Tensor[FP32 [2, 3] cpu: 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]}
   */
  @Override
  public String toString() {
    String head = "Tensor[" + layout + " " + device();
    if (!isOpen()) {
      return head + ", closed]";
    }
    StringJoiner values =
        new StringJoiner(", ", head + ": ", elements() > PREVIEW ? ", ...]" : "]");
    values.setEmptyValue(head + "]");
    try {
      for (long i = 0; i < Math.min(PREVIEW, elements()); i++) {
        values.add(preview(i));
      }
    } catch (FlareException e) {
      return head + ": " + e.getMessage() + "]"; // a GPU that is lost, or capturing
    }
    return values.toString();
  }

  private String preview(long ordinal) {
    long[] index = new long[rank()];
    long rest = ordinal;
    for (int i = rank() - 1; i >= 0; i--) {
      index[i] = rest % layout.dim(i);
      rest /= layout.dim(i);
    }
    double value = get(index);
    return dtype().isFloating() ? Float.toString((float) value) : Long.toString((long) value);
  }
}
