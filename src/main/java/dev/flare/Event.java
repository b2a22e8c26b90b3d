package dev.flare;

import dev.flare.internal.CudaApi;
import dev.flare.internal.Lease;
import org.jspecify.annotations.Nullable;

/**
 * A point in a stream's work: to wait for, to order other streams after, and to measure time
 * between two of them.
 *
 * <pre>{@code
 * start.record(stream);
 * plan.launch(stream, q, k, v, out, null);
 * end.record(stream);
 * end.synchronize();
 * double millis = end.millisSince(start);
 * }</pre>
 *
 * <p>On the CPU, whose stream is synchronous, an event is a look at the clock.
 *
 * <p><b>Ownership.</b> The caller closes it; closing twice is fine.
 *
 * <p><b>Threads.</b> Any thread may use it.
 */
public final class Event implements AutoCloseable {
  private final Device device;
  private final @Nullable Gpu gpu;
  private final long handle;
  private final Use use = new Use();
  private volatile long nanos; // on the CPU
  private volatile boolean recorded;
  private volatile @Nullable Capture capture; // where it was recorded, if that was one

  private Event(Device device, @Nullable Gpu gpu, long handle) {
    this.device = device;
    this.gpu = gpu;
    this.handle = handle;
  }

  private final class Use extends Lease {
    @Override
    protected boolean free() {
      if (gpu != null && !gpu.isLost()) {
        gpu.enter();
        gpu.check(gpu.api.eventDestroy(handle), "cuEventDestroy");
      }
      return true;
    }
  }

  /**
   * Makes an event.
   *
   * @param device whose streams it will be recorded on
   * @return an event that the caller closes
   * @throws DeviceException if the GPU is lost
   */
  public static Event create(Device device) {
    if (device.isCpu()) {
      return new Event(device, null, 0);
    }
    Gpu gpu = device.gpu();
    gpu.enter();
    gpu.check(gpu.api.eventCreate(0), "cuEventCreate");
    return new Event(device, gpu, gpu.api.out());
  }

  /**
   * Returns the device whose streams it is recorded on.
   *
   * @return the device
   */
  public Device device() {
    return device;
  }

  /**
   * Moves the event to the end of what is queued on a stream by now.
   *
   * @param stream of the event's device
   * @return this event
   * @throws ClosedException if the event or the stream is closed
   */
  public Event record(Stream stream) {
    if (!stream.device().equals(device)) {
      throw new InvalidArgumentException("stream", stream, "a stream of " + device);
    }
    acquire();
    try {
      if (gpu == null) {
        nanos = System.nanoTime();
      } else {
        stream.begin();
        try {
          gpu.enter();
          gpu.check(gpu.api.eventRecord(handle, stream.handle()), "cuEventRecord");
          capture = stream.capture();
        } finally {
          stream.end();
        }
      }
      recorded = true;
      return this;
    } finally {
      use.release();
    }
  }

  /**
   * Waits until the stream has come to where the event was recorded last. A virtual thread leaves
   * its carrier to others meanwhile.
   *
   * @throws ClosedException if the event is closed
   * @throws InUseException if it was recorded into a graph: then it never happens
   * @throws DeviceException if some of the work before it failed
   */
  public void synchronize() {
    if (gpu == null) {
      return;
    }
    acquire();
    try {
      refuseCaptured("synchronize");
      gpu.awaitEvent(handle);
    } finally {
      use.release();
    }
  }

  /**
   * Tells whether the stream has come there, without waiting.
   *
   * @return true also if the event was never recorded
   * @throws ClosedException if the event is closed
   * @throws DeviceException if some of the work before it failed
   */
  public boolean isDone() {
    if (gpu == null) {
      return true;
    }
    acquire();
    try {
      refuseCaptured("isDone");
      gpu.enter();
      int status = gpu.api.eventQuery(handle);
      if (status == CudaApi.ERROR_NOT_READY) {
        return false;
      }
      gpu.check(status, "cuEventQuery");
      return true;
    } finally {
      use.release();
    }
  }

  /**
   * Tells how much time the device spent between two events.
   *
   * @param start recorded before this one, on the same device
   * @return milliseconds, to about half a microsecond
   * @throws InvalidArgumentException if one of them has not been recorded, or on another device
   * @throws InUseException if the device has not come to one of them yet: {@link #synchronize}
   *     first
   * @throws ClosedException if one of them is closed
   */
  public double millisSince(Event start) {
    if (!start.device.equals(device)) {
      throw new InvalidArgumentException("start", start, "an event of " + device);
    }
    if (!recorded || !start.recorded) {
      throw new InvalidArgumentException(
          recorded ? "start" : "event", "an event without record()", "both events recorded");
    }
    acquire();
    try {
      start.acquire();
      try {
        if (gpu == null) {
          return (nanos - start.nanos) / 1e6;
        }
        refuseCaptured("millisSince");
        start.refuseCaptured("millisSince");
        gpu.enter();
        int status = gpu.api.eventElapsed(start.handle, handle);
        if (status == CudaApi.ERROR_NOT_READY) {
          throw new InUseException("millisSince: the device is not there yet; synchronize() first");
        }
        gpu.check(status, "cuEventElapsedTime");
        return Float.intBitsToFloat((int) gpu.api.out());
      } finally {
        start.use.release();
      }
    } finally {
      use.release();
    }
  }

  /** Queues the wait of {@code stream}, which the caller has entered. */
  void letWait(Stream stream) {
    acquire();
    try {
      Gpu waiting = stream.gpu();
      Capture from = capture;
      if (from != null && !from.isOver()) {
        from.join(stream);
      }
      waiting.enter();
      waiting.check(waiting.api.streamWaitEvent(stream.handle(), handle), "cuStreamWaitEvent");
    } finally {
      use.release();
    }
  }

  private void refuseCaptured(String call) {
    if (capture != null) {
      throw new InUseException(
          call + ": the event was recorded into a graph, where it is only an order");
    }
  }

  private void acquire() {
    if (!use.acquire()) {
      Throwable site = use.closeSite();
      String text = "the event is closed";
      throw site == null ? new ClosedException(text) : new ClosedException(text, site);
    }
  }

  /**
   * Gives the event back; does nothing when called again.
   *
   * @throws InUseException if another thread waits for it now
   */
  @Override
  public void close() {
    if (use.close() > 0) {
      throw new InUseException("close: the event is in use on another thread");
    }
  }

  /** Returns for example {@code Event[cuda:0]}. */
  @Override
  public String toString() {
    return "Event[" + device + "]";
  }
}
