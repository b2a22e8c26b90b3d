package dev.flare.cli;

import java.util.Locale;

/** Parts of the grouped benchmark, by the name that {@code --group} takes. */
enum BenchGroup {
  /** One or two rows of each operation, on the path that every GPU has. */
  PORTABLE("the portable path of each operation"),
  ATTENTION("dense attention, prefill"),
  WINDOW("sliding windows, prefill"),
  VARLEN("packed sequences of unequal lengths, prefill"),
  FP8("dense attention of e4m3 inputs, prefill"),
  KDA("Kimi Delta Attention, prefill"),
  KDA_DECODE("Kimi Delta Attention, one token"),
  MLA("MLA decode, absorbed"),
  MLA_PREFILL("MLA prefill, up-projecting in the kernel"),
  DECODE("attention decode over pages"),
  COPIES("copies between host and device"),
  HOST("what a launch costs the host");

  private final String title;

  BenchGroup(String title) {
    this.title = title;
  }

  /** {@return what the group measures} */
  String title() {
    return title;
  }

  /** {@return the name on the command line} */
  String text() {
    return name().toLowerCase(Locale.ROOT).replace('_', '-');
  }

  /** The name on the command line, which is what picocli takes and lists. */
  @Override
  public String toString() {
    return text();
  }
}
