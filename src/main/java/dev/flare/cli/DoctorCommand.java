package dev.flare.cli;

import dev.flare.Device;
import dev.flare.Flare;
import dev.flare.FlareException;
import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import java.util.Optional;
import picocli.CommandLine.Command;
import picocli.CommandLine.Mixin;

/** Tells what works here and what to do about the rest. */
@Command(
    name = "doctor",
    description = {
      "Looks at Java, the C library, the system's libraries, the driver and the GPUs, and tells what"
          + " works for flare and what to do about the rest.",
      "A GPU counts as needed with --device cuda:N, and without --device where the machine has one."
    },
    footer = "%nExit status: 0 all that is needed works, 1 something does not.")
final class DoctorCommand extends BaseCommand {
  /** The newest symbol versions that libflare.so asks for; scripts/tests/library checks them. */
  private static final String GLIBC = "2.34";

  private static final int JAVA = 22;

  @Mixin private DeviceOption device = new DeviceOption();

  @Override
  public Integer call() {
    List<Finding> findings = new ArrayList<>();
    findings.add(java());
    findings.add(nativeAccess());
    findings.add(system());
    findings.add(glibc());
    Flare.Status status = Flare.status();
    findings.add(library(status));
    boolean gpuNeeded = device.isCuda() || (!device.isCpu() && Host.hasNvidiaHardware());
    findings.add(driver(gpuNeeded));
    findings.add(cuda(status, gpuNeeded));
    if (status instanceof Flare.Status(Flare.Ready library, Flare.Ready cuda)) {
      findings.add(GpuFindings.versions(library.detail(), cuda.detail()));
      findings.addAll(gpus());
    }
    if (device.isCuda()) {
      findings.add(asked());
    }

    boolean failed = false;
    for (Finding finding : findings) {
      out()
          .printf(
              Locale.ROOT,
              "%-4s  %-16s %s%n",
              finding.level().text(),
              finding.what(),
              finding.detail());
      if (finding.level() == Finding.Level.FAIL) {
        failed = true;
        out().printf(Locale.ROOT, "%-4s  %-16s what to do: %s%n", "", "", finding.remedy());
      }
    }
    out().println();
    out()
        .println(
            failed
                ? "Something that is needed does not work."
                : "flare works here" + (gpuNeeded ? "." : ", on the CPU."));
    return failed ? MISS : OK;
  }

  private static Finding java() {
    Runtime.Version version = Runtime.version();
    String detail =
        version
            + ", "
            + System.getProperty("java.vm.name")
            + ", "
            + System.getProperty("java.home");
    return version.feature() >= JAVA
        ? Finding.ok("Java", detail)
        : Finding.fail("Java", detail, "run with Java " + JAVA + " or newer");
  }

  private static Finding nativeAccess() {
    Module module = Flare.class.getModule();
    String name = module.isNamed() ? module.getName() : "ALL-UNNAMED";
    return module.isNativeAccessEnabled()
        ? Finding.ok("native access", "given to " + name)
        : Finding.fail(
            "native access",
            "not given to " + name,
            "start Java with --enable-native-access=" + name);
  }

  private static Finding system() {
    String os = System.getProperty("os.name");
    String detail =
        os
            + " "
            + System.getProperty("os.arch")
            + ", "
            + Runtime.getRuntime().availableProcessors()
            + " cores, "
            + Host.processor();
    return os.equals("Linux")
        ? Finding.ok("system", detail)
        : Finding.fail("system", detail, "run on Linux: the kernels are built for it alone");
  }

  private static Finding glibc() {
    Optional<String> version = Host.glibc();
    if (version.isEmpty()) {
      return Finding.fail(
          "glibc",
          "not found in this process",
          "use a system with glibc " + GLIBC + " or newer (Debian 12, Ubuntu 22.04, RHEL 9)");
    }
    String detail = version.get() + ", libflare needs " + GLIBC;
    return Host.atLeast(version.get(), GLIBC)
        ? Finding.ok("glibc", detail)
        : Finding.fail(
            "glibc",
            detail,
            "use a newer system (Debian 12, Ubuntu 22.04, RHEL 9), or build libflare here with"
                + " scripts/build-native");
  }

  private static Finding library(Flare.Status status) {
    return part("libflare.so", status.library());
  }

  private static Finding part(String what, Flare.Part part) {
    return switch (part) {
      case Flare.Ready ready -> Finding.ok(what, ready.detail());
      case Flare.Missing missing -> Finding.fail(what, missing.reason(), missing.remedy());
    };
  }

  private static Finding driver(boolean needed) {
    Optional<String> driver = Host.nvidiaKernelDriver();
    if (driver.isPresent()) {
      return Finding.ok("NVIDIA driver", driver.get());
    }
    if (!needed) {
      return Finding.none("NVIDIA driver", "none loaded, and no NVIDIA GPU in this machine");
    }
    return Finding.fail(
        "NVIDIA driver",
        Host.hasNvidiaHardware()
            ? "none loaded, though a GPU is there"
            : "none loaded, no GPU seen",
        "install NVIDIA's driver (Debian: package nvidia-driver); in a container start it with"
            + " --gpus all");
  }

  private static Finding cuda(Flare.Status status, boolean needed) {
    if (!needed && status.cuda() instanceof Flare.Missing missing) {
      return Finding.none("CUDA", missing.reason());
    }
    return part("CUDA", status.cuda());
  }

  /** All GPUs of the driver, those that are too old included. */
  private static List<Finding> gpus() {
    List<Device> gpus = new ArrayList<>();
    try {
      for (int i = 0; ; i++) {
        gpus.add(Device.cuda(i));
      }
    } catch (FlareException e) {
      // There are no more.
    }
    List<Finding> findings = new ArrayList<>();
    gpus.forEach(gpu -> findings.addAll(GpuFindings.of(GpuFindings.ask(gpu))));
    findings.addAll(
        GpuFindings.peers(
            gpus.stream().map(Device::toString).toList(),
            (a, b) -> gpus.get(a).canAccess(gpus.get(b))));
    return findings;
  }

  private Finding asked() {
    try {
      return Finding.ok("device", device.resolve() + " can be used");
    } catch (FlareException e) {
      return Finding.fail(
          "device", Main.oneLine(e), "use --device cpu, or one of the devices listed here");
    }
  }
}
