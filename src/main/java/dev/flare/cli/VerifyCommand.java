package dev.flare.cli;

import dev.flare.FlareException;
import dev.flare.UnsupportedException;
import dev.flare.reference.Precision;
import java.util.ArrayList;
import java.util.EnumSet;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Set;
import picocli.CommandLine.Command;
import picocli.CommandLine.Mixin;
import picocli.CommandLine.Option;

/** Runs every kernel with every mask and number format and compares with float64 definitions. */
@Command(
    name = "verify",
    description = {
      "Checks all kernels on this machine: each with each number format and mask, at sizes on and off"
          + " the tile edges, against float64 definitions in plain Java.",
      "Outputs are poisoned first, unused cache slots hold NaN, and each call runs twice: the bits"
          + " must be equal."
    },
    footer = "%nExit status: 0 all within their tolerance, 1 a miss.")
final class VerifyCommand extends BaseCommand {
  /** The number formats that have tolerances and kernels on every backend. */
  enum Format {
    FP32(Precision.FP32),
    FP16(Precision.FP16),
    BF16(Precision.BF16);

    private final Precision precision;

    Format(Precision precision) {
      this.precision = precision;
    }
  }

  @Mixin private DeviceOption device = new DeviceOption();

  @Option(
      names = "--kernel",
      paramLabel = "NAME",
      split = ",",
      description = "Only these kernels: attention, window, mla, kda.")
  private List<CaseGrid.Group> kernels = List.of();

  @Option(
      names = "--dtype",
      paramLabel = "TYPE",
      split = ",",
      description = "Only these number formats: fp32, fp16, bf16.")
  private List<Format> formats = List.of();

  @Override
  public Integer call() {
    try (CaseRunner runner = device.open()) {
      return verify(runner, device.resolve().toString());
    }
  }

  /** Runs the grid on {@code runner}; the exit status. */
  int verify(CaseRunner runner, String deviceText) {
    Set<CaseGrid.Group> groups =
        kernels.isEmpty() ? EnumSet.allOf(CaseGrid.Group.class) : EnumSet.copyOf(kernels);
    Set<Format> wanted = formats.isEmpty() ? EnumSet.allOf(Format.class) : EnumSet.copyOf(formats);
    List<CaseGrid.Entry> entries =
        CaseGrid.entries().stream()
            .filter(e -> groups.contains(e.group()))
            .filter(e -> wanted.stream().anyMatch(f -> f.precision == e.precision()))
            .toList();

    out().println("Device: " + deviceText);
    out().println("max abs and rel: distance of out from the float64 reference; tol bounds rel.");
    out().println();
    TextTable table =
        new TextTable(false)
            .column("kernel", 9, TextTable.Align.LEFT)
            .column("dtype", 5, TextTable.Align.LEFT)
            .column("mask or gate", 19, TextTable.Align.LEFT)
            .column("shape", 27, TextTable.Align.LEFT)
            .column("max abs", 8, TextTable.Align.RIGHT)
            .column("rel", 7, TextTable.Align.RIGHT)
            .column("tol", 7, TextTable.Align.RIGHT)
            .column("lse/state", 9, TextTable.Align.RIGHT)
            .column("tol", 7, TextTable.Align.RIGHT)
            .column("ms", 9, TextTable.Align.RIGHT)
            .column("", 4, TextTable.Align.LEFT)
            .column("ran as", 6, TextTable.Align.LEFT);
    table.printHeader(out());

    Progress progress = Progress.on(err());
    List<String> misses = new ArrayList<>();
    long start = System.nanoTime();
    for (int i = 0; i < entries.size(); i++) {
      KernelCase c = entries.get(i).maker().get();
      String group = entries.get(i).group().text();
      String dtype = c.precision().name().toLowerCase(Locale.ROOT);
      String title = group + " " + dtype + " " + c.mask() + " " + c.shape();
      progress.show(i, entries.size(), title);
      try {
        Map<String, double[]> expected = CaseReference.of(c);
        CaseRunner.Outcome outcome = runner.run(c);
        List<CaseCheck> checks = CaseCheck.of(c, expected, outcome.tensors());
        String why = why(checks, outcome);
        progress.clear();
        table.row(out(), cells(group, dtype, c, checks, outcome, why.isEmpty()));
        if (!why.isEmpty()) {
          misses.add(title + ": " + why);
        }
      } catch (FlareException e) {
        // One kernel that cannot run must not hide the others.
        progress.clear();
        table.row(
            out(),
            group,
            dtype,
            c.mask(),
            c.shape(),
            "",
            "",
            "",
            "",
            "",
            "",
            "MISS",
            e instanceof UnsupportedException ? "unsupported" : "did not run");
        misses.add(title + ": " + Main.oneLine(e));
      }
    }
    out().println();
    misses.forEach(miss -> out().println("MISS " + miss));
    out()
        .printf(
            Locale.ROOT,
            "%d passed, %d failed (%.1f s)%n",
            entries.size() - misses.size(),
            misses.size(),
            (System.nanoTime() - start) / 1e9);
    return misses.isEmpty() ? OK : MISS;
  }

  private static String[] cells(
      String group,
      String dtype,
      KernelCase c,
      List<CaseCheck> checks,
      CaseRunner.Outcome outcome,
      boolean passed) {
    CaseCheck out = checks.get(0);
    CaseCheck second = checks.get(1);
    return new String[] {
      group,
      dtype,
      c.mask(),
      c.shape(),
      CaseCheck.scientific(out.error().maxAbsolute()),
      CaseCheck.scientific(out.measured()),
      CaseCheck.scientific(out.tolerance()),
      CaseCheck.scientific(second.measured()),
      CaseCheck.scientific(second.tolerance()),
      String.format(Locale.ROOT, "%.3f", outcome.seconds() * 1e3),
      passed ? "ok" : "MISS",
      outcome.kernel()
    };
  }

  /** What is wrong; empty if nothing is. */
  private static String why(List<CaseCheck> checks, CaseRunner.Outcome outcome) {
    List<String> reasons = new ArrayList<>();
    checks.stream()
        .filter(check -> !check.passed())
        .forEach(check -> reasons.add(check.tensor() + ": " + check.error()));
    if (!outcome.repeatable()) {
      reasons.add("two calls gave different bits");
    }
    return String.join("; ", reasons);
  }
}
