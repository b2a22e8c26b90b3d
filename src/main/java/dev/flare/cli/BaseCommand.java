package dev.flare.cli;

import java.io.PrintWriter;
import java.util.Objects;
import java.util.concurrent.Callable;
import org.jspecify.annotations.Nullable;
import picocli.CommandLine.Model.CommandSpec;
import picocli.CommandLine.ParameterException;
import picocli.CommandLine.Spec;

/** What all commands share: the output that picocli hands them, and usage errors. */
abstract class BaseCommand implements Callable<Integer> {
  /** Everything asked for was done and is right. */
  static final int OK = 0;

  /** A result missed its tolerance, or a check failed. */
  static final int MISS = 1;

  /** Wrong usage, or input that cannot be used; nothing is said about results. */
  static final int USAGE = 2;

  @Spec private @Nullable CommandSpec spec;

  final PrintWriter out() {
    return spec().commandLine().getOut();
  }

  final PrintWriter err() {
    return spec().commandLine().getErr();
  }

  /** An error in how the command was called; the caller throws it. */
  final ParameterException usage(String message) {
    return new ParameterException(spec().commandLine(), message);
  }

  private CommandSpec spec() {
    return Objects.requireNonNull(spec, "picocli sets the command's spec before it runs");
  }
}
