package dev.flare.internal;

import static java.lang.foreign.ValueLayout.JAVA_LONG;

import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.lang.invoke.VarHandle;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.TimeUnit;
import java.util.function.BooleanSupplier;
import org.jspecify.annotations.Nullable;

/**
 * How many users outside Java memory has: a counter in native memory that they count down from
 * threads which Java does not know.
 *
 * <p>Nobody calls Java when the last one is done. Memory that is closed before that waits here: one
 * daemon thread looks every few milliseconds, as long as there is something to wait for.
 */
public final class Holds {
  private static final VarHandle COUNT = JAVA_LONG.varHandle();
  private static final long PAUSE_MILLIS = 5;

  private static final List<Waiting> WAITING = new ArrayList<>();
  private static @Nullable Thread watcher; // guarded by WAITING

  private record Waiting(Holds holds, BooleanSupplier free) {}

  private final Arena arena = Arena.ofShared();
  private final MemorySegment count = arena.allocate(JAVA_LONG);

  Holds() {}

  /** The counter: users add 1 and take it away. */
  public long address() {
    return count.address();
  }

  /** Users that are not done. */
  public long outstanding() {
    return (long) COUNT.getAcquire(count, 0L);
  }

  /** Ends the counter, which nobody counts down any more. */
  void close() {
    arena.close();
  }

  /**
   * Calls {@code free} on another thread once nobody outside Java uses the memory, and again a
   * little later as long as that returns false or throws.
   */
  void whenReleased(BooleanSupplier free) {
    synchronized (WAITING) {
      WAITING.add(new Waiting(this, free));
      if (watcher == null) {
        watcher = Thread.ofPlatform().daemon(true).name("flare-dlpack-watcher").start(Holds::watch);
      }
    }
  }

  private static void watch() {
    while (true) {
      try {
        TimeUnit.MILLISECONDS.sleep(PAUSE_MILLIS);
      } catch (InterruptedException e) {
        // Nobody has a reason to interrupt it; the memory still has to be freed.
        continue;
      }
      List<Waiting> released;
      synchronized (WAITING) {
        if (WAITING.isEmpty()) {
          watcher = null;
          return;
        }
        released = WAITING.stream().filter(w -> w.holds.outstanding() == 0).toList();
        WAITING.removeAll(released);
      }
      for (Waiting waiting : released) {
        if (!isFreed(waiting)) {
          synchronized (WAITING) {
            WAITING.add(waiting);
          }
        }
      }
    }
  }

  private static boolean isFreed(Waiting waiting) {
    try {
      return waiting.free.getAsBoolean();
    } catch (RuntimeException e) {
      return false; // a graph is being captured on a stream that used the memory, say
    }
  }
}
