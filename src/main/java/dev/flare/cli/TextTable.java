package dev.flare.cli;

import java.io.PrintWriter;
import java.util.ArrayList;
import java.util.List;

/**
 * A table of text that is printed row by row, so that a long run shows each result as it comes.
 *
 * <p>Column widths are minima, fixed before the first row; a longer cell pushes its row to the
 * right and is never cut. The output is also valid Markdown when {@code markdown} is set. Not
 * thread safe.
 */
final class TextTable {
  /** Side on which a column's text stands. */
  enum Align {
    LEFT,
    RIGHT
  }

  private record Column(String title, int width, Align align) {}

  private final List<Column> columns = new ArrayList<>();
  private final boolean markdown;

  TextTable(boolean markdown) {
    this.markdown = markdown;
  }

  /** Adds a column at least {@code width} characters wide. */
  TextTable column(String title, int width, Align align) {
    columns.add(new Column(title, Math.max(width, title.length()), align));
    return this;
  }

  /** Prints the titles and the rule below them. */
  void printHeader(PrintWriter out) {
    row(out, columns.stream().map(Column::title).toArray(String[]::new));
    StringBuilder rule = new StringBuilder(markdown ? "|" : "");
    for (Column column : columns) {
      String dashes = "-".repeat(column.width());
      if (markdown) {
        boolean right = column.align() == Align.RIGHT;
        rule.append(right ? "-" + dashes + ":|" : "-" + dashes + "-|");
      } else {
        rule.append(rule.isEmpty() ? "" : "  ").append(dashes);
      }
    }
    out.println(rule);
    out.flush();
  }

  /** Prints one row; {@code cells} has one entry a column. */
  void row(PrintWriter out, String... cells) {
    if (cells.length != columns.size()) {
      throw new IllegalArgumentException(
          "a row of " + cells.length + " cells in a table of " + columns.size() + " columns");
    }
    StringBuilder line = new StringBuilder(markdown ? "| " : "");
    for (int i = 0; i < cells.length; i++) {
      Column column = columns.get(i);
      String padding = " ".repeat(Math.max(0, column.width() - cells[i].length()));
      if (i > 0) {
        line.append(markdown ? " | " : "  ");
      }
      line.append(column.align() == Align.RIGHT ? padding + cells[i] : cells[i] + padding);
    }
    out.println(markdown ? line + " |" : line.toString().stripTrailing());
    out.flush();
  }
}
