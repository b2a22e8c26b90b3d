package dev.flare;

import dev.flare.internal.CommonParams;
import dev.flare.internal.HostMemory;
import dev.flare.internal.Kernels;
import dev.flare.internal.Kernels.Operation;
import dev.flare.internal.Struct;
import dev.flare.internal.Struct.Pointer;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.lang.invoke.MethodHandles;
import java.lang.invoke.VarHandle;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.atomic.AtomicInteger;
import org.jspecify.annotations.Nullable;

/**
 * What every plan has: a filled params struct, its workspace, and the tensors of the launch under
 * way.
 *
 * <p>A launch is {@code begin}, {@code bind} for each argument, {@code run}, and {@code end} in a
 * finally block. One at a time: a second one throws. It allocates nothing.
 */
final class Launcher {
  private static final int IDLE = 0;
  private static final int BUSY = 1;
  private static final int CLOSED = 2;

  /**
   * Addresses that stand for outputs which are not there yet, where the C library is only asked: 1
   * TiB apart, and below any memory of a process.
   */
  private static final int PLACEHOLDER_SHIFT = 40;

  private static final VarHandle STATE;

  static {
    try {
      STATE = MethodHandles.lookup().findVarHandle(Launcher.class, "state", int.class);
    } catch (ReflectiveOperationException e) {
      throw new ExceptionInInitializerError(e);
    }
  }

  /**
   * A tensor that each launch gives anew.
   *
   * @param layout what it must look like; null if this plan has no such argument
   */
  private record Argument(String name, Pointer field, @Nullable Layout layout, boolean output) {}

  /** A tensor that was given when the plan was made: lengths, block tables, sinks. */
  private record Fixed(String name, Pointer field, Tensor tensor) {}

  private final Operation operation;
  private final Device device;
  private final Struct params;
  private final Arena arena;
  private final long workspaceBytes;
  private final Argument[] arguments;
  private final Fixed[] fixed;
  private final @Nullable Tensor[] bound;
  private final @Nullable GpuMemory workspace; // the CPU's lies in the arena
  private final AtomicInteger graphs = new AtomicInteger(); // that replay launches of this plan
  private int heldFixed;
  private @Nullable Stream on; // of the launch under way, on a GPU

  @SuppressWarnings("UnusedVariable") // through STATE
  private volatile int state;

  private Launcher(
      Operation operation,
      Device device,
      Struct params,
      Arena arena,
      Argument[] arguments,
      Fixed[] fixed,
      long workspaceBytes) {
    this.operation = operation;
    this.device = device;
    this.params = params;
    this.arena = arena;
    this.arguments = arguments;
    this.fixed = fixed;
    this.bound = new @Nullable Tensor[arguments.length];
    this.workspaceBytes = workspaceBytes;
    this.workspace = workspaceBytes > 0 ? allocateWorkspace() : null;
  }

  /** Null on the CPU, where the workspace goes with the arena. */
  private @Nullable GpuMemory allocateWorkspace() {
    CommonParams.Workspace fields = CommonParams.workspace(operation);
    params.set(fields.bytes(), workspaceBytes);
    if (!device.isCpu()) {
      GpuMemory memory =
          device
              .gpu()
              .allocate(operation + ": the workspace of a plan", workspaceBytes, device.stream());
      params.set(fields.address(), memory.allocation().address());
      return memory;
    }
    MemorySegment memory = HostMemory.workspace(arena, workspaceBytes);
    if (memory == null) {
      throw new OutOfMemoryException(
          operation
              + ": "
              + workspaceBytes
              + " bytes of host memory for the workspace could not be had");
    }
    params.set(fields.address(), memory.address());
    return null;
  }

  /** Collects what a plan consists of, then checks it against the C library. */
  static final class Builder {
    private final Operation operation;
    private final Device device;
    private final Struct params;
    private final Arena arena;
    private final List<Argument> arguments = new ArrayList<>();
    private final List<Fixed> fixed = new ArrayList<>();

    Builder(Operation operation, Device device, Arena arena, Struct params) {
      this.operation = operation;
      this.device = device;
      this.arena = arena;
      this.params = params;
      params.set(CommonParams.DEVICE, device.kernelDevice());
    }

