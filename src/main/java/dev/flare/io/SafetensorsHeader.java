package dev.flare.io;

import com.fasterxml.jackson.core.JsonFactory;
import com.fasterxml.jackson.core.JsonFactoryBuilder;
import com.fasterxml.jackson.core.JsonGenerator;
import com.fasterxml.jackson.core.JsonParser;
import com.fasterxml.jackson.core.JsonProcessingException;
import com.fasterxml.jackson.core.JsonToken;
import com.fasterxml.jackson.core.StreamReadConstraints;
import dev.flare.InvalidArgumentException;
import dev.flare.Shape;
import java.io.IOException;
import java.io.StringWriter;
import java.lang.foreign.MemorySegment;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.CharacterCodingException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.Comparator;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;

/**
 * The JSON header of a safetensors file: {@code {"__metadata__": {key: text}, name: {"dtype":
 * "F32", "shape": [..], "data_offsets": [begin, end]}}}. Offsets count from the end of the header.
 *
 * @param metadata free text by key, in the order of the header
 * @param entries tensors by name, in the order of the header
 */
record SafetensorsHeader(Map<String, String> metadata, Map<String, TensorEntry> entries) {
  private static final String METADATA = "__metadata__";

  /** Dimensions of a tensor; the format names no bound, no real tensor comes near. */
  private static final int MAX_NUMBERS = 64;

  /** Names are not shared through a table that a hostile header could grow or make collide. */
  private static final JsonFactory JSON =
      new JsonFactoryBuilder()
          .disable(JsonFactory.Feature.CANONICALIZE_FIELD_NAMES)
          .disable(JsonFactory.Feature.INTERN_FIELD_NAMES)
          .streamReadConstraints(
              StreamReadConstraints.builder()
                  .maxNestingDepth(8)
                  .maxNumberLength(32)
                  .maxStringLength((int) Safetensors.MAX_HEADER_BYTES)
                  .build())
          .build();

  /** Where the bytes of a tensor are said to lie. */
  private record Range(String name, long begin, long end) {}

  /**
   * Reads and checks a header.
   *
   * @param json the bytes of the header
   * @param data everything behind it
   */
  static SafetensorsHeader parse(Path file, byte[] json, MemorySegment data)
      throws MalformedFileException {
    if (json.length == 0 || json[0] != '{') {
      throw new MalformedFileException(file, "header does not begin with '{'");
    }
    try (JsonParser parser = JSON.createParser(decodeStrictly(file, json))) {
      return new Parser(file, parser, data).header();
    } catch (MalformedFileException e) {
      throw e;
    } catch (JsonProcessingException e) {
      long at = e.getLocation() == null ? -1 : e.getLocation().getCharOffset();
      throw new MalformedFileException(
          file, "header is not JSON at character " + at + ": " + e.getOriginalMessage(), e);
    } catch (IOException e) {
      throw new MalformedFileException(file, "header is not JSON: " + e.getMessage(), e);
    }
  }

  private static String decodeStrictly(Path file, byte[] json) throws MalformedFileException {
    try {
      return StandardCharsets.UTF_8.newDecoder().decode(ByteBuffer.wrap(json)).toString();
    } catch (CharacterCodingException e) {
      throw new MalformedFileException(file, "header is not UTF-8: " + e.getMessage(), e);
    }
  }

  /** One pass over the tokens of a header. */
  private static final class Parser {
    private final Path file;
    private final JsonParser json;
    private final MemorySegment data;
    private final Map<String, String> metadata = new LinkedHashMap<>();
    private final Map<String, TensorEntry> entries = new LinkedHashMap<>();
    private final List<Range> ranges = new ArrayList<>();
    private boolean sawMetadata;

    Parser(Path file, JsonParser json, MemorySegment data) {
      this.file = file;
      this.json = json;
      this.data = data;
    }

    SafetensorsHeader header() throws IOException {
      expect(JsonToken.START_OBJECT, "header");
      while (json.nextToken() == JsonToken.FIELD_NAME) {
        String name = json.currentName();
        if (name.equals(METADATA)) {
          readMetadata();
        } else {
          readTensor(name);
        }
      }
      if (json.nextToken() != null) {
        throw malformed("header goes on with " + json.currentToken() + " behind its object");
      }
      checkRanges();
      return new SafetensorsHeader(
          Collections.unmodifiableMap(metadata), Collections.unmodifiableMap(entries));
    }

