package dev.flare.internal;

import static java.lang.foreign.ValueLayout.JAVA_LONG;

import dev.flare.generated.cuda.CUDA_MEMCPY2D_st;
import dev.flare.generated.cuda.CUmemAccessDesc_st;
import dev.flare.generated.cuda.CUmemLocation_st;
import dev.flare.generated.cuda.CUmemPoolProps_st;
import dev.flare.generated.cuda.cuda_h;
import java.lang.foreign.MemorySegment;
import org.jspecify.annotations.Nullable;

/**
 * {@code libcuda.so.1} itself. Only to be touched once {@link Driver#status} was {@code Ready}:
 * loading the bindings fails for good where there is no driver.
 */
final class CudaDriver implements CudaApi {
  static final CudaDriver INSTANCE = new CudaDriver();

  private CudaDriver() {}

  private static MemorySegment at(long handle) {
    return MemorySegment.ofAddress(handle);
  }

  /** This thread's out-pointer, zeroed: some calls write 4 bytes of it. */
  private static MemorySegment answer() {
    MemorySegment word = Scratch.get().word();
    word.set(JAVA_LONG, 0, 0);
    return word;
  }

  @Override
  public long out() {
    return Scratch.get().word().get(JAVA_LONG, 0);
  }

  @Override
  public long out2() {
    return Scratch.get().second().get(JAVA_LONG, 0);
  }

  @Override
  public String errorName(int status) {
    return cuda_h.cuGetErrorName(status, answer()) == SUCCESS ? text(out()) : "CUDA_ERROR";
  }

  @Override
  public String errorText(int status) {
    return cuda_h.cuGetErrorString(status, answer()) == SUCCESS ? text(out()) : "unknown error";
  }

  private static String text(long pointer) {
    return at(pointer).reinterpret(Long.MAX_VALUE).getString(0);
  }

  @Override
  public int kernelDevice(int ordinal) {
    return ordinal;
  }

  // ---- devices and contexts ---------------------------------------------------------------------

  @Override
  public int deviceGet(int ordinal) {
    return cuda_h.cuDeviceGet(answer(), ordinal);
  }

  @Override
  public int deviceAttribute(int attribute, int device) {
    return cuda_h.cuDeviceGetAttribute(answer(), attribute, device);
  }

  @Override
  public int deviceTotalMemory(int device) {
    return cuda_h.cuDeviceTotalMem_v2(answer(), device);
  }

  @Override
  public int deviceCanAccessPeer(int device, int peer) {
    return cuda_h.cuDeviceCanAccessPeer(answer(), device, peer);
  }

  @Override
  public @Nullable String deviceName(int device) {
    MemorySegment name = Scratch.get().text();
    return cuda_h.cuDeviceGetName(name, (int) name.byteSize(), device) == SUCCESS
        ? name.getString(0)
        : null;
  }

  @Override
  public @Nullable String devicePciBusId(int device) {
    MemorySegment id = Scratch.get().text();
    return cuda_h.cuDeviceGetPCIBusId(id, (int) id.byteSize(), device) == SUCCESS
        ? id.getString(0)
        : null;
  }

  @Override
  public int primaryContextRetain(int device) {
    return cuda_h.cuDevicePrimaryCtxRetain(answer(), device);
  }

  @Override
  public int primaryContextRelease(int device) {
    return cuda_h.cuDevicePrimaryCtxRelease_v2(device);
  }

  @Override
  public int contextGetCurrent() {
    return cuda_h.cuCtxGetCurrent(answer());
  }

  @Override
  public int contextSetCurrent(long context) {
    return cuda_h.cuCtxSetCurrent(at(context));
  }

  @Override
  public int contextSynchronize() {
    return cuda_h.cuCtxSynchronize();
  }

  // ---- memory ---------------------------------------------------------------------------------

  @Override
  public int memoryInfo() {
    return cuda_h.cuMemGetInfo_v2(answer(), Scratch.get().second());
  }

