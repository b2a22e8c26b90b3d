package dev.flare;

import dev.flare.internal.CacheAppendParams;
import dev.flare.internal.Kernels.Operation;
import dev.flare.internal.Struct;
import java.lang.foreign.Arena;
import java.util.Arrays;
import java.util.List;
import org.jspecify.annotations.Nullable;

/**
 * Keys and values of many sequences in pages, for {@link FlashAttention} and {@link
 * SlidingWindowAttention}.
 *
 * <pre>{@code
 * try (var cache = PagedKvCache.create(Device.cpu(), DType.BF16, 8, 128, 16, 1000);
 *     var sequence = cache.open()) {
 *   cache.append(sequence, k, v); // k, v [T, 8, 128]
 *   try (var batch = cache.batch(sequence)) {
 *     Tensor out = FlashAttention.causal().run(q, batch); // q [1, Sq, H, 128]
 *   }
 * }
 * }</pre>
 *
 * <p>Pages, sequences, ownership and thread rules: {@link KvCache}.
 */
public final class PagedKvCache extends KvCache {
  private final Tensor keys;
  private final Tensor values;
  private final @Nullable Tensor keyDescale;
  private final @Nullable Tensor valueDescale;

  private PagedKvCache(
      Tensor keys, Tensor values, @Nullable Tensor keyDescale, @Nullable Tensor valueDescale) {
    super(keys.device(), (int) keys.dim(0), keys.dim(1));
    this.keys = keys;
    this.values = values;
    this.keyDescale = keyDescale;
    this.valueDescale = valueDescale;
  }

  /**
   * Allocates a cache whose keys and values have the same width.
   *
   * @param device where
   * @param dtype FP32, FP16, BF16 or FP8_E4M3; what is appended is converted to it
   * @param heads key and value heads
   * @param headDim channels of a head
   * @param pageSize tokens of a page, at least 1
   * @param pages how many
   * @return a cache that the caller closes
   * @throws OutOfMemoryException if there is not that much memory
   */
  public static PagedKvCache create(
      Device device, DType dtype, long heads, long headDim, long pageSize, long pages) {
    return create(device, dtype, heads, headDim, headDim, pageSize, pages, null, null);
  }

  /**
   * Allocates a cache.
   *
   * @param device where
   * @param dtype FP32, FP16, BF16 or FP8_E4M3; what is appended is converted to it
   * @param heads key and value heads
   * @param keyDim channels of a key
   * @param valueDim channels of a value
   * @param pageSize tokens of a page, at least 1
   * @param pages how many
   * @param keyDescale FP8 caches: FP32 {@code [heads]}, keys are stored divided by it; null for 1.
   *     The cache refers to it
   * @param valueDescale the same for values
   * @return a cache that the caller closes
   * @throws OutOfMemoryException if there is not that much memory
   */
  public static PagedKvCache create(
      Device device,
      DType dtype,
      long heads,
      long keyDim,
      long valueDim,
      long pageSize,
      long pages,
      @Nullable Tensor keyDescale,
      @Nullable Tensor valueDescale) {
    if (!dtype.isFloating()) {
      throw new InvalidArgumentException("dtype", dtype, "FP32, FP16, BF16 or FP8_E4M3");
    }
    Checks.positive("heads", heads);
    Checks.positive("keyDim", keyDim);
    Checks.positive("valueDim", valueDim);
    Checks.positive("pageSize", pageSize);
    checkPages(pages);
    descale("keyDescale", keyDescale, dtype, heads);
    descale("valueDescale", valueDescale, dtype, heads);
    Tensor keys = Tensor.zeros(device, dtype, Shape.of(pages, pageSize, heads, keyDim));
    try {
      Tensor values = Tensor.zeros(device, dtype, Shape.of(pages, pageSize, heads, valueDim));
      return new PagedKvCache(keys, values, keyDescale, valueDescale);
    } catch (RuntimeException | Error e) {
      keys.close();
      throw e;
    }
  }

  private static void descale(String name, @Nullable Tensor descale, DType dtype, long heads) {
    if (descale != null) {
      if (dtype != DType.FP8_E4M3) {
        throw new InvalidArgumentException(name, "a tensor", "null: " + dtype + " has no descale");
      }
      Checks.present(name, descale);
      Checks.vector(name, descale, DType.FP32, "[heads]", heads);
    }
  }

  /**
   * Returns the pool of keys.
   *
   * @return {@code [pages, page_size, heads, key_dim]}; the cache owns it
   */
  public Tensor keys() {
    return keys;
  }

  /**
   * Returns the pool of values.
   *
   * @return {@code [pages, page_size, heads, value_dim]}; the cache owns it
   */
  public Tensor values() {
    return values;
  }

