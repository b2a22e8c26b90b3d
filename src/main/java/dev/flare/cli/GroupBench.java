package dev.flare.cli;

import dev.flare.AttentionPlan;
import dev.flare.DType;
import dev.flare.Device;
import dev.flare.FlashAttention;
import dev.flare.Graph;
import dev.flare.Kernel;
import dev.flare.Shape;
import dev.flare.Stream;
import dev.flare.Tensor;
import dev.flare.UnsupportedException;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.function.Consumer;

/** Measures the rows of the grouped benchmark. Not thread safe. */
final class GroupBench implements AutoCloseable {
  private static final String UP_PROJECTION = "cuBLAS up-projection alone";
  private static final int HOST_ROUNDS = 31;
  private static final int HOST_LAUNCHES = 256;
  private static final int GRAPH_LAUNCHES = 100;

  private final Device device;
  private final Kernel kernel;
  private final boolean quick;
  private final Peers peers;
  private final BenchTimer timer;
  private final Map<String, Double> secondPass = new HashMap<>();
  private final Consumer<GroupReport.Row> listener;

  /** {@code listener} gets each row as it comes. */
  GroupBench(
      Device device,
      Kernel kernel,
      boolean quick,
      double seconds,
      Peers peers,
      Consumer<GroupReport.Row> listener) {
    this.device = device;
    this.kernel = kernel;
    this.quick = quick;
    this.peers = peers;
    this.listener = listener;
    timer = new BenchTimer(device, seconds);
  }

  /** Measures the rows of the groups whose names contain {@code text}. */
  void run(Set<BenchGroup> groups, String text) {
    for (BenchRows.Row row : BenchRows.all(quick)) {
      if (groups.contains(row.group()) && row.name().contains(text)) {
        add(measure(row));
      }
    }
    if (groups.contains(BenchGroup.COPIES)) {
      guarded(BenchGroup.COPIES, this::copies);
    }
    if (groups.contains(BenchGroup.HOST)) {
      guarded(BenchGroup.HOST, this::host);
    }
  }

  private void guarded(BenchGroup group, Runnable body) {
    try {
      body.run();
    } catch (RuntimeException e) {
      add(GroupReport.Row.without(group, group.text(), "FAILED: " + Main.oneLine(e)));
    }
  }

  private void add(GroupReport.Row row) {
    listener.accept(row);
  }

  private GroupReport.Row measure(BenchRows.Row row) {
    Kernel forced = row.group() == BenchGroup.PORTABLE ? Kernel.PORTABLE : kernel;
    try (BenchData data = new BenchData(device)) {
      BenchRows.Prepared prepared = row.maker().make(data, forced);
      BenchTimer.Timing timing = timer.time(prepared.launch());
      // The output is that of the timed launches.
      BenchRows.Checked checked = prepared.check().get();
      double micros = timing.micros();
      return new GroupReport.Row(
          row.group(),
          row.name(),
          "",
          micros,
          timing.spread(),
          prepared.flops() / micros / 1e6,
          prepared.bytes() / micros / 1e6,
          checked.error(),
          !checked.passed(),
          checked.what(),
          peers(row.name(), micros),
          prepared.plan().kernelName());
    } catch (UnsupportedException e) {
      return GroupReport.Row.without(row.group(), row.name(), "unsupported: " + Main.oneLine(e));
    } catch (RuntimeException e) {
      // One row that breaks must not cost the tables of the others.
      return GroupReport.Row.without(row.group(), row.name(), "FAILED: " + Main.oneLine(e));
    }
  }

  /**
   * Times of others; for a prefill that up-projects also those of two passes with our attention.
   */
  private List<Peers.Time> peers(String name, double micros) {
    List<Peers.Time> times = new ArrayList<>(peers.of(name));
    if (name.startsWith(BenchRows.TWO_PASS)) {
      secondPass.put(name.substring(BenchRows.TWO_PASS.length()), micros);
    }
    if (name.startsWith(BenchRows.PREFILL)) {
      Double attention = secondPass.get(name.substring(BenchRows.PREFILL.length()));
      for (Peers.Time time : peers.of(name)) {
        if (time.peer().equals(UP_PROJECTION)) {
          times.remove(time);
          if (attention != null) {
            times.add(
                new Peers.Time(
                    "cuBLAS + flare's attention", time.micros() + attention, time.stored()));
          }
        }
      }
    }
    return times;
  }

  // ---- copies ---------------------------------------------------------------------------------

