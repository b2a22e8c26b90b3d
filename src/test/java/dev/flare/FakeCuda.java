package dev.flare;

import static java.lang.foreign.ValueLayout.JAVA_BYTE;
import static java.lang.foreign.ValueLayout.JAVA_INT;
import static java.lang.foreign.ValueLayout.JAVA_SHORT;

import dev.flare.internal.CudaApi;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Collections;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Queue;
import java.util.Set;
import java.util.TreeMap;

/**
 * A driver without a GPU: device memory is host memory, streams do their work at once, and kernels
 * run on the CPU. It writes down what it is asked for, and is as strict as the real one where flare
 * has to keep to rules: contexts, captures, freed memory.
 */
@SuppressWarnings({"restricted", "MustBeClosedChecker"})
final class FakeCuda implements CudaApi {
  /** Of the GPU that all memory is said to be on; no test has so many. */
  static final int ORDINAL = 77;

  static final int INVALID_CONTEXT = 201;
  static final int ILLEGAL_STATE = 401;
  static final int CAPTURE_UNSUPPORTED = 900;
  private static final long CONTEXT = 0xC0;

  /** What was called, with handles in order of their making: {@code free m2 on s1}. */
  final List<String> log = Collections.synchronizedList(new ArrayList<>());

  /** Bytes that can be allocated in all. */
  long capacity = 1L << 30;

  /** Makes {@code capture} calls describe a graph of a new shape. */
  boolean graphsDiffer;

  private final Map<String, Queue<Integer>> failures = new HashMap<>();
  private final ThreadLocal<long[]> answers = ThreadLocal.withInitial(() -> new long[2]);
  private final ThreadLocal<Long> current = ThreadLocal.withInitial(() -> 0L);
  private final TreeMap<Long, Block> blocks = new TreeMap<>();
  private final Map<Long, String> names = new HashMap<>();
  private final Map<String, Integer> counts = new HashMap<>();
  private final Set<Long> streams = new HashSet<>();
  private final Set<Long> events = new HashSet<>();
  private final Set<Long> capturing = new HashSet<>();
  private final Set<Long> executables = new HashSet<>();
  private final Set<Long> graphs = new HashSet<>();
  private long used;
  private long next = 0x1000;

  private record Block(Arena arena, MemorySegment segment, boolean pinned) {}

  /** The next call of that name answers {@code status}. */
  void failNext(String call, int status) {
    failures.computeIfAbsent(call, c -> new ArrayDeque<>()).add(status);
  }

  /** What other code does to a thread. */
  void forgetContext() {
    current.set(0L);
  }

  synchronized long usedBytes() {
    return used;
  }

  synchronized boolean isMemory(long pointer) {
    return blocks.containsKey(pointer);
  }

  synchronized int openHandles() {
    return streams.size() + events.size() + executables.size() + graphs.size();
  }

  /** The name that the log has for a handle or a device pointer. */
  synchronized String name(long handle) {
    return names.getOrDefault(handle, Long.toHexString(handle));
  }

  /** As at the end of a process: what is left of a lost device. */
  synchronized void forgetEverything() {
    blocks.values().forEach(block -> block.arena.close());
    blocks.clear();
    used = 0;
    streams.clear();
    events.clear();
    executables.clear();
    graphs.clear();
  }

  // ---- bookkeeping ------------------------------------------------------------------------------

  private long handle(String kind) {
    next += 0x10;
    names.put(next, kind + counts.merge(kind, 1, Integer::sum));
    answer(next);
    return next;
  }

  private void answer(long value) {
    answers.get()[0] = value;
  }

  private int failure(String call) {
    Queue<Integer> queue = failures.get(call);
    Integer status = queue == null ? null : queue.poll();
    return status == null ? SUCCESS : status;
  }

  /** Most calls want a current context, and can be told to fail. */
  private int enter(String call, String text) {
    log.add(text);
    int status = failure(call);
    return status != SUCCESS ? status : current.get() == CONTEXT ? SUCCESS : INVALID_CONTEXT;
  }

