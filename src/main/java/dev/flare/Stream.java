package dev.flare;

import dev.flare.internal.CudaApi;
import dev.flare.internal.Lease;
import org.jspecify.annotations.Nullable;

/**
 * An order of work on a device: what is queued on one stream runs one after the other, and streams
 * run beside each other.
 *
 * <p>Each GPU has a default stream, {@link Device#stream()}, which every call without a stream
 * uses; {@link #create} makes more. A tensor's first use on another stream than the one where it
 * was made waits for its making (allocation, fill, copy); beyond that, only {@link #waitFor} orders
 * streams among each other.
 *
 * <p>The CPU has one stream, and it is synchronous: a launch returns when its work is done. Several
 * threads may use it at once; nothing orders their launches among each other.
 *
 * <p><b>Ownership.</b> The caller of {@link #create} closes the stream, which waits for its work. A
 * {@link #foreign} stream is closed before its owner destroys it; that ends flare's use of it.
 * Closing the CPU's or a default stream does nothing.
 *
 * <p><b>Threads.</b> Any thread may use a stream. Two threads that queue on one have no order among
 * each other but that of their calls.
 */
public final class Stream implements AutoCloseable {
  private static final Stream CPU = new Stream(Device.cpu(), null, 0, Kind.SHARED);

  private enum Kind {
    /** The CPU's or a GPU's own one: it stays. */
    SHARED,
    CREATED,
    FOREIGN
  }

  private final Device device;
  private final @Nullable Gpu gpu;
  private final long handle;
  private final Kind kind;
  private final Use use = new Use();
  private volatile @Nullable Capture capture;

  private Stream(Device device, @Nullable Gpu gpu, long handle, Kind kind) {
    this.device = device;
    this.gpu = gpu;
    this.handle = handle;
    this.kind = kind;
  }

