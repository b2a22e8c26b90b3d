package dev.flare;

import dev.flare.internal.CudaApi;

/**
 * Work on a GPU that is queued as one: captured once, replayed with one call, however many launches
 * it holds.
 *
 * <pre>{@code
 * try (Stream stream = Stream.create(device);
 *     Graph graph = Graph.capture(stream, () -> {
 *       for (Layer layer : layers) {
 *         layer.plan.launch(stream, layer.q, layer.k, layer.v, layer.out, null);
 *       }
 *     })) {
 *   graph.launch(stream);
 *   stream.synchronize();
 * }
 * }</pre>
 *
 * <p>A replay reads and writes the very tensors of the capture: write new inputs into them with
 * {@link Tensor#copyFrom(Tensor, Stream)}. Lengths and block tables on the device may change from
 * replay to replay. {@link #update} moves a graph to other tensors.
 *
 * <p><b>While capturing</b> nothing runs. Only launches and copies with a stream that takes part
 * are captured; allocating or closing device memory, waiting, and launches without a stream throw
 * {@link InUseException}. Other threads may go on with other streams.
 *
 * <p><b>Ownership.</b> The caller closes the graph. Until then it keeps the tensors and plans that
 * it uses: closing one of them throws {@link InUseException}.
 *
 * <p><b>Threads.</b> Any thread may launch or close it; its methods exclude each other.
 */
public final class Graph implements AutoCloseable {
  private final Device device;
  private final Gpu gpu;
  private long executable;
  private int launches;
  private Capture.Kept kept;
  private boolean closed;

  private Graph(Stream stream) {
    this.device = stream.device();
    this.gpu = stream.gpu();
    this.kept = Capture.Kept.NOTHING;
  }

  /** A captured graph of the driver, and what it needs. */
  private record Captured(long graph, int launches, Capture.Kept kept) {}

  /**
   * Captures what {@code work} queues on a stream.
   *
   * @param stream one of {@link Stream#create}; nothing may be queued on it by other threads
   *     meanwhile
   * @param work launches and copies on that stream, and on others that wait for its events
   * @return a graph that the caller closes
   * @throws UnsupportedException on the CPU
   * @throws InvalidArgumentException if the stream is a device's default stream
   * @throws InUseException if {@code work} does what a capture can't take
   */
  public static Graph capture(Stream stream, Runnable work) {
    if (stream.device().isCpu()) {
      throw new UnsupportedException("graph: the CPU has none; call the plans one after the other");
    }
    Captured captured = record(stream, work);
    try {
      Graph graph = new Graph(stream);
      graph.instantiate(captured);
      return graph;
    } catch (RuntimeException | Error e) {
      captured.kept.release();
      throw e;
    } finally {
      destroy(stream.gpu(), captured);
    }
  }

  private static Captured record(Stream stream, Runnable work) {
    Gpu gpu = stream.gpu();
    stream.begin();
    try {
      Capture capture = Capture.begin(stream);
      try {
        work.run();
      } catch (RuntimeException | Error e) {
        abandon(gpu, capture, e);
        throw e;
      }
      long graph;
      try {
        graph = capture.end();
      } catch (RuntimeException | Error e) {
        capture.kept().release();
        throw e;
      }
      return new Captured(graph, capture.launches(), capture.kept());
    } finally {
      stream.end();
    }
  }

  /** Ends a capture whose work has failed. */
  private static void abandon(Gpu gpu, Capture capture, Throwable failure) {
    try {
      gpu.api.graphDestroy(capture.end());
    } catch (FlareException e) {
      failure.addSuppressed(e);
    }
    capture.kept().release();
  }

  private static void destroy(Gpu gpu, Captured captured) {
    if (!gpu.isLost()) {
      gpu.check(gpu.api.graphDestroy(captured.graph), "cuGraphDestroy");
    }
  }