    private void readMetadata() throws IOException {
      if (sawMetadata) {
        throw malformed("header has two of " + METADATA);
      }
      sawMetadata = true;
      expect(JsonToken.START_OBJECT, METADATA);
      while (json.nextToken() == JsonToken.FIELD_NAME) {
        String key = json.currentName();
        expect(JsonToken.VALUE_STRING, METADATA + "." + shorten(key));
        if (metadata.put(key, json.getText()) != null) {
          throw malformed(METADATA + " has two of '" + shorten(key) + "'");
        }
      }
    }

    private void readTensor(String name) throws IOException {
      String where = "tensor '" + shorten(name) + "'";
      ElementType type = null;
      long[] shape = null;
      long[] offsets = null;
      expect(JsonToken.START_OBJECT, where);
      while (json.nextToken() == JsonToken.FIELD_NAME) {
        String key = json.currentName();
        String place = where + " " + shorten(key);
        boolean repeated =
            switch (key) {
              case "dtype" -> type != null;
              case "shape" -> shape != null;
              case "data_offsets" -> offsets != null;
              default -> throw malformed(place + ": no such field in the format");
            };
        if (repeated) {
          throw malformed(where + " has two of " + key);
        }
        switch (key) {
          case "dtype" -> type = readType(place);
          case "shape" -> shape = readLongs(place);
          default -> offsets = readLongs(place);
        }
      }
      if (type == null || shape == null || offsets == null) {
        throw malformed(where + " lacks one of dtype, shape, data_offsets");
      }
      add(name, type, shape, offsets);
    }

    private ElementType readType(String place) throws IOException {
      expect(JsonToken.VALUE_STRING, place);
      String name = json.getText();
      return ElementType.named(name)
          .orElseThrow(
              () ->
                  malformed(
                      place
                          + " is '"
                          + shorten(name)
                          + "', want "
                          + Arrays.toString(ElementType.values())));
    }

    /** An array of numbers that are whole, not negative, and fit in a long. */
    private long[] readLongs(String place) throws IOException {
      expect(JsonToken.START_ARRAY, place);
      long[] numbers = new long[4];
      int count = 0;
      while (json.nextToken() != JsonToken.END_ARRAY) {
        String here = place + "[" + count + "]";
        if (json.currentToken() != JsonToken.VALUE_NUMBER_INT) {
          throw malformed(here + " is " + found() + ", want a whole number");
        }
        if (json.getNumberType() == JsonParser.NumberType.BIG_INTEGER || json.getLongValue() < 0) {
          throw malformed(here + " is " + found() + ", want 0 to 2^63-1");
        }
        if (count == MAX_NUMBERS) {
          throw malformed(place + " has more than " + MAX_NUMBERS + " numbers");
        }
        if (count == numbers.length) {
          numbers = Arrays.copyOf(numbers, 2 * count);
        }
        numbers[count++] = json.getLongValue();
      }
      return Arrays.copyOf(numbers, count);
    }

    private void add(String name, ElementType type, long[] dims, long[] offsets)
        throws MalformedFileException {
      String where = "tensor '" + shorten(name) + "'";
      if (offsets.length != 2 || offsets[0] > offsets[1]) {
        throw malformed(
            where + " data_offsets are " + Arrays.toString(offsets) + ", want [begin, end]");
      }
      long begin = offsets[0];
      long end = offsets[1];
      if (end > data.byteSize()) {
        throw malformed(
            where + " ends at " + end + ", the file has " + data.byteSize() + " bytes of data");
      }
      Shape shape;
      long bytes;
      try {
        shape = Shape.of(dims);
        bytes = Math.multiplyExact(shape.elements(), (long) type.bytes());
      } catch (InvalidArgumentException | ArithmeticException e) {
        throw malformed(where + " has shape " + Arrays.toString(dims) + ": too many elements");
      }
      if (bytes != end - begin) {
        throw malformed(
            where
                + " has "
                + (end - begin)
                + " bytes, want "
                + bytes
                + " for "
                + type
                + " "
                + shape);
      }
      TensorEntry entry = TensorEntry.of(name, type, shape, data.asSlice(begin, bytes));
      if (entries.put(name, entry) != null) {
        throw malformed("header has two tensors '" + shorten(name) + "'");
      }
      ranges.add(new Range(name, begin, end));
    }

