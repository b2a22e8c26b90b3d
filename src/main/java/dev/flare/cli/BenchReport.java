package dev.flare.cli;

import com.fasterxml.jackson.jr.ob.JSON;
import java.io.IOException;
import java.io.PrintWriter;
import java.io.StringWriter;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;

/** The results of {@code flare bench} as Markdown, JSON and a bar chart in SVG. */
final class BenchReport {
  /**
   * One measured case.
   *
   * @param kernel kernel and form
   * @param dtype number format of the inputs
   * @param mask mask or gate
   * @param shape sizes
   * @param micros median time of a call
   * @param spread (upper quartile - lower quartile) / median
   * @param rate in {@code unit}
   * @param unit GFLOP/s, TFLOP/s or GB/s
   * @param error relative error of the output against the float64 reference, measured in this run
   * @param ranAs name of the kernel
   */
  record Row(
      String kernel,
      String dtype,
      String mask,
      String shape,
      double micros,
      double spread,
      double rate,
      String unit,
      double error,
      String ranAs) {}

  private final Map<String, String> environment;
  private final List<Row> rows;

  BenchReport(Map<String, String> environment, List<Row> rows) {
    this.environment = environment;
    this.rows = List.copyOf(rows);
  }

  static TextTable table(boolean markdown) {
    return new TextTable(markdown)
        .column("kernel", 16, TextTable.Align.LEFT)
        .column("dtype", 5, TextTable.Align.LEFT)
        .column("mask or gate", 12, TextTable.Align.LEFT)
        .column("shape", 34, TextTable.Align.LEFT)
        .column("median us", 11, TextTable.Align.RIGHT)
        .column("spread", 6, TextTable.Align.RIGHT)
        .column("rate", 13, TextTable.Align.RIGHT)
        .column("rel error", 9, TextTable.Align.RIGHT)
        .column("ran as", 6, TextTable.Align.LEFT);
  }

  static String[] cells(Row row) {
    return new String[] {
      row.kernel(),
      row.dtype(),
      row.mask(),
      row.shape(),
      String.format(Locale.ROOT, "%.1f", row.micros()),
      String.format(Locale.ROOT, "%.0f %%", 100 * row.spread()),
      String.format(Locale.ROOT, "%.4g %s", row.rate(), row.unit()),
      CaseCheck.scientific(row.error()),
      row.ranAs()
    };
  }

  String markdown(String command) {
    StringWriter text = new StringWriter();
    PrintWriter out = new PrintWriter(text);
    out.println("# Speed through Java");
    out.println();
    out.println("Made by `" + command + " --markdown FILE`; `--json` and `--svg` write the same.");
    out.println();
    out.println(
        "Median of repeated calls of `plan.launch` after a warm-up; spread is the distance of the"
            + " quartiles over the median.");
    out.println(
        "Work: attention 2 (D + Dv) per visible pair and head; MLA prefill that plus one"
            + " up-projection; KDA 6 K V + 64 (K + V) + 3072");
    out.println(
        "per token and head. Decode counts the bytes of cache read, or of states read and written."
            + " The relative error is");
    out.println("that of the output against the float64 reference, in the same run.");
    out.println();
    environment.forEach((name, value) -> out.println("- " + name + ": " + value));
    out.println();
    TextTable table = table(true);
    table.printHeader(out);
    rows.forEach(row -> table.row(out, cells(row)));
    out.flush();
    return text.toString();
  }

  String json(String command) throws IOException {
    Map<String, Object> report = new LinkedHashMap<>();
    report.put("command", command);
    report.put("environment", environment);
    List<Map<String, Object>> results = new ArrayList<>();
    for (Row row : rows) {
      Map<String, Object> result = new LinkedHashMap<>();
      result.put("kernel", row.kernel());
      result.put("dtype", row.dtype());
      result.put("mask", row.mask());
      result.put("shape", row.shape());
      result.put("median_us", row.micros());
      result.put("spread", row.spread());
      result.put("rate", row.rate());
      result.put("unit", row.unit());
      result.put("relative_error", row.error());
      result.put("ran_as", row.ranAs());
      results.add(result);
    }
    report.put("results", results);
    return JSON.std.with(JSON.Feature.PRETTY_PRINT_OUTPUT).asString(report) + "\n";
  }

  /** Bars by rate; each unit has its own scale. */
  String svg(String title) {
    int rowHeight = 22;
    int labelWidth = 430;
    int barWidth = 320;
    int height = 50 + rowHeight * rows.size();
    StringBuilder svg = new StringBuilder();
    svg.append(
        String.format(
            Locale.ROOT,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\""
                + " font-family=\"sans-serif\" font-size=\"12\">%n"
                + "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>%n"
                + "<text x=\"10\" y=\"22\" font-size=\"15\">%s</text>%n",
            labelWidth + barWidth + 130,
            height,
            escape(title)));
    Map<String, Double> highest = new LinkedHashMap<>();
    rows.forEach(row -> highest.merge(row.unit(), row.rate(), Math::max));
    for (int i = 0; i < rows.size(); i++) {
      Row row = rows.get(i);
      int y = 40 + i * rowHeight;
      double length = barWidth * row.rate() / highest.getOrDefault(row.unit(), 1.0);
      svg.append(
          String.format(
              Locale.ROOT,
              "<text x=\"%d\" y=\"%d\" text-anchor=\"end\">%s</text>%n"
                  + "<rect x=\"%d\" y=\"%d\" width=\"%.1f\" height=\"14\" fill=\"#3b78b5\"/>%n"
                  + "<text x=\"%.1f\" y=\"%d\">%.4g %s</text>%n",
              labelWidth - 8,
              y + 12,
              escape(row.kernel() + " " + row.dtype() + " " + row.mask() + " " + row.shape()),
              labelWidth,
              y,
              length,
              labelWidth + length + 6,
              y + 12,
              row.rate(),
              row.unit()));
    }
    return svg.append("</svg>\n").toString();
  }

  private static String escape(String text) {
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;");
  }
}
