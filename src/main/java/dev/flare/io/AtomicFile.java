package dev.flare.io;

import java.io.IOException;
import java.lang.foreign.MemorySegment;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardCopyOption;
import java.nio.file.StandardOpenOption;
import java.util.concurrent.ThreadLocalRandom;

/** Writes files that are whole or not there. */
final class AtomicFile {
  private static final long CHUNK = 1 << 24;

  private AtomicFile() {}

  /** Takes the bytes of a file, in order. */
  static final class Sink {
    private final FileChannel channel;

    private Sink(FileChannel channel) {
      this.channel = channel;
    }

    void write(byte[] bytes) throws IOException {
      write(MemorySegment.ofArray(bytes));
    }

    /** In chunks: a byte buffer ends at 2 GB, and a write from the heap is copied whole. */
    void write(MemorySegment bytes) throws IOException {
      for (long at = 0; at < bytes.byteSize(); at += CHUNK) {
        long size = Math.min(CHUNK, bytes.byteSize() - at);
        ByteBuffer buffer = bytes.asSlice(at, size).asByteBuffer();
        while (buffer.hasRemaining()) {
          channel.write(buffer);
        }
      }
    }
  }

  /** Writes the contents of a file. */
  interface Body {
    void writeTo(Sink sink) throws IOException;
  }

  /**
   * Runs {@code body} on a temporary file beside {@code file}, then moves it there. Beside it,
   * because only a move within a file system is atomic; not by createTempFile, whose files nobody
   * else can read.
   */
  static void write(Path file, Body body) throws IOException {
    long random = ThreadLocalRandom.current().nextLong();
    Path temporary =
        file.resolveSibling(file.getFileName() + "." + Long.toHexString(random) + ".tmp");
    try {
      try (FileChannel channel =
          FileChannel.open(temporary, StandardOpenOption.CREATE_NEW, StandardOpenOption.WRITE)) {
        body.writeTo(new Sink(channel));
        channel.force(true);
      }
      Files.move(temporary, file, StandardCopyOption.ATOMIC_MOVE);
    } finally {
      Files.deleteIfExists(temporary);
    }
  }
}