  @Override
  public int poolCreate(int ordinal) {
    MemorySegment props = Scratch.get().struct();
    CUmemPoolProps_st.allocType(props, cuda_h.CU_MEM_ALLOCATION_TYPE_PINNED());
    MemorySegment location = CUmemPoolProps_st.location(props);
    CUmemLocation_st.type(location, cuda_h.CU_MEM_LOCATION_TYPE_DEVICE());
    CUmemLocation_st.id(location, ordinal);
    return cuda_h.cuMemPoolCreate(answer(), props);
  }

  @Override
  public int poolDestroy(long pool) {
    return cuda_h.cuMemPoolDestroy(at(pool));
  }

  @Override
  public int poolSet(long pool, int attribute, long value) {
    MemorySegment word = answer();
    word.set(JAVA_LONG, 0, value);
    return cuda_h.cuMemPoolSetAttribute(at(pool), attribute, word);
  }

  @Override
  public int poolGet(long pool, int attribute) {
    return cuda_h.cuMemPoolGetAttribute(at(pool), attribute, answer());
  }

  @Override
  public int poolTrim(long pool, long bytesToKeep) {
    return cuda_h.cuMemPoolTrimTo(at(pool), bytesToKeep);
  }

  @Override
  public int poolOpenTo(long pool, int ordinal) {
    MemorySegment access = Scratch.get().struct();
    MemorySegment location = CUmemAccessDesc_st.location(access);
    CUmemLocation_st.type(location, cuda_h.CU_MEM_LOCATION_TYPE_DEVICE());
    CUmemLocation_st.id(location, ordinal);
    CUmemAccessDesc_st.flags(access, cuda_h.CU_MEM_ACCESS_FLAGS_PROT_READWRITE());
    return cuda_h.cuMemPoolSetAccess(at(pool), access, 1);
  }

  @Override
  public int allocateAsync(long bytes, long pool, long stream) {
    return cuda_h.cuMemAllocFromPoolAsync(answer(), bytes, at(pool), at(stream));
  }

  @Override
  public int freeAsync(long pointer, long stream) {
    return cuda_h.cuMemFreeAsync(pointer, at(stream));
  }

  @Override
  public int hostAllocate(long bytes, int flags) {
    return cuda_h.cuMemHostAlloc(answer(), bytes, flags);
  }

  @Override
  public int hostFree(long pointer) {
    return cuda_h.cuMemFreeHost(at(pointer));
  }

  @Override
  public int pointerAttribute(int attribute, long pointer) {
    return cuda_h.cuPointerGetAttribute(answer(), attribute, pointer);
  }

  // ---- copies ---------------------------------------------------------------------------------

  @Override
  public int copyHostToDevice(long to, long hostPointer, long bytes, long stream) {
    return cuda_h.cuMemcpyHtoDAsync_v2(to, at(hostPointer), bytes, at(stream));
  }

  @Override
  public int copyDeviceToHost(long hostPointer, long from, long bytes, long stream) {
    return cuda_h.cuMemcpyDtoHAsync_v2(at(hostPointer), from, bytes, at(stream));
  }

  @Override
  public int copyDeviceToDevice(long to, long from, long bytes, long stream) {
    return cuda_h.cuMemcpyDtoDAsync_v2(to, from, bytes, at(stream));
  }

