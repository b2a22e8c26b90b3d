package dev.flare;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import org.jspecify.annotations.Nullable;

/**
 * The pages of a serving cache: which sequence owns which, in what order.
 *
 * <p>A pool of equal pages is allocated once. A {@link Sequence} takes pages as it grows and gives
 * them back when it is closed; a fork shares its parent's pages until one of the two writes to one.
 * A {@link Batch} puts the block table and the lengths of some sequences into tensors for a kernel.
 *
 * <p><b>Ownership.</b> The caller closes the cache, which ends its sequences and batches. Closing
 * twice is fine.
 *
 * <p><b>Threads.</b> Any thread may use a cache; its methods exclude each other. Appending to a
 * sequence while a kernel reads it is the caller's to avoid.
 */
public abstract sealed class KvCache implements AutoCloseable permits PagedKvCache, LatentKvCache {
  private final Device device;
  private final long pageSize;
  private final int[] references; // of each page; 0 is free
  private final int[] free; // a stack of free pages
  private int freeCount;
  private boolean closed;

  KvCache(Device device, int pages, long pageSize) {
    this.device = device;
    this.pageSize = pageSize;
    this.references = new int[pages];
    this.free = new int[pages];
    this.freeCount = pages;
    // Pages are handed out from 0 up.
    Arrays.setAll(free, i -> pages - 1 - i);
  }

  static int checkPages(long pages) {
    if (pages < 1 || pages > Integer.MAX_VALUE - 8) {
      throw new InvalidArgumentException("pages", pages, "1 to 2^31-9");
    }
    return (int) pages;
  }

  /** Copies the rows of one page to another, on a stream if one is given. */
  abstract void copyPage(int from, int to, @Nullable Stream stream);

  static void copyPage(Tensor pool, int from, int to, @Nullable Stream stream) {
    Tensor target = pool.select(0, to);
    Tensor source = pool.select(0, from);
    if (stream == null) {
      target.copyFrom(source);
    } else {
      target.copyFrom(source, stream);
    }
  }

  /** Frees the pools. */
  abstract void closePools();

  /**
   * Returns where the pages are.
   *
   * @return the device
   */
  public Device device() {
    return device;
  }

  /**
   * Returns the tokens that a page holds.
   *
   * @return at least 1
   */
  public long pageSize() {
    return pageSize;
  }

  /**
   * Returns the number of pages in the pool.
   *
   * @return free and used ones
   */
  public int pages() {
    return references.length;
  }

  /**
   * Returns the number of pages that no sequence uses.
   *
   * @return 0 to {@link #pages()}
   */
  public synchronized int freePages() {
    return freeCount;
  }

  /**
   * Starts a sequence without tokens.
   *
   * @return a sequence that the caller closes
   * @throws ClosedException if the cache is closed
   */
  public synchronized Sequence open() {
    requireOpen();
    return new Sequence();
  }

  /**
   * Collects sequences for a kernel, with room for them to grow.
   *
   * @param maxLength the most tokens that one of them will have while the batch is used
   * @param sequences of this cache, in the order of the batch
   * @return tensors that the caller closes
   * @throws InvalidArgumentException if a sequence is longer already
   */
  public synchronized Batch batch(long maxLength, Sequence... sequences) {
    requireOpen();
    if (maxLength < 0 || maxLength > Integer.MAX_VALUE) {
      throw new InvalidArgumentException("maxLength", maxLength, "0 to 2^31-1");
    }
    return new Batch(maxLength, List.of(sequences));
  }

  /**
   * Collects sequences as they are now.
   *
   * @param sequences of this cache, in the order of the batch
   * @return tensors that the caller closes
   */
  public Batch batch(Sequence... sequences) {
    long longest = 0;
    for (Sequence sequence : sequences) {
      longest = Math.max(longest, sequence.length());
    }
    return batch(longest, sequences);
  }

  /** Frees all pages; sequences and batches can't be used any more. */
  @Override
  public synchronized void close() {
    if (!closed) {
      closePools();
      closed = true;
    }
  }

  void requireOpen() {
    if (closed) {
      throw new ClosedException("the cache is closed");
    }
  }

  private int take() {
    int page = free[--freeCount];
    references[page] = 1;
    return page;
  }

  private void drop(int page) {
    if (--references[page] == 0) {
      free[freeCount++] = page;
    }
  }

  /** The rows where new tokens go; ends with {@link #commit} or {@link #rollback}. */
  final class Growth {
    private final List<Sequence> sequences;
    private final int[] counts;
    private final long[] slots;
    private final long[] positions;

