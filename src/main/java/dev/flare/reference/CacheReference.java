package dev.flare.reference;

import static dev.flare.reference.Checks.require;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import org.jspecify.annotations.Nullable;

/**
 * Writing rows into a cache, and the 656-byte row of a quantised latent cache.
 *
 * <p>A cache is {@code [pages * pageSize, heads, dim]}; slot {@code s} is row {@code s}: offset
 * {@code s % pageSize} of page {@code s / pageSize}.
 */
public final class CacheReference {
  /** Width of the latent part of a 656-byte row. */
  public static final int LATENT = 512;

  /** Width of the rotary part of a 656-byte row. */
  public static final int ROPE = 64;

  /** Channels that share a scale in a 656-byte row. */
  public static final int GROUP = 128;

  /** Bytes of a quantised latent row: 512 e4m3, 4 fp32 scales, 64 bf16, little-endian. */
  public static final int ROW_BYTES = LATENT + LATENT / GROUP * 4 + ROPE * 2;

  private CacheReference() {}

  /**
   * Returns the cache after rows were written to it.
   *
   * @param cache {@code [slots, heads, dim]}: the numbers that the stored elements stand for before
   *     descaling; not changed
   * @param heads heads of a row
   * @param dim width of a head
   * @param rows {@code [T, heads, dim]}
   * @param slots {@code [T]}; a negative one skips its row
   * @param format what the cache stores: values are rounded to it
   * @param descales {@code [heads]}: stored = row / descale; null: 1
   * @return the new cache, {@code [slots, heads, dim]}
   */
  public static double[] append(
      double[] cache,
      int heads,
      int dim,
      double[] rows,
      int[] slots,
      Precision format,
      double @Nullable [] descales) {
    int width = Math.multiplyExact(heads, dim);
    require(cache.length % width == 0, "cache has %d elements, want whole rows", cache.length);
    Checks.size("rows", rows, slots.length, heads, dim);
    Checks.optionalSize("descales", descales, heads);
    double[] updated = cache.clone();
    for (int t = 0; t < slots.length; t++) {
      if (slots[t] < 0) {
        continue;
      }
      require(
          slots[t] < cache.length / width,
          "slots[%d] is %d, the cache has %d",
          t,
          slots[t],
          cache.length / width);
      for (int c = 0; c < width; c++) {
        double descale = descales == null ? 1 : descales[c / dim];
        updated[slots[t] * width + c] = format.round(rows[t * width + c] / descale);
      }
    }
    return updated;
  }

  /**
   * Rotates the first {@code rotaryDim} channels of every head, pair by pair: {@code (a, b) -> (a
   * cos - b sin, a sin + b cos)}.
   *
   * @param rows {@code [T, heads, dim]}; not changed
   * @param heads heads of a row
   * @param dim width of a head
   * @param rotaryDim channels to turn, even, at most {@code dim}
   * @param interleaved pairs are (0, 1), (2, 3), ...; else (i, i + rotaryDim / 2)
   * @param cos {@code [positions, rotaryDim / 2]}
   * @param sin {@code [positions, rotaryDim / 2]}
   * @param positions {@code [T]}: row of {@code cos} and {@code sin} of each token
   * @return the rotated rows, {@code [T, heads, dim]}
   */
  public static double[] rotate(
      double[] rows,
      int heads,
      int dim,
      int rotaryDim,
      boolean interleaved,
      double[] cos,
      double[] sin,
      int[] positions) {
    Checks.size("rows", rows, positions.length, heads, dim);
    require(
        rotaryDim >= 0 && rotaryDim <= dim && rotaryDim % 2 == 0,
        "rotary_dim is %d, want an even number up to %d",
        rotaryDim,
        dim);
    int half = rotaryDim / 2;
    double[] rotated = rows.clone();
    for (int t = 0; t < positions.length; t++) {
      for (int h = 0; h < heads; h++) {
        int at = (t * heads + h) * dim;
        for (int i = 0; i < half; i++) {
          int first = at + (interleaved ? 2 * i : i);
          int second = at + (interleaved ? 2 * i + 1 : i + half);
          double c = cos[positions[t] * half + i];
          double s = sin[positions[t] * half + i];
          rotated[first] = rows[first] * c - rows[second] * s;
          rotated[second] = rows[first] * s + rows[second] * c;
        }
      }
    }
    return rotated;
  }

  /**
   * Returns the scale of a group of latent channels: the power of two 2^ceil(log2(max(amax / 448,
   * 1e-4))), at least 2^-13.
   *
   * @param amax largest magnitude of the group
   * @return the scale
   */
  public static double latentScale(double amax) {
    double wanted = Math.max(amax / Precision.FP8_E4M3.max(), 1e-4);
    double powerBelow = Math.scalb(1.0, Math.getExponent(wanted));
    return powerBelow == wanted ? powerBelow : 2 * powerBelow;
  }

  /**
   * Quantises one latent row.
   *
   * @param row {@code [512 + 64]}: latent, then the rotary part
   * @return 656 bytes
   */
  public static byte[] encodeLatentRow(double[] row) {
    Checks.size("row", row, LATENT + ROPE);
    ByteBuffer bytes = ByteBuffer.allocate(ROW_BYTES).order(ByteOrder.LITTLE_ENDIAN);
    for (int group = 0; group < LATENT / GROUP; group++) {
      double amax = 0;
      for (int c = group * GROUP; c < (group + 1) * GROUP; c++) {
        // As fmax does: a NaN is stored as NaN but does not spoil its group.
        amax = Double.isNaN(row[c]) ? amax : Math.max(amax, Math.abs(row[c]));
      }
      double scale = latentScale(amax);
      for (int c = group * GROUP; c < (group + 1) * GROUP; c++) {
        bytes.put(c, (byte) Precision.FP8_E4M3.encode(row[c] / scale));
      }
      bytes.putFloat(LATENT + 4 * group, (float) scale);
    }
    for (int c = 0; c < ROPE; c++) {
      short rope = (short) Precision.BF16.encode(row[LATENT + c]);
      bytes.putShort(LATENT + 4 * (LATENT / GROUP) + 2 * c, rope);
    }
    return bytes.array();
  }

  /**
   * Dequantises latent rows.
   *
   * @param bytes rows of 656 bytes
   * @return {@code [rows, 512 + 64]}: each e4m3 number times its fp32 scale, then the rotary part
   */
  public static double[] decodeLatentRows(byte[] bytes) {
    require(
        bytes.length % ROW_BYTES == 0, "%d bytes, want whole rows of %d", bytes.length, ROW_BYTES);
    int count = bytes.length / ROW_BYTES;
    ByteBuffer buffer = ByteBuffer.wrap(bytes).order(ByteOrder.LITTLE_ENDIAN);
    double[] rows = Checks.allocate(count, LATENT + ROPE);
    for (int r = 0; r < count; r++) {
      int from = r * ROW_BYTES;
      int to = r * (LATENT + ROPE);
      for (int c = 0; c < LATENT; c++) {
        double scale = buffer.getFloat(from + LATENT + 4 * (c / GROUP));
        rows[to + c] = Precision.FP8_E4M3.decode(bytes[from + c]) * scale;
      }
      for (int c = 0; c < ROPE; c++) {
        int bits = buffer.getShort(from + LATENT + 4 * (LATENT / GROUP) + 2 * c);
        rows[to + LATENT + c] = Precision.BF16.decode(bits);
      }
    }
    return rows;
  }
}
