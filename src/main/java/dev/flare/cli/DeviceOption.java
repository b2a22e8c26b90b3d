package dev.flare.cli;

import dev.flare.Device;
import java.util.Objects;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.jspecify.annotations.Nullable;
import picocli.CommandLine.Model.CommandSpec;
import picocli.CommandLine.Option;
import picocli.CommandLine.ParameterException;
import picocli.CommandLine.Spec;

/** The option {@code --device}. */
final class DeviceOption {
  private static final Pattern CUDA = Pattern.compile("cuda(?::(\\d{1,4}))?");

  @Spec(Spec.Target.MIXEE)
  private @Nullable CommandSpec spec;

  private String device = "";

  @Option(
      names = "--device",
      paramLabel = "D",
      description = "cpu or cuda:N; without it the first usable GPU, else the CPU.")
  void setDevice(String text) {
    if (!text.equals("cpu") && !CUDA.matcher(text).matches()) {
      throw new ParameterException(
          Objects.requireNonNull(spec).commandLine(),
          "--device is '" + text + "', want cpu, cuda:0, cuda:1 ...");
    }
    device = text;
  }

  boolean isCpu() {
    return device.equals("cpu");
  }

  boolean isCuda() {
    return device.startsWith("cuda");
  }

  /**
   * {@return the device asked for}
   *
   * @throws dev.flare.FlareException if it cannot be used, telling why
   */
  Device resolve() {
    if (device.isEmpty()) {
      return Device.best();
    }
    Matcher cuda = CUDA.matcher(device);
    if (!cuda.matches()) {
      return Device.cpu();
    }
    return Device.cuda(cuda.group(1) == null ? 0 : Integer.parseInt(cuda.group(1)));
  }

  /** {@return what runs cases on the device asked for} */
  CaseRunner open() {
    return new DeviceRunner(resolve());
  }
}
