package dev.flare;

import dev.flare.internal.Tracking;
import java.util.List;

/**
 * Where tensors live and kernels run: the CPU, or one NVIDIA GPU.
 *
 * <p>Immutable; any thread may use it. Two objects are equal when they name the same device.
 */
public final class Device {
  private static final int CPU_INDEX = -1;
  private static final Device CPU = new Device(CPU_INDEX);

  private final int index;

  private Device(int index) {
    this.index = index;
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
   * Returns an NVIDIA GPU.
   *
   * @param ordinal from 0, in the driver's order
   * @return the device
   * @throws InvalidArgumentException if {@code ordinal} is negative
   * @throws DeviceException if there is no driver or no such GPU, telling why
   * @throws UnsupportedException if the GPU is there: tensors on CUDA devices are not part of this
   *     version
   */
  public static Device cuda(int ordinal) {
    if (ordinal < 0) {
      throw new InvalidArgumentException("ordinal", ordinal, "a CUDA ordinal of zero or more");
    }
    Flare.Part cuda = Flare.status().cuda();
    if (cuda instanceof Flare.Missing missing) {
      throw new DeviceException(
          "cuda(" + ordinal + "): " + missing.reason() + ". What to do: " + missing.remedy());
    }
    throw new UnsupportedException(
        "cuda(" + ordinal + "): tensors on CUDA devices are not part of this version; use cpu()");
  }

  /**
   * Returns the fastest device that flare can use here.
   *
   * @return a GPU if one is usable, else the CPU
   */
  public static Device best() {
    return all().getLast();
  }

  /**
   * Lists the devices that flare can use here.
   *
   * @return the CPU first, then the GPUs in the driver's order
   */
  public static List<Device> all() {
    return List.of(CPU);
  }

  /**
   * Returns a name for people.
   *
   * @return the processor's or GPU's own name
   */
  public String name() {
    return HostInfo.processor();
  }

  /**
   * Asks how much memory there is.
   *
   * @return free and total bytes now; for the CPU, free is what the system could give without
   *     swapping
   */
  public Memory memory() {
    return HostInfo.memory();
  }

  /**
   * Tells how much memory open tensors and caches hold.
   *
   * @return bytes; mapped files count, borrowed memory and plans' workspaces do not
   */
  public long liveBytes() {
    return Tracking.liveBytes();
  }

  /**
   * Tells who holds memory, when the program runs with {@code -Dflare.track=true}.
   *
   * @return a line for each place in the code, the largest first; empty without the property
   */
  public List<String> liveSites() {
    return Tracking.liveSites();
  }

  /**
   * Memory of a device.
   *
   * @param freeBytes what could be allocated now
   * @param totalBytes all of it
   */
  public record Memory(long freeBytes, long totalBytes) {}

  /**
   * Tells whether this is the host.
   *
   * @return true for {@link #cpu()}
   */
  public boolean isCpu() {
    return index == CPU_INDEX;
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
    return other instanceof Device that && index == that.index;
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
