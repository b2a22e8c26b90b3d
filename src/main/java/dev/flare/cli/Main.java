package dev.flare.cli;

import java.io.PrintWriter;
import java.nio.file.NoSuchFileException;
import picocli.CommandLine;
import picocli.CommandLine.Command;
import picocli.CommandLine.IVersionProvider;
import picocli.CommandLine.Option;
import picocli.CommandLine.ScopeType;

/**
 * The {@code flare} command.
 *
 * <p>Exit status: 0 all right, 1 a result missed its tolerance or a check failed, 2 wrong usage or
 * input that cannot be used. Errors are one line on standard error; {@code --verbose} adds the
 * stack.
 */
@Command(
    name = "flare",
    description = "Attention kernels for the JVM: check, run, measure.",
    mixinStandardHelpOptions = true,
    scope = ScopeType.INHERIT,
    versionProvider = Main.Version.class,
    subcommands = {
      VerifyCommand.class,
      RunCommand.class,
      KvCacheCommand.class,
      BenchCommand.class,
      DoctorCommand.class
    })
public final class Main extends BaseCommand {
  @Option(
      names = "--verbose",
      scope = ScopeType.INHERIT,
      description = "Print the stack of an error.")
  private boolean verbose;

  /** The version of the jar that this class came in. */
  static final class Version implements IVersionProvider {
    @Override
    public String[] getVersion() {
      String version = Main.class.getPackage().getImplementationVersion();
      return new String[] {"flare " + (version == null ? "(not from a jar)" : version)};
    }
  }

  private Main() {}

  /**
   * Runs the command and ends the process.
   *
   * @param args the words after {@code flare}
   */
  public static void main(String[] args) {
    PrintWriter out = new PrintWriter(System.out, true, System.out.charset());
    PrintWriter err = new PrintWriter(System.err, true, System.err.charset());
    System.exit(run(out, err, args));
  }

  /** Runs the command with the given output and returns its exit status. */
  static int run(PrintWriter out, PrintWriter err, String... args) {
    Main main = new Main();
    CommandLine line = new CommandLine(main);
    line.setOut(out).setErr(err);
    line.setCaseInsensitiveEnumValuesAllowed(true);
    line.setParameterExceptionHandler(
        (error, words) -> {
          err.println("flare: error: " + oneLine(error));
          err.println(
              "Try '" + error.getCommandLine().getCommandSpec().qualifiedName() + " --help'.");
          return USAGE;
        });
    line.setExecutionExceptionHandler(
        (error, command, parsed) -> {
          out.flush();
          if (main.verbose) {
            error.printStackTrace(err);
          } else {
            err.println("flare: error: " + oneLine(error));
          }
          return USAGE;
        });
    int status = line.execute(args);
    out.flush();
    err.flush();
    return status;
  }

  /** Without a command there is nothing to do: tells what there is. */
  @Override
  public Integer call() {
    throw usage("no command given: verify, run, kv-cache, bench or doctor");
  }

  /** The message of {@code error} on one line; its kind where it has none. */
  static String oneLine(Throwable error) {
    String message = error.getMessage();
    if (message == null || message.isBlank()) {
      message = error.getClass().getSimpleName();
    } else if (error instanceof NoSuchFileException) {
      message = "no such file: " + message;
    }
    return message.replaceAll("\\s*\\R\\s*", "; ");
  }
}
