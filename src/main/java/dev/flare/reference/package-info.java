/**
 * Float64 definitions of every operation: the oracle of the tests and of {@code flare verify}.
 *
 * <p>Plain Java on plain arrays. Each class is written straight from the formulas, with no
 * blocking, no online softmax and no other trick, so that a reader can check it against a paper
 * line by line. Nothing here depends on tensors, devices or native code.
 *
 * <p><b>Arrays.</b> Row-major, contiguous, flat {@code double[]}. Token data is {@code [rows,
 * heads, dim]}; {@link dev.flare.reference.Tokens} says which rows belong to which sequence, which
 * is all that dense, packed (varlen) and paged storage differ in. Inputs are never changed. Records
 * of this package hold such arrays without copying: they are bundles of arguments and results, not
 * values to compare.
 *
 * <p><b>Threads.</b> All methods are pure functions of their arguments and may be called from any
 * thread; work is spread over the common pool by sequence and head.
 */
package dev.flare.reference;
