package dev.flare;

/**
 * An operation with everything decided but the addresses of its tensors.
 *
 * <p>Making a plan checks shapes, strides, dtypes and options, and allocates what the kernel needs
 * besides its tensors. A launch then only puts in addresses: it allocates nothing, and its tensors
 * must look exactly like those that the plan was made for.
 *
 * <p>On the CPU a launch returns when its work is done; on a GPU when the work is queued, on the
 * stream that it names, or on the device's own. Launched on another stream than before, a plan with
 * a workspace waits there for its last launch.
 *
 * <p><b>Ownership.</b> The caller closes the plan. Closing twice is fine; closing during a launch,
 * or while a {@link Graph} replays it, throws {@link InUseException}. Tensors given as options
 * (lengths, block tables, sinks) stay the caller's and must be open at each launch.
 *
 * <p><b>Threads.</b> Any thread may launch or close a plan, one at a time: a plan has one
 * workspace, so an overlapping use throws {@link InUseException}. {@code fork()} makes a plan for
 * another thread.
 */
public abstract sealed class Plan implements AutoCloseable
    permits AttentionPlan, MlaPrefillPlan, MlaDecodePlan, KdaPlan, KdaDecodePlan {
  final Launcher launcher;

  Plan(Launcher launcher) {
    this.launcher = launcher;
  }

  /**
   * Makes another plan for the same shapes and options, with a workspace of its own.
   *
   * @return a plan that the caller closes
   * @throws ClosedException if this plan is closed
   * @throws OutOfMemoryException if there is no memory for the workspace
   */
  public abstract Plan fork();

  /**
   * Names the kernel that a launch runs.
   *
   * @return backend, operation and tile, for example {@code cpu_avx512_attention_forward}
   * @throws ClosedException if the plan is closed
   * @throws InUseException if a launch is under way
   */
  public String kernelName() {
    return launcher.kernelName();
  }

  /**
   * Returns the size of the memory that the plan holds besides the tensors.
   *
   * @return bytes
   */
  public long workspaceBytes() {
    return launcher.workspaceBytes();
  }

  /**
   * Returns where launches run.
   *
   * @return the device of all tensors
   */
  public Device device() {
    return launcher.device();
  }

  /**
   * Frees the workspace, on a GPU after the launches that are queued.
   *
   * @throws InUseException if a launch is under way, or a graph replays one
   */
  @Override
  public void close() {
    launcher.close();
  }
}
