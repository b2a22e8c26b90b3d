package dev.flare;

import dev.flare.internal.CacheAppendParams;
import dev.flare.internal.Kernels.Operation;
import dev.flare.internal.Struct;
import java.lang.foreign.Arena;
import java.util.Arrays;
import java.util.List;
import org.jspecify.annotations.Nullable;

/**
 * Latent rows of many sequences in pages, for {@link MultiHeadLatentAttention}: one row of d_c +
 * d_rope channels a token, whatever the number of heads.
 *
 * <p>With dtype UINT8 a row takes 656 bytes: 512 e4m3 values with 4 FP32 scales, and 64 BF16 rope
 * values.
 *
 * <p>Pages, sequences, ownership and thread rules: {@link KvCache}.
 */
public final class LatentKvCache extends KvCache {
  private static final int LATENT_LAYOUT = 1;

  private final Tensor rows;
  private final long latentDim;
  private final long ropeDim;

  private LatentKvCache(Tensor rows, long latentDim, long ropeDim) {
    super(rows.device(), (int) rows.dim(0), rows.dim(1));
    this.rows = rows;
    this.latentDim = latentDim;
    this.ropeDim = ropeDim;
  }

  /**
   * Allocates a cache.
   *
   * @param device where
   * @param dtype FP32, FP16 or BF16; or UINT8 for rows of 656 bytes, with latentDim 512 and ropeDim
   *     64. What is appended is converted to it
   * @param latentDim d_c
   * @param ropeDim d_rope; 0 for none
   * @param pageSize tokens of a page, at least 1
   * @param pages how many
   * @return a cache that the caller closes
   * @throws OutOfMemoryException if there is not that much memory
   */
  public static LatentKvCache create(
      Device device, DType dtype, long latentDim, long ropeDim, long pageSize, long pages) {
    Checks.positive("latentDim", latentDim);
    Checks.notNegative("ropeDim", ropeDim);
    Checks.positive("pageSize", pageSize);
    checkPages(pages);
    boolean packed = dtype == DType.UINT8;
    if (packed && (latentDim != MlaSettings.PACKED_LATENT || ropeDim != MlaSettings.PACKED_ROPE)) {
      throw new InvalidArgumentException(
          "latentDim, ropeDim", latentDim + ", " + ropeDim, "512, 64, as UINT8 rows have");
    }
    if (!packed && dtype != DType.FP32 && dtype != DType.FP16 && dtype != DType.BF16) {
      throw new InvalidArgumentException("dtype", dtype, "FP32, FP16, BF16 or UINT8");
    }
    long width = packed ? MlaSettings.PACKED_ROW : latentDim + ropeDim;
    return new LatentKvCache(
        Tensor.zeros(device, dtype, Shape.of(pages, pageSize, width)), latentDim, ropeDim);
  }

  /**
   * Returns the pool of rows.
   *
   * @return {@code [pages, page_size, d_c + d_rope]}, or UINT8 {@code [pages, page_size, 656]}; the
   *     cache owns it
   */
  public Tensor rows() {
    return rows;
  }

  /**
   * Adds tokens to the end of a sequence.
   *
   * @param sequence of this cache
   * @param cKv {@code [T, d_c]}, FP32, FP16 or BF16
   * @param kRope {@code [T, d_rope]}, of the same dtype; null if there is no rope part
   * @throws OutOfMemoryException if there are too few free pages; nothing has changed then
   * @throws InvalidArgumentException if the tensors do not fit the cache
   */
  public void append(Sequence sequence, Tensor cKv, @Nullable Tensor kRope) {
    append(sequence, cKv, kRope, null);
  }

  /**
   * Adds tokens to the end of a sequence, turning the rope part by their positions in it.
   *
   * @param sequence of this cache
   * @param cKv {@code [T, d_c]}, FP32, FP16 or BF16
   * @param kRope {@code [T, d_rope]}, of the same dtype; null if there is no rope part
   * @param rotary the turn; null for none
   * @throws OutOfMemoryException if there are too few free pages; nothing has changed then
   * @throws InvalidArgumentException if the tensors do not fit the cache
   */
  public void append(
      Sequence sequence, Tensor cKv, @Nullable Tensor kRope, @Nullable Rotary rotary) {
    append(sequence, cKv, kRope, rotary, null);
  }

