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
import java.util.TreeSet;
import java.util.stream.Collectors;

/** The results of the grouped benchmark as Markdown, JSON and a bar chart in SVG. */
final class GroupReport {
  /**
   * One row.
   *
   * @param group where it belongs
   * @param name the row's
   * @param note why there is no time; empty if there is one
   * @param micros median time of a call; NaN without one
   * @param spread (upper quartile - lower quartile) / median
   * @param teraflops a second; 0 where they are not what counts
   * @param terabytes a second; 0 where they are not what counts
   * @param error relative error in this run; NaN where there is nothing to compare
   * @param wrong whether the error is beyond its tolerance
   * @param checked what was compared with what
   * @param peers others' times for the row
   * @param ranAs name of the kernel
   */
  record Row(
      BenchGroup group,
      String name,
      String note,
      double micros,
      double spread,
      double teraflops,
      double terabytes,
      double error,
      boolean wrong,
      String checked,
      List<Peers.Time> peers,
      String ranAs) {

    static Row without(BenchGroup group, String name, String note) {
      return new Row(group, name, note, Double.NaN, 0, 0, 0, Double.NaN, false, "", List.of(), "");
    }

    boolean isTimed() {
      return note.isEmpty();
    }
  }

  private static final String STORED = "*";

  private final String command;
  private final Map<String, String> environment;
  private final List<Row> rows;

  GroupReport(String command, Map<String, String> environment, List<Row> rows) {
    this.command = command;
    this.environment = environment;
    this.rows = List.copyOf(rows);
  }

  static TextTable table(boolean markdown) {
    return new TextTable(markdown)
        .column("row", 46, TextTable.Align.LEFT)
        .column("median us", 10, TextTable.Align.RIGHT)
        .column("spread", 6, TextTable.Align.RIGHT)
        .column("TFLOP/s", 7, TextTable.Align.RIGHT)
        .column("TB/s", 5, TextTable.Align.RIGHT)
        .column("rel error", 9, TextTable.Align.RIGHT)
        .column("their time / ours", 34, TextTable.Align.LEFT)
        .column("ran as", 6, TextTable.Align.LEFT);
  }

  static String[] cells(Row row) {
    if (!row.isTimed()) {
      return new String[] {row.name(), "", "", "", "", "", "", row.note()};
    }
    return new String[] {
      row.name(),
      number(row.micros() < 10 ? "%.3f" : "%.1f", row.micros()),
      number("%.1f %%", 100 * row.spread()),
      row.teraflops() == 0 ? "" : number("%.1f", row.teraflops()),
      row.terabytes() == 0 ? "" : number("%.3f", row.terabytes()),
      Double.isNaN(row.error())
          ? ""
          : CaseCheck.scientific(row.error()) + (row.wrong() ? " MISS" : ""),
      row.peers().stream().map(peer -> text(peer, row.micros())).collect(Collectors.joining(", ")),
      row.ranAs()
    };
  }

  private static String text(Peers.Time peer, double micros) {
    return peer.peer()
        + number(" %.2f", peer.micros() / micros)
        + (peer.stored().isEmpty() ? "" : STORED);
  }

  private static String number(String format, double value) {
    return String.format(Locale.ROOT, format, value);
  }

  String markdown() {
    StringWriter text = new StringWriter();
    PrintWriter out = new PrintWriter(text);
    out.println("# Speed through Java");
    out.println();
    out.println("Made by `" + command + "`.");
    out.println();
    out.println(
        "Medians of event times around `plan.launch`, 256 MB written before each launch to flush the"
            + " L2 cache; spread is the distance of the");
    out.println(
        "quartiles over the median. FLOPs count visible pairs of query and key only, bytes are those"
            + " that must move (inputs, outputs, states, once).");
    out.println(
        "The relative error is that of a part of the timed output, in the same run. Ratios are the"
            + " peer's time over ours: above 1 flare is faster.");
    new TreeSet<>(rows.stream().flatMap(r -> r.peers().stream()).map(Peers.Time::stored).toList())
        .stream()
            .filter(stored -> !stored.isEmpty())
            .forEach(stored -> out.println("Ratios with " + STORED + ": " + stored + "."));
    out.println();
    environment.forEach((name, value) -> out.println("- " + name + ": " + value));
    for (BenchGroup group : BenchGroup.values()) {
      List<Row> own = rows.stream().filter(row -> row.group() == group).toList();
      if (own.isEmpty()) {
        continue;
      }
      out.println();
      out.println("## " + group.text() + ": " + group.title());
      out.println();
      TextTable table = table(true);
      table.printHeader(out);
      own.forEach(row -> table.row(out, cells(row)));
      own.stream()
          .map(Row::checked)
          .filter(checked -> !checked.isEmpty())
          .distinct()
          .forEach(checked -> out.println("\nChecked against the " + checked + "."));
    }
    out.flush();
    return text.toString();
  }

