package dev.flare.cli;

import com.fasterxml.jackson.jr.ob.JSON;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Objects;

/**
 * Times of other libraries, by the names of the benchmark's rows: what {@code cuda/bench/peers.py}
 * and {@code copies_bench} write.
 *
 * <p>A file is a JSON object with {@code results}, a list of {@code row}, {@code peer} and {@code
 * median_us}, and {@code environment}, texts by name. A file with {@code stored} was measured in
 * another run, and that text says which: {@code stored_peers.json}.
 */
final class Peers {
  /**
   * A time.
   *
   * @param peer whose
   * @param micros median
   * @param stored in which other run it was measured; empty if in this one
   */
  record Time(String peer, double micros, String stored) {}

  private final Map<String, List<Time>> times = new LinkedHashMap<>();
  private final Map<String, String> environment = new LinkedHashMap<>();

  /** Reads files; a later one adds to the earlier ones. */
  static Peers read(List<Path> files) throws IOException {
    Peers peers = new Peers();
    for (Path file : files) {
      try {
        peers.add(JSON.std.mapFrom(Files.readString(file)));
      } catch (ClassCastException | NullPointerException e) {
        throw new IOException(file + " is no file of peers: cuda/bench/peers.py writes one", e);
      }
    }
    return peers;
  }

  private void add(Map<String, Object> file) {
    if (file.get("environment") instanceof Map<?, ?> names) {
      names.forEach((name, value) -> environment.put("peers' " + name, String.valueOf(value)));
    }
    Object stored = file.get("stored");
    for (Object entry : (List<?>) Objects.requireNonNull(file.get("results"))) {
      Map<?, ?> result = (Map<?, ?>) entry;
      String row = (String) Objects.requireNonNull(result.get("row"));
      String peer = (String) Objects.requireNonNull(result.get("peer"));
      Number micros = (Number) Objects.requireNonNull(result.get("median_us"));
      times
          .computeIfAbsent(row, key -> new ArrayList<>())
          .add(new Time(peer, micros.doubleValue(), stored == null ? "" : stored.toString()));
    }
  }

  /** {@return the times for a row, in the order of the files} */
  List<Time> of(String row) {
    return times.getOrDefault(row, List.of());
  }

  /** {@return what the files say of where they were made} */
  Map<String, String> environment() {
    return environment;
  }
}