    Struct params() {
      return params;
    }

    /** The next argument of a launch, an input; null means that launches have none here. */
    void input(String name, Pointer field, @Nullable Tensor like) {
      arguments.add(new Argument(name, field, like == null ? null : like.layout(), false));
      params.set(field, like == null ? 0 : like.address());
    }

    /**
     * The next argument of a launch, an output.
     *
     * @param layout what it looks like; null means that launches have none here
     * @param like a tensor to check in advance; null if there is none yet
     */
    void output(String name, Pointer field, @Nullable Layout layout, @Nullable Tensor like) {
      if (like != null) {
        like.requireOutput(name);
      }
      arguments.add(new Argument(name, field, layout, true));
      if (layout != null) {
        // The C library wants to know which outputs there will be.
        params.set(
            field, like != null ? like.address() : (long) arguments.size() << PLACEHOLDER_SHIFT);
      }
    }

    /** The next argument of a launch, an output that is there; null means that there is none. */
    void output(String name, Pointer field, @Nullable Tensor like) {
      output(name, field, like == null ? null : like.layout(), like);
    }

    /** A tensor of the plan itself; its memory must stay open as long as launches follow. */
    void fixed(String name, Pointer field, @Nullable Tensor tensor) {
      if (tensor != null) {
        Checks.present(name, tensor, device);
        fixed.add(new Fixed(name, field, tensor));
        params.set(field, tensor.address());
      }
    }

    /**
     * Asks the C library about the workspace, which checks all sizes and options on the way.
     *
     * @throws FlareException if it can't run these params
     */
    Launcher build() {
      int status = Kernels.workspace(operation, params.segment());
      if (status != 0) {
        throw Failures.of(operation, status, device);
      }
      return new Launcher(
          operation,
          device,
          params,
          arena,
          arguments.toArray(Argument[]::new),
          fixed.toArray(Fixed[]::new),
          Kernels.workspaceBytes());
    }
  }

  /** The same plan with a workspace of its own. */
  Launcher fork() {
    return inArena(
        false,
        to -> new Launcher(operation, device, copyOf(to), to, arguments, fixed, workspaceBytes));
  }

  private Struct copyOf(Arena to) {
    if (state != CLOSED) {
      try {
        return params.copy(to);
      } catch (IllegalStateException e) {
        // Another thread closed the plan in between.
      }
    }
    throw closed();
  }

  /** Makes something that owns an arena; if that fails, the arena is closed. */
  interface InArena<T> {
    T make(Arena arena);
  }

  /**
   * Opens an arena for a plan.
   *
   * @param confined true for a plan that never leaves this thread: it is cheaper to close
   */
  @SuppressWarnings("MustBeClosedChecker") // the launcher closes it
  static <T> T inArena(boolean confined, InArena<T> maker) {
    Arena arena = confined ? Arena.ofConfined() : Arena.ofShared();
    try {
      return maker.make(arena);
    } catch (RuntimeException | Error e) {
      arena.close();
      throw e;
    }
  }

  // ---- a launch -------------------------------------------------------------------------------

  void begin(@Nullable Stream stream) {
    if (!STATE.compareAndSet(this, IDLE, BUSY)) {
      throw state == CLOSED ? closed() : busy("launch");
    }
    if (stream != null || !device.isCpu()) {
      enter(stream);
    }
  }

  /** Enters the stream of a launch; if that fails, the launch has not begun. */
  private void enter(@Nullable Stream stream) {
    try {
      Stream wanted = Stream.of(stream, device);
      if (wanted != null) {
        wanted.gpu().requireAlive();
        wanted.begin();
        on = wanted;
      }
    } catch (RuntimeException | Error e) {
      state = IDLE;
      throw e;
    }
  }

  /** Gives argument {@code i} its tensor, which stays open until {@link #end}. */
  void bind(int i, @Nullable Tensor tensor) {
    Argument argument = arguments[i];
    if (tensor == null || argument.layout == null) {
      if (tensor != null || argument.layout != null) {
        throw unexpected(argument, tensor);
      }
      return;
    }
    Layout layout = tensor.layout();
    if (!layout.equals(argument.layout)) {
      throw unexpected(argument, tensor);
    }
    if (!tensor.device().equals(device)) {
      Checks.present(argument.name, tensor, device);
    }
    if (argument.output && tensor.isReadOnly()) {
      tensor.requireOutput(argument.name);
    }
    tensor.acquire(argument.name, on);
    bound[i] = tensor;
    params.set(argument.field, tensor.address());
  }