  /**
   * Queues adding tokens to the end of a sequence on a stream, turning the rope part by their
   * positions in it.
   *
   * @param sequence of this cache
   * @param cKv {@code [T, d_c]}, FP32, FP16 or BF16
   * @param kRope {@code [T, d_rope]}, of the same dtype; null if there is no rope part
   * @param rotary the turn; null for none
   * @param stream of the cache's device; null for its default stream
   * @throws OutOfMemoryException if there are too few free pages; nothing has changed then
   * @throws InvalidArgumentException if the tensors do not fit the cache
   */
  public synchronized void append(
      Sequence sequence,
      Tensor cKv,
      @Nullable Tensor kRope,
      @Nullable Rotary rotary,
      @Nullable Stream stream) {
    check(cKv, kRope);
    int tokens = Math.toIntExact(cKv.dim(0));
    grow(new Growth(stream, List.of(sequence), tokens), cKv, kRope, rotary, stream);
  }

  /**
   * Adds one token to each of several sequences: a decode step.
   *
   * @param sequences of this cache, each once
   * @param cKv {@code [B, d_c]}: row b goes to sequence b
   * @param kRope {@code [B, d_rope]}; null if there is no rope part
   * @param rotary the turn; null for none
   * @throws OutOfMemoryException if there are too few free pages; nothing has changed then
   * @throws InvalidArgumentException if the tensors do not fit the cache or the sequences
   */
  public void appendEach(
      List<Sequence> sequences, Tensor cKv, @Nullable Tensor kRope, @Nullable Rotary rotary) {
    appendEach(sequences, cKv, kRope, rotary, null);
  }

  /**
   * Queues adding one token to each of several sequences on a stream: a decode step.
   *
   * @param sequences of this cache, each once
   * @param cKv {@code [B, d_c]}: row b goes to sequence b
   * @param kRope {@code [B, d_rope]}; null if there is no rope part
   * @param rotary the turn; null for none
   * @param stream of the cache's device; null for its default stream
   * @throws OutOfMemoryException if there are too few free pages; nothing has changed then
   * @throws InvalidArgumentException if the tensors do not fit the cache or the sequences
   */
  public synchronized void appendEach(
      List<Sequence> sequences,
      Tensor cKv,
      @Nullable Tensor kRope,
      @Nullable Rotary rotary,
      @Nullable Stream stream) {
    check(cKv, kRope);
    if (cKv.dim(0) != sequences.size()) {
      throw new InvalidArgumentException(
          "cKv", cKv.shape(), "[B, d_c] with B = " + sequences.size() + " sequences");
    }
    int[] ones = new int[sequences.size()];
    Arrays.fill(ones, 1);
    grow(new Growth(stream, sequences, ones), cKv, kRope, rotary, stream);
  }

  private void grow(
      Growth growth,
      Tensor cKv,
      @Nullable Tensor kRope,
      @Nullable Rotary rotary,
      @Nullable Stream stream) {
    try (Tensor slots = growth.slots(stream);
        Tensor positions = growth.positions(stream)) {
      write(cKv, kRope, slots, rotary, rotary == null ? null : positions, stream);
      growth.commit();
    } catch (RuntimeException | Error e) {
      growth.rollback();
      throw e;
    }
  }

  /**
   * Writes tokens to given rows: row t goes to page {@code slots[t] / page_size}, offset {@code
   * slots[t] % page_size}. For callers that manage pages themselves.
   *
   * @param cKv {@code [T, d_c]}, FP32, FP16 or BF16
   * @param kRope {@code [T, d_rope]}, of the same dtype; null if there is no rope part
   * @param slots {@code [T]} INT32 or INT64; a negative one skips its row
   * @param rotary the turn; null for none
   * @param positions {@code [T]}, of the dtype of slots: rows of the rotary tables; null without
   *     rotary
   * @throws InvalidArgumentException if the tensors do not fit the cache, or a slot is out of range
   */
  public void write(
      Tensor cKv,
      @Nullable Tensor kRope,
      Tensor slots,
      @Nullable Rotary rotary,
      @Nullable Tensor positions) {
    write(cKv, kRope, slots, rotary, positions, null);
  }

