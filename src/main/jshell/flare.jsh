// Start-up of scripts/jshell: everything public of flare, and a few words less to type.
import dev.flare.*
import dev.flare.io.*
import static dev.flare.DType.*
import static dev.flare.FlashAttention.flash
import java.nio.file.*
import java.util.*

/** Where randn puts its tensors: the first GPU, if there is one. Assign Device.cpu() to compare. */
Device device = Device.best()

long seed = 1

/** Standard normal numbers in bf16; each call gives others, each session the same. */
Tensor randn(long... dims) { return Tensor.randn(device, seed++, BF16, Shape.of(dims)); }

/** As randn, in a number format of your choice. */
Tensor randn(DType dtype, long... dims) { return Tensor.randn(device, seed++, dtype, Shape.of(dims)); }

/** Causal attention in which a query sees the last `window` keys, its own among them. */
Tensor sliding(long window, Tensor q, Tensor k, Tensor v) { return SlidingWindowAttention.of(window).run(q, k, v); }

/** The largest difference between two tensors of one shape. */
double maxDiff(Tensor a, Tensor b) {
  double[] x = a.toDoubleArray(), y = b.toDoubleArray();
  double most = 0;
  for (int i = 0; i < x.length; i++) {
    most = Math.max(most, Math.abs(x[i] - y[i]));
  }
  return most;
}

/** Milliseconds of one call of `work`, the median of some. */
double millis(Runnable work) {
  double[] times = new double[9];
  for (int i = -3; i < times.length; i++) {
    long start = System.nanoTime();
    work.run();
    device.synchronize();
    times[Math.max(i, 0)] = (System.nanoTime() - start) / 1e6;
  }
  Arrays.sort(times);
  return times[times.length / 2];
}

System.out.println("flare on " + device + ". Try:  var q = randn(1, 1024, 8, 128)   then   flash(q, q, q)")
