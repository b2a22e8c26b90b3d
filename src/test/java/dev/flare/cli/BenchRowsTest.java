package dev.flare.cli;

import static org.assertj.core.api.Assertions.assertThat;
import static org.junit.jupiter.api.Assumptions.assumeTrue;

import com.fasterxml.jackson.jr.ob.JSON;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.Set;
import java.util.stream.Collectors;
import org.junit.jupiter.api.Test;

class BenchRowsTest {
  @Test
  void namesAreUniqueInAGroupAndTheSameInQuickRuns() {
    List<String> full = new ArrayList<>();
    BenchRows.all(false).forEach(row -> full.add(row.group() + ": " + row.name()));

    assertThat(full).doesNotHaveDuplicates().hasSizeGreaterThan(100);
    List<String> quick = new ArrayList<>();
    BenchRows.all(true).forEach(row -> quick.add(row.group() + ": " + row.name()));
    assertThat(quick).isEqualTo(full);
  }

  @Test
  void storedPeersHaveRows() throws IOException {
    Path file = Path.of("cuda/bench/stored_peers.json");
    assumeTrue(Files.exists(file), "not in a source tree");
    Set<String> rows =
        BenchRows.all(false).stream().map(BenchRows.Row::name).collect(Collectors.toSet());
    Map<String, Object> stored = JSON.std.mapFrom(Files.readString(file));

    assertThat((List<?>) Objects.requireNonNull(stored.get("results")))
        .isNotEmpty()
        .allSatisfy(result -> assertThat(rows).contains((String) ((Map<?, ?>) result).get("row")));
  }
}
