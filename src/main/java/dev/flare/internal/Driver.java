package dev.flare.internal;

import dev.flare.generated.cuda.cuda_h;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.SymbolLookup;
import java.lang.foreign.ValueLayout;
import org.jspecify.annotations.Nullable;

/**
 * The CUDA driver, {@code libcuda.so.1}.
 *
 * <p>The bindings open that library when their class is first used, and stay broken for the whole
 * process if that fails: so nothing here touches them before a probe has found it. Thread-safe.
 */
public final class Driver {
  private static final String LIBRARY = "libcuda.so.1";

  private static volatile @Nullable Ready ready;

  private Driver() {}

  /** Whether CUDA devices can be reached. */
  public sealed interface Status permits Ready, Missing {}

  /**
   * They can.
   *
   * @param version the newest CUDA that the driver knows: 13000 for 13.0
   * @param devices how many there are, at least 1
   */
  public record Ready(int version, int devices) implements Status {}

  /**
   * They can't.
   *
   * @param reason one line
   * @param remedy what to do
   * @param cause what was thrown, if anything
   */
  public record Missing(String reason, String remedy, @Nullable Throwable cause)
      implements Status {}

  /** Initialises the driver if that has not happened; a failure is tried again by the next call. */
  public static synchronized Status status() {
    Ready known = ready;
    if (known != null) {
      return known;
    }
    Status status = probe();
    if (status instanceof Ready found) {
      ready = found;
    }
    return status;
  }

  /**
   * The driver's calls.
   *
   * @throws IllegalStateException if {@link #status} was not {@link Ready} before
   */
  public static CudaApi api() {
    if (ready == null) {
      throw new IllegalStateException("the CUDA driver has not been found");
    }
    return CudaDriver.INSTANCE;
  }

  private static Status probe() {
    try (Arena arena = Arena.ofConfined()) {
      SymbolLookup.libraryLookup(LIBRARY, arena);
      return initialise(arena);
    } catch (IllegalCallerException e) {
      return new Missing(
          "native access is off for flare",
          "start Java with --enable-native-access="
              + (Driver.class.getModule().isNamed() ? "dev.flare" : "ALL-UNNAMED"),
          e);
    } catch (IllegalArgumentException e) {
      return new Missing(
          "no NVIDIA driver here (" + LIBRARY + " was not found)",
          "on a machine with an NVIDIA GPU install its driver; in a container start it with the GPU"
              + " passed through",
          e);
    }
  }

  private static Status initialise(Arena arena) {
    MemorySegment out = arena.allocate(ValueLayout.JAVA_INT);
    int status = cuda_h.cuInit(0);
    if (status == cuda_h.CUDA_ERROR_NO_DEVICE()) {
      return new Missing(
          "the NVIDIA driver sees no GPU",
          "check nvidia-smi and CUDA_VISIBLE_DEVICES; in a container pass the GPU through",
          null);
    }
    if (status != 0) {
      return new Missing(
          "the NVIDIA driver does not start: cuInit returned " + errorName(arena, status),
          "check nvidia-smi; after a driver update restart the machine",
          null);
    }
    cuda_h.cuDriverGetVersion(out);
    int version = out.get(ValueLayout.JAVA_INT, 0);
    cuda_h.cuDeviceGetCount(out);
    int devices = out.get(ValueLayout.JAVA_INT, 0);
    if (devices == 0) {
      return new Missing(
          "the NVIDIA driver sees no GPU", "check nvidia-smi and CUDA_VISIBLE_DEVICES", null);
    }
    return new Ready(version, devices);
  }

  private static String errorName(Arena arena, int status) {
    MemorySegment out = arena.allocate(ValueLayout.ADDRESS);
    if (cuda_h.cuGetErrorName(status, out) != 0) {
      return "code " + status;
    }
    return out.get(cuda_h.C_POINTER, 0).getString(0) + " (" + status + ")";
  }
}
