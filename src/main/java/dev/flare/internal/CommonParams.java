package dev.flare.internal;

import dev.flare.internal.Struct.I32;
import dev.flare.internal.Struct.I64;
import dev.flare.internal.Struct.Pointer;

/**
 * The fields that every params struct of {@code flare.h} starts with, at the same offsets in each.
 */
public final class CommonParams {
  public static final I32 FLAGS = AttentionParams.FLAGS;
  public static final I32 DEVICE = AttentionParams.DEVICE;
  public static final I32 KERNEL = AttentionParams.KERNEL;
  public static final Pointer STREAM = AttentionParams.STREAM;
  public static final I32 NUM_THREADS = AttentionParams.NUM_THREADS;

  private CommonParams() {}

  /** Where an operation takes its workspace. */
  public record Workspace(Pointer address, I64 bytes) {}

  /** The workspace fields of an operation that has them. */
  public static Workspace workspace(Kernels.Operation operation) {
    return switch (operation) {
      case ATTENTION_FORWARD ->
          new Workspace(AttentionParams.WORKSPACE, AttentionParams.WORKSPACE_BYTES);
      case MLA_PREFILL ->
          new Workspace(MlaPrefillParams.WORKSPACE, MlaPrefillParams.WORKSPACE_BYTES);
      case MLA_DECODE -> new Workspace(MlaDecodeParams.WORKSPACE, MlaDecodeParams.WORKSPACE_BYTES);
      case KDA_FORWARD ->
          new Workspace(KdaForwardParams.WORKSPACE, KdaForwardParams.WORKSPACE_BYTES);
      case KDA_DECODE -> new Workspace(KdaDecodeParams.WORKSPACE, KdaDecodeParams.WORKSPACE_BYTES);
      case ATTENTION_MERGE, CAST, FILL, CACHE_APPEND ->
          throw new IllegalArgumentException(operation + " needs no workspace");
    };
  }
}
