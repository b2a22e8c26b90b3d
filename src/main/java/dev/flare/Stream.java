package dev.flare;

/**
 * An order of work on a device: what is launched on one stream runs one after the other.
 *
 * <p>The CPU has one stream, and it is synchronous: a launch returns when its work is done. Several
 * threads may use it at once; nothing orders their launches among each other.
 */
public final class Stream {
  private static final Stream CPU = new Stream(Device.cpu());

  private final Device device;

  private Stream(Device device) {
    this.device = device;
  }

  /**
   * Returns the stream of the CPU.
   *
   * @return always the same object
   */
  public static Stream cpu() {
    return CPU;
  }

  /**
   * Returns the device whose work it orders.
   *
   * @return the device
   */
  public Device device() {
    return device;
  }

  /** Waits until everything launched on this stream so far is done; on the CPU it already is. */
  public void synchronize() {
    // A launch on the CPU returns when its work is done.
  }

  /** Returns for example {@code Stream[cpu]}. */
  @Override
  public String toString() {
    return "Stream[" + device + "]";
  }
}
