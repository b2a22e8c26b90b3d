package dev.flare;

import dev.flare.internal.Allocation;
import dev.flare.internal.CudaApi;
import dev.flare.internal.Driver;
import dev.flare.internal.Tracking;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.concurrent.ConcurrentHashMap;
import org.jspecify.annotations.Nullable;

/**
 * Where tensors live and kernels run: the CPU, or one NVIDIA GPU.
 *
 * <p>A GPU is used through its primary context, which flare retains when something first needs it
 * and shares with the CUDA runtime of other libraries. Nothing is torn down when the JVM exits: the
 * driver takes everything back.
 *
 * <p>When a kernel faults, the driver gives the whole context up: from then on every call on that
 * device throws the same {@link DeviceException}, and only a new process helps.
 *
 * <p>Immutable; any thread may use it. Two objects are equal when they name the same device.
 */
public final class Device {
  private static final int CPU_INDEX = -1;
  private static final Device CPU = new Device(CPU_INDEX, null);
  private static final Map<Integer, Device> GPUS = new ConcurrentHashMap<>();

  /** Code for older GPUs is not in the library. */
  private static final int OLDEST_CAPABILITY = 80;

  private final int index;
  private final @Nullable CudaApi api;
  private volatile @Nullable Gpu gpu;

  private Device(int index, @Nullable CudaApi api) {
    this.index = index;
    this.api = api;
  }

  /**
   * Returns the host: its memory and all of its cores.
   *
   * @return always the same object
   */
  public static Device cpu() {
    return CPU;
  }

  /**
   * Returns an NVIDIA GPU. Its context is made when something first needs it.
   *
   * @param ordinal from 0, in the driver's order
   * @return the device
   * @throws InvalidArgumentException if {@code ordinal} is negative
   * @throws DeviceException if there is no driver or no such GPU, telling why
   */
  public static Device cuda(int ordinal) {
    if (ordinal < 0) {
      throw new InvalidArgumentException("ordinal", ordinal, "a CUDA ordinal of zero or more");
    }
    return switch (Driver.status()) {
      case Driver.Missing missing ->
          throw new DeviceException(
              "cuda(" + ordinal + "): " + missing.reason() + ". What to do: " + missing.remedy());
      case Driver.Ready ready -> {
        if (ordinal >= ready.devices()) {
          throw new DeviceException(
              "cuda("
                  + ordinal
                  + "): there are "
                  + ready.devices()
                  + " GPU(s) here, the last is cuda:"
                  + (ready.devices() - 1)
                  + "; see nvidia-smi and CUDA_VISIBLE_DEVICES");
        }
        yield GPUS.computeIfAbsent(ordinal, i -> new Device(i, Driver.api()));
      }
    };
  }

  /** A GPU behind a driver of a test's own. */
  static Device of(CudaApi api, int ordinal) {
    return new Device(ordinal, api);
  }

  /**
   * Returns the fastest device that flare can use here.
   *
   * @return the first usable GPU, else the CPU; {@link Flare#status} tells why there is no GPU
   */
  public static Device best() {
    List<Device> all = all();
    return all.get(all.size() > 1 ? 1 : 0);
  }

  /**
   * Lists the devices that flare can use here.
   *
   * @return the CPU first, then the GPUs of compute capability 8.0 and newer in the driver's order
   */
  public static List<Device> all() {
    List<Device> devices = new ArrayList<>();
    devices.add(CPU);
    if (Driver.status() instanceof Driver.Ready ready) {
      for (int i = 0; i < ready.devices(); i++) {
        Device device = cuda(i);
        if (device.capability() >= OLDEST_CAPABILITY) {
          devices.add(device);
        }
      }
    }
    return List.copyOf(devices);
  }

  /**
   * Returns a name for people.
   *
   * @return the processor's or GPU's own name
   */
  public String name() {
    if (api == null) {
      return HostInfo.processor();
    }
    String name = api.deviceName(handle(api));
    return name == null ? toString() : name;
  }

  /**
   * Asks how much memory there is.
   *
   * @return free and total bytes now; for the CPU, free is what the system could give without
   *     swapping. What a GPU's pool holds unused is not free: {@link #trim}
   * @throws DeviceException if the GPU is lost
   */
  public Memory memory() {
    return isCpu() ? HostInfo.memory() : gpu().memory();
  }

  /**
   * Tells how much memory open tensors and caches hold.
   *
   * @return bytes; mapped files count, borrowed memory does not; plans' workspaces count on a GPU
   */
  public long liveBytes() {
    return Tracking.liveBytes(isCpu() ? Allocation.HOST : index);
  }

  /**
   * Tells who holds memory, when the program runs with {@code -Dflare.track=true}.
   *
   * @return a line for each place in the code, the largest first; empty without the property
   */
  public List<String> liveSites() {
    return Tracking.liveSites(isCpu() ? Allocation.HOST : index);
  }

  /**
   * Memory of a device.
   *
   * @param freeBytes what could be allocated now
   * @param totalBytes all of it
   */
  public record Memory(long freeBytes, long totalBytes) {}

  /**
   * The pool that a GPU's tensors come from.
   *
   * @param usedBytes in tensors and workspaces, and in those whose closing the GPU has not come to
   * @param usedPeakBytes the most there ever were
   * @param reservedBytes what the pool has from the driver
   * @param reservedPeakBytes the most there ever were
   */
  public record Pool(
      long usedBytes, long usedPeakBytes, long reservedBytes, long reservedPeakBytes) {}