  private void copies() {
    long bytes = quick ? 1 << 20 : 256 << 20;
    Shape shape = Shape.of(bytes);
    if (device.isCpu()) {
      add(GroupReport.Row.without(BenchGroup.COPIES, "copies", "none: the CPU has no other side"));
      return;
    }
    try (Tensor onDevice = Tensor.empty(device, DType.UINT8, shape);
        Tensor other = Tensor.empty(device, DType.UINT8, shape);
        Tensor pinned = Tensor.pinned(device, DType.UINT8, shape);
        Tensor pageable = Tensor.empty(Device.cpu(), DType.UINT8, shape)) {
      pinned.fill(3);
      pageable.fill(5);
      copy("host to device, pinned", onDevice, pinned, bytes, 3);
      copy("host to device, pageable", onDevice, pageable, bytes, 5);
      copy("device to host, pinned", pinned, onDevice, bytes, 5);
      onDevice.fill(7);
      copy("device to host, pageable", pageable, onDevice, bytes, 7);
      copy("device to device", other, onDevice, 2 * bytes, 7);
    }
    for (Device peer : Device.all()) {
      if (!peer.isCpu() && !peer.equals(device)) {
        try (Tensor from = Tensor.full(device, 9, DType.UINT8, shape);
            Tensor to = Tensor.empty(peer, DType.UINT8, shape)) {
          peer.synchronize();
          copy(device + " to " + peer, to, from, bytes, 9);
        }
        break;
      }
    }
  }

  private void copy(String what, Tensor to, Tensor from, long bytes, double value) {
    String name = "copies " + what;
    BenchTimer.Timing timing = timer.time(stream -> to.copyFrom(from, stream));
    boolean same = true;
    for (long at = 0; at < to.elements(); at += Math.max(1, to.elements() / 1000)) {
      same &= to.get(at) == value;
    }
    add(
        new GroupReport.Row(
            BenchGroup.COPIES,
            name,
            "",
            timing.micros(),
            timing.spread(),
            0,
            (double) bytes / timing.micros() / 1e6,
            same ? 0 : 1,
            !same,
            "bytes that went in: 1000 of them",
            peers.of(name),
            "cuMemcpyAsync"));
  }

  // ---- host -----------------------------------------------------------------------------------

  private void host() {
    Stream stream = timer.stream();
    hostLaunches("host: plan.launch, batch 0", 0, stream);
    hostLaunches("host: plan.launch, one query and key", 1, stream);
    if (!device.isCpu()) {
      graph(stream);
    }
  }

  private void hostLaunches(String name, int batch, Stream stream) {
    try (Tensor q = Tensor.zeros(device, DType.BF16, Shape.of(batch, 1, 1, 64));
        Tensor out = Tensor.zeros(device, DType.BF16, Shape.of(batch, 1, 1, 64));
        AttentionPlan plan = FlashAttention.causal().withKernel(kernel).plan(q, q, q, out, null)) {
      double[] micros = new double[HOST_ROUNDS];
      // Compiled code first: rounds until the JVM has settled.
      for (int round = -20; round < HOST_ROUNDS; round++) {
        long start = System.nanoTime();
        for (int i = 0; i < HOST_LAUNCHES; i++) {
          plan.launch(stream, q, q, q, out, null);
        }
        long nanos = System.nanoTime() - start;
        stream.synchronize();
        if (round >= 0) {
          micros[round] = nanos / 1e3 / HOST_LAUNCHES;
        }
      }
      add(hostRow(name, BenchTimer.timing(micros), plan.kernelName()));
    } catch (UnsupportedException e) {
      add(GroupReport.Row.without(BenchGroup.HOST, name, "unsupported: " + Main.oneLine(e)));
    }
  }

  private void graph(Stream stream) {
    String name = "host: a launch inside a graph of " + GRAPH_LAUNCHES;
    try (Tensor q = Tensor.zeros(device, DType.BF16, Shape.of(1, 1, 1, 64));
        Tensor out = Tensor.zeros(device, DType.BF16, Shape.of(1, 1, 1, 64));
        AttentionPlan plan = FlashAttention.causal().withKernel(kernel).plan(q, q, q, out, null);
        Graph graph =
            Graph.capture(
                stream,
                () -> {
                  for (int i = 0; i < GRAPH_LAUNCHES; i++) {
                    plan.launch(stream, q, q, q, out, null);
                  }
                })) {
      double[] micros = new double[HOST_ROUNDS];
      for (int round = -5; round < HOST_ROUNDS; round++) {
        long start = System.nanoTime();
        graph.launch(stream);
        long nanos = System.nanoTime() - start;
        stream.synchronize();
        if (round >= 0) {
          micros[round] = nanos / 1e3 / GRAPH_LAUNCHES;
        }
      }
      add(hostRow(name, BenchTimer.timing(micros), plan.kernelName()));
    } catch (UnsupportedException e) {
      add(GroupReport.Row.without(BenchGroup.HOST, name, "unsupported: " + Main.oneLine(e)));
    }
  }

  private GroupReport.Row hostRow(String name, BenchTimer.Timing timing, String ranAs) {
    return new GroupReport.Row(
        BenchGroup.HOST,
        name,
        "",
        timing.micros(),
        timing.spread(),
        0,
        0,
        Double.NaN,
        false,
        "",
        peers.of(name),
        ranAs);
  }

  @Override
  public void close() {
    timer.close();
  }
}
