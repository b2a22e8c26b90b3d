package dev.flare.io;

import static org.assertj.core.api.Assertions.assertThat;

import dev.flare.Shape;
import dev.flare.testing.Seeds;
import java.io.IOException;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.ValueLayout;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.SplittableRandom;
import java.util.stream.Stream;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.MethodSource;

/**
 * Readers fed with damaged files: each is read, or refused with a {@link MalformedFileException}.
 * Nothing else may come out, and what was read must lie within the file.
 */
class ReaderFuzzTest {
  private static final Path NAME = Path.of("fuzz");
  private static final int ROUNDS = 3000;

  /** Numbers and words that break careless readers. */
  private static final String[] PIECES = {
    "-1",
    "0",
    "1e3",
    "1.5",
    "2147483648",
    "4294967296",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "99999999999999999999999999999999999999",
    "null",
    "true",
    "NaN",
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    ",",
    ":",
    "\"",
    "'",
    "\\u0000",
    "\\",
    "\"x\":",
    "[[[[[[[[[[",
    "{\"a\":{\"a\":{\"a\":",
    "\"BF16\"",
    "'>f4'",
    "True",
    "\u0000",
    "é"
  };

  static Stream<Long> seeds() {
    return Seeds.from(0xF122, 8);
  }

  /** One to four changes: bits, bytes, pieces put in, stretches removed, repeated or cut off. */
  private static byte[] damage(SplittableRandom random, byte[] file) {
    byte[] result = file;
    for (int i = random.nextInt(1, 5); i > 0 && result.length > 0; i--) {
      int at = random.nextInt(result.length);
      int end = Math.min(result.length, at + random.nextInt(1, 9));
      byte[] middle =
          switch (random.nextInt(6)) {
            case 0 -> {
              byte[] flipped = Arrays.copyOfRange(result, at, end);
              flipped[0] ^= (byte) (1 << random.nextInt(8));
              yield flipped;
            }
            case 1 -> {
              byte[] bytes = new byte[end - at];
              random.nextBytes(bytes);
              yield bytes;
            }
            case 2 -> PIECES[random.nextInt(PIECES.length)].getBytes(StandardCharsets.UTF_8);
            case 3 -> new byte[0];
            case 4 -> {
              byte[] twice = Arrays.copyOfRange(result, at, 2 * end - at);
              System.arraycopy(result, at, twice, end - at, end - at);
              yield twice;
            }
            default -> {
              end = result.length;
              yield new byte[0];
            }
          };
      byte[] next = new byte[at + middle.length + result.length - end];
      System.arraycopy(result, 0, next, 0, at);
      System.arraycopy(middle, 0, next, at, middle.length);
      System.arraycopy(result, end, next, at + middle.length, result.length - end);
      result = next;
    }
    return result;
  }

  private static byte[] noise(SplittableRandom random) {
    byte[] bytes = new byte[random.nextInt(200)];
    random.nextBytes(bytes);
    return bytes;
  }

  /** Keeps the header length true, so that damage reaches the JSON behind it. */
  private static byte[] damagedSafetensors(SplittableRandom random, byte[] file) {
    if (random.nextInt(3) == 0) {
      return damage(random, file);
    }
    int length = (int) MemorySegment.ofArray(file).get(ValueLayout.JAVA_LONG_UNALIGNED, 0);
    byte[] json = damage(random, Arrays.copyOfRange(file, 8, 8 + length));
    byte[] data = Arrays.copyOfRange(file, 8 + length, file.length);
    return SafetensorsTest.bytes(new String(json, StandardCharsets.ISO_8859_1), data);
  }

  private static void touch(TensorEntry entry) {
    assertThat(entry.data().byteSize()).isEqualTo(entry.shape().elements() * entry.type().bytes());
    assertThat(entry.toDoubles()).hasSize((int) entry.shape().elements());
  }

