package dev.flare.internal;

import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.util.Objects;
import java.util.concurrent.atomic.AtomicInteger;
import org.jspecify.annotations.Nullable;

/**
 * A block of memory with one owner, kept open by the calls that use it.
 *
 * <p>Any thread may use or close it. {@link #close} never frees under a call in flight: it reports
 * the call instead.
 */
public final class Allocation extends Lease {
  /** Where memory that no GPU allocated counts. */
  public static final int HOST = -1;

  private final int space;
  private final long address;
  private final long bytes;
  private final @Nullable MemorySegment segment;
  private final @Nullable Owner owner;
  private final boolean counted; // as memory that flare holds
  private final AtomicInteger graphs = new AtomicInteger();

  /** Frees memory. */
  public interface Owner {
    /**
     * Frees it.
     *
     * @return false if somebody reads or copies it right now; it stays open then, as it does when
     *     this throws
     */
    boolean free();
  }

  private @Nullable Loan loan; // to users outside Java; guarded by this

  private Allocation(
      int space,
      long address,
      long bytes,
      @Nullable MemorySegment segment,
      @Nullable Owner owner,
      boolean counted) {
    this.space = space;
    this.address = address;
    this.bytes = bytes;
    this.segment = segment;
    this.owner = owner;
    this.counted = counted;
    if (counted) {
      Tracking.opened(this);
    }
  }

  /**
   * Host memory that closes with {@code arena}, which belongs to this allocation from now on.
   *
   * @param segment all of the memory
   * @param arena a shared arena
   */
  public static Allocation owned(MemorySegment segment, Arena arena) {
    Objects.requireNonNull(arena);
    return owned(segment, () -> close(arena));
  }

  /** Host memory that {@code owner} frees. */
  public static Allocation owned(MemorySegment segment, Owner owner) {
    return new Allocation(HOST, segment.address(), segment.byteSize(), segment, owner, true);
  }

  /** Host memory of somebody else: closing this allocation ends its use and frees nothing. */
  public static Allocation borrowed(MemorySegment segment) {
    return new Allocation(HOST, segment.address(), segment.byteSize(), segment, null, false);
  }

  /**
   * Memory of a GPU: an address that Java must never follow.
   *
   * @param space the GPU's ordinal
   */
  public static Allocation onDevice(int space, long address, long bytes, Owner owner) {
    return new Allocation(space, address, bytes, null, owner, true);
  }

  /** Host memory that belongs to somebody else, whom {@code owner} tells when it is closed. */
  public static Allocation lent(MemorySegment segment, Owner owner) {
    return new Allocation(HOST, segment.address(), segment.byteSize(), segment, owner, false);
  }

  /** A GPU's memory that belongs to somebody else, whom {@code owner} tells when it is closed. */
  public static Allocation borrowedOnDevice(int space, long address, long bytes, Owner owner) {
    return new Allocation(space, address, bytes, null, owner, false);
  }

  private static boolean close(Arena arena) {
    try {
      arena.close();
      return true;
    } catch (IllegalStateException e) {
      // Somebody reads or copies through the segment right now: as good as a call in flight.
      return false;
    }
  }

  /**
   * Host memory itself; alive for sure only between {@link #acquire} and {@link #release}.
   *
   * @throws IllegalStateException if this is a GPU's memory
   */
  public MemorySegment segment() {
    if (segment == null) {
      throw new IllegalStateException("memory of a GPU can't be reached from Java");
    }
    return segment;
  }

  /** Whether the memory can't be written to. */
  public boolean isReadOnly() {
    return segment != null && segment.isReadOnly();
  }

  public long address() {
    return address;
  }

  public long bytes() {
    return bytes;
  }

  /** The ordinal of the GPU that it counts for, or {@link #HOST}. */
  public int space() {
    return space;
  }

  @Override
  public boolean isOpen() {
    return super.isOpen() && (segment == null || segment.scope().isAlive());
  }

  @Override
  public boolean acquire() {
    if (!super.acquire()) {
      return false;
    }
    // Only a lender can end the life of memory that isn't ours, or keep it to one thread.
    if (owner == null
        && segment != null
        && !(segment.scope().isAlive() && segment.isAccessibleBy(Thread.currentThread()))) {
      release();
      return false;
    }
    return true;
  }

  /**
   * Lends the memory to users outside Java.
   *
   * @param settle waits for their work, which no stream of flare's knows; runs before the memory is
   *     freed
   * @return the address of the counter that they count down, see {@link Holds}
   */
  public synchronized long lend(Runnable settle) {
    Loan current = loan;
    if (current == null) {
      current = new Loan(new Holds(), settle);
      loan = current;
    }
    return current.holds.address();
  }

  /** How many users outside Java have not given it back. */
  public synchronized long consumers() {
    Loan current = loan;
    return current == null ? 0 : current.holds.outstanding();
  }

  private record Loan(Holds holds, Runnable settle) {}

  /** Keeps the memory open for a graph; false if it is closed. */
  public boolean retain() {
    if (!acquire()) {
      return false;
    }
    graphs.incrementAndGet();
    return true;
  }

  /** Ends what {@link #retain} began. */
  public void unretain() {
    graphs.decrementAndGet();
    release();
  }

  /** How many graphs keep it open. */
  public int graphs() {
    return graphs.get();
  }

  @Override
  protected boolean free() {
    Loan lent;
    synchronized (this) {
      lent = loan;
    }
    if (lent == null) {
      return giveBack();
    }
    if (lent.holds.outstanding() > 0) {
      lent.holds.whenReleased(() -> end(lent));
      return true;
    }
    return end(lent);
  }

  private boolean end(Loan lent) {
    lent.settle.run();
    if (!giveBack()) {
      return false;
    }
    synchronized (this) {
      loan = null;
    }
    lent.holds.close();
    return true;
  }

  private boolean giveBack() {
    if (owner == null) {
      return true;
    }
    if (!owner.free()) {
      return false;
    }
    if (counted) {
      Tracking.closed(this);
    }
    return true;
  }
}
