package dev.flare.reference;

import static dev.flare.reference.Checks.require;

import org.jspecify.annotations.Nullable;

/**
 * Where the tokens of each sequence of a batch lie in a {@code [rows, heads, dim]} array.
 *
 * <p>Dense, packed and paged storage differ only in the map from (sequence, token) to row, and so
 * the definitions are written once. Immutable.
 */
public final class Tokens {
  private final int[] starts; // first row of each sequence; unused when paged
  private final int[] lengths; // tokens that count
  private final int rows; // rows of the whole array
  private final boolean packed;
  private final int @Nullable [] blockTable;
  private final int pagesPerSequence;
  private final int pageSize;

  private Tokens(
      int[] starts,
      int[] lengths,
      int rows,
      boolean packed,
      int @Nullable [] blockTable,
      int pagesPerSequence,
      int pageSize) {
    this.starts = starts;
    this.lengths = lengths;
    this.rows = rows;
    this.packed = packed;
    this.blockTable = blockTable;
    this.pagesPerSequence = pagesPerSequence;
    this.pageSize = pageSize;
  }

  /**
   * {@return sequences of one length, one after the other: {@code [B, N]}}
   *
   * @param batch number of sequences
   * @param length tokens of each
   */
  public static Tokens dense(int batch, int length) {
    require(batch >= 0 && length >= 0, "negative size: batch %d, length %d", batch, length);
    int[] starts = new int[batch];
    int[] lengths = new int[batch];
    for (int b = 0; b < batch; b++) {
      starts[b] = Math.multiplyExact(b, length);
      lengths[b] = length;
    }
    return new Tokens(starts, lengths, Math.multiplyExact(batch, length), false, null, 0, 0);
  }

  /**
   * Sequences of any length packed on one axis: sequence {@code b} owns the rows {@code
   * [cuSeqlens[b], cuSeqlens[b + 1])}.
   *
   * @param cuSeqlens exclusive prefix sums, one more than there are sequences, the first 0
   * @return the sequences
   */
  public static Tokens packed(int... cuSeqlens) {
    require(cuSeqlens.length >= 1, "cu_seqlens is empty: want batch + 1 prefix sums");
    require(cuSeqlens[0] == 0, "cu_seqlens[0] is %d, want 0", cuSeqlens[0]);
    int batch = cuSeqlens.length - 1;
    int[] starts = new int[batch];
    int[] lengths = new int[batch];
    for (int b = 0; b < batch; b++) {
      starts[b] = cuSeqlens[b];
      lengths[b] = cuSeqlens[b + 1] - cuSeqlens[b];
      require(
          lengths[b] >= 0,
          "cu_seqlens falls from %d to %d at %d",
          cuSeqlens[b],
          cuSeqlens[b + 1],
          b + 1);
    }
    return new Tokens(starts, lengths, cuSeqlens[batch], true, null, 0, 0);
  }

  /**
   * A cache of pages: token {@code t} of sequence {@code b} is row {@code blockTable[b][t /
   * pageSize] * pageSize + t % pageSize}. Table entries past the length are never read.
   *
   * @param pages pages in the pool
   * @param pageSize tokens in a page
   * @param blockTable {@code [B, pagesPerSequence]}
   * @param pagesPerSequence width of the table
   * @param lengths tokens of each sequence, {@code [B]}
   * @return the sequences
   */
  public static Tokens paged(
      int pages, int pageSize, int[] blockTable, int pagesPerSequence, int... lengths) {
    require(pageSize >= 1, "page size is %d, want at least 1", pageSize);
    Checks.size("block_table", blockTable, lengths.length, pagesPerSequence);
    for (int b = 0; b < lengths.length; b++) {
      require(lengths[b] >= 0, "seqlens_k[%d] is %d", b, lengths[b]);
      int used = Math.ceilDiv(lengths[b], pageSize);
      require(
          used <= pagesPerSequence,
          "seqlens_k[%d] = %d needs %d pages, block_table has %d",
          b,
          lengths[b],
          used,
          pagesPerSequence);
    }
    return new Tokens(
        new int[lengths.length],
        lengths.clone(),
        Math.multiplyExact(pages, pageSize),
        false,
        blockTable.clone(),
        pagesPerSequence,
        pageSize);
  }

  /**
   * The same storage, of which only the first {@code used[b]} tokens of each sequence count
   * (seqused): masks align to them.
   *
   * @param used {@code [B]}, each at most the length
   * @return the shorter sequences
   */
  public Tokens used(int... used) {
    require(used.length == batch(), "seqused has %d entries, want %d", used.length, batch());
    for (int b = 0; b < used.length; b++) {
      require(
          used[b] >= 0 && used[b] <= lengths[b],
          "seqused[%d] is %d, want 0..%d",
          b,
          used[b],
          lengths[b]);
    }
    return new Tokens(starts, used.clone(), rows, packed, blockTable, pagesPerSequence, pageSize);
  }

  /** {@return the number of sequences} */
  public int batch() {
    return lengths.length;
  }

  /** {@return the rows of the whole array, used or not} */
  public int rows() {
    return rows;
  }

  /**
   * {@return how many tokens of a sequence count}
   *
   * @param b sequence
   */
  public int length(int b) {
    return lengths[b];
  }

  /**
   * {@return the row of a token}
   *
   * @param b sequence
   * @param t token of the sequence, from 0 to {@code length(b) - 1}
   */
  public int row(int b, int t) {
    if (blockTable == null) {
      return starts[b] + t;
    }
    int page = blockTable[b * pagesPerSequence + t / pageSize];
    require(
        page >= 0 && (long) page * pageSize + pageSize <= rows,
        "block_table[%d][%d] is %d, want a page in 0..%d",
        b,
        t / pageSize,
        page,
        rows / pageSize - 1);
    return page * pageSize + t % pageSize;
  }

  /**
   * Returns where a per-row statistic (LSE) of head {@code h} of {@code heads} lies: {@code [B, H,
   * N]} when dense, {@code [H, T]} when packed.
   */
  int statistic(int b, int h, int heads, int t) {
    if (packed) {
      return h * rows + row(b, t);
    }
    require(blockTable == null, "queries cannot be paged");
    int capacity = rows / batch();
    return (b * heads + h) * capacity + t;
  }
}
