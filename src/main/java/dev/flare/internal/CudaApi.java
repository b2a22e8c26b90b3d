package dev.flare.internal;

import org.jspecify.annotations.Nullable;

/**
 * The calls of the CUDA driver that flare needs, as they are: statuses, addresses and handles.
 *
 * <p>0 is success. What a call answers besides, {@link #out} has for the same thread until its next
 * call. Handles and device pointers are numbers: nothing in Java follows them. Tests put a driver
 * of their own in its place.
 */
public interface CudaApi {
  int SUCCESS = 0;
  int ERROR_INVALID_VALUE = 1;
  int ERROR_OUT_OF_MEMORY = 2;
  int ERROR_DEINITIALIZED = 4;
  int ERROR_NOT_READY = 600;
  int ERROR_PEER_ACCESS_UNSUPPORTED = 217;
  int ERROR_GRAPH_EXEC_UPDATE_FAILURE = 910;

  int STREAM_NON_BLOCKING = 1;
  int EVENT_DISABLE_TIMING = 2;
  int MEMHOSTALLOC_PORTABLE = 1;

  int ATTRIBUTE_MULTIPROCESSOR_COUNT = 16;
  int ATTRIBUTE_ECC_ENABLED = 32;
  int ATTRIBUTE_L2_CACHE_SIZE = 38;
  int ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75;
  int ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76;
  int ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97;

  int POOL_RELEASE_THRESHOLD = 4;
  int POOL_RESERVED_CURRENT = 5;
  int POOL_RESERVED_HIGH = 6;
  int POOL_USED_CURRENT = 7;
  int POOL_USED_HIGH = 8;

  int POINTER_MEMORY_TYPE = 2;
  int POINTER_DEVICE_ORDINAL = 9;
  int POINTER_RANGE_START = 11;
  int POINTER_RANGE_SIZE = 12;
  int MEMORY_TYPE_HOST = 1;
  int MEMORY_TYPE_DEVICE = 2;

  /** The answer to this thread's last call that has one. */
  long out();

  /** The second answer to this thread's last call that has two. */
  long out2();

  String errorName(int status);

  String errorText(int status);

  /** What params structs of the C library name a GPU by. */
  int kernelDevice(int ordinal);

  // ---- devices and contexts: out is what the name says ------------------------------------------

  int deviceGet(int ordinal);

  int deviceAttribute(int attribute, int device);

  int deviceTotalMemory(int device);

  int deviceCanAccessPeer(int device, int peer);

  /** The name; null if the call fails. */
  @Nullable String deviceName(int device);

  /** Bus, device and function; null if the call fails. */
  @Nullable String devicePciBusId(int device);

  int primaryContextRetain(int device);

  int primaryContextRelease(int device);

  int contextGetCurrent();

  int contextSetCurrent(long context);

  int contextSynchronize();

  // ---- memory ---------------------------------------------------------------------------------

  /** Answers the free bytes, and in out2 the total. */
  int memoryInfo();

  int poolCreate(int ordinal);

  int poolDestroy(long pool);

  int poolSet(long pool, int attribute, long value);

  int poolGet(long pool, int attribute);

  int poolTrim(long pool, long bytesToKeep);

  /** Lets another GPU reach the pool's memory. */
  int poolOpenTo(long pool, int ordinal);

  int allocateAsync(long bytes, long pool, long stream);

  int freeAsync(long pointer, long stream);

  int hostAllocate(long bytes, int flags);

  int hostFree(long pointer);

  int pointerAttribute(int attribute, long pointer);

  // ---- copies ---------------------------------------------------------------------------------

  int copyHostToDevice(long to, long hostPointer, long bytes, long stream);

  int copyDeviceToHost(long hostPointer, long from, long bytes, long stream);

  int copyDeviceToDevice(long to, long from, long bytes, long stream);

  int copyPeer(long to, long toContext, long from, long fromContext, long bytes, long stream);

  /** A copy of {@code rows} rows of {@code width} bytes; the kinds tell what the addresses are. */
  int copy2d(
      boolean toHost,
      long to,
      long toPitch,
      boolean fromHost,
      long from,
      long fromPitch,
      long width,
      long rows,
      long stream);

  /** Writes {@code count} elements of 1, 2 or 4 bytes. */
  int fill(long pointer, int elementBytes, int value, long count, long stream);

  // ---- streams and events ---------------------------------------------------------------------

  int streamCreate(int flags);

  int streamDestroy(long stream);

  int streamSynchronize(long stream);

  int streamQuery(long stream);

  int streamWaitEvent(long stream, long event);

  int eventCreate(int flags);

  int eventDestroy(long event);

  int eventRecord(long event, long stream);

  int eventSynchronize(long event);

  int eventQuery(long event);

  /** Answers the bits of a float: milliseconds. */
  int eventElapsed(long start, long end);

  // ---- graphs ---------------------------------------------------------------------------------

  /** Begins a capture that leaves other threads and streams alone. */
  int captureBegin(long stream);

  int captureEnd(long stream);

  int graphInstantiate(long graph);

  int graphUpdate(long executable, long graph);

  int graphLaunch(long executable, long stream);

  int graphDestroy(long graph);

  int executableDestroy(long executable);
}
