package dev.flare.cli;

import dev.flare.DType;
import dev.flare.Device;
import dev.flare.Event;
import dev.flare.Shape;
import dev.flare.Stream;
import dev.flare.Tensor;
import java.util.Arrays;
import java.util.function.Consumer;

/**
 * Times calls on a device by events. Before each one 256 MB are written, so that no call finds its
 * inputs in a cache. Not thread safe.
 */
final class BenchTimer implements AutoCloseable {
  private static final long FLUSH_BYTES = 256L << 20;
  private static final double FLUSH_SECONDS = 1e-4;
  private static final int WARM_UP = 3;
  private static final long WARM_UP_NANOS = 10_000_000;
  private static final int LEAST = 11;
  private static final int MOST = 200;

  private final Device device;
  private final Stream stream;
  private final Tensor flush;
  private final Event[] starts = new Event[MOST];
  private final Event[] ends = new Event[MOST];
  private final double seconds;

  /** How long calls took. */
  record Timing(double micros, double spread, int calls) {}

  /** {@code seconds}: time to spend on the calls of one row. */
  BenchTimer(Device device, double seconds) {
    this.device = device;
    this.seconds = seconds;
    stream = device.isCpu() ? Stream.cpu() : Stream.create(device);
    flush =
        Tensor.empty(device, DType.FP32, Shape.of(device.isCpu() ? 1 : FLUSH_BYTES / Float.BYTES));
    Arrays.setAll(starts, i -> Event.create(device));
    Arrays.setAll(ends, i -> Event.create(device));
  }

  Stream stream() {
    return stream;
  }

  /** Runs the call a few times, for 10 ms at least, then times it. */
  Timing time(Consumer<Stream> call) {
    // What made the inputs went through another stream.
    device.synchronize();
    for (int i = 0; i < WARM_UP; i++) {
      call.accept(stream);
    }
    stream.synchronize();
    // A GPU that was idle takes a while to reach its clock.
    long begin = System.nanoTime();
    do {
      once(0, call);
      ends[0].synchronize();
    } while (System.nanoTime() - begin < WARM_UP_NANOS);
    double estimate = ends[0].millisSince(starts[0]) / 1e3 + FLUSH_SECONDS;
    int count = (int) Math.clamp(seconds / estimate, LEAST, MOST);
    for (int i = 0; i < count; i++) {
      once(i, call);
    }
    stream.synchronize();
    double[] micros = new double[count];
    Arrays.setAll(micros, i -> 1e3 * ends[i].millisSince(starts[i]));
    return timing(micros);
  }

  private void once(int i, Consumer<Stream> call) {
    if (!device.isCpu()) {
      flush.fill(i, stream);
    }
    starts[i].record(stream);
    call.accept(stream);
    ends[i].record(stream);
  }

  /** Median, and the distance of the quartiles over it. */
  static Timing timing(double[] micros) {
    double[] sorted = micros.clone();
    Arrays.sort(sorted);
    int n = sorted.length;
    double median = sorted[n / 2];
    return new Timing(median, (sorted[n * 3 / 4] - sorted[n / 4]) / median, n);
  }

  @Override
  public void close() {
    stream.synchronize();
    for (int i = 0; i < MOST; i++) {
      starts[i].close();
      ends[i].close();
    }
    flush.close();
    if (!device.isCpu()) {
      stream.close();
    }
  }
}
