#include "thread_pool.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#include <pthread.h>
#include <signal.h>

namespace flare::cpu {
namespace {

// ---- scratch --------------------------------------------------------------------------------------------------------

constexpr size_t kAlignment = 64;

struct ScratchHeader {
    size_t bytes;  // usable bytes behind the header
    ScratchHeader* next;
};
static_assert(sizeof(ScratchHeader) <= kAlignment, "the header takes one aligned slot");

struct ScratchList {
    std::mutex mutex;
    ScratchHeader* head = nullptr;
};

// Leaked on purpose, like the pool below: detached workers may still use it while static destructors run.
ScratchList& scratch_list() {
    static ScratchList* list = new ScratchList;
    return *list;
}

// ---- jobs -----------------------------------------------------------------------------------------------------------

// std::condition_variable::wait is a newer symbol from GCC 12 on (GLIBCXX_3.4.30), and the library's ceiling is 3.4.29.
class Condition {
  public:
    Condition() = default;
    Condition(const Condition&) = delete;
    Condition& operator=(const Condition&) = delete;
    ~Condition() { pthread_cond_destroy(&cond_); }

    template <class Done>
    void wait(std::unique_lock<std::mutex>& lock, Done done) {
        while (!done()) {
            pthread_cond_wait(&cond_, lock.mutex()->native_handle());
        }
    }
    void notify_one() { pthread_cond_signal(&cond_); }
    void notify_all() { pthread_cond_broadcast(&cond_); }

  private:
    pthread_cond_t cond_ = PTHREAD_COND_INITIALIZER;
};

// Lives on the caller's stack. Guarded by Pool::mutex except for `next_index`.
struct Job {
    void (*body)(void*, int64_t, void*);
    void* context;
    int64_t count;
    size_t scratch_bytes;
    int max_helpers;
    std::atomic<int64_t> next_index{0};
    int joined = 0;  // workers that ever joined
    int active = 0;  // workers inside now
    Condition idle;
    Job* next = nullptr;
};

void run_indices(Job& job, void* scratch) {
    for (;;) {
        const int64_t index = job.next_index.fetch_add(1, std::memory_order_relaxed);
        if (index >= job.count) {
            return;
        }
        job.body(job.context, index, scratch);
    }
}

class Pool {
  public:
    static Pool& instance() {
        static Pool* pool = new Pool;
        return *pool;
    }

    int size() const { return size_; }

    void run(Job& job) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            start_workers();
            job.next = jobs_;
            jobs_ = &job;
        }
        if (job.max_helpers == 1) {
            wake_.notify_one();
        } else {
            wake_.notify_all();
        }
    }

    // Takes the job off the list, so that nobody joins any more, and waits for those inside.
    void finish(Job& job) {
        std::unique_lock<std::mutex> lock(mutex_);
        for (Job** link = &jobs_; *link != nullptr; link = &(*link)->next) {
            if (*link == &job) {
                *link = job.next;
                break;
            }
        }
        job.idle.wait(lock, [&] { return job.active == 0; });
    }

  private:
    Pool() : size_(std::max(1, static_cast<int>(std::thread::hardware_concurrency()))) {}

    void start_workers() {
        if (started_) {
            return;
        }
        started_ = true;
        // Workers take no signals: those belong to the host program's threads (a JVM installs its own handlers).
        sigset_t all;
        sigset_t previous;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &previous);
        for (int i = 1; i < size_; ++i) {
            try {
                std::thread([this, i] { work(i); }).detach();
            } catch (const std::system_error&) {
                break;  // fewer workers; the callers do the rest
            }
        }
        pthread_sigmask(SIG_SETMASK, &previous, nullptr);
    }

    // The job with the fewest helpers that wants one more.
    Job* pick() {
        Job* best = nullptr;
        for (Job* job = jobs_; job != nullptr; job = job->next) {
            const bool wants_help =
                job->joined < job->max_helpers && job->next_index.load(std::memory_order_relaxed) < job->count;
            if (wants_help && (best == nullptr || job->active < best->active)) {
                best = job;
            }
        }
        return best;
    }

    void work(int worker_idx) {
        char name[16];
        std::snprintf(name, sizeof(name), "flare-cpu-%d", worker_idx);
#ifdef __linux__
        pthread_setname_np(pthread_self(), name);
#endif
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            Job* job = nullptr;
            wake_.wait(lock, [&] { return (job = pick()) != nullptr; });
            ++job->joined;
            ++job->active;
            lock.unlock();
            help(*job);
            lock.lock();
            if (--job->active == 0) {
                job->idle.notify_one();
            }
        }
    }

    // A worker that gets no scratch leaves the indices to the others; the caller holds its scratch already.
    static void help(Job& job) {
        void* scratch = nullptr;
        if (job.scratch_bytes != 0) {
            try {
                scratch = acquire_scratch(job.scratch_bytes);
            } catch (const std::bad_alloc&) {
                return;
            }
        }
        run_indices(job, scratch);
        if (scratch != nullptr) {
            release_scratch(scratch);
        }
    }

    const int size_;
    bool started_ = false;
    std::mutex mutex_;
    Condition wake_;
    Job* jobs_ = nullptr;
};

}  // namespace

void* acquire_scratch(size_t bytes) {
    ScratchList& list = scratch_list();
    ScratchHeader* block = nullptr;
    {
        std::lock_guard<std::mutex> lock(list.mutex);
        // First block that is large enough; else give up the first one in exchange for a larger.
        for (ScratchHeader** link = &list.head; *link != nullptr; link = &(*link)->next) {
            if ((*link)->bytes >= bytes) {
                block = *link;
                *link = block->next;
                return reinterpret_cast<char*>(block) + kAlignment;
            }
        }
        block = list.head;
        if (block != nullptr) {
            list.head = block->next;
        }
    }
    std::free(block);
    const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    if (rounded < bytes) {
        throw std::bad_alloc();
    }
    void* memory = std::aligned_alloc(kAlignment, rounded + kAlignment);
    if (memory == nullptr) {
        throw std::bad_alloc();
    }
    block = new (memory) ScratchHeader{rounded, nullptr};
    return static_cast<char*>(memory) + kAlignment;
}

void release_scratch(void* scratch) {
    ScratchHeader* block = reinterpret_cast<ScratchHeader*>(static_cast<char*>(scratch) - kAlignment);
    ScratchList& list = scratch_list();
    std::lock_guard<std::mutex> lock(list.mutex);
    block->next = list.head;
    list.head = block;
}

void parallel_for(int64_t count, int max_threads, size_t scratch_bytes, void (*body)(void*, int64_t, void*),
                  void* context) {
    if (count <= 0) {
        return;
    }
    Pool& pool = Pool::instance();
    const int threads = max_threads > 0 ? std::min(max_threads, pool.size()) : pool.size();
    const int64_t helpers = std::min<int64_t>(count, threads) - 1;
    Job job;
    job.body = body;
    job.context = context;
    job.count = count;
    job.scratch_bytes = scratch_bytes;
    job.max_helpers = static_cast<int>(helpers);
    void* scratch = scratch_bytes != 0 ? acquire_scratch(scratch_bytes) : nullptr;
    if (helpers > 0) {
        pool.run(job);
    }
    run_indices(job, scratch);
    if (helpers > 0) {
        pool.finish(job);
    }
    if (scratch != nullptr) {
        release_scratch(scratch);
    }
}

int num_threads() {
    return Pool::instance().size();
}

}  // namespace flare::cpu