  private final class Use extends Lease {
    @Override
    protected boolean free() {
      if (gpu != null && !gpu.isLost()) {
        gpu.awaitStream(handle);
        if (kind == Kind.CREATED) {
          gpu.enter();
          gpu.check(gpu.api.streamDestroy(handle), "cuStreamDestroy");
        }
      }
      return true;
    }
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
   * Makes a stream whose work runs beside that of others.
   *
   * @param device a GPU; for the CPU there is only {@link #cpu}, which is returned
   * @return a stream that the caller closes
   * @throws DeviceException if the GPU is lost
   */
  public static Stream create(Device device) {
    if (device.isCpu()) {
      return CPU;
    }
    Gpu gpu = device.gpu();
    return new Stream(device, gpu, gpu.createStream(), Kind.CREATED);
  }

  /**
   * Takes a stream that somebody else has made in the device's primary context, which is the one of
   * the CUDA runtime and of most libraries.
   *
   * @param device the GPU that it belongs to
   * @param cuStream its {@code CUstream} or {@code cudaStream_t}; 0 is the legacy default stream
   * @return a stream to close before its owner destroys it
   * @throws InvalidArgumentException if {@code device} is the CPU
   */
  public static Stream foreign(Device device, long cuStream) {
    if (device.isCpu()) {
      throw new InvalidArgumentException("device", device, "a GPU");
    }
    return new Stream(device, device.gpu(), cuStream, Kind.FOREIGN);
  }

  static Stream ofDevice(Device device, Gpu gpu, long handle) {
    return new Stream(device, gpu, handle, Kind.SHARED);
  }

  /**
   * Returns the device whose work it orders.
   *
   * @return the device
   */
  public Device device() {
    return device;
  }

  /**
   * Returns the driver's handle, for other libraries.
   *
   * @return a {@code CUstream} as a number, valid while the stream is open; 0 on the CPU
   * @throws ClosedException if the stream is closed
   */
  public long handle() {
    if (!use.isOpen()) {
      // While it closes, close() itself still needs it.
      throw closed();
    }
    return handle;
  }

  /**
   * Waits until everything queued on this stream so far is done; on the CPU it already is. A
   * virtual thread leaves its carrier to others meanwhile.
   *
   * @throws ClosedException if the stream is closed
   * @throws InUseException if a graph is being captured on it
   * @throws DeviceException if some of the work failed
   */
  public void synchronize() {
    if (gpu == null) {
      return;
    }
    begin();
    try {
      refuseInCapture("synchronize");
      gpu.awaitStream(handle);
    } finally {
      end();
    }
  }

  /**
   * Tells whether everything queued on this stream is done, without waiting.
   *
   * @return true on the CPU
   * @throws ClosedException if the stream is closed
   * @throws InUseException if a graph is being captured on it
   * @throws DeviceException if some of the work failed
   */
  public boolean isIdle() {
    if (gpu == null) {
      return true;
    }
    begin();
    try {
      refuseInCapture("isIdle");
      gpu.enter();
      int status = gpu.api.streamQuery(handle);
      if (status == CudaApi.ERROR_NOT_READY) {
        return false;
      }
      gpu.check(status, "cuStreamQuery");
      return true;
    } finally {
      end();
    }
  }

  /**
   * Lets what is queued here from now on run after all that is queued on another stream by now.
   *
   * @param other a stream of a GPU, also of another one
   * @throws ClosedException if one of the two is closed
   */
  public void waitFor(Stream other) {
    if (gpu == null || other.gpu == null || other == this) {
      return; // the CPU's work is done already
    }
    try (Event event = Event.create(other.device)) {
      event.record(other);
      waitFor(event);
    }
  }

  /**
   * Lets what is queued here from now on run after an event's last {@link Event#record}.
   *
   * <p>If that happened on a stream where a graph is being captured, this stream takes part in the
   * capture from now on; before it ends, the first stream has to wait for this one again.
   *
   * @param event one that has been recorded; otherwise there is nothing to wait for
   * @throws ClosedException if the stream or the event is closed
   */
  public void waitFor(Event event) {
    if (gpu == null || event.device().isCpu()) {
      return;
    }
    begin();
    try {
      event.letWait(this);
    } finally {
      end();
    }
  }

  /**
   * Waits for the stream's work and ends it; does nothing when called again, or if it belongs to
   * the device.
   *
   * @throws InUseException if another thread queues work on it now, or a graph is being captured
   */
  @Override
  public void close() {
    if (kind == Kind.SHARED) {
      return;
    }
    synchronized (this) {
      if (use.close() > 0) {
        throw new InUseException("close: " + this + " is in use by a call; close it afterwards");
      }
    }
  }

  // ---- for the package --------------------------------------------------------------------------

  /** The GPU; there is none for the CPU's stream. */
  Gpu gpu() {
    if (gpu == null) {
      throw new IllegalStateException("the CPU's stream is not a GPU's");
    }
    return gpu;
  }

  boolean isOpen() {
    return use.isOpen();
  }

  /** Returns once a close() that has begun is through with waiting for the stream's work. */
  void awaitClosed() {
    synchronized (this) {
      // The lock is all that is wanted.
    }
  }

  /** The stream that a call names, or the device's; null on the CPU. */
  static @Nullable Stream of(@Nullable Stream named, Device device) {
    if (named == null) {
      if (device.isCpu()) {
        return null;
      }
      Capture.refuse("work without a stream");
      return device.stream();
    }
    if (!named.device.equals(device)) {
      throw new InvalidArgumentException("stream", named, "a stream of " + device);
    }
    return named.gpu == null ? null : named;
  }

  /** Enters a call that queues work here. */
  void begin() {
    if (!use.acquire()) {
      throw closed();
    }
    Capture now = capture;
    if (now != null && now.thread() != Thread.currentThread()) {
      use.release();
      throw new InUseException(
          "another thread captures a graph on " + this + "; use a stream of your own");
    }
  }

  /** Enters a call that only looks at what is queued; false if the stream is closed. */
  boolean tryBegin() {
    return use.acquire();
  }

  void end() {
    use.release();
  }

  boolean isCapturing() {
    return capture != null;
  }

  /** The capture that this stream takes part in. */
  @Nullable Capture capture() {
    return capture;
  }

  /** Counts a piece of work if it went into a graph. */
  void captured() {
    Capture now = capture;
    if (now != null) {
      now.count();
    }
  }

  void setCapture(@Nullable Capture now) {
    capture = now;
  }

  /** Whether a graph may be captured here. */
  boolean isShared() {
    return kind == Kind.SHARED;
  }

  private void refuseInCapture(String call) {
    if (capture != null) {
      throw new InUseException(
          call + ": a graph is being captured on " + this + ", where nothing runs yet");
    }
  }

  private ClosedException closed() {
    Throwable site = use.closeSite();
    String text = this + " is closed";
    return site == null ? new ClosedException(text) : new ClosedException(text, site);
  }

  /** Returns for example {@code Stream[cpu]} or {@code Stream[cuda:0 default]}. */
  @Override
  public String toString() {
    if (gpu == null) {
      return "Stream[" + device + "]";
    }
    return "Stream["
        + device
        + (kind == Kind.SHARED ? " default" : " " + Long.toHexString(handle))
        + "]";
  }
}