  /**
   * Adds tokens to the end of a sequence.
   *
   * @param sequence of this cache
   * @param k {@code [T, heads, key_dim]}, FP32, FP16 or BF16
   * @param v {@code [T, heads, value_dim]}, of the same dtype
   * @throws OutOfMemoryException if there are too few free pages; nothing has changed then
   * @throws InvalidArgumentException if the tensors do not fit the cache
   */
  public void append(Sequence sequence, Tensor k, Tensor v) {
    append(sequence, k, v, null);
  }

  /**
   * Adds tokens to the end of a sequence, turning the keys by their positions in it.
   *
   * @param sequence of this cache
   * @param k {@code [T, heads, key_dim]}, FP32, FP16 or BF16
   * @param v {@code [T, heads, value_dim]}, of the same dtype
   * @param rotary the turn; null for none
   * @throws OutOfMemoryException if there are too few free pages; nothing has changed then
   * @throws InvalidArgumentException if the tensors do not fit the cache
   */
  public void append(Sequence sequence, Tensor k, Tensor v, @Nullable Rotary rotary) {
    append(sequence, k, v, rotary, null);
  }

  /**
   * Queues adding tokens to the end of a sequence on a stream, turning the keys by their positions
   * in it.
   *
   * @param sequence of this cache
   * @param k {@code [T, heads, key_dim]}, FP32, FP16 or BF16
   * @param v {@code [T, heads, value_dim]}, of the same dtype
   * @param rotary the turn; null for none
   * @param stream of the cache's device; null for its default stream
   * @throws OutOfMemoryException if there are too few free pages; nothing has changed then
   * @throws InvalidArgumentException if the tensors do not fit the cache
   */
  public synchronized void append(
      Sequence sequence, Tensor k, Tensor v, @Nullable Rotary rotary, @Nullable Stream stream) {
    check(k, v);
    int tokens = Math.toIntExact(k.dim(0));
    grow(new Growth(stream, List.of(sequence), tokens), k, v, rotary, stream);
  }

  /**
   * Adds one token to each of several sequences: a decode step.
   *
   * @param sequences of this cache, each once
   * @param k {@code [B, heads, key_dim]}: row b goes to sequence b
   * @param v {@code [B, heads, value_dim]}
   * @param rotary the turn; null for none
   * @throws OutOfMemoryException if there are too few free pages; nothing has changed then
   * @throws InvalidArgumentException if the tensors do not fit the cache or the sequences
   */
  public void appendEach(List<Sequence> sequences, Tensor k, Tensor v, @Nullable Rotary rotary) {
    appendEach(sequences, k, v, rotary, null);
  }

  /**
   * Queues adding one token to each of several sequences on a stream: a decode step.
   *
   * @param sequences of this cache, each once
   * @param k {@code [B, heads, key_dim]}: row b goes to sequence b
   * @param v {@code [B, heads, value_dim]}
   * @param rotary the turn; null for none
   * @param stream of the cache's device; null for its default stream
   * @throws OutOfMemoryException if there are too few free pages; nothing has changed then
   * @throws InvalidArgumentException if the tensors do not fit the cache or the sequences
   */
  public synchronized void appendEach(
      List<Sequence> sequences,
      Tensor k,
      Tensor v,
      @Nullable Rotary rotary,
      @Nullable Stream stream) {
    check(k, v);
    if (k.dim(0) != sequences.size()) {
      throw new InvalidArgumentException(
          "k", k.shape(), "[B, heads, key_dim] with B = " + sequences.size() + " sequences");
    }
    int[] ones = new int[sequences.size()];
    Arrays.fill(ones, 1);
    grow(new Growth(stream, sequences, ones), k, v, rotary, stream);
  }

