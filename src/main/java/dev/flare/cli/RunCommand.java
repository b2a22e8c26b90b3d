package dev.flare.cli;

import dev.flare.FlareException;
import dev.flare.Shape;
import dev.flare.io.ElementType;
import dev.flare.io.Safetensors;
import dev.flare.io.TensorEntry;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.stream.Collectors;
import org.jspecify.annotations.Nullable;
import picocli.CommandLine.Command;
import picocli.CommandLine.Mixin;
import picocli.CommandLine.Option;
import picocli.CommandLine.Parameters;

/** Runs case files and, if asked, compares the results with those that the files hold. */
@Command(
    name = "run",
    description = {
      "Runs case files: safetensors with the inputs of one call, and its options as JSON in the"
          + " metadata entry 'params'.",
      "The format, with tolerances, is described in src/test/resources/golden/README.md."
    },
    footer =
        "%nExit status: 0 all right, 1 a result is off, 2 a file cannot be used. Files that can are"
            + " run all the same.")
final class RunCommand extends BaseCommand {
  @Mixin private DeviceOption device = new DeviceOption();

  @Parameters(arity = "1..*", paramLabel = "FILE", description = "Case files (.safetensors).")
  private List<Path> files = List.of();

  @Option(
      names = "--check",
      description = "Compare with the results in the file: one line a case, PASS or FAIL.")
  private boolean check;

  @Option(
      names = {"-o", "--output"},
      paramLabel = "OUT",
      description = {
        "Write the results to this safetensors file, fp32; with several case files into this"
            + " folder, under the same names."
      })
  private @Nullable Path output;

  @Override
  public Integer call() {
    try (CaseRunner runner = device.open()) {
      return run(runner);
    }
  }

  /** Runs the files on {@code runner}; the exit status. */
  int run(CaseRunner runner) {
    int width =
        files.stream()
            .mapToInt(file -> String.valueOf(file.getFileName()).length())
            .max()
            .orElse(0);
    Progress progress = Progress.on(err());
    int passed = 0;
    int failed = 0;
    int unusable = 0;
    for (int i = 0; i < files.size(); i++) {
      Path file = files.get(i);
      String name = String.valueOf(file.getFileName());
      String padded = name + " ".repeat(width - name.length());
      progress.show(i, files.size(), name);
      try {
        GoldenFile golden = GoldenFile.read(file);
        KernelCase c = golden.kernelCase();
        if (check && golden.expected().isEmpty()) {
          throw new IOException("holds no results to check against: out, lse or final_state");
        }
        CaseRunner.Outcome outcome = runner.run(c);
        List<CaseCheck> checks =
            check ? CaseCheck.of(c, golden.expected(), outcome.tensors()) : List.of();
        if (output != null) {
          write(c, outcome, target(output, name));
        }
        boolean ok = outcome.repeatable() && checks.stream().allMatch(CaseCheck::passed);
        passed += ok ? 1 : 0;
        failed += ok ? 0 : 1;
        progress.clear();
        out().println(line(check ? (ok ? "PASS " : "FAIL ") : "RAN  ", padded, c, checks, outcome));
      } catch (IOException | FlareException | IllegalArgumentException | ArithmeticException e) {
        unusable++;
        progress.clear();
        out().println("ERROR " + padded + "  " + Main.oneLine(e));
      }
    }
    out().flush();
    out()
        .println(
            passed
                + (check ? " passed, " : " ran, ")
                + failed
                + " failed"
                + (unusable > 0 ? ", " + unusable + " unusable" : ""));
    return unusable > 0 ? USAGE : failed > 0 ? MISS : OK;
  }

  private static String line(
      String verdict,
      String name,
      KernelCase c,
      List<CaseCheck> checks,
      CaseRunner.Outcome outcome) {
    String errors = checks.stream().map(CaseCheck::summary).collect(Collectors.joining(", "));
    return String.format(
        Locale.ROOT,
        "%s %s  %s %s%s%s  %.3f ms  %s",
        verdict,
        name,
        c.precision().name().toLowerCase(Locale.ROOT),
        c.mask(),
        errors.isEmpty() ? "" : "  " + errors,
        outcome.repeatable() ? "" : "  (two calls gave different bits)",
        outcome.seconds() * 1e3,
        outcome.kernel());
  }

  private Path target(Path wanted, String name) throws IOException {
    if (files.size() == 1 && !Files.isDirectory(wanted)) {
      return wanted;
    }
    return Files.createDirectories(wanted).resolve(name);
  }

  private static void write(KernelCase c, CaseRunner.Outcome outcome, Path to) throws IOException {
    List<TensorEntry> entries = new ArrayList<>();
    for (Map.Entry<String, double[]> tensor : outcome.tensors().entrySet()) {
      entries.add(
          TensorEntry.ofValues(
              tensor.getKey(),
              ElementType.F32,
              Shape.of(c.resultShape(tensor.getKey())),
              tensor.getValue()));
    }
    Safetensors.write(to, entries, Map.of("case", c.name(), "kernel", outcome.kernel()));
  }
}