  @Override
  public int copyPeer(
      long to, long toContext, long from, long fromContext, long bytes, long stream) {
    return cuda_h.cuMemcpyPeerAsync(to, at(toContext), from, at(fromContext), bytes, at(stream));
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
    MemorySegment copy = Scratch.get().struct();
    if (fromHost) {
      CUDA_MEMCPY2D_st.srcMemoryType(copy, cuda_h.CU_MEMORYTYPE_HOST());
      CUDA_MEMCPY2D_st.srcHost(copy, at(from));
    } else {
      CUDA_MEMCPY2D_st.srcMemoryType(copy, cuda_h.CU_MEMORYTYPE_DEVICE());
      CUDA_MEMCPY2D_st.srcDevice(copy, from);
    }
    CUDA_MEMCPY2D_st.srcPitch(copy, fromPitch);
    if (toHost) {
      CUDA_MEMCPY2D_st.dstMemoryType(copy, cuda_h.CU_MEMORYTYPE_HOST());
      CUDA_MEMCPY2D_st.dstHost(copy, at(to));
    } else {
      CUDA_MEMCPY2D_st.dstMemoryType(copy, cuda_h.CU_MEMORYTYPE_DEVICE());
      CUDA_MEMCPY2D_st.dstDevice(copy, to);
    }
    CUDA_MEMCPY2D_st.dstPitch(copy, toPitch);
    CUDA_MEMCPY2D_st.WidthInBytes(copy, width);
    CUDA_MEMCPY2D_st.Height(copy, rows);
    return cuda_h.cuMemcpy2DAsync_v2(copy, at(stream));
  }

  @Override
  public int fill(long pointer, int elementBytes, int value, long count, long stream) {
    return switch (elementBytes) {
      case 1 -> cuda_h.cuMemsetD8Async(pointer, (byte) value, count, at(stream));
      case 2 -> cuda_h.cuMemsetD16Async(pointer, (short) value, count, at(stream));
      case 4 -> cuda_h.cuMemsetD32Async(pointer, value, count, at(stream));
      default -> throw new IllegalArgumentException("elements of " + elementBytes + " bytes");
    };
  }

  // ---- streams and events ---------------------------------------------------------------------

  @Override
  public int streamCreate(int flags) {
    return cuda_h.cuStreamCreate(answer(), flags);
  }

  @Override
  public int streamDestroy(long stream) {
    return cuda_h.cuStreamDestroy_v2(at(stream));
  }

  @Override
  public int streamSynchronize(long stream) {
    return cuda_h.cuStreamSynchronize(at(stream));
  }

  @Override
  public int streamQuery(long stream) {
    return cuda_h.cuStreamQuery(at(stream));
  }

  @Override
  public int streamWaitEvent(long stream, long event) {
    return cuda_h.cuStreamWaitEvent(at(stream), at(event), 0);
  }

  @Override
  public int eventCreate(int flags) {
    return cuda_h.cuEventCreate(answer(), flags);
  }

  @Override
  public int eventDestroy(long event) {
    return cuda_h.cuEventDestroy_v2(at(event));
  }

  @Override
  public int eventRecord(long event, long stream) {
    return cuda_h.cuEventRecord(at(event), at(stream));
  }

  @Override
  public int eventSynchronize(long event) {
    return cuda_h.cuEventSynchronize(at(event));
  }

  @Override
  public int eventQuery(long event) {
    return cuda_h.cuEventQuery(at(event));
  }

  @Override
  public int eventElapsed(long start, long end) {
    return cuda_h.cuEventElapsedTime_v2(answer(), at(start), at(end));
  }

  // ---- graphs ---------------------------------------------------------------------------------

  @Override
  public int captureBegin(long stream) {
    // Relaxed: flare itself refuses what a capture can't take, and on the capturing thread only.
    return cuda_h.cuStreamBeginCapture_v2(at(stream), cuda_h.CU_STREAM_CAPTURE_MODE_RELAXED());
  }

  @Override
  public int captureEnd(long stream) {
    return cuda_h.cuStreamEndCapture(at(stream), answer());
  }

  @Override
  public int graphInstantiate(long graph) {
    return cuda_h.cuGraphInstantiateWithFlags(answer(), at(graph), 0);
  }

  @Override
  public int graphUpdate(long executable, long graph) {
    return cuda_h.cuGraphExecUpdate_v2(at(executable), at(graph), Scratch.get().struct());
  }

  @Override
  public int graphLaunch(long executable, long stream) {
    return cuda_h.cuGraphLaunch(at(executable), at(stream));
  }

  @Override
  public int graphDestroy(long graph) {
    return cuda_h.cuGraphDestroy(at(graph));
  }

  @Override
  public int executableDestroy(long executable) {
    return cuda_h.cuGraphExecDestroy(at(executable));
  }
}