  @ParameterizedTest(name = "seed {0}")
  @MethodSource("seeds")
  void safetensors(long seed, @TempDir Path folder) throws IOException {
    SplittableRandom random = new SplittableRandom(seed);
    Path file = folder.resolve("valid");
    Safetensors.write(
        file,
        List.of(
            TensorEntry.ofValues("x", ElementType.BF16, Shape.of(2, 3), 1, 2, 3, 4, 5, 6),
            TensorEntry.ofValues("lengths", ElementType.I32, Shape.of(2), 7, 8),
            TensorEntry.ofValues("none", ElementType.F32, Shape.of(0, 4))),
        Map.of("params", "{\"kernel\": \"attention\"}"));
    byte[] valid = Files.readAllBytes(file);
    int read = 0;
    for (int i = 0; i < ROUNDS; i++) {
      byte[] bytes =
          i == 0 ? valid : i % 16 == 1 ? noise(random) : damagedSafetensors(random, valid);
      try {
        SafetensorsHeader header = Safetensors.parse(NAME, MemorySegment.ofArray(bytes));
        header.entries().values().forEach(ReaderFuzzTest::touch);
        read++;
      } catch (MalformedFileException expected) {
        assertThat(expected.getMessage()).hasSizeLessThan(1000);
      }
    }
    assertThat(read).as("files read").isBetween(1, ROUNDS - 1);
  }

  @ParameterizedTest(name = "seed {0}")
  @MethodSource("seeds")
  void npy(long seed) {
    SplittableRandom random = new SplittableRandom(seed);
    int read = 0;
    for (int i = 0; i < ROUNDS; i++) {
      byte[] valid =
          NpyTest.bytes(
              random.nextInt(1, 4),
              "{'descr': '<i4', 'fortran_order': False, 'shape': (2, 3), }\n",
              new byte[24]);
      byte[] bytes = i == 0 ? valid : i % 16 == 1 ? noise(random) : damage(random, valid);
      try {
        touch(Npy.parse(NAME, MemorySegment.ofArray(bytes)));
        read++;
      } catch (MalformedFileException expected) {
        assertThat(expected.getMessage()).hasSizeLessThan(1000);
      }
    }
    assertThat(read).as("files read").isBetween(1, ROUNDS - 1);
  }

  @ParameterizedTest(name = "seed {0}")
  @MethodSource("seeds")
  void caseFiles(long seed, @TempDir Path folder) throws IOException {
    SplittableRandom random = new SplittableRandom(seed);
    String params =
        """
        {"kernel": "attention_paged", "layout": "", "causal": true, "window": [3, 0],
         "softcap": 2.0, "scale": 0.5}""";
    Path file = folder.resolve("case");
    int read = 0;
    for (int i = 0; i < ROUNDS / 20; i++) {
      int[] numbers = {1, 0, 4, 2};
      String text = params;
      if (i > 0 && random.nextBoolean()) {
        numbers[random.nextInt(4)] =
            random.nextBoolean() ? random.nextInt() : random.nextInt(-2, 6);
      } else if (i > 0) {
        byte[] damaged = damage(random, params.getBytes(StandardCharsets.UTF_8));
        text = new String(damaged, StandardCharsets.UTF_8);
      }
      Safetensors.write(
          file,
          List.of(
              TensorEntry.ofValues("q", ElementType.F32, Shape.of(2, 1, 1, 1), 1, 2),
              TensorEntry.ofValues("k_pages", ElementType.F32, Shape.of(2, 4, 1, 1), new double[8]),
              TensorEntry.ofValues("v_pages", ElementType.F32, Shape.of(2, 4, 1, 1), new double[8]),
              TensorEntry.ofValues(
                  "block_table", ElementType.I32, Shape.of(2, 1), numbers[0], numbers[1]),
              TensorEntry.ofValues(
                  "seqlens_k", ElementType.I32, Shape.of(2), numbers[2], numbers[3])),
          Map.of("params", text));
      try (CaseFile open = CaseFile.open(file)) {
        assertThat(open.params()).isNotNull();
        read++;
      } catch (MalformedFileException expected) {
        assertThat(expected.getMessage()).hasSizeLessThan(2000);
      }
    }
    assertThat(read).as("files read").isBetween(1, ROUNDS / 20 - 1);
  }
}