    /**
     * Makes room for {@code counts[i]} more tokens of each sequence. Caller holds the lock.
     *
     * @throws OutOfMemoryException if there are too few free pages; nothing has changed then
     */
    Growth(@Nullable Stream stream, List<Sequence> sequences, int... counts) {
      requireOpen();
      this.sequences = sequences;
      this.counts = counts;
      long needed = 0;
      int tokens = 0;
      for (int i = 0; i < counts.length; i++) {
        Sequence sequence = sequences.get(i).mine(KvCache.this);
        if (sequences.indexOf(sequence) != i) {
          throw new InvalidArgumentException("sequences", "one twice", "each sequence once");
        }
        needed += sequence.pagesFor(counts[i]);
        tokens += counts[i];
      }
      if (needed > freeCount) {
        throw new OutOfMemoryException(
            "append: "
                + tokens
                + " token(s) need "
                + needed
                + " page(s), and "
                + freeCount
                + " of "
                + pages()
                + " are free; close sequences or make a larger cache");
      }
      slots = new long[tokens];
      positions = new long[tokens];
      int at = 0;
      for (int i = 0; i < counts.length; i++) {
        Sequence sequence = sequences.get(i);
        sequence.grow(counts[i], stream);
        for (int t = 0; t < counts[i]; t++) {
          long position = sequence.length + t;
          int page = sequence.pages[(int) (position / pageSize)];
          slots[at] = page * pageSize + position % pageSize;
          positions[at++] = position;
        }
      }
    }

    Tensor slots(@Nullable Stream stream) {
      return there(slots, stream);
    }

    Tensor positions(@Nullable Stream stream) {
      return there(positions, stream);
    }

    /** A new tensor on the cache's device. */
    private Tensor there(long[] values, @Nullable Stream stream) {
      Tensor here = Tensor.of(values);
      if (device.isCpu()) {
        return here;
      }
      try (here) {
        // The driver has read pageable memory when it returns.
        return stream == null ? here.to(device) : here.to(device, stream);
      }
    }

    /** The rows could not be written: gives the new pages back. */
    void rollback() {
      for (Sequence sequence : sequences) {
        sequence.trim();
      }
    }

    /** The rows have been written. */
    void commit() {
      for (int i = 0; i < counts.length; i++) {
        sequences.get(i).length += counts[i];
      }
    }
  }

  /**
   * The tokens of one request, in pages of the cache.
   *
   * <p>Closing gives the pages back, except those that a fork still uses.
   */
  public final class Sequence implements AutoCloseable {
    private int[] pages = new int[4];
    private int pageCount;
    private long length;
    private boolean released;

    private Sequence() {}

    /**
     * Returns the number of tokens.
     *
     * @return 0 for a new sequence
     */
    public long length() {
      synchronized (KvCache.this) {
        return length;
      }
    }

    /**
     * Starts another sequence with the same tokens, without copying: pages are shared until one of
     * the two writes to one.
     *
     * @return a sequence that the caller closes
     * @throws ClosedException if this sequence or the cache is closed
     */
    public Sequence fork() {
      synchronized (KvCache.this) {
        mine(KvCache.this);
        Sequence child = new Sequence();
        child.pages = pages.clone();
        child.pageCount = pageCount;
        child.length = length;
        for (int i = 0; i < pageCount; i++) {
          references[pages[i]]++;
        }
        return child;
      }
    }

    /**
     * Forgets the last tokens: rejected drafts.
     *
     * @param newLength tokens to keep
     * @throws InvalidArgumentException if there are not that many
     * @throws ClosedException if this sequence or the cache is closed
     */
    public void truncate(long newLength) {
      synchronized (KvCache.this) {
        mine(KvCache.this);
        if (newLength < 0 || newLength > length) {
          throw new InvalidArgumentException("newLength", newLength, "0.." + length);
        }
        length = newLength;
        trim();
      }
    }

    /** Drops the pages that the length does not need. */
    private void trim() {
      int keep = (int) ((length + pageSize - 1) / pageSize);
      while (pageCount > keep) {
        drop(pages[--pageCount]);
      }
    }

    /** Gives the pages back; does nothing when called again. */
    @Override
    public void close() {
      synchronized (KvCache.this) {
        if (!released) {
          released = true;
          while (pageCount > 0) {
            drop(pages[--pageCount]);
          }
          length = 0;
        }
      }
    }

    private Sequence mine(KvCache cache) {
      cache.requireOpen();
      if (KvCache.this != cache) {
        throw new InvalidArgumentException(
            "sequence", "one of another cache", "one that this cache opened");
      }
      if (released) {
        throw new ClosedException("the sequence is closed");
      }
      return this;
    }