  /**
   * Queues writing tokens to given rows on a stream: row t goes to page {@code slots[t] /
   * page_size}, offset {@code slots[t] % page_size}. For callers that manage pages themselves.
   *
   * @param cKv {@code [T, d_c]}, FP32, FP16 or BF16
   * @param kRope {@code [T, d_rope]}, of the same dtype; null if there is no rope part
   * @param slots {@code [T]} INT32 or INT64; a negative one skips its row
   * @param rotary the turn; null for none
   * @param positions {@code [T]}, of the dtype of slots: rows of the rotary tables; null without
   *     rotary
   * @param stream of the cache's device; null for its default stream
   * @throws InvalidArgumentException if the tensors do not fit the cache, or a slot is out of range
   */
  public void write(
      Tensor cKv,
      @Nullable Tensor kRope,
      Tensor slots,
      @Nullable Rotary rotary,
      @Nullable Tensor positions,
      @Nullable Stream stream) {
    Flare.require();
    requireOpen();
    check(cKv, kRope);
    DType index = checkSlots(slots, cKv.dim(0), rotary, positions);
    try (Arena arena = Arena.ofConfined()) {
      Struct params =
          CacheAppendParams.allocate(arena)
              .set(CacheAppendParams.LAYOUT, LATENT_LAYOUT)
              .set(CacheAppendParams.DTYPE, cKv.dtype().code())
              .set(CacheAppendParams.CACHE_DTYPE, rows.dtype().code())
              .set(CacheAppendParams.INDEX_DTYPE, index.code())
              .set(CacheAppendParams.NUM_TOKENS, cKv.dim(0))
              .set(CacheAppendParams.HEADS, 1)
              .set(CacheAppendParams.HEAD_DIM_K, latentDim)
              .set(CacheAppendParams.HEAD_DIM_V, ropeDim)
              .set(CacheAppendParams.NUM_PAGES, rows.dim(0))
              .set(CacheAppendParams.PAGE_SIZE, rows.dim(1))
              .set(CacheAppendParams.K_STRIDE_T, cKv.layout().stride(0))
              .set(CacheAppendParams.K_CACHE_STRIDE_B, rows.layout().stride(0))
              .set(CacheAppendParams.K_CACHE_STRIDE_S, rows.layout().stride(1));
      if (kRope != null) {
        params.set(CacheAppendParams.V_STRIDE_T, kRope.layout().stride(0));
      }
      setRotary(params, rotary);
      Once.run(
          Operation.CACHE_APPEND,
          device(),
          stream,
          params,
          Once.argument("cKv", CacheAppendParams.K, cKv),
          Once.argument("kRope", CacheAppendParams.V, kRope),
          Once.argument("rows", CacheAppendParams.K_CACHE, rows),
          Once.argument("slots", CacheAppendParams.SLOTS, slots),
          Once.argument("cos", CacheAppendParams.ROTARY_COS, rotary == null ? null : rotary.cos()),
          Once.argument("sin", CacheAppendParams.ROTARY_SIN, rotary == null ? null : rotary.sin()),
          Once.argument("positions", CacheAppendParams.POSITIONS, positions));
    }
  }

  private void check(Tensor cKv, @Nullable Tensor kRope) {
    Checks.present("cKv", cKv, device());
    MlaSettings.activation("cKv", cKv);
    Checks.form("cKv", cKv, "[T, d_c]");
    Checks.shape("cKv", cKv, "[T, d_c]", cKv.dim(0), latentDim);
    if (kRope == null) {
      if (ropeDim > 0) {
        throw new InvalidArgumentException(
            "kRope", null, "[T, d_rope] with d_rope = " + ropeDim + ", as the cache has");
      }
      return;
    }
    Checks.present("kRope", kRope, device());
    Checks.dtype("kRope", kRope, cKv.dtype());
    Checks.form("kRope", kRope, "[T, d_rope]");
    Checks.shape("kRope", kRope, "[T, d_rope]", cKv.dim(0), ropeDim);
  }

  /** Checks what both caches take alike; the dtype of the indices. */
  static DType checkSlots(
      Tensor slots, long tokens, @Nullable Rotary rotary, @Nullable Tensor positions) {
    Checks.present("slots", slots);
    DType index = Checks.index("slots", slots, null);
    Checks.form("slots", slots, "[T]");
    Checks.shape("slots", slots, "[T]", tokens);
    if ((rotary == null) != (positions == null)) {
      throw new InvalidArgumentException(
          positions == null ? "positions" : "rotary", null, "both of them or neither");
    }
    if (positions != null) {
      Checks.present("positions", positions);
      Checks.index("positions", positions, index);
      Checks.form("positions", positions, "[T]");
      Checks.shape("positions", positions, "[T]", tokens);
    }
    return index;
  }

  static void setRotary(Struct params, @Nullable Rotary rotary) {
    if (rotary != null) {
      params
          .set(CacheAppendParams.ROTARY_DIM, 2 * rotary.cos().dim(1))
          .set(CacheAppendParams.MAX_POSITION, rotary.cos().dim(0))
          .set(CacheAppendParams.ROTARY_INTERLEAVED, rotary.interleaved() ? 1 : 0);
    }
  }

  @Override
  void copyPage(int from, int to, @Nullable Stream stream) {
    copyPage(rows, from, to, stream);
  }

  @Override
  void closePools() {
    rows.close();
  }
}
