// The CPU backend's thread pool: persistent workers, started by the first job that can use them, asleep when idle.
//
// parallel_for splits [0, count) dynamically. The calling thread takes part, so any number of threads may call at once (each
// makes progress on its own) and a nested call cannot deadlock. Which thread runs which index carries no meaning:
// a body must compute the same result for an index wherever it runs.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flare::cpu {

// Scratch blocks are recycled between jobs; at most as many are kept as threads ever ran bodies at the same time.
// acquire_scratch throws std::bad_alloc. 64-byte aligned.
void* acquire_scratch(size_t bytes);
void release_scratch(void* scratch);

// Runs body(context, index, scratch) for every index in [0, count), then returns. At most max_threads take part, the
// caller included; 0 means all. Pass 1 for a job too small to be worth waking a worker: it then runs inline. scratch
// holds scratch_bytes, 64-byte aligned, uninitialised, private to one running body; nullptr when scratch_bytes is 0.
// Throws std::bad_alloc, before any body has run, if the caller's own scratch cannot be had. A body must not throw.
void parallel_for(int64_t count, int max_threads, size_t scratch_bytes,
                  void (*body)(void* context, int64_t index, void* scratch), void* context);

// The same for a callable body(index, scratch).
template <class Body>
void parallel_for(int64_t count, int max_threads, size_t scratch_bytes, Body& body) {
    parallel_for(
        count, max_threads, scratch_bytes,
        [](void* context, int64_t index, void* scratch) { (*static_cast<Body*>(context))(index, scratch); }, &body);
}

// Threads that can take part in a job, the caller included.
int num_threads();

}  // namespace flare::cpu