    /** The tensors must fill the data exactly, in whatever order the header lists them. */
    private void checkRanges() throws MalformedFileException {
      ranges.sort(Comparator.comparingLong(Range::begin).thenComparingLong(Range::end));
      long at = 0;
      for (Range range : ranges) {
        if (range.begin() != at) {
          throw malformed(
              "tensor '"
                  + shorten(range.name())
                  + "' begins at "
                  + range.begin()
                  + (range.begin() < at ? ", inside another that ends at " : ", after a hole from ")
                  + at);
        }
        at = range.end();
      }
      if (at != data.byteSize()) {
        throw malformed(
            (data.byteSize() - at) + " bytes of no tensor follow the last one, at " + at);
      }
    }

    private void expect(JsonToken wanted, String place) throws IOException {
      if (json.nextToken() != wanted) {
        throw malformed(place + " is " + found() + ", want " + wanted);
      }
    }

    private String found() throws IOException {
      JsonToken token = json.currentToken();
      if (token == null) {
        return "missing";
      }
      return token.isScalarValue() ? shorten(json.getText()) : token.toString();
    }

    /** Text of a hostile file goes into messages, but not by the megabyte. */
    private static String shorten(String text) {
      return text.length() <= 80 ? text : text.substring(0, 80) + "...";
    }

    private MalformedFileException malformed(String what) {
      return new MalformedFileException(file, what);
    }
  }

  /**
   * What a file with some entries looks like.
   *
   * @param prefix header length and header, padded so that the data begins at a multiple of 8
   * @param order the entries in the order of their bytes
   */
  @SuppressWarnings("ArrayRecordComponent") // written once, never compared
  record Layout(byte[] prefix, List<TensorEntry> order) {}

  /**
   * Lays out a file: larger elements first, then by name, so that every tensor is aligned to its
   * elements without holes.
   */
  static Layout layOut(List<TensorEntry> entries, Map<String, String> metadata) throws IOException {
    List<TensorEntry> order = new ArrayList<>(entries);
    order.sort(
        Comparator.comparingInt((TensorEntry e) -> -e.type().bytes())
            .thenComparing(TensorEntry::name));
    StringWriter text = new StringWriter();
    try (JsonGenerator json = JSON.createGenerator(text)) {
      json.writeStartObject();
      if (!metadata.isEmpty()) {
        json.writeObjectFieldStart(METADATA);
        for (Map.Entry<String, String> item : metadata.entrySet()) {
          json.writeStringField(item.getKey(), item.getValue());
        }
        json.writeEndObject();
      }
      Set<String> names = new HashSet<>(Set.of(METADATA));
      long at = 0;
      for (TensorEntry entry : order) {
        if (!names.add(entry.name())) {
          throw new InvalidArgumentException(
              "entries", "'" + entry.name() + "' twice", "distinct names other than " + METADATA);
        }
        json.writeObjectFieldStart(entry.name());
        json.writeStringField("dtype", entry.type().name());
        json.writeArrayFieldStart("shape");
        for (long dim : entry.shape().dims()) {
          json.writeNumber(dim);
        }
        json.writeEndArray();
        json.writeArrayFieldStart("data_offsets");
        json.writeNumber(at);
        at += entry.data().byteSize();
        json.writeNumber(at);
        json.writeEndArray();
        json.writeEndObject();
      }
      json.writeEndObject();
    }
    byte[] header = text.toString().getBytes(StandardCharsets.UTF_8);
    int padded = Math.ceilDiv(header.length, 8) * 8;
    if (padded > Safetensors.MAX_HEADER_BYTES) {
      throw new InvalidArgumentException(
          "entries",
          "a header of " + padded + " bytes",
          "names and metadata that fit in " + Safetensors.MAX_HEADER_BYTES);
    }
    byte[] prefix = new byte[Long.BYTES + padded];
    Arrays.fill(prefix, (byte) ' ');
    ByteBuffer.wrap(prefix).order(ByteOrder.LITTLE_ENDIAN).putLong(padded).put(header);
    return new Layout(prefix, order);
  }
}