  private void instantiate(Captured captured) {
    gpu.enter();
    gpu.check(gpu.api.graphInstantiate(captured.graph), "cuGraphInstantiate");
    executable = gpu.api.out();
    kept = captured.kept;
    launches = captured.launches;
  }

  /**
   * Captures anew, with other tensors or lengths, and puts the result in place of the old work:
   * replays under way still do the old one.
   *
   * @param stream one of {@link Stream#create}
   * @param work as for {@link #capture}
   * @return true if the driver could change the graph in place; false if the work is so different
   *     that it was built anew, which takes longer
   * @throws ClosedException if the graph is closed
   * @throws InUseException if {@code work} does what a capture can't take
   */
  public synchronized boolean update(Stream stream, Runnable work) {
    requireOpen();
    requireHere(stream);
    Captured captured = record(stream, work);
    Capture.Kept before = kept;
    boolean taken = false;
    try {
      gpu.enter();
      int status = gpu.api.graphUpdate(executable, captured.graph);
      boolean inPlace = status != CudaApi.ERROR_GRAPH_EXEC_UPDATE_FAILURE;
      if (inPlace) {
        gpu.check(status, "cuGraphExecUpdate");
        kept = captured.kept;
        launches = captured.launches;
        taken = true;
      } else {
        long old = executable;
        instantiate(captured);
        taken = true;
        gpu.check(gpu.api.executableDestroy(old), "cuGraphExecDestroy");
      }
      return inPlace;
    } finally {
      (taken ? before : captured.kept).release();
      destroy(gpu, captured);
    }
  }

  /**
   * Replays the work on the device's default stream.
   *
   * @throws ClosedException if the graph is closed
   */
  public void launch() {
    launch(device.stream());
  }

  /**
   * Queues a replay of all work on a stream.
   *
   * @param stream of the graph's device, not necessarily the one of the capture
   * @throws ClosedException if the graph or the stream is closed
   * @throws InUseException if one of the graph's plans is being launched on another thread
   */
  public synchronized void launch(Stream stream) {
    requireOpen();
    requireHere(stream);
    stream.begin();
    int entered = 0;
    try {
      if (stream.isCapturing()) {
        throw new InUseException("launch: a graph can't be captured into another one");
      }
      gpu.enter();
      for (Launcher plan : kept.plans()) {
        plan.beginReplay(stream);
        entered++;
      }
      for (Capture.Memory memory : kept.memory()) {
        if (memory.onGpu() != null) {
          memory.onGpu().use(stream);
        }
      }
      gpu.check(gpu.api.graphLaunch(executable, stream.handle()), "cuGraphLaunch");
    } finally {
      for (int i = 0; i < entered; i++) {
        kept.plans().get(i).endReplay();
      }
      stream.end();
    }
  }

  /**
   * Returns the number of launches, copies and fills in the graph.
   *
   * @return as many as were captured
   */
  public synchronized int size() {
    return launches;
  }

  /**
   * Returns where it runs.
   *
   * @return the device of the stream that it was captured on
   */
  public Device device() {
    return device;
  }

  private void requireOpen() {
    if (closed) {
      throw new ClosedException("the graph is closed");
    }
  }

  private void requireHere(Stream stream) {
    if (!stream.device().equals(device)) {
      throw new InvalidArgumentException("stream", stream, "a stream of " + device);
    }
  }

  /** Ends the graph and lets go of its tensors and plans; replays under way are finished. */
  @Override
  public synchronized void close() {
    if (closed) {
      return;
    }
    if (!gpu.isLost()) {
      gpu.enter();
      gpu.check(gpu.api.executableDestroy(executable), "cuGraphExecDestroy");
    }
    closed = true;
    kept.release();
    kept = Capture.Kept.NOTHING;
  }

  /** Returns for example {@code Graph[cuda:0, 100 launches]}. */
  @Override
  public String toString() {
    return "Graph[" + device + ", " + size() + " launches]";
  }
}
