package dev.flare.cli;

import java.io.PrintWriter;
import java.io.StringWriter;

/** Runs the {@code flare} command inside the test's JVM and keeps what it printed. */
record Cli(int status, String out, String err) {
  static Cli run(String... args) {
    StringWriter out = new StringWriter();
    StringWriter err = new StringWriter();
    int status = Main.run(new PrintWriter(out), new PrintWriter(err), args);
    return new Cli(status, out.toString(), err.toString());
  }
}