  private static MemorySegment at(long pointer, long bytes) {
    return MemorySegment.ofAddress(pointer).reinterpret(bytes);
  }

  private synchronized int allocate(String kind, long bytes, boolean pinned) {
    if (bytes <= 0) {
      return ERROR_INVALID_VALUE;
    }
    if (bytes > capacity - used) {
      return ERROR_OUT_OF_MEMORY;
    }
    Arena arena = Arena.ofShared();
    MemorySegment segment = arena.allocate(bytes, 512);
    segment.fill((byte) 0xAB); // undefined memory
    blocks.put(segment.address(), new Block(arena, segment, pinned));
    used += bytes;
    names.put(segment.address(), kind + counts.merge(kind, 1, Integer::sum));
    answer(segment.address());
    return SUCCESS;
  }

  private synchronized int release(long pointer, boolean pinned) {
    Block block = blocks.remove(pointer);
    if (block == null || block.pinned != pinned) {
      return ERROR_INVALID_VALUE;
    }
    used -= block.segment.byteSize();
    block.segment.fill((byte) 0xCD); // use after free shows
    block.arena.close();
    return SUCCESS;
  }

  @Override
  public long out() {
    return answers.get()[0];
  }

  @Override
  public long out2() {
    return answers.get()[1];
  }

  @Override
  public String errorName(int status) {
    return "CUDA_ERROR_" + status;
  }

  @Override
  public String errorText(int status) {
    return "made up";
  }

  @Override
  public int kernelDevice(int ordinal) {
    return -1;
  }

  // ---- devices and contexts ---------------------------------------------------------------------

  @Override
  public int deviceGet(int ordinal) {
    answer(ordinal);
    return SUCCESS;
  }

  @Override
  public int deviceAttribute(int attribute, int device) {
    answer(
        switch (attribute) {
          case ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR -> 9;
          case ATTRIBUTE_MULTIPROCESSOR_COUNT -> 132;
          case ATTRIBUTE_ECC_ENABLED -> 1;
          default -> 0;
        });
    return SUCCESS;
  }

  @Override
  public int deviceTotalMemory(int device) {
    answer(capacity);
    return SUCCESS;
  }

  @Override
  public int deviceCanAccessPeer(int device, int peer) {
    answer(1);
    return SUCCESS;
  }

  @Override
  public String deviceName(int device) {
    return "fake GPU " + device;
  }

  @Override
  public String devicePciBusId(int device) {
    return "0000:0" + device + ":00.0";
  }

  @Override
  public int primaryContextRetain(int device) {
    int status = failure("primaryContextRetain");
    answer(CONTEXT);
    return status;
  }

  @Override
  public int primaryContextRelease(int device) {
    log.add("release context");
    return SUCCESS;
  }

  @Override
  public int contextGetCurrent() {
    answer(current.get());
    return SUCCESS;
  }

  @Override
  public int contextSetCurrent(long context) {
    log.add("set context");
    current.set(context);
    return SUCCESS;
  }

  @Override
  public int contextSynchronize() {
    return enter("contextSynchronize", "synchronize context");
  }

  // ---- memory ---------------------------------------------------------------------------------

  @Override
  public int memoryInfo() {
    answers.get()[0] = capacity - usedBytes();
    answers.get()[1] = capacity;
    return current.get() == CONTEXT ? SUCCESS : INVALID_CONTEXT;
  }

  @Override
  public int poolCreate(int ordinal) {
    handle("pool");
    return enter("poolCreate", "create pool");
  }

  @Override
  public int poolDestroy(long pool) {
    return SUCCESS;
  }

  @Override
  public int poolSet(long pool, int attribute, long value) {
    return SUCCESS;
  }

  @Override
  public int poolGet(long pool, int attribute) {
    answer(usedBytes());
    return SUCCESS;
  }

  @Override
  public int poolTrim(long pool, long bytesToKeep) {
    return enter("poolTrim", "trim");
  }

  @Override
  public int poolOpenTo(long pool, int ordinal) {
    return enter("poolOpenTo", "open " + name(pool) + " to " + ordinal);
  }

