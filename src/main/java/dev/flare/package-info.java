/**
 * The public API: tensors, attention operations, serving state and devices.
 *
 * <p>Shapes are written outermost dimension first; strides are counted in elements. Every failure
 * is a {@link dev.flare.FlareException} whose message tells what was asked, what was found and what
 * to do. Unless a class says otherwise, {@code null} is never accepted.
 */
package dev.flare;