  /**
   * Tells about the pool that this GPU's tensors come from.
   *
   * @return all zeros on the CPU
   * @throws DeviceException if the GPU is lost
   */
  public Pool pool() {
    return isCpu() ? new Pool(0, 0, 0, 0) : gpu().pool();
  }

  /**
   * Gives memory that flare holds for later back to the driver, for other processes and libraries:
   * what no tensor uses of the GPU's pool, and the pinned buffers of large copies. What a stream
   * still uses stays: {@link #synchronize} first.
   *
   * @throws DeviceException if the GPU is lost
   */
  public void trim() {
    if (!isCpu()) {
      gpu().trim();
    }
  }

  /**
   * Returns the stream of calls that name none.
   *
   * @return always the same object for a device; {@link Stream#cpu} for the CPU
   * @throws DeviceException if the GPU is lost
   */
  public Stream stream() {
    return isCpu() ? Stream.cpu() : gpu().stream();
  }

  /**
   * Waits for everything queued on the device, also by other libraries of this process.
   *
   * @throws InUseException if this thread is capturing a graph
   * @throws DeviceException if the GPU is lost, or some of the work failed
   */
  public void synchronize() {
    if (!isCpu()) {
      gpu().synchronize();
    }
  }

  /**
   * What kind of GPU a device is.
   *
   * @param capability compute capability: 90 for 9.0
   * @param multiprocessors how many
   * @param totalBytes of memory
   * @param l2Bytes of second-level cache
   * @param ecc whether memory corrects errors
   * @param pciBusId such as 0000:3b:00.0; empty if unknown
   */
  public record Properties(
      int capability,
      int multiprocessors,
      long totalBytes,
      long l2Bytes,
      boolean ecc,
      String pciBusId) {}

  /**
   * Asks the driver about this GPU; makes no context.
   *
   * @return what kind of GPU it is
   * @throws UnsupportedException on the CPU
   * @throws DeviceException if the driver does not answer
   */
  public Properties properties() {
    CudaApi driver = driver("properties");
    int handle = handle(driver);
    check(driver, driver.deviceTotalMemory(handle), "cuDeviceTotalMem");
    long total = driver.out();
    String bus = driver.devicePciBusId(handle);
    return new Properties(
        capability(),
        attribute(driver, handle, CudaApi.ATTRIBUTE_MULTIPROCESSOR_COUNT),
        total,
        attribute(driver, handle, CudaApi.ATTRIBUTE_L2_CACHE_SIZE),
        attribute(driver, handle, CudaApi.ATTRIBUTE_ECC_ENABLED) != 0,
        bus == null ? "" : bus);
  }

  /**
   * Tells whether kernels and copies of this GPU can reach another one's memory directly.
   *
   * @param other a GPU
   * @return false if copies between the two go through the host
   * @throws UnsupportedException if one of the two is the CPU
   */
  public boolean canAccess(Device other) {
    CudaApi driver = driver("canAccess");
    check(
        driver,
        driver.deviceCanAccessPeer(handle(driver), other.handle(other.driver("canAccess"))),
        "cuDeviceCanAccessPeer");
    return driver.out() != 0;
  }

  private int capability() {
    CudaApi driver = driver("capability");
    int handle = handle(driver);
    return 10 * attribute(driver, handle, CudaApi.ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        + attribute(driver, handle, CudaApi.ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  }

  private CudaApi driver(String call) {
    if (api == null) {
      throw new UnsupportedException(call + ": the CPU is no GPU");
    }
    return api;
  }

  private int handle(CudaApi driver) {
    check(driver, driver.deviceGet(index), "cuDeviceGet");
    return (int) driver.out();
  }

  private int attribute(CudaApi driver, int handle, int attribute) {
    check(driver, driver.deviceAttribute(attribute, handle), "cuDeviceGetAttribute");
    return (int) driver.out();
  }

  private void check(CudaApi driver, int status, String call) {
    if (status != CudaApi.SUCCESS) {
      throw new DeviceException(
          call + " on " + this + " failed with " + driver.errorName(status) + " (" + status + ")");
    }
  }

  /** What there is to run on; opens the GPU if nothing has needed it yet. */
  Gpu gpu() {
    Gpu open = gpu;
    return open != null ? open : openGpu();
  }

  private synchronized Gpu openGpu() {
    Gpu open = gpu;
    if (open == null) {
      open = Gpu.open(this, driver("gpu"));
      gpu = open;
    }
    return open;
  }

  /** What params structs name the device by. */
  int kernelDevice() {
    return api == null ? CPU_INDEX : api.kernelDevice(index);
  }

  /**
   * Tells whether this is the host.
   *
   * @return true for {@link #cpu()}
   */
  public boolean isCpu() {
    return api == null;
  }

  /**
   * Returns the CUDA ordinal.
   *
   * @return -1 for the CPU
   */
  public int index() {
    return index;
  }

  @Override
  public boolean equals(Object other) {
    return this == other
        || (other instanceof Device that && index == that.index && Objects.equals(api, that.api));
  }

  @Override
  public int hashCode() {
    return index;
  }

  /** Returns {@code cpu} or {@code cuda:0}. */
  @Override
  public String toString() {
    return isCpu() ? "cpu" : "cuda:" + index;
  }
}