    private boolean sharesLastPage() {
      return length % pageSize != 0 && references[pages[pageCount - 1]] > 1;
    }

    /** New pages for so many more tokens, the copy of a shared page included. */
    private long pagesFor(int tokens) {
      if (tokens == 0) {
        return 0;
      }
      long wanted = (length + tokens + pageSize - 1) / pageSize;
      return wanted - pageCount + (sharesLastPage() ? 1 : 0);
    }

    private void grow(int tokens, @Nullable Stream stream) {
      if (tokens == 0) {
        return;
      }
      if (sharesLastPage()) {
        int own = take();
        copyPage(pages[pageCount - 1], own, stream);
        drop(pages[pageCount - 1]);
        pages[pageCount - 1] = own;
      }
      int wanted = (int) ((length + tokens + pageSize - 1) / pageSize);
      if (wanted > pages.length) {
        pages = Arrays.copyOf(pages, Math.max(wanted, 2 * pages.length));
      }
      while (pageCount < wanted) {
        pages[pageCount++] = take();
      }
    }
  }

  /**
   * Sequences as a kernel sees them: a block table and lengths, in tensors whose addresses stay.
   * After appending, {@link #update} writes the new state into the same tensors.
   */
  public final class Batch implements AutoCloseable {
    private final List<Sequence> sequences;
    private final long maxLength;
    private final Tensor blockTable;
    private final Tensor lengths;

    private Batch(long maxLength, List<Sequence> sequences) {
      this.maxLength = maxLength;
      this.sequences = new ArrayList<>(sequences);
      long width = Math.max(1, (maxLength + pageSize - 1) / pageSize);
      this.blockTable = Tensor.empty(device, DType.INT32, Shape.of(sequences.size(), width));
      try {
        this.lengths = Tensor.empty(device, DType.INT32, Shape.of(sequences.size()));
        try {
          update();
        } catch (RuntimeException | Error e) {
          lengths.close();
          throw e;
        }
      } catch (RuntimeException | Error e) {
        blockTable.close();
        throw e;
      }
    }

    /**
     * Writes the sequences' pages and lengths of now into the tensors, after all work that flare
     * has queued on them.
     *
     * @throws InvalidArgumentException if a sequence is longer than {@link #maxLength}
     * @throws ClosedException if a sequence, the batch or the cache is closed
     */
    public void update() {
      update(null);
    }

    /**
     * Queues the writing of the sequences' pages and lengths of now into the tensors.
     *
     * @param stream of the cache's device; null for {@link #update()}
     * @throws InvalidArgumentException if a sequence is longer than {@link #maxLength}
     * @throws ClosedException if a sequence, the batch or the cache is closed
     */
    public void update(@Nullable Stream stream) {
      synchronized (KvCache.this) {
        for (Sequence sequence : sequences) {
          if (sequence.mine(KvCache.this).length > maxLength) {
            throw new InvalidArgumentException(
                "sequence", sequence.length + " tokens", "at most maxLength = " + maxLength);
          }
        }
        int width = Math.toIntExact(blockTable.dim(1));
        int[] table = new int[Math.multiplyExact(width, sequences.size())];
        int[] counts = new int[sequences.size()];
        for (int b = 0; b < sequences.size(); b++) {
          Sequence sequence = sequences.get(b);
          counts[b] = Math.toIntExact(sequence.length);
          for (int p = 0; p < width; p++) {
            // Beyond the length nothing is read; -1 would show.
            table[b * width + p] = p < sequence.pageCount ? sequence.pages[p] : -1;
          }
        }
        blockTable.overwrite(table, stream);
        lengths.overwrite(counts, stream);
      }
    }

    /**
     * Returns the pages of each sequence.
     *
     * @return INT32 {@code [B, maxLength / pageSize rounded up]}; the batch owns it
     */
    public Tensor blockTable() {
      return blockTable;
    }

    /**
     * Returns the tokens of each sequence.
     *
     * @return INT32 {@code [B]}; the batch owns it
     */
    public Tensor lengths() {
      return lengths;
    }

    /**
     * Returns the most tokens that a sequence may have.
     *
     * @return what the batch was made for
     */
    public long maxLength() {
      return maxLength;
    }

    /**
     * Returns the cache that the sequences are in.
     *
     * @return where they were opened
     */
    public KvCache cache() {
      return KvCache.this;
    }

    /** Frees the two tensors; the sequences stay. */
    @Override
    public void close() {
      blockTable.close();
      lengths.close();
    }
  }
}
