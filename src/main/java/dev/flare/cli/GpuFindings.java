package dev.flare.cli;

import dev.flare.DType;
import dev.flare.Device;
import dev.flare.FlareException;
import dev.flare.Shape;
import dev.flare.Tensor;
import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import java.util.OptionalInt;
import java.util.function.BiPredicate;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.jspecify.annotations.Nullable;

/** What {@code flare doctor} says about GPUs: facts first, asked of the driver, then judgements. */
final class GpuFindings {
  private static final int OLDEST_CAPABILITY = 80;
  private static final int HOPPER = 90;
  private static final long LEAST_FREE = 1L << 30;
  private static final double GIB = 1L << 30;
  private static final Pattern CUDA = Pattern.compile("CUDA (\\d+)\\.(\\d+)");

  /** A GPU, or why it cannot be asked. */
  sealed interface Facts permits Gpu, Unusable {}

  /**
   * A GPU that answers.
   *
   * @param device cuda:N
   * @param name the driver's
   * @param capability 90 for 9.0
   * @param multiprocessors how many
   * @param totalBytes of memory
   * @param freeBytes of memory now
   * @param ecc whether memory corrects errors
   * @param bus PCI address
   * @param failure what went wrong when a kernel was run on it; null if nothing
   */
  record Gpu(
      String device,
      String name,
      int capability,
      int multiprocessors,
      long totalBytes,
      long freeBytes,
      boolean ecc,
      String bus,
      @Nullable String failure)
      implements Facts {}

  /** A GPU that does not answer. */
  record Unusable(String device, String reason) implements Facts {}

  private GpuFindings() {}

  /** Asks a GPU about itself, and has it fill and copy a few bytes. */
  static Facts ask(Device gpu) {
    Device.Properties properties;
    Device.Memory memory;
    try {
      properties = gpu.properties();
      memory = gpu.memory();
    } catch (FlareException e) {
      return new Unusable(gpu.toString(), Main.oneLine(e));
    }
    return new Gpu(
        gpu.toString(),
        gpu.name(),
        properties.capability(),
        properties.multiprocessors(),
        memory.totalBytes(),
        memory.freeBytes(),
        properties.ecc(),
        properties.pciBusId(),
        smokeTest(gpu));
  }

  private static @Nullable String smokeTest(Device gpu) {
    try (Tensor ones = Tensor.full(gpu, 1, DType.BF16, Shape.of(4, 256));
        Tensor cast = ones.to(DType.FP32)) {
      for (float value : cast.toFloatArray()) {
        if (value != 1) {
          return "a kernel that ran on it gave " + value + " instead of 1";
        }
      }
      return null;
    } catch (FlareException e) {
      return Main.oneLine(e);
    }
  }

  /**
   * Judges the driver's CUDA against the library's.
   *
   * @param library the text that the library tells of itself
   * @param driver the text that the driver's probe tells
   */
  static Finding versions(String library, String driver) {
    OptionalInt built = cuda(library);
    OptionalInt known = cuda(driver);
    if (built.isEmpty()) {
      return Finding.fail(
          "CUDA in libflare",
          "this libflare.so was built without CUDA: the CPU backend alone",
          "build it where nvcc is: scripts/build-native; and load that one");
    }
    String detail = "built with CUDA " + version(built.getAsInt());
    if (known.isPresent() && known.getAsInt() / 10 < built.getAsInt() / 10) {
      return Finding.fail(
          "CUDA in libflare",
          detail + ", the driver knows " + version(known.getAsInt()) + " and older",
          "update NVIDIA's driver, or build libflare with the older toolkit: CUDA_HOME=..."
              + " scripts/build-native");
    }
    return Finding.ok("CUDA in libflare", detail);
  }

  /** The first CUDA version of a text: 130 for 13.0. */
  private static OptionalInt cuda(String text) {
    Matcher version = CUDA.matcher(text);
    return version.find()
        ? OptionalInt.of(
            10 * Integer.parseInt(version.group(1)) + Integer.parseInt(version.group(2)))
        : OptionalInt.empty();
  }

  private static String version(int version) {
    return version / 10 + "." + version % 10;
  }

  /** Judges one GPU. */
  static List<Finding> of(Facts facts) {
    return switch (facts) {
      case Unusable unusable ->
          List.of(
              Finding.fail(
                  unusable.device(),
                  unusable.reason(),
                  "check nvidia-smi; if another process has it alone (compute mode), end that one or"
                      + " run nvidia-smi -c 0; after a fault restart the process or the machine"));
      case Gpu gpu -> of(gpu);
    };
  }

  private static List<Finding> of(Gpu gpu) {
    List<Finding> findings = new ArrayList<>();
    String what = gpu.device();
    String detail =
        String.format(
            Locale.ROOT,
            "%s, compute capability %d.%d, %d multiprocessors, %s",
            gpu.name(),
            gpu.capability() / 10,
            gpu.capability() % 10,
            gpu.multiprocessors(),
            gpu.bus());
    if (gpu.capability() < OLDEST_CAPABILITY) {
      findings.add(
          Finding.fail(
              what,
              detail,
              "use a GPU of compute capability 8.0 or newer (A100, RTX 30 and later), or --device"
                  + " cpu"));
      return findings;
    }
    findings.add(
        Finding.ok(
            what,
            detail
                + (gpu.capability() == HOPPER
                    ? ": Hopper kernels"
                    : ": portable kernels, which the driver compiles at first use")));
    String memory =
        String.format(
            Locale.ROOT, "%.1f GiB free of %.1f", gpu.freeBytes() / GIB, gpu.totalBytes() / GIB);
    findings.add(
        gpu.freeBytes() >= LEAST_FREE
            ? Finding.ok(what + " memory", memory)
            : Finding.fail(
                what + " memory", memory, "end what nvidia-smi shows to hold memory of this GPU"));
    findings.add(
        gpu.ecc()
            ? Finding.ok(what + " ECC", "on")
            : Finding.none(what + " ECC", "off: a flipped bit goes unseen (nvidia-smi -e 1)"));
    findings.add(
        gpu.failure() == null
            ? Finding.ok(what + " works", "ran a kernel, copied its result")
            : Finding.fail(
                what + " works",
                gpu.failure(),
                "check nvidia-smi and dmesg for Xid errors; a GPU that has faulted needs a reset or a"
                    + " restart"));
    return findings;
  }

  /** Which pairs of GPUs reach each other's memory; nothing to say about a single one. */
  static List<Finding> peers(List<String> gpus, BiPredicate<Integer, Integer> canAccess) {
    if (gpus.size() < 2) {
      return List.of();
    }
    List<String> direct = new ArrayList<>();
    List<String> staged = new ArrayList<>();
    for (int a = 0; a < gpus.size(); a++) {
      for (int b = a + 1; b < gpus.size(); b++) {
        boolean both = canAccess.test(a, b) && canAccess.test(b, a);
        (both ? direct : staged).add(gpus.get(a) + " - " + gpus.get(b));
      }
    }
    List<Finding> findings = new ArrayList<>();
    if (!direct.isEmpty()) {
      findings.add(Finding.ok("peer access", "direct: " + String.join(", ", direct)));
    }
    if (!staged.isEmpty()) {
      findings.add(
          Finding.none(
              "peer access",
              "copies go through the host: "
                  + String.join(", ", staged)
                  + "; direct ones want NVLink, or PCIe peer access (nvidia-smi topo -p2p r)"));
    }
    return findings;
  }
}
