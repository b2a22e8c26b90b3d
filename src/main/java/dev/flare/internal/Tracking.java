package dev.flare.internal;

import java.util.ArrayList;
import java.util.Comparator;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.atomic.AtomicLong;
import org.jspecify.annotations.Nullable;

/**
 * How much memory flare holds, and with {@code -Dflare.track=true} also who asked for it and who
 * closed it.
 */
public final class Tracking {
  private static final boolean ON = Boolean.getBoolean("flare.track");
  private static final Map<Integer, AtomicLong> LIVE = new ConcurrentHashMap<>();
  private static final Map<Allocation, Throwable> SITES = new ConcurrentHashMap<>();

  private Tracking() {}

  static void opened(Allocation allocation) {
    live(allocation.space()).addAndGet(allocation.bytes());
    if (ON) {
      SITES.put(allocation, new Throwable("allocated here"));
    }
  }

  static void closed(Allocation allocation) {
    live(allocation.space()).addAndGet(-allocation.bytes());
    if (ON) {
      SITES.remove(allocation);
    }
  }

  private static AtomicLong live(int space) {
    return LIVE.computeIfAbsent(space, s -> new AtomicLong());
  }

  /** Where we are, if that is recorded. */
  static @Nullable Throwable closeSite() {
    return ON ? new Throwable("closed here") : null;
  }

  /** Bytes of a GPU, or of the host, that are allocated and not closed. */
  public static long liveBytes(int space) {
    return live(space).get();
  }

  /** One line for each place in the caller's code that holds memory, the largest first. */
  public static List<String> liveSites(int space) {
    record Held(long count, long bytes) {}
    Map<String, Held> sites = new HashMap<>();
    SITES.forEach(
        (allocation, site) -> {
          if (allocation.space() == space) {
            sites.merge(
                caller(site),
                new Held(1, allocation.bytes()),
                (a, b) -> new Held(a.count + b.count, a.bytes + b.bytes));
          }
        });
    List<Map.Entry<String, Held>> sorted = new ArrayList<>(sites.entrySet());
    sorted.sort(Comparator.comparingLong(e -> -e.getValue().bytes));
    return sorted.stream()
        .map(e -> e.getValue().bytes + " bytes in " + e.getValue().count + " from " + e.getKey())
        .toList();
  }

  /** The first frame outside the library. */
  private static String caller(Throwable site) {
    StackTraceElement[] frames = site.getStackTrace();
    for (StackTraceElement frame : frames) {
      String type = frame.getClassName();
      boolean library =
          type.startsWith("dev.flare.internal.")
              || (type.startsWith("dev.flare.") && type.indexOf('.', 10) < 0);
      if (!library) {
        return frame.toString();
      }
    }
    return frames.length == 0 ? "unknown" : frames[frames.length - 1].toString();
  }
}