  String json() throws IOException {
    Map<String, Object> report = new LinkedHashMap<>();
    report.put("command", command);
    report.put("environment", environment);
    report.put("results", rows.stream().map(GroupReport::fields).toList());
    return JSON.std.with(JSON.Feature.PRETTY_PRINT_OUTPUT).asString(report) + "\n";
  }

  private static Map<String, Object> fields(Row row) {
    Map<String, Object> result = new LinkedHashMap<>();
    result.put("group", row.group().text());
    result.put("row", row.name());
    if (!row.isTimed()) {
      result.put("note", row.note());
      return result;
    }
    result.put("median_us", row.micros());
    result.put("spread", row.spread());
    result.put("tflops", row.teraflops());
    result.put("terabytes_per_s", row.terabytes());
    if (!Double.isNaN(row.error())) {
      result.put("relative_error", row.error());
      result.put("within_tolerance", !row.wrong());
      result.put("checked", row.checked());
    }
    result.put("ran_as", row.ranAs());
    List<Map<String, Object>> peers = new ArrayList<>();
    for (Peers.Time peer : row.peers()) {
      Map<String, Object> fields = new LinkedHashMap<>();
      fields.put("peer", peer.peer());
      fields.put("median_us", peer.micros());
      fields.put("ratio", peer.micros() / row.micros());
      if (!peer.stored().isEmpty()) {
        fields.put("stored", peer.stored());
      }
      peers.add(fields);
    }
    result.put("peers", peers);
    return result;
  }

  /** A bar for each time of each row, longer is faster; every group has its own scale. */
  String svg(String title) {
    int rowHeight = 16;
    int labelWidth = 470;
    int barWidth = 360;
    StringBuilder bars = new StringBuilder();
    int y = 40;
    for (BenchGroup group : BenchGroup.values()) {
      List<Row> own = rows.stream().filter(r -> r.group() == group && r.isTimed()).toList();
      for (Row row : own) {
        double work = Math.max(row.teraflops(), row.terabytes()) * row.micros();
        if (work == 0) {
          continue;
        }
        String unit = row.teraflops() > 0 ? "TFLOP/s" : "TB/s";
        double best =
            own.stream()
                .filter(r -> (r.teraflops() > 0) == (row.teraflops() > 0))
                .mapToDouble(GroupReport::highest)
                .max()
                .orElse(1);
        y = bar(bars, y, row.name(), "flare", work / row.micros(), best, unit, "#3b78b5");
        for (Peers.Time peer : row.peers()) {
          y = bar(bars, y, "", peer.peer(), work / peer.micros(), best, unit, "#b9b9b9");
        }
        y += 4;
      }
      y += own.isEmpty() ? 0 : 10;
    }
    return String.format(
            Locale.ROOT,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\""
                + " font-family=\"sans-serif\" font-size=\"11\">%n"
                + "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>%n"
                + "<text x=\"10\" y=\"22\" font-size=\"15\">%s</text>%n",
            labelWidth + barWidth + 130,
            y + rowHeight,
            escape(title))
        + bars
        + "</svg>\n";
  }

  private static double highest(Row row) {
    double rate = Math.max(row.teraflops(), row.terabytes());
    double fastest =
        row.peers().stream().mapToDouble(Peers.Time::micros).min().orElse(row.micros());
    return rate * row.micros() / Math.min(fastest, row.micros());
  }

  private static int bar(
      StringBuilder svg,
      int y,
      String row,
      String who,
      double rate,
      double best,
      String unit,
      String colour) {
    double length = 360 * rate / best;
    svg.append(
        String.format(
            Locale.ROOT,
            "<text x=\"372\" y=\"%d\" text-anchor=\"end\">%s</text>%n"
                + "<text x=\"462\" y=\"%d\" text-anchor=\"end\" fill=\"#666\">%s</text>%n"
                + "<rect x=\"470\" y=\"%d\" width=\"%.1f\" height=\"11\" fill=\"%s\"/>%n"
                + "<text x=\"%.1f\" y=\"%d\">%.4g %s</text>%n",
            y + 10,
            escape(row),
            y + 10,
            escape(who.length() > 14 ? who.substring(0, 13) + "…" : who),
            y,
            length,
            colour,
            476 + length,
            y + 10,
            rate,
            unit));
    return y + 16;
  }

  private static String escape(String text) {
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;");
  }
}
