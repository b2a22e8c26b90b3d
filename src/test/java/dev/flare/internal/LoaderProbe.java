package dev.flare.internal;

import dev.flare.DType;
import dev.flare.Flare;
import dev.flare.FlashAttention;
import dev.flare.Tensor;
import java.nio.file.Files;
import java.nio.file.Path;

/** A program that tells how loading went, for {@link LoaderTest}. */
final class LoaderProbe {
  private LoaderProbe() {}

  public static void main(String[] args) throws Exception {
    System.out.println(NativeLibrary.status());
    System.out.println(Flare.status());
    String copy = System.getProperty("probe.then.copy");
    if (copy != null) {
      String[] fromTo = copy.split(":", 2);
      Files.copy(Path.of(fromTo[0]), Path.of(fromTo[1]));
      System.out.println("then " + NativeLibrary.status());
    }
    try (Tensor t = Tensor.randn(1, DType.FP32, 1, 4, 1, 8)) {
      System.out.println("tensor works: " + (t.toFloatArray().length == 32));
      if (Flare.status().library().isReady()) {
        try (Tensor out = FlashAttention.flash(t, t, t)) {
          System.out.println("kernel works: " + (out.elements() == 32));
        }
      }
    }
  }
}