  private void grow(
      Growth growth, Tensor k, Tensor v, @Nullable Rotary rotary, @Nullable Stream stream) {
    try (Tensor slots = growth.slots(stream);
        Tensor positions = growth.positions(stream)) {
      write(k, v, slots, rotary, rotary == null ? null : positions, stream);
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
   * @param k {@code [T, heads, key_dim]}, FP32, FP16 or BF16
   * @param v {@code [T, heads, value_dim]}, of the same dtype
   * @param slots {@code [T]} INT32 or INT64; a negative one skips its row
   * @param rotary the turn; null for none
   * @param positions {@code [T]}, of the dtype of slots: rows of the rotary tables; null without
   *     rotary
   * @throws InvalidArgumentException if the tensors do not fit the cache, or a slot is out of range
   */
  public void write(
      Tensor k, Tensor v, Tensor slots, @Nullable Rotary rotary, @Nullable Tensor positions) {
    write(k, v, slots, rotary, positions, null);
  }

  /**
   * Queues writing tokens to given rows on a stream: row t goes to page {@code slots[t] /
   * page_size}, offset {@code slots[t] % page_size}. For callers that manage pages themselves.
   *
   * @param k {@code [T, heads, key_dim]}, FP32, FP16 or BF16
   * @param v {@code [T, heads, value_dim]}, of the same dtype
   * @param slots {@code [T]} INT32 or INT64; a negative one skips its row
   * @param rotary the turn; null for none
   * @param positions {@code [T]}, of the dtype of slots: rows of the rotary tables; null without
   *     rotary
   * @param stream of the cache's device; null for its default stream
   * @throws InvalidArgumentException if the tensors do not fit the cache, or a slot is out of range
   */
  public void write(
      Tensor k,
      Tensor v,
      Tensor slots,
      @Nullable Rotary rotary,
      @Nullable Tensor positions,
      @Nullable Stream stream) {
    Flare.require();
    requireOpen();
    check(k, v);
    DType index = LatentKvCache.checkSlots(slots, k.dim(0), rotary, positions);
    try (Arena arena = Arena.ofConfined()) {
      Struct params =
          CacheAppendParams.allocate(arena)
              .set(CacheAppendParams.LAYOUT, 0)
              .set(CacheAppendParams.DTYPE, k.dtype().code())
              .set(CacheAppendParams.CACHE_DTYPE, keys.dtype().code())
              .set(CacheAppendParams.INDEX_DTYPE, index.code())
              .set(CacheAppendParams.NUM_TOKENS, k.dim(0))
              .set(CacheAppendParams.HEADS, keys.dim(2))
              .set(CacheAppendParams.HEAD_DIM_K, keys.dim(3))
              .set(CacheAppendParams.HEAD_DIM_V, values.dim(3))
              .set(CacheAppendParams.NUM_PAGES, keys.dim(0))
              .set(CacheAppendParams.PAGE_SIZE, keys.dim(1))
              .set(CacheAppendParams.K_STRIDE_T, k.layout().stride(0))
              .set(CacheAppendParams.K_STRIDE_H, k.layout().stride(1))
              .set(CacheAppendParams.V_STRIDE_T, v.layout().stride(0))
              .set(CacheAppendParams.V_STRIDE_H, v.layout().stride(1))
              .set(CacheAppendParams.K_CACHE_STRIDE_B, keys.layout().stride(0))
              .set(CacheAppendParams.K_CACHE_STRIDE_S, keys.layout().stride(1))
              .set(CacheAppendParams.K_CACHE_STRIDE_H, keys.layout().stride(2))
              .set(CacheAppendParams.V_CACHE_STRIDE_B, values.layout().stride(0))
              .set(CacheAppendParams.V_CACHE_STRIDE_S, values.layout().stride(1))
              .set(CacheAppendParams.V_CACHE_STRIDE_H, values.layout().stride(2));
      LatentKvCache.setRotary(params, rotary);
      Once.run(
          Operation.CACHE_APPEND,
          device(),
          stream,
          params,
          Once.argument("k", CacheAppendParams.K, k),
          Once.argument("v", CacheAppendParams.V, v),
          Once.argument("keys", CacheAppendParams.K_CACHE, keys),
          Once.argument("values", CacheAppendParams.V_CACHE, values),
          Once.argument("slots", CacheAppendParams.SLOTS, slots),
          Once.argument("keyDescale", CacheAppendParams.K_DESCALE, keyDescale),
          Once.argument("valueDescale", CacheAppendParams.V_DESCALE, valueDescale),
          Once.argument("cos", CacheAppendParams.ROTARY_COS, rotary == null ? null : rotary.cos()),
          Once.argument("sin", CacheAppendParams.ROTARY_SIN, rotary == null ? null : rotary.sin()),
          Once.argument("positions", CacheAppendParams.POSITIONS, positions));
    }
  }

  private void check(Tensor k, Tensor v) {
    Checks.present("k", k, device());
    Checks.present("v", v, device());
    MlaSettings.activation("k", k);
    Checks.dtype("v", v, k.dtype());
    Checks.form("k", k, "[T, heads, key_dim]");
    Checks.form("v", v, "[T, heads, value_dim]");
    Checks.shape("k", k, "[T, heads, key_dim]", k.dim(0), keys.dim(2), keys.dim(3));
    Checks.shape("v", v, "[T, heads, value_dim]", k.dim(0), keys.dim(2), values.dim(3));
  }

  @Override
  void copyPage(int from, int to, @Nullable Stream stream) {
    copyPage(keys, from, to, stream);
    copyPage(values, from, to, stream);
  }

  @Override
  void closePools() {
    keys.close();
    values.close();
  }
}
