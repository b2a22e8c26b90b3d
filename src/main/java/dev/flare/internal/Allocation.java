package dev.flare.internal;

import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.lang.invoke.MethodHandles;
import java.lang.invoke.VarHandle;
import java.util.Objects;
import org.jspecify.annotations.Nullable;

/**
 * A block of host memory with one owner, kept open by the calls that use it.
 *
 * <p>Any thread may use or close it. {@link #close} never frees under a call in flight: it reports
 * the call instead.
 */
public final class Allocation {
  private static final int CLOSED = -1;
  private static final VarHandle USES;

  static {
    try {
      USES = MethodHandles.lookup().findVarHandle(Allocation.class, "uses", int.class);
    } catch (ReflectiveOperationException e) {
      throw new ExceptionInInitializerError(e);
    }
  }

  private final MemorySegment segment;
  private final long address;
  private final @Nullable Arena arena;

  @SuppressWarnings("UnusedVariable") // through USES
  private volatile int uses; // calls in flight, or CLOSED

  private volatile @Nullable Throwable closeSite;

  private Allocation(MemorySegment segment, @Nullable Arena arena) {
    this.segment = segment;
    this.address = segment.address();
    this.arena = arena;
  }

  /**
   * Memory that closes with {@code arena}, which belongs to this allocation from now on.
   *
   * @param segment all of the memory
   * @param arena a shared arena
   */
  public static Allocation owned(MemorySegment segment, Arena arena) {
    Allocation allocation = new Allocation(segment, Objects.requireNonNull(arena));
    Tracking.opened(allocation, segment.byteSize());
    return allocation;
  }

  /** Memory of somebody else: closing this allocation ends its use and frees nothing. */
  public static Allocation borrowed(MemorySegment segment) {
    return new Allocation(segment, null);
  }

  /** The memory itself; alive for sure only between {@link #acquire} and {@link #release}. */
  public MemorySegment segment() {
    return segment;
  }

  public long address() {
    return address;
  }

  public boolean isOwned() {
    return arena != null;
  }

  public boolean isOpen() {
    return uses != CLOSED && segment.scope().isAlive();
  }

  /** Where it was closed, if it is and that is recorded. */
  public @Nullable Throwable closeSite() {
    return closeSite;
  }

  /**
   * Enters a call that uses the memory.
   *
   * @return false if the memory is closed; else {@link #release} must follow
   */
  public boolean acquire() {
    for (int n = uses; n != CLOSED; n = uses) {
      if (USES.compareAndSet(this, n, n + 1)) {
        // Only a lender can end the life of memory that isn't ours, or keep it to one thread.
        if (arena == null
            && !(segment.scope().isAlive() && segment.isAccessibleBy(Thread.currentThread()))) {
          release();
          return false;
        }
        return true;
      }
    }
    return false;
  }

  public void release() {
    USES.getAndAdd(this, -1);
  }

  /**
   * Closes the memory unless a call uses it.
   *
   * @return calls in flight that keep it open; 0 when it is closed now or was before
   */
  public int close() {
    if (USES.compareAndSet(this, 0, CLOSED)) {
      if (arena != null) {
        try {
          arena.close();
        } catch (IllegalStateException e) {
          // Somebody reads or copies through the segment right now: as good as a call in flight.
          uses = 0;
          return 1;
        }
        Tracking.closed(this, segment.byteSize());
      }
      closeSite = Tracking.closeSite();
      return 0;
    }
    return Math.max(0, uses);
  }
}
