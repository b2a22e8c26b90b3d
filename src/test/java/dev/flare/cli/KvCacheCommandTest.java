package dev.flare.cli;

import static org.assertj.core.api.Assertions.assertThat;

import java.util.List;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;

class KvCacheCommandTest {
  private static List<List<String>> rows(Cli cli) {
    return cli.out()
        .lines()
        .filter(line -> line.matches("\\s*\\d+[KM] .*"))
        .map(line -> List.of(line.strip().split("\\s{2,}")))
        .toList();
  }

  @Test
  void printsTheFiguresOfTheWrittenTable() {
    Cli cli = Cli.run("kv-cache", "--heads", "128", "--dim", "128", "--latent", "512");

    assertThat(cli.status()).isZero();
    assertThat(rows(cli))
        .startsWith(
            List.of("1K", "67.1", "1.0", "98.4 %"),
            List.of("4K", "268.4", "4.2", "98.4 %"),
            List.of("16K", "1,073.7", "16.8", "98.4 %"),
            List.of("64K", "4,295.0", "67.1", "98.4 %"),
            List.of("128K", "8,589.9", "134.2", "98.4 %"))
        .hasSizeGreaterThan(5);
    assertThat(cli.out()).contains("K = 1024 tokens", "MB = 10^6 bytes", "64.0 times as long");
  }

  @Test
  void countsTheRopeKeyOfDeepSeek() {
    Cli cli = Cli.run("kv-cache", "--rope", "64");

    assertThat(rows(cli))
        .startsWith(
            List.of("1K", "67.109", "1.180", "98.242 %"),
            List.of("4K", "268.435", "4.719", "98.242 %"),
            List.of("16K", "1,073.742", "18.874", "98.242 %"),
            List.of("64K", "4,294.967", "75.497", "98.242 %"),
            List.of("128K", "8,589.935", "150.995", "98.242 %"));
    assertThat(cli.out())
        .contains("1,152 bytes a token", "56.9 times as long", "98.594 % saved, 71.1 times");
  }

  /** DeepSeek-V3's 61 layers at 128K: 9.21 GB in bf16, 5.24 GB in 656-byte rows. */
  @ParameterizedTest
  @CsvSource({"bf16, 9,210.7", "fp8, 5,245.0", "fp32, 18,421.4"})
  void countsLayersAndDtypes(String dtype, String whole, String fraction) {
    Cli cli =
        Cli.run("kv-cache", "--rope", "64", "--layers", "61", "--dtype", dtype, "--digits", "1");

    assertThat(rows(cli).get(4).get(2)).isEqualTo(whole + "," + fraction);
  }

  @ParameterizedTest
  @CsvSource({
    "--heads, 0, '--heads must be from 1'",
    "--rope, -1, '--rope must be from 0'",
    "--dim, 99999999, '--dim must be from 1'",
    "--dtype, int8, 'expected one of [FP32, FP16, BF16, FP8]'",
    "--latent, many, 'not an int'",
    "--wrong, 1, 'Unknown option'",
  })
  void refusesWrongOptionsInOneLine(String option, String value, String message) {
    Cli cli = Cli.run("kv-cache", option, value);

    assertThat(cli.status()).isEqualTo(2);
    assertThat(cli.out()).isEmpty();
    assertThat(cli.err().lines().toList()).hasSize(2);
    assertThat(cli.err()).startsWith("flare: error: ").contains(message).contains("--help");
  }
}