  @Override
  public int allocateAsync(long bytes, long pool, long stream) {
    int status = enter("allocateAsync", "allocate " + bytes + " on " + name(stream));
    if (status == SUCCESS && isCapturing(stream)) {
      status = CAPTURE_UNSUPPORTED;
    }
    return status != SUCCESS ? status : allocate("m", bytes, false);
  }

  @Override
  public int freeAsync(long pointer, long stream) {
    int status = enter("freeAsync", "free " + name(pointer) + " on " + name(stream));
    if (status == SUCCESS && isCapturing(stream)) {
      status = CAPTURE_UNSUPPORTED;
    }
    return status != SUCCESS ? status : release(pointer, false);
  }

  @Override
  public int hostAllocate(long bytes, int flags) {
    int status = enter("hostAllocate", "pin " + bytes);
    return status != SUCCESS ? status : allocate("h", bytes, true);
  }

  @Override
  public int hostFree(long pointer) {
    int status = enter("hostFree", "unpin " + name(pointer));
    return status != SUCCESS ? status : release(pointer, true);
  }

  @Override
  public synchronized int pointerAttribute(int attribute, long pointer) {
    Map.Entry<Long, Block> entry = blocks.floorEntry(pointer);
    Block block = entry == null ? null : entry.getValue();
    if (block == null || pointer >= block.segment.address() + block.segment.byteSize()) {
      return ERROR_INVALID_VALUE;
    }
    answer(
        switch (attribute) {
          case POINTER_MEMORY_TYPE -> block.pinned ? 1 : MEMORY_TYPE_DEVICE;
          case POINTER_RANGE_START -> block.segment.address();
          case POINTER_RANGE_SIZE -> block.segment.byteSize();
          case POINTER_DEVICE_ORDINAL -> ORDINAL;
          default -> 0;
        });
    return SUCCESS;
  }

  // ---- copies ---------------------------------------------------------------------------------

  private int copy(String what, long to, long from, long bytes, long stream) {
    int status = enter("copy", "copy " + what + " " + bytes + " on " + name(stream));
    if (status == SUCCESS) {
      at(to, bytes).copyFrom(at(from, bytes));
    }
    return status;
  }

  @Override
  public int copyHostToDevice(long to, long hostPointer, long bytes, long stream) {
    return copy("in", to, hostPointer, bytes, stream);
  }

  @Override
  public int copyDeviceToHost(long hostPointer, long from, long bytes, long stream) {
    return copy("out", hostPointer, from, bytes, stream);
  }

  @Override
  public int copyDeviceToDevice(long to, long from, long bytes, long stream) {
    return copy("within", to, from, bytes, stream);
  }

  @Override
  public int copyPeer(
      long to, long toContext, long from, long fromContext, long bytes, long stream) {
    return copy("across", to, from, bytes, stream);
  }

  @Override
  public int copy2d(
      boolean toHost,
      long to,
      long toPitch,
      boolean fromHost,
      long from,
      long fromPitch,
      long width,
      long rows,
      long stream) {
    if (toPitch < width || fromPitch < width) {
      return ERROR_INVALID_VALUE;
    }
    int status = enter("copy2d", "copy " + rows + " rows of " + width + " on " + name(stream));
    for (long row = 0; status == SUCCESS && row < rows; row++) {
      at(to + row * toPitch, width).copyFrom(at(from + row * fromPitch, width));
    }
    return status;
  }

  @Override
  public int fill(long pointer, int elementBytes, int value, long count, long stream) {
    int status = enter("fill", "fill " + count + " of " + elementBytes + " on " + name(stream));
    MemorySegment to = at(pointer, count * elementBytes);
    for (long i = 0; status == SUCCESS && i < count; i++) {
      switch (elementBytes) {
        case 1 -> to.set(JAVA_BYTE, i, (byte) value);
        case 2 -> to.setAtIndex(JAVA_SHORT, i, (short) value);
        default -> to.setAtIndex(JAVA_INT, i, value);
      }
    }
    return status;
  }

  // ---- streams and events ---------------------------------------------------------------------

