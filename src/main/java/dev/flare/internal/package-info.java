/**
 * The binding ring: the only code that touches generated bindings and restricted methods.
 *
 * <p>It knows C statuses, addresses and struct offsets, and nothing of the public API: callers turn
 * its answers into tensors and exceptions.
 */
package dev.flare.internal;
