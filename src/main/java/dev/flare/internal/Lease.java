package dev.flare.internal;

import java.lang.invoke.MethodHandles;
import java.lang.invoke.VarHandle;
import org.jspecify.annotations.Nullable;

/**
 * Something that calls use and somebody closes: it is never closed under a call.
 *
 * <p>Any thread may use or close it.
 */
public abstract class Lease {
  private static final int CLOSED = -1;
  private static final VarHandle USES;

  static {
    try {
      USES = MethodHandles.lookup().findVarHandle(Lease.class, "uses", int.class);
    } catch (ReflectiveOperationException e) {
      throw new ExceptionInInitializerError(e);
    }
  }

  @SuppressWarnings("UnusedVariable") // through USES
  private volatile int uses; // calls in flight, or CLOSED

  private volatile @Nullable Throwable closeSite;

  /** For subclasses. */
  protected Lease() {}

  public boolean isOpen() {
    return uses != CLOSED;
  }

  /** Where it was closed, if it is and that is recorded. */
  public final @Nullable Throwable closeSite() {
    return closeSite;
  }

  /**
   * Enters a call that uses it.
   *
   * @return false if it is closed; else {@link #release} must follow
   */
  public boolean acquire() {
    for (int n = uses; n != CLOSED; n = uses) {
      if (USES.compareAndSet(this, n, n + 1)) {
        return true;
      }
    }
    return false;
  }

  public final void release() {
    USES.getAndAdd(this, -1);
  }

  /**
   * Closes it unless a call uses it.
   *
   * @return calls in flight that keep it open; 0 when it is closed now or was before
   */
  public final int close() {
    if (!USES.compareAndSet(this, 0, CLOSED)) {
      return Math.max(0, uses);
    }
    boolean freed = false;
    try {
      freed = free();
    } finally {
      if (!freed) {
        uses = 0;
      }
    }
    if (!freed) {
      return 1;
    }
    closeSite = Tracking.closeSite();
    return 0;
  }

  /**
   * Gives back what lies behind, once nobody uses it; called at most once with success.
   *
   * @return false if somebody still uses it in a way that can't be counted
   */
  protected abstract boolean free();
}