  private synchronized boolean isCapturing(long stream) {
    return capturing.contains(stream);
  }

  private synchronized boolean isStream(long stream) {
    return streams.contains(stream);
  }

  @Override
  public synchronized int streamCreate(int flags) {
    int status = enter("streamCreate", "create stream");
    if (status == SUCCESS) {
      streams.add(handle("s"));
    }
    return status;
  }

  @Override
  public synchronized int streamDestroy(long stream) {
    int status = enter("streamDestroy", "destroy " + name(stream));
    return status == SUCCESS && !streams.remove(stream) ? ERROR_INVALID_VALUE : status;
  }

  @Override
  public int streamSynchronize(long stream) {
    int status = enter("streamSynchronize", "synchronize " + name(stream));
    return status == SUCCESS && isCapturing(stream) ? CAPTURE_UNSUPPORTED : status;
  }

  @Override
  public int streamQuery(long stream) {
    int status = enter("streamQuery", "query " + name(stream));
    return status == SUCCESS && isCapturing(stream) ? CAPTURE_UNSUPPORTED : status;
  }

  @Override
  public int streamWaitEvent(long stream, long event) {
    return enter("streamWaitEvent", name(stream) + " waits for " + name(event));
  }

  @Override
  public synchronized int eventCreate(int flags) {
    int status = enter("eventCreate", "create event");
    if (status == SUCCESS) {
      events.add(handle("e"));
    }
    return status;
  }

  @Override
  public synchronized int eventDestroy(long event) {
    int status = enter("eventDestroy", "destroy " + name(event));
    return status == SUCCESS && !events.remove(event) ? ERROR_INVALID_VALUE : status;
  }

  @Override
  public int eventRecord(long event, long stream) {
    int status = enter("eventRecord", "record " + name(event) + " on " + name(stream));
    return status == SUCCESS && stream != 0 && !isStream(stream) ? ERROR_INVALID_VALUE : status;
  }

  @Override
  public int eventSynchronize(long event) {
    return enter("eventSynchronize", "synchronize " + name(event));
  }

  @Override
  public int eventQuery(long event) {
    return enter("eventQuery", "query " + name(event));
  }

  @Override
  public int eventElapsed(long start, long end) {
    answer(Float.floatToRawIntBits(1.5f));
    return enter("eventElapsed", "elapsed");
  }

  // ---- graphs ---------------------------------------------------------------------------------

  @Override
  public synchronized int captureBegin(long stream) {
    int status = enter("captureBegin", "capture on " + name(stream));
    if (status == SUCCESS && !capturing.add(stream)) {
      status = ILLEGAL_STATE;
    }
    return status;
  }

  @Override
  public synchronized int captureEnd(long stream) {
    int status = enter("captureEnd", "captured on " + name(stream));
    if (!capturing.remove(stream)) {
      return ILLEGAL_STATE;
    }
    if (status == SUCCESS) {
      graphs.add(handle("g"));
    }
    return status;
  }

  @Override
  public synchronized int graphInstantiate(long graph) {
    int status = enter("graphInstantiate", "instantiate " + name(graph));
    if (status == SUCCESS) {
      executables.add(handle("x"));
    }
    return status;
  }

  @Override
  public int graphUpdate(long executable, long graph) {
    int status = enter("graphUpdate", "update " + name(executable) + " with " + name(graph));
    return status == SUCCESS && graphsDiffer ? ERROR_GRAPH_EXEC_UPDATE_FAILURE : status;
  }

  @Override
  public int graphLaunch(long executable, long stream) {
    return enter("graphLaunch", "launch " + name(executable) + " on " + name(stream));
  }

  @Override
  public synchronized int graphDestroy(long graph) {
    int status = enter("graphDestroy", "destroy " + name(graph));
    return status == SUCCESS && !graphs.remove(graph) ? ERROR_INVALID_VALUE : status;
  }

  @Override
  public synchronized int executableDestroy(long executable) {
    int status = enter("executableDestroy", "destroy " + name(executable));
    return status == SUCCESS && !executables.remove(executable) ? ERROR_INVALID_VALUE : status;
  }
}
