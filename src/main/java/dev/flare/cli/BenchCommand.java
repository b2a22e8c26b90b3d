package dev.flare.cli;

import dev.flare.Device;
import dev.flare.DeviceException;
import dev.flare.Flare;
import dev.flare.Kernel;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.EnumSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Set;
import java.util.stream.Collectors;
import org.jspecify.annotations.Nullable;
import picocli.CommandLine.Command;
import picocli.CommandLine.Mixin;
import picocli.CommandLine.Option;

/** Times every kernel as a Java program calls it, with its error in the same run. */
@Command(
    name = "bench",
    description = {
      "Times each kernel through plan.launch: the median of repeated calls after a warm-up, inputs on"
          + " the device, and compares its output in the same run.",
      "On the CPU a short table, against the float64 reference. On a GPU, and with --group, the grouped"
          + " tables: by events, the L2 cache flushed before each launch, against the CPU backend on a"
          + " part of each output.",
      "Rates count the work of the papers' formulas: FLOPs for prefill; for decode the bytes of cache"
          + " or state that must be moved."
    },
    footer = "%nExit status: 0 all right, 1 a result missed its tolerance.")
final class BenchCommand extends BaseCommand {
  private static final int LEAST_CALLS = 10;
  private static final int MOST_CALLS = 1000;

  @Mixin private DeviceOption device = new DeviceOption();

  @Option(names = "--quick", description = "Small sizes: shows that it runs, not how fast it is.")
  private boolean quick;

  @Option(
      names = "--seconds",
      paramLabel = "S",
      description = "Time to spend on the calls of each case (${DEFAULT-VALUE}).")
  private double seconds = 1;

  @Option(names = "--markdown", paramLabel = "FILE", description = "Write a page.")
  private @Nullable Path markdown;

  @Option(names = "--json", paramLabel = "FILE", description = "Write the figures.")
  private @Nullable Path json;

  @Option(names = "--svg", paramLabel = "FILE", description = "Write a bar chart.")
  private @Nullable Path svg;

  @Option(
      names = "--group",
      paramLabel = "NAME",
      split = ",",
      description = "Only these groups of the grouped tables: ${COMPLETION-CANDIDATES}.")
  private List<BenchGroup> groups = List.of();

  @Option(
      names = "--row",
      paramLabel = "TEXT",
      description = "Only rows of the grouped tables whose name contains this.")
  private String rowText = "";

  @Option(
      names = "--kernel",
      paramLabel = "PATH",
      description = "Force a path in the grouped tables: portable or sm90 (${DEFAULT-VALUE}).")
  private Kernel kernel = Kernel.AUTO;

  @Option(
      names = "--peers",
      paramLabel = "FILE",
      split = ",",
      description =
          "Times of other libraries, from cuda/bench/peers.py and copies_bench: join them as"
              + " ratios.")
  private List<Path> peers = List.of();

  @Override
  public Integer call() throws IOException {
    if (!(seconds > 0 && seconds <= 60)) {
      throw usage("--seconds must be more than 0 and at most 60, not " + seconds);
    }
    Device on = device.resolve();
    return on.isCpu() && groups.isEmpty() ? shortTable(on) : groupedTables(on);
  }

  private int groupedTables(Device on) throws IOException {
    Peers others = Peers.read(peers);
    Map<String, String> environment = environment(on);
    environment.putAll(others.environment());
    environment.forEach((name, value) -> out().println(name + ": " + value));
    out().println();
    TextTable table = GroupReport.table(false);
    table.printHeader(out());
    List<GroupReport.Row> rows = new ArrayList<>();
    String failure = "";
    try (GroupBench bench =
        new GroupBench(
            on,
            kernel,
            quick,
            seconds,
            others,
            row -> {
              rows.add(row);
              table.row(out(), GroupReport.cells(row));
              // What has been measured stays, whatever happens to the run.
              report(on, environment, rows);
            })) {
      bench.run(groups.isEmpty() ? EnumSet.allOf(BenchGroup.class) : Set.copyOf(groups), rowText);
    } catch (DeviceException e) {
      failure = ", then " + Main.oneLine(e); // a fault of one row ends the device for all
    }
    out().println();
    long misses =
        rows.stream().filter(row -> row.wrong() || row.note().startsWith("FAILED")).count();
    long without = rows.stream().filter(row -> !row.isTimed()).count();
    out()
        .println(
            rows.size()
                - without
                + " rows timed, "
                + without
                + " not, "
                + misses
                + " wrong"
                + failure);
    return misses == 0 && failure.isEmpty() ? OK : MISS;
  }

