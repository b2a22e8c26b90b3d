package dev.flare;

import java.util.Arrays;
import java.util.List;
import org.jspecify.annotations.Nullable;

/**
 * The recurrent states of many sequences in a pool, for {@link KimiDeltaAttention}: one slot a
 * sequence, of a size that does not grow.
 *
 * <p><b>Ownership.</b> The caller closes the pool, which ends its sequences and batches. Closing
 * twice is fine.
 *
 * <p><b>Threads.</b> Any thread may use it; its methods exclude each other. Two calls that move the
 * same sequence on at once are the caller's to avoid.
 */
public final class DeltaState implements AutoCloseable {
  /** The slot that kernels neither read nor write. */
  static final long PADDING_SLOT = -1;

  private final Tensor pool;
  private final StateLayout layout;
  private final int[] free; // a stack of free slots
  private int freeCount;

  private DeltaState(Tensor pool, StateLayout layout) {
    this.pool = pool;
    this.layout = layout;
    this.freeCount = (int) pool.dim(0);
    this.free = new int[freeCount];
    Arrays.setAll(free, i -> free.length - 1 - i);
  }

  /**
   * Allocates a pool.
   *
   * @param device where
   * @param dtype FP32 or BF16
   * @param layout the order of a state's dimensions
   * @param slots how many sequences it can hold
   * @param heads value heads
   * @param keyDim K
   * @param valueDim V
   * @return a pool that the caller closes
   * @throws OutOfMemoryException if there is not that much memory
   */
  public static DeltaState create(
      Device device,
      DType dtype,
      StateLayout layout,
      long slots,
      long heads,
      long keyDim,
      long valueDim) {
    if (dtype != DType.FP32 && dtype != DType.BF16) {
      throw new InvalidArgumentException("dtype", dtype, "FP32 or BF16");
    }
    if (slots < 1 || slots > Integer.MAX_VALUE - 8) {
      throw new InvalidArgumentException("slots", slots, "1 to 2^31-9");
    }
    Checks.positive("heads", heads);
    Checks.positive("keyDim", keyDim);
    Checks.positive("valueDim", valueDim);
    return new DeltaState(
        Tensor.zeros(device, dtype, layout.shape(slots, heads, keyDim, valueDim)), layout);
  }

  /**
   * Returns the states of all slots.
   *
   * @return {@code [slots, HV, K, V]} or {@code [slots, HV, V, K]}; the pool owns it
   */
  public Tensor pool() {
    return pool;
  }

  /**
   * Returns the order of a state's dimensions.
   *
   * @return K first or V first
   */
  public StateLayout layout() {
    return layout;
  }

  /**
   * Returns the number of slots that no sequence uses.
   *
   * @return 0 or more
   */
  public synchronized int freeSlots() {
    return freeCount;
  }

  /**
   * Starts a sequence from a state of zeros.
   *
   * @return a sequence that the caller closes
   * @throws OutOfMemoryException if no slot is free
   * @throws ClosedException if the pool is closed
   */
  public synchronized Sequence open() {
    Sequence sequence = new Sequence(take());
    sequence.state().fill(0);
    return sequence;
  }

  private int take() {
    if (!pool.isOpen()) {
      throw new ClosedException("the pool of states is closed");
    }
    if (freeCount == 0) {
      throw new OutOfMemoryException(
          "open: all " + free.length + " slots are in use; close sequences or make a larger pool");
    }
    return free[--freeCount];
  }

  /**
   * Collects sequences for a kernel.
   *
   * @param sequences of this pool, in the order of the batch; null entries are padding
   * @return a tensor of slots that the caller closes
   */
  public synchronized Batch batch(Sequence... sequences) {
    return new Batch(Arrays.asList(sequences));
  }

  /** Frees all states; sequences and batches can't be used any more. */
  @Override
  public synchronized void close() {
    pool.close();
  }

  /** The state of one request. Closing gives its slot back. */
  public final class Sequence implements AutoCloseable {
    private int slot; // -1 once it is closed

    private Sequence(int slot) {
      this.slot = slot;
    }

    /**
     * Returns the state itself.
     *
     * @return a view {@code [HV, K, V]} or {@code [HV, V, K]} of the pool
     * @throws ClosedException if the sequence or the pool is closed
     */
    public Tensor state() {
      synchronized (DeltaState.this) {
        return pool.select(0, slot());
      }
    }

    /**
     * Starts another sequence from the state of now, which is copied.
     *
     * @return a sequence that the caller closes
     * @throws OutOfMemoryException if no slot is free
     * @throws ClosedException if the sequence or the pool is closed
     */
    public Sequence fork() {
      synchronized (DeltaState.this) {
        Tensor state = state();
        Sequence child = new Sequence(take());
        child.state().copyFrom(state);
        return child;
      }
    }

    /** Gives the slot back; does nothing when called again. */
    @Override
    public void close() {
      synchronized (DeltaState.this) {
        if (slot >= 0) {
          free[freeCount++] = slot;
          slot = -1;
        }
      }
    }

    private int slot() {
      if (slot < 0) {
        throw new ClosedException("the sequence is closed");
      }
      return slot;
    }

    private boolean isOf(DeltaState other) {
      return DeltaState.this == other;
    }
  }

  /** The slots of some sequences, in a tensor for a kernel. */
  public final class Batch implements AutoCloseable {
    private final Tensor slots;

    private Batch(List<Sequence> sequences) {
      slots = Tensor.empty(pool.device(), DType.INT32, Shape.of(sequences.size()));
      try {
        slots.overwrite(sequences.stream().mapToInt(this::slotOf).toArray(), null);
      } catch (RuntimeException | Error e) {
        slots.close();
        throw e;
      }
    }

    private int slotOf(@Nullable Sequence sequence) {
      if (sequence == null) {
        return (int) PADDING_SLOT;
      }
      if (!sequence.isOf(DeltaState.this)) {
        throw new InvalidArgumentException(
            "sequence", "one of another pool", "one that this pool opened");
      }
      return sequence.slot();
    }

    /**
     * Returns the slot of each sequence.
     *
     * @return INT32 {@code [N]}, -1 for padding; the batch owns it
     */
    public Tensor slots() {
      return slots;
    }

    /**
     * Returns the pool that the slots are in.
     *
     * @return where the sequences were opened
     */
    public DeltaState states() {
      return DeltaState.this;
    }

    /** Frees the tensor; the sequences stay. */
    @Override
    public void close() {
      slots.close();
    }
  }
}
