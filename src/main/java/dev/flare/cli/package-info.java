/** The {@code flare} command: everything that a person runs from the shell. */
@NullMarked
package dev.flare.cli;

import org.jspecify.annotations.NullMarked;