  private void report(Device on, Map<String, String> environment, List<GroupReport.Row> rows) {
    StringBuilder command = new StringBuilder("scripts/flare bench --device " + on);
    if (!groups.isEmpty()) {
      command
          .append(" --group ")
          .append(groups.stream().map(BenchGroup::text).collect(Collectors.joining(",")));
    }
    if (!rowText.isEmpty()) {
      command.append(" --row '").append(rowText).append('\'');
    }
    if (kernel != Kernel.AUTO) {
      command.append(" --kernel ").append(kernel.name().toLowerCase(Locale.ROOT));
    }
    if (quick) {
      command.append(" --quick");
    }
    command.append(peers.isEmpty() ? "" : " --peers FILE");
    GroupReport report = new GroupReport(command.toString(), environment, rows);
    try {
      write(markdown, report.markdown());
      write(json, report.json());
      write(svg, report.svg("flare on " + environment.get("device")));
    } catch (IOException e) {
      throw new UncheckedIOException(e);
    }
  }

  private int shortTable(Device on) throws IOException {
    Map<String, String> environment = environment(on);
    environment.forEach((name, value) -> out().println(name + ": " + value));
    out().println();
    TextTable table = BenchReport.table(false);
    table.printHeader(out());
    Progress progress = Progress.on(err());
    List<BenchReport.Row> rows = new ArrayList<>();
    List<String> misses = new ArrayList<>();
    List<BenchCases.Maker> makers = BenchCases.all(quick);
    for (int i = 0; i < makers.size(); i++) {
      BenchCases.Entry entry = makers.get(i).make();
      KernelCase c = entry.kernelCase();
      progress.show(i, makers.size(), entry.kernel() + " " + c.mask() + " " + c.shape());
      BenchReport.Row row = measure(entry, on, misses);
      progress.clear();
      table.row(out(), BenchReport.cells(row));
      rows.add(row);
    }
    out().println();
    String command = "scripts/bench" + (quick ? " --quick" : "") + " --device " + on;
    BenchReport report = new BenchReport(environment, rows);
    write(markdown, report.markdown(command));
    write(json, report.json(command));
    write(svg, report.svg("flare on " + environment.get("device")));
    misses.forEach(miss -> out().println("MISS " + miss + ": a wrong result has no speed"));
    return misses.isEmpty() ? OK : MISS;
  }

  private BenchReport.Row measure(BenchCases.Entry entry, Device on, List<String> misses) {
    KernelCase c = entry.kernelCase();
    try (PreparedCase prepared = PreparedCase.of(c, on)) {
      prepared.poison();
      prepared.launch();
      List<CaseCheck> checks = CaseCheck.of(c, CaseReference.of(c), prepared.results());
      if (!checks.stream().allMatch(CaseCheck::passed)) {
        misses.add(entry.kernel() + " " + c.mask() + " " + c.shape());
      }
      double error = checks.getFirst().measured();
      double[] times = times(prepared);
      double median = times[times.length / 2];
      double spread = (times[times.length * 3 / 4] - times[times.length / 4]) / median;
      return new BenchReport.Row(
          entry.kernel(),
          c.precision().name().toLowerCase(Locale.ROOT),
          c.mask(),
          c.shape(),
          median * 1e6,
          spread,
          entry.work() / median / 1e9,
          entry.bytes() ? "GB/s" : "GFLOP/s",
          error,
          prepared.kernelName());
    }
  }

  /** {@return seconds of each call, ascending} */
  private double[] times(PreparedCase prepared) {
    long warmUp = System.nanoTime() + (long) (seconds * 0.2e9);
    do {
      prepared.launch();
    } while (System.nanoTime() < warmUp);
    double[] times = new double[MOST_CALLS];
    int calls = 0;
    long end = System.nanoTime() + (long) (seconds * 1e9);
    while (calls < MOST_CALLS && (calls < LEAST_CALLS || System.nanoTime() < end)) {
      long start = System.nanoTime();
      prepared.launch();
      times[calls++] = (System.nanoTime() - start) / 1e9;
    }
    double[] sorted = Arrays.copyOf(times, calls);
    Arrays.sort(sorted);
    return sorted;
  }

  private static Map<String, String> environment(Device on) {
    Map<String, String> environment = new LinkedHashMap<>();
    environment.put(
        "device",
        on.isCpu()
            ? Host.processor() + ", " + Runtime.getRuntime().availableProcessors() + " cores"
            : on.name() + ", " + on);
    environment.put("java", Runtime.version().toString());
    environment.put(
        "library",
        switch (Flare.status().library()) {
          case Flare.Ready ready -> ready.detail().replaceAll(", from .*", "");
          case Flare.Missing missing -> "missing: " + missing.reason();
        });
    return environment;
  }

  private static void write(@Nullable Path file, String text) throws IOException {
    if (file != null) {
      Files.writeString(file, text, StandardCharsets.UTF_8);
    }
  }
}
