/**
 * Tensor files: safetensors, npy, and the case files that hold an operation's inputs and its
 * expected result.
 *
 * <p>Files are mapped, never read into the heap, and may be larger than 2 GB. What a file says
 * about itself is not trusted: every size, offset and name is checked before it is used, and a file
 * that does not hold together is refused with a {@link dev.flare.io.MalformedFileException} that
 * tells what is wrong and where.
 */
package dev.flare.io;
