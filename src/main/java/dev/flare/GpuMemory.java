package dev.flare;

import dev.flare.internal.Allocation;
import dev.flare.internal.HostMemory;
import java.util.ArrayList;
import java.util.List;
import org.jspecify.annotations.Nullable;

/**
 * Memory that streams use: which ones, so that it is freed after all of them.
 *
 * <p>Nothing is recorded when work is queued but the stream it went to. Only when the memory is
 * closed events are recorded, on the streams that used it. Thread-safe.
 */
abstract sealed class GpuMemory implements Allocation.Owner {
  final Gpu gpu;

  /** Streams whose work may use the memory; guarded by this. The first is where it was made. */
  private final List<Stream> users = new ArrayList<>(2);

  /** The stream of the use before, which is in {@code users}: mostly it is the next one too. */
  private @Nullable Stream last;

  private GpuMemory(Gpu gpu) {
    this.gpu = gpu;
  }

  abstract Allocation allocation();

  /** Memory of the GPU's pool, allocated on {@code home}. */
  static GpuMemory pooled(Gpu gpu, long address, long bytes, Stream home) {
    return new Pooled(gpu, address, bytes, home);
  }

  /** Pinned host memory. */
  static GpuMemory pinned(Gpu gpu, HostMemory.Pinned memory) {
    return new Pinned(gpu, memory);
  }

  /** Memory of somebody else. */
  static GpuMemory foreign(Gpu gpu, long address, long bytes, @Nullable Runnable release) {
    return new Foreign(gpu, address, bytes, release);
  }

  /**
   * Notes that {@code stream} is about to use the memory.
   *
   * <p>A stream's first use is ordered after what the memory's own stream has queued: its
   * allocation, and whatever filled it.
   */
  final void use(Stream stream) {
    if (stream != last) {
      add(stream, false);
    }
  }

  /** The same for memory that must not be used by two streams at once: a workspace. */
  final void useAlone(Stream stream) {
    if (stream != last) {
      add(stream, true);
    }
  }

  private synchronized void add(Stream stream, boolean alone) {
    boolean known = users.contains(stream);
    Stream before = alone ? last : known || users.isEmpty() ? null : users.getFirst();
    if (before != null) {
      before.gpu().order(before, stream);
    }
    if (!known) {
      users.removeIf(user -> !user.isOpen());
      users.add(stream);
    }
    last = stream;
  }

  /**
   * Orders {@code stream} after all others that use the memory.
   *
   * @return whether there are others
   */
  final boolean orderAfterUsers(Stream stream) {
    boolean others = false;
    for (Stream user : users()) {
      if (user != stream) {
        user.gpu().order(user, stream);
        others = true;
      }
    }
    return others;
  }

  /** Streams that may still be at work on the memory. */
  final synchronized List<Stream> users() {
    List<Stream> open = new ArrayList<>(users.size());
    for (Stream user : users) {
      if (user.isOpen()) {
        if (user.isCapturing()) {
          throw new InUseException(
              "close: the memory was used on " + user + ", where a graph is being captured now");
        }
        open.add(user);
      } else {
        user.awaitClosed();
      }
    }
    return open;
  }

  /** Waits for all of them. */
  final void awaitUsers() {
    for (Stream user : users()) {
      user.synchronize();
    }
  }

  private static final class Pooled extends GpuMemory {
    private final long address;
    private final Allocation allocation;

    Pooled(Gpu gpu, long address, long bytes, Stream home) {
      super(gpu);
      this.address = address;
      this.allocation = Allocation.onDevice(gpu.space(), address, bytes, this);
      use(home);
    }

    @Override
    Allocation allocation() {
      return allocation;
    }

    @Override
    public boolean free() {
      if (gpu.isLost()) {
        return true; // it went with the context
      }
      Capture.refuse("closing memory of " + gpu.device());
      gpu.free(address, users());
      return true;
    }
  }

  private static final class Pinned extends GpuMemory {
    private final HostMemory.Pinned memory;
    private final Allocation allocation;

    Pinned(Gpu gpu, HostMemory.Pinned memory) {
      super(gpu);
      this.memory = memory;
      this.allocation = Allocation.owned(memory.segment(), this);
    }

    @Override
    Allocation allocation() {
      return allocation;
    }

    /** The host has no queue to free it in: waits for the copies under way. */
    @Override
    public boolean free() {
      if (!gpu.isLost()) {
        Capture.refuse("closing pinned memory");
        awaitUsers();
      }
      long address = memory.segment().address();
      if (!memory.close()) {
        return false;
      }
      if (!gpu.isLost()) {
        gpu.enter();
        gpu.check(gpu.api.hostFree(address), "cuMemFreeHost");
      }
      return true;
    }
  }

  private static final class Foreign extends GpuMemory {
    private final @Nullable Runnable release;
    private final Allocation allocation;

    Foreign(Gpu gpu, long address, long bytes, @Nullable Runnable release) {
      super(gpu);
      this.release = release;
      this.allocation = Allocation.borrowedOnDevice(gpu.space(), address, bytes, this);
    }

    @Override
    Allocation allocation() {
      return allocation;
    }

    /** The owner may do anything with it from then on: waits for the work under way. */
    @Override
    public boolean free() {
      if (release != null) {
        if (!gpu.isLost()) {
          Capture.refuse("closing memory of " + gpu.device());
          awaitUsers();
        }
        release.run();
      }
      return true;
    }
  }
}