  void run() {
    while (heldFixed < fixed.length) {
      fixed[heldFixed].tensor.acquire(fixed[heldFixed].name, on);
      heldFixed++;
    }
    if (on != null) {
      prepare(on);
    }
    int status = Kernels.run(operation, params.segment());
    if (status != 0) {
      throw Failures.of(operation, status, device);
    }
  }

  private void prepare(Stream stream) {
    params.set(CommonParams.STREAM, stream.handle());
    Capture capture = stream.capture();
    if (capture != null) {
      capture.keep(this);
      if (workspace != null) {
        capture.keep(workspace);
      }
      capture.count();
    } else if (workspace != null) {
      workspace.useAlone(stream);
    }
  }

  void end() {
    for (int i = 0; i < bound.length; i++) {
      Tensor tensor = bound[i];
      if (tensor != null) {
        bound[i] = null;
        tensor.release();
      }
    }
    while (heldFixed > 0) {
      heldFixed--;
      fixed[heldFixed].tensor.release();
    }
    Stream stream = on;
    if (stream != null) {
      on = null;
      stream.end();
    }
    state = IDLE;
  }

  // ---- graphs ---------------------------------------------------------------------------------

  /** A graph has captured a launch, whose workspace has to stay. */
  void retain() {
    graphs.incrementAndGet();
  }

  void unretain() {
    graphs.decrementAndGet();
  }

  /** Enters a replay of captured launches, which use the workspace. */
  void beginReplay(Stream stream) {
    if (!STATE.compareAndSet(this, IDLE, BUSY)) {
      throw busy("launch of a graph");
    }
    if (workspace != null) {
      try {
        workspace.useAlone(stream);
      } catch (RuntimeException | Error e) {
        state = IDLE;
        throw e;
      }
    }
  }

  void endReplay() {
    state = IDLE;
  }

  private static InvalidArgumentException unexpected(Argument argument, @Nullable Tensor tensor) {
    return new InvalidArgumentException(
        argument.name,
        tensor == null ? null : tensor.layout(),
        argument.layout == null
            ? "null: the plan was made without it"
            : argument.layout + ": what the plan was made for");
  }

  // ---- what plans tell ------------------------------------------------------------------------

  String kernelName() {
    if (!STATE.compareAndSet(this, IDLE, BUSY)) {
      throw state == CLOSED ? closed() : busy("kernelName");
    }
    try {
      int status = Kernels.kernelName(operation, params.segment());
      if (status != 0) {
        throw Failures.of(operation, status, device);
      }
      return Kernels.kernelName();
    } finally {
      state = IDLE;
    }
  }

  boolean isBusy() {
    return state == BUSY;
  }

  long workspaceBytes() {
    return workspaceBytes;
  }

  Device device() {
    return device;
  }

  /** What argument {@code i} must look like. */
  Layout layout(int i) {
    Layout layout = arguments[i].layout;
    if (layout == null) {
      throw new InvalidArgumentException(arguments[i].name + ": the plan was made without it");
    }
    return layout;
  }

  /** Allocates a dense tensor for argument {@code i}. */
  Tensor empty(int i) {
    return Tensor.empty(device, layout(i).dtype(), layout(i).shape());
  }

  void close() {
    if (graphs.get() > 0) {
      throw new InUseException("close: a graph replays launches of this plan; close it first");
    }
    if (STATE.compareAndSet(this, IDLE, BUSY)) {
      try {
        if (workspace != null) {
          workspace.allocation().close();
        }
      } catch (RuntimeException | Error e) {
        state = IDLE;
        throw e;
      }
      state = CLOSED;
      arena.close();
    } else if (state == BUSY) {
      throw busy("close");
    }
  }

  private InUseException busy(String call) {
    return new InUseException(
        call + ": another launch of this plan is under way; fork() a plan for each thread");
  }

  private static ClosedException closed() {
    return new ClosedException("the plan is closed");
  }
}
