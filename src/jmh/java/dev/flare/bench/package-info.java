/** JMH benchmarks of the host side: what Java adds to a kernel. */
package dev.flare.bench;
