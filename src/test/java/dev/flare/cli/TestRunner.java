package dev.flare.cli;

import static org.junit.platform.engine.discovery.DiscoverySelectors.selectClass;
import static org.junit.platform.engine.discovery.DiscoverySelectors.selectPackage;
import static org.junit.platform.engine.discovery.PackageNameFilter.includePackageNames;

import java.io.PrintStream;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import org.junit.platform.engine.TestExecutionResult;
import org.junit.platform.engine.support.descriptor.ClassSource;
import org.junit.platform.launcher.LauncherDiscoveryRequest;
import org.junit.platform.launcher.TagFilter;
import org.junit.platform.launcher.TestExecutionListener;
import org.junit.platform.launcher.TestIdentifier;
import org.junit.platform.launcher.core.LauncherDiscoveryRequestBuilder;
import org.junit.platform.launcher.core.LauncherFactory;

/**
 * Runs the unit tests from the bundle, on a machine without build tools: {@code bin/test [--device
 * cuda:N] [--tag TAG]... [--class NAME]...}.
 *
 * <p>Prints each failure as it happens and their names again at the end, the reasons of skipped
 * tests, and one closing line; exit status 1 if a test failed or none ran.
 */
public final class TestRunner implements TestExecutionListener {
  private final PrintStream out;
  private final Map<String, Integer> skipReasons = new TreeMap<>();
  private final List<String> failures = new ArrayList<>();
  private int passed;
  private int skipped;

  private TestRunner(PrintStream out) {
    this.out = out;
  }

  /**
   * Runs the tests and ends the process.
   *
   * @param args {@code --tag TAG} keeps tests of a tag, {@code --exclude-tag TAG} drops them,
   *     {@code --class NAME} runs one class (full name) instead of all; {@code --device cuda:N}
   *     runs the tests of a GPU and of operations, on that one
   */
  public static void main(String[] args) {
    List<String> tags = new ArrayList<>();
    List<String> excludedTags = new ArrayList<>();
    List<String> classes = new ArrayList<>();
    List<String> devices = new ArrayList<>();
    for (int i = 0; i < args.length; i += 2) {
      List<String> values =
          switch (args[i]) {
            case "--tag" -> tags;
            case "--exclude-tag" -> excludedTags;
            case "--class" -> classes;
            case "--device" -> devices;
            default -> null;
          };
      if (values == null || i + 1 == args.length) {
        System.err.println(
            "usage: test [--device cuda:N] [--tag TAG]... [--exclude-tag TAG]... [--class NAME]...");
        System.exit(2);
      } else {
        values.add(args[i + 1]);
      }
    }
    for (String device : devices) {
      System.setProperty("flare.test.device", device);
      tags.addAll(List.of("gpu", "device"));
    }
    System.exit(new TestRunner(System.out).run(tags, excludedTags, classes) ? 0 : 1);
  }

  private boolean run(List<String> tags, List<String> excludedTags, List<String> classes) {
    LauncherDiscoveryRequestBuilder request = LauncherDiscoveryRequestBuilder.request();
    if (classes.isEmpty()) {
      request.selectors(selectPackage("dev.flare")).filters(includePackageNames("dev.flare"));
    } else {
      classes.forEach(name -> request.selectors(selectClass(name)));
    }
    if (!tags.isEmpty()) {
      request.filters(TagFilter.includeTags(tags));
    }
    if (!excludedTags.isEmpty()) {
      request.filters(TagFilter.excludeTags(excludedTags));
    }
    request.configurationParameter("junit.jupiter.extensions.autodetection.enabled", "true");
    LauncherDiscoveryRequest built = request.build();
    LauncherFactory.create().execute(built, this);
    failures.forEach(id -> out.println("FAILED " + id));
    skipReasons.forEach((reason, count) -> out.println("skipped " + count + ": " + reason));
    out.println(passed + " passed, " + failures.size() + " failed, " + skipped + " skipped");
    return failures.isEmpty() && passed + skipped > 0;
  }

  @Override
  public void executionStarted(TestIdentifier test) {
    // Says where a long run is.
    test.getSource()
        .filter(ClassSource.class::isInstance)
        .ifPresent(source -> out.println(((ClassSource) source).getClassName()));
  }

  @Override
  public void executionSkipped(TestIdentifier test, String reason) {
    skip(reason);
  }

  @Override
  public void executionFinished(TestIdentifier test, TestExecutionResult result) {
    switch (result.getStatus()) {
      case SUCCESSFUL -> passed += test.isTest() ? 1 : 0;
      case ABORTED -> skip(result.getThrowable().map(Throwable::getMessage).orElse("no reason"));
      case FAILED -> {
        failures.add(test.getUniqueId());
        out.println("FAILED " + test.getUniqueId());
        result.getThrowable().ifPresent(error -> error.printStackTrace(out));
      }
    }
  }

  private void skip(String reason) {
    skipped++;
    skipReasons.merge(reason, 1, Integer::sum);
  }
}
