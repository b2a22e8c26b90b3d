package dev.flare.cli;

import java.io.PrintWriter;
import java.io.StringWriter;
import java.util.function.IntSupplier;
import picocli.CommandLine;

/** Runs the {@code flare} command inside the test's JVM and keeps what it printed. */
record Cli(int status, String out, String err) {
  static Cli run(String... args) {
    StringWriter out = new StringWriter();
    StringWriter err = new StringWriter();
    int status = Main.run(new PrintWriter(out), new PrintWriter(err), args);
    return new Cli(status, out.toString(), err.toString());
  }

  /** Parses {@code args} for one command, then runs {@code body} in place of its own. */
  static Cli run(BaseCommand command, IntSupplier body, String... args) {
    StringWriter out = new StringWriter();
    StringWriter err = new StringWriter();
    CommandLine line = new CommandLine(command);
    line.setOut(new PrintWriter(out)).setErr(new PrintWriter(err));
    line.setCaseInsensitiveEnumValuesAllowed(true);
    line.parseArgs(args);
    int status = body.getAsInt();
    line.getOut().flush();
    line.getErr().flush();
    return new Cli(status, out.toString(), err.toString());
  }
}
