package dev.flare.internal;

import static java.lang.foreign.ValueLayout.JAVA_LONG;

import dev.flare.generated.flare.flare_h;
import java.lang.foreign.MemorySegment;

/**
 * The calls into {@code libflare.so}. They return its statuses: 0 is success, and {@link
 * #lastError} tells more about anything else, to the same thread.
 *
 * <p>Callers make sure that {@link NativeLibrary#status} was {@code Ready}.
 */
public final class Kernels {
  private Kernels() {}

  /** An operation of the C library, with its params struct. */
  public enum Operation {
    ATTENTION_FORWARD(flare_h.FLARE_OP_ATTENTION_FORWARD()),
    ATTENTION_MERGE(flare_h.FLARE_OP_ATTENTION_MERGE()),
    MLA_PREFILL(flare_h.FLARE_OP_MLA_PREFILL()),
    MLA_DECODE(flare_h.FLARE_OP_MLA_DECODE()),
    KDA_FORWARD(flare_h.FLARE_OP_KDA_FORWARD()),
    KDA_DECODE(flare_h.FLARE_OP_KDA_DECODE()),
    CAST(flare_h.FLARE_OP_CAST()),
    FILL(flare_h.FLARE_OP_FILL()),
    CACHE_APPEND(flare_h.FLARE_OP_CACHE_APPEND());

    private final int code;

    Operation(int code) {
      this.code = code;
    }
  }

  /** Runs an operation with a filled params struct. */
  public static int run(Operation operation, MemorySegment params) {
    try {
      return switch (operation) {
        case ATTENTION_FORWARD -> flare_h.flare_attention_forward(params);
        case ATTENTION_MERGE -> flare_h.flare_attention_merge(params);
        case MLA_PREFILL -> flare_h.flare_mla_prefill(params);
        case MLA_DECODE -> flare_h.flare_mla_decode(params);
        case KDA_FORWARD -> flare_h.flare_kda_forward(params);
        case KDA_DECODE -> flare_h.flare_kda_decode(params);
        case CAST -> flare_h.flare_cast(params);
        case FILL -> flare_h.flare_fill(params);
        case CACHE_APPEND -> flare_h.flare_cache_append(params);
      };
    } catch (AssertionError e) {
      throw unwrapped(e);
    }
  }

  /** Asks for the bytes of workspace; {@link #workspaceBytes} has the answer if the status is 0. */
  public static int workspace(Operation operation, MemorySegment params) {
    MemorySegment bytes = Scratch.get().word();
    bytes.set(JAVA_LONG, 0, 0);
    try {
      return switch (operation) {
        case ATTENTION_FORWARD -> flare_h.flare_attention_workspace(params, bytes);
        case MLA_PREFILL -> flare_h.flare_mla_prefill_workspace(params, bytes);
        case MLA_DECODE -> flare_h.flare_mla_decode_workspace(params, bytes);
        case KDA_FORWARD -> flare_h.flare_kda_forward_workspace(params, bytes);
        case KDA_DECODE -> flare_h.flare_kda_decode_workspace(params, bytes);
        case ATTENTION_MERGE, CAST, FILL, CACHE_APPEND -> 0; // they need none
      };
    } catch (AssertionError e) {
      throw unwrapped(e);
    }
  }

  /** The answer to this thread's last {@link #workspace}. */
  public static long workspaceBytes() {
    return Scratch.get().word().get(JAVA_LONG, 0);
  }

  /** Asks which kernel would run; {@link #kernelName()} has the answer if the status is 0. */
  public static int kernelName(Operation operation, MemorySegment params) {
    MemorySegment name = Scratch.get().text();
    try {
      return flare_h.flare_kernel_name(operation.code, params, name, name.byteSize());
    } catch (AssertionError e) {
      throw unwrapped(e);
    }
  }

  /** The answer to this thread's last {@link #kernelName(Operation, MemorySegment)}. */
  public static String kernelName() {
    return Scratch.get().text().getString(0);
  }

  public static final int DLPACK_VERSIONED = flare_h.FLARE_DLPACK_VERSIONED();
  public static final int DLPACK_LEGACY = flare_h.FLARE_DLPACK_LEGACY();
  public static final int DLPACK_MAX_RANK = flare_h.FLARE_DLPACK_MAX_RANK();
  public static final int DLPACK_READ_ONLY = flare_h.FLARE_DLPACK_READ_ONLY();
  public static final int DLPACK_HOST_PINNED = flare_h.FLARE_DLPACK_HOST_PINNED();

  /**
   * Makes a managed tensor; {@link #dlpackExported} has it if the status is 0.
   *
   * @param tensor a {@link DlpackTensor}
   * @param holds the address of a counter of 8 bytes
   */
  public static int dlpackExport(MemorySegment tensor, int kind, long holds) {
    return flare_h.flare_dlpack_export(
        tensor, kind, MemorySegment.ofAddress(holds), Scratch.get().word());
  }

  /** The answer to this thread's last {@link #dlpackExport}. */
  public static MemorySegment dlpackExported() {
    return MemorySegment.ofAddress(Scratch.get().word().get(JAVA_LONG, 0));
  }

  /** Describes another library's managed tensor in a {@link DlpackTensor}. */
  public static int dlpackImport(MemorySegment managed, int kind, MemorySegment tensor) {
    return flare_h.flare_dlpack_import(managed, kind, tensor);
  }

  /** Calls the deleter of a managed tensor. */
  public static int dlpackRelease(MemorySegment managed, int kind) {
    return flare_h.flare_dlpack_release(managed, kind);
  }

  /** The C side's text about this thread's last failure. */
  public static String lastError() {
    MemorySegment text = Scratch.get().text();
    flare_h.flare_last_error(text, text.byteSize());
    return text.getString(0);
  }

  /** The name of a status, {@code FLARE_ERROR_SHAPE} say. */
  public static String statusName(int status) {
    return NativeLibrary.text(flare_h.flare_status_string(status));
  }

  /** Whether a status says that host memory ran out. */
  public static boolean isOutOfMemory(int status) {
    return status == flare_h.FLARE_ERROR_MEMORY();
  }

  /** Whether a status says that the device's context is gone for good. */
  public static boolean isContextLost(int status) {
    return status == flare_h.FLARE_ERROR_CONTEXT();
  }

  /** What the library says of its own ABI: structs, offsets, functions, constants. */
  public static String abi() {
    return NativeLibrary.text(flare_h.flare_abi());
  }

  /**
   * The bindings turn whatever a call throws into an AssertionError: an argument whose arena is
   * closed or belongs to another thread arrives that way.
   */
  static RuntimeException unwrapped(AssertionError e) {
    if (e.getCause() instanceof RuntimeException cause) {
      return cause;
    }
    throw e;
  }
}
