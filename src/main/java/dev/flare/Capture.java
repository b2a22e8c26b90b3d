package dev.flare;

import dev.flare.internal.Allocation;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import org.jspecify.annotations.Nullable;

/**
 * A graph while it is being captured: which streams take part, and what the graph will need to
 * stay.
 *
 * <p>Belongs to the thread that captures.
 */
final class Capture {
  private static final ThreadLocal<@Nullable Capture> CURRENT = new ThreadLocal<>();

  private final Thread thread = Thread.currentThread();
  private final List<Stream> streams = new ArrayList<>();
  private final Map<Allocation, Memory> memory = new HashMap<>();
  private final Set<Launcher> plans = new HashSet<>();
  private int launches;
  private boolean over;

  /** What a graph keeps open. */
  record Memory(Allocation allocation, @Nullable GpuMemory onGpu) {}

  private Capture() {}

  /**
   * Refuses what a capture can't take, if this thread is capturing.
   *
   * @param what a call in words, for the message
   */
  static void refuse(String what) {
    if (CURRENT.get() != null) {
      throw new InUseException(
          what + ": this thread is capturing a graph; do it before the capture or after it");
    }
  }

  /** Begins a capture on {@code stream}, which the caller has entered. */
  static Capture begin(Stream stream) {
    refuse("capture");
    if (stream.isShared()) {
      throw new InvalidArgumentException(
          "stream", stream, "one of Stream.create(device), which nothing else uses meanwhile");
    }
    Gpu gpu = stream.gpu();
    gpu.enter();
    gpu.check(gpu.api.captureBegin(stream.handle()), "cuStreamBeginCapture");
    Capture capture = new Capture();
    capture.join(stream);
    CURRENT.set(capture);
    return capture;
  }

  /** Lets another stream take part. */
  void join(Stream stream) {
    if (stream.capture() != this) {
      stream.setCapture(this);
      streams.add(stream);
    }
  }

  /**
   * Ends it.
   *
   * @return the driver's graph
   */
  long end() {
    over = true;
    CURRENT.remove();
    Stream stream = streams.getFirst();
    streams.forEach(s -> s.setCapture(null));
    Gpu gpu = stream.gpu();
    gpu.enter();
    gpu.check(gpu.api.captureEnd(stream.handle()), "cuStreamEndCapture");
    return gpu.api.out();
  }

  boolean isOver() {
    return over;
  }

  Thread thread() {
    return thread;
  }

  /** Keeps the memory of a tensor that the caller holds open. */
  void keep(Tensor tensor) {
    Allocation allocation = tensor.memory();
    if (!memory.containsKey(allocation) && allocation.retain()) {
      memory.put(allocation, new Memory(allocation, tensor.onGpu()));
    }
  }

  /** The same for memory that is no tensor's: a workspace. */
  void keep(GpuMemory used) {
    Allocation allocation = used.allocation();
    if (!memory.containsKey(allocation) && allocation.retain()) {
      memory.put(allocation, new Memory(allocation, used));
    }
  }

  /** Keeps the plan of a launch that has been captured. */
  void keep(Launcher plan) {
    if (plans.add(plan)) {
      plan.retain();
    }
  }

  /** Counts a piece of work. */
  void count() {
    launches++;
  }

  int launches() {
    return launches;
  }

  /** What to give to the graph. */
  Kept kept() {
    return new Kept(List.copyOf(memory.values()), List.copyOf(plans));
  }

  /** Memory and plans that stay open. */
  record Kept(List<Memory> memory, List<Launcher> plans) {
    static final Kept NOTHING = new Kept(List.of(), List.of());

    void release() {
      memory.forEach(m -> m.allocation().unretain());
      plans.forEach(Launcher::unretain);
    }
  }
}
