/**
 * Modern attention kernels for the JVM: FlashAttention-2, sliding-window attention, multi-head
 * latent attention and Kimi Delta Attention.
 *
 * <p>The API is {@link dev.flare}; {@link dev.flare.io} reads and writes tensor files, and {@link
 * dev.flare.reference} defines every operation in float64. The kernels live in a C library that the
 * jar carries; Java needs {@code --enable-native-access=dev.flare} (module path) or {@code
 * --enable-native-access=ALL-UNNAMED} (class path) to call it.
 */
@org.jspecify.annotations.NullMarked
module dev.flare {
  requires static transitive org.jspecify;
  requires com.fasterxml.jackson.jr.ob;
  requires static info.picocli;

  exports dev.flare;
  exports dev.flare.io;
  exports dev.flare.reference;

  // The command line's options are fields that picocli sets.
  opens dev.flare.cli to
      info.picocli;
}
