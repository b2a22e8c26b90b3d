// KDA on the CPU: checks of index arrays, and the loops over (sequence, value head, group of value columns).
#include <algorithm>
#include <cmath>
#include <new>
#include <utility>
#include <vector>

#include "api/status.h"
#include "cpu.h"
#include "index.h"
#include "kernels.h"
#include "thread_pool.h"

namespace flare::cpu {
namespace {

// How the value columns of a head are divided: more items for more threads, at the price of preparing the tokens' keys, queries and
// decays once for each group. Columns don't interact, so this changes no bit of the result.
struct ColumnGroups {
    int64_t panels;            // of the head
    int64_t panels_per_group;
    int64_t groups;
};

ColumnGroups choose_groups(int64_t heads, int64_t head_dim_v, int64_t panel, int64_t threads) {
    ColumnGroups best{};
    best.panels = (head_dim_v + panel - 1) / panel;
    double least = 0.0;
    for (int64_t per_group = best.panels; per_group >= 1; --per_group) {
        const int64_t groups = (best.panels + per_group - 1) / per_group;
        const double share = static_cast<double>(per_group) / static_cast<double>(best.panels);
        // Measured at K = V = 128 (one core of an AVX-512 machine): about a quarter of an item is preparation.
        const double time = static_cast<double>((heads * groups + threads - 1) / threads) * (0.25 + 0.75 * share);
        if (best.groups == 0 || time < 0.95 * least) {
            best.panels_per_group = per_group;
            best.groups = groups;
            least = time;
        }
    }
    return best;
}

// What both operations' params say about tokens, for a value head.
template <typename Params>
KdaTask task_of(const Params& p, const SequenceSpan& span, int64_t batch_row, int64_t hv) {
    const int64_t h = hv / (p.heads_v / p.heads_qk);
    const auto at = [&](const void* base, int32_t dtype, int64_t stride_b, int64_t stride_t, int64_t stride_h, int64_t head) {
        const int64_t offset = batch_row * stride_b + span.begin * stride_t + head * stride_h;
        return static_cast<const char*>(base) + offset * dtype_bytes(dtype);
    };
    KdaTask task{};
    task.num_tokens = span.length;
    task.head_dim_k = p.head_dim_k;
    task.head_dim_v = p.head_dim_v;
    if (span.length > 0) {
        task.q = at(p.q, p.dtype, p.q_stride_b, p.q_stride_t, p.q_stride_h, h);
        task.k = at(p.k, p.dtype, p.k_stride_b, p.k_stride_t, p.k_stride_h, h);
        task.v = at(p.v, p.dtype, p.v_stride_b, p.v_stride_t, p.v_stride_h, hv);
        task.g = at(p.g, p.gate_dtype, p.g_stride_b, p.g_stride_t, p.g_stride_h, hv);
        task.beta = at(p.beta, p.beta_dtype, p.beta_stride_b, p.beta_stride_t, p.beta_stride_h, hv);
        task.out = const_cast<char*>(at(p.out, p.dtype, p.out_stride_b, p.out_stride_t, p.out_stride_h, hv));
    }
    task.q_stride_t = p.q_stride_t;
    task.k_stride_t = p.k_stride_t;
    task.v_stride_t = p.v_stride_t;
    task.g_stride_t = p.g_stride_t;
    task.beta_stride_t = p.beta_stride_t;
    task.out_stride_t = p.out_stride_t;
    task.dtype = p.dtype;
    task.gate_dtype = p.gate_dtype;
    task.beta_dtype = p.beta_dtype;
    task.gate = p.gate;
    task.beta_activation = p.beta_activation;
    task.qk_l2norm = p.qk_l2norm != 0;
    task.beta_per_channel = p.beta_per_channel != 0;
    task.gate_factor = p.a_log != nullptr ? std::exp(p.a_log[hv]) : 1.0f;
    task.lower_bound = p.lower_bound;
    task.dt_bias = p.dt_bias != nullptr ? p.dt_bias + hv * p.head_dim_k : nullptr;
    task.scale = p.scale;
    task.state_layout = p.state_layout;
    task.index_dtype = p.index_dtype;
    return task;
}

KdaState state_at(const void* base, int32_t dtype, int64_t row, int64_t stride_n, int64_t hv, int64_t stride_h) {
    if (base == nullptr) {
        return KdaState{};
    }
    const int64_t offset = (row * stride_n + hv * stride_h) * dtype_bytes(dtype);
    return KdaState{const_cast<char*>(static_cast<const char*>(base)) + offset, dtype};
}

// Slots in [0, num_slots), or the padding slot.
int32_t check_slot(const char* name, const void* slots, int32_t dtype, int64_t at, int64_t num_slots, int64_t padding_slot) {
    const int64_t slot = read_index(slots, dtype, at);
    if (slot == padding_slot || (slot >= 0 && slot < num_slots)) {
        return FLARE_OK;
    }
    return fail(FLARE_ERROR_INDEX, "%s[%lld] is %lld, allowed are 0..%lld (num_slots - 1) and the padding slot %lld", name,
                static_cast<long long>(at), static_cast<long long>(slot), static_cast<long long>(num_slots - 1),
                static_cast<long long>(padding_slot));
}

int32_t check_forward(const flare_kda_forward_params& p) {
    const int32_t type = p.index_dtype;
    if (p.cu_seqlens != nullptr) {
        if (const int32_t status = check_cumulative("cu_seqlens", p.cu_seqlens, type, p.num_sequences, p.seqlen, p.seqlen)) {
            return status;
        }
    }
    if (p.state_slots != nullptr) {
        std::vector<std::pair<int64_t, int64_t>> written;
        for (int64_t n = 0; n < p.num_sequences; ++n) {
            if (const int32_t status = check_slot("state_slots", p.state_slots, type, n, p.num_slots, p.padding_slot)) {
                return status;
            }
            const int64_t slot = read_index(p.state_slots, type, n);
            if (p.final_state != nullptr && slot != p.padding_slot) {
                written.emplace_back(slot, n);
            }
        }
        if (const int32_t status = check_distinct("state_slots", written)) {
            return status;
        }
    }
    if (p.checkpoints == nullptr || p.cu_seqlens == nullptr) {
        return FLARE_OK;
    }
    int64_t first = 0;
    for (int64_t n = 0; n <= p.num_sequences; ++n) {
        const int64_t row = read_index(p.cu_checkpoints, type, n);
        if (row < first) {
            return fail(FLARE_ERROR_INDEX, "cu_checkpoints[%lld] is %lld, allowed is %lld or more: room for every checkpoint before it",
                        static_cast<long long>(n), static_cast<long long>(row), static_cast<long long>(first));
        }
        if (n < p.num_sequences) {
            const int64_t length = sequence_span(p.cu_seqlens, nullptr, 0, type, n).length;
            first = row + length / p.checkpoint_interval;
        }
    }
    return FLARE_OK;
}

int32_t check_decode(const flare_kda_decode_params& p) {
    const int32_t type = p.index_dtype;
    const bool slot_per_token = p.slots_per_sequence > 1;
    if (p.cu_seqlens != nullptr) {
        const int64_t longest = slot_per_token && p.slots_per_sequence < p.seqlen ? p.slots_per_sequence : p.seqlen;
        if (const int32_t status = check_cumulative("cu_seqlens", p.cu_seqlens, type, p.num_sequences, longest, p.seqlen)) {
            return status;
        }
    }
    if (p.num_accepted != nullptr) {
        if (const int32_t status =
                check_index_range("num_accepted", p.num_accepted, type, p.num_sequences, 1, p.slots_per_sequence)) {
            return status;
        }
    }
    if (p.slots == nullptr) {
        return FLARE_OK;
    }
    // Only the slots that will be used: the rest of a ragged row may hold anything.
    const bool is_in_place = p.state_out == nullptr || p.state_out == p.state;
    std::vector<std::pair<int64_t, int64_t>> written;  // slot, entry
    std::vector<std::pair<int64_t, int64_t>> read;
    for (int64_t n = 0; n < p.num_sequences; ++n) {
        const int64_t tokens = sequence_span(p.cu_seqlens, nullptr, p.seqlen, type, n).length;
        const int64_t start = p.num_accepted != nullptr ? read_index(p.num_accepted, type, n) - 1 : 0;
        const int64_t used = slot_per_token ? tokens : 1;
        for (int64_t i = 0; i < p.slots_per_sequence; ++i) {
            if (i >= used && i != start) {
                continue;
            }
            const int64_t at = n * p.slots_stride_n + i;
            if (const int32_t status = check_slot("slots", p.slots, type, at, p.num_slots, p.padding_slot)) {
                return status;
            }
            const int64_t slot = read_index(p.slots, type, at);
            if (i < used && slot != p.padding_slot) {
                written.emplace_back(slot, at);
            } else if (is_in_place && slot != p.padding_slot) {
                read.emplace_back(slot, at);
            }
        }
    }
    if (const int32_t status = check_distinct("slots", written)) {
        return status;
    }
    // Sorted now. A start state that another sequence overwrites would be a race.
    for (const auto& [slot, at] : read) {
        const auto same = std::lower_bound(written.begin(), written.end(), std::make_pair(slot, int64_t{0}));
        if (same != written.end() && same->first == slot && same->second / p.slots_stride_n != at / p.slots_stride_n) {
            return fail(FLARE_ERROR_INDEX,
                        "slots[%lld] and slots[%lld] are both %lld; a sequence can't start from a slot that another writes",
                        static_cast<long long>(at), static_cast<long long>(same->second), static_cast<long long>(slot));
        }
    }
    return FLARE_OK;
}

// Runs item(n, hv, task's panel range) over everything. Throws std::bad_alloc.
template <typename Params, typename Item>
void for_each_item(const Params& p, const Kernels& kernels, Item& item) {
    const double columns = static_cast<double>(p.head_dim_k) * static_cast<double>(p.head_dim_v);
    const double tokens = static_cast<double>(p.batch) * static_cast<double>(p.seqlen) + static_cast<double>(p.num_sequences);
    const int threads = choose_threads(p.num_threads, 3.0 * columns * tokens * static_cast<double>(p.heads_v));
    const int64_t available = threads > 0 && threads < num_threads() ? threads : num_threads();
    const int64_t heads = p.num_sequences * p.heads_v;
    const ColumnGroups groups = choose_groups(heads, p.head_dim_v, kernels.kda_panel, available);
    auto body = [&](int64_t index, void* scratch) {
        const int64_t group = index % groups.groups;
        const int64_t head = index / groups.groups;
        const int64_t begin = group * groups.panels_per_group;
        const int64_t end = begin + groups.panels_per_group;
        item(head / p.heads_v, head % p.heads_v, begin, end < groups.panels ? end : groups.panels, scratch);
    };
    parallel_for(heads * groups.groups, threads, kernels.kda_scratch(p.head_dim_k, groups.panels_per_group), body);
}

}  // namespace

uint64_t kda_forward_workspace(const flare_kda_forward_params&) {
    return 0;
}

uint64_t kda_decode_workspace(const flare_kda_decode_params&) {
    return 0;
}

int32_t kda_forward(const flare_kda_forward_params& p) {
    const Kernels& kernels = active_kernels();
    const int64_t checkpoint_stride = p.heads_v * p.head_dim_k * p.head_dim_v;
    auto item = [&](int64_t n, int64_t hv, int64_t panel_begin, int64_t panel_end, void* scratch) {
        const SequenceSpan span = sequence_span(p.cu_seqlens, nullptr, p.seqlen, p.index_dtype, n);
        KdaTask task = task_of(p, span, p.cu_seqlens != nullptr ? 0 : n, hv);
        task.panel_begin = panel_begin;
        task.panel_end = panel_end;
        const int64_t slot = p.state_slots != nullptr ? read_index(p.state_slots, p.index_dtype, n) : n;
        if (p.state_slots == nullptr || slot != p.padding_slot) {
            task.initial = state_at(p.initial_state, p.initial_state_dtype, slot, p.initial_state_stride_n, hv,
                                    p.initial_state_stride_h);
            task.final = state_at(p.final_state, p.final_state_dtype, slot, p.final_state_stride_n, hv, p.final_state_stride_h);
        }
        if (p.checkpoints != nullptr) {
            const int64_t row = p.cu_seqlens != nullptr ? read_index(p.cu_checkpoints, p.index_dtype, n)
                                                        : n * (p.seqlen / p.checkpoint_interval);
            task.checkpoints = state_at(p.checkpoints, p.checkpoint_dtype, row, checkpoint_stride, hv, p.head_dim_k * p.head_dim_v);
            task.checkpoint_interval = p.checkpoint_interval;
            task.checkpoint_stride = checkpoint_stride;
        }
        kernels.kda_forward_item(task, scratch);
    };
    try {
        if (const int32_t status = check_forward(p)) {
            return status;
        }
        for_each_item(p, kernels, item);
    } catch (const std::bad_alloc&) {
        return fail(FLARE_ERROR_MEMORY, "kda_forward: no memory for a thread's scratch or a list of slots");
    }
    return FLARE_OK;
}

int32_t kda_decode(const flare_kda_decode_params& p) {
    const Kernels& kernels = active_kernels();
    void* state_out = p.state_out != nullptr ? p.state_out : p.state;
    auto item = [&](int64_t n, int64_t hv, int64_t panel_begin, int64_t panel_end, void* scratch) {
        const SequenceSpan span = sequence_span(p.cu_seqlens, nullptr, p.seqlen, p.index_dtype, n);
        KdaTask task = task_of(p, span, p.cu_seqlens != nullptr ? 0 : n, hv);
        task.panel_begin = panel_begin;
        task.panel_end = panel_end;
        task.padding_slot = p.padding_slot;
        int64_t slot = n;
        if (p.slots != nullptr) {
            const int64_t start = p.num_accepted != nullptr ? read_index(p.num_accepted, p.index_dtype, n) - 1 : 0;
            slot = read_index(p.slots, p.index_dtype, n * p.slots_stride_n + start);
        }
        const bool has_state = p.slots == nullptr || slot != p.padding_slot;
        if (has_state) {
            task.initial = state_at(p.state, p.state_dtype, slot, p.state_stride_n, hv, p.state_stride_h);
        }
        if (p.slots_per_sequence > 1) {
            task.token_states = state_at(state_out, p.state_dtype, 0, p.state_stride_n, hv, p.state_stride_h);
            task.token_state_stride = p.state_stride_n;
            task.token_slots = p.slots;
            task.token_slots_offset = n * p.slots_stride_n;
        } else if (has_state) {
            task.final = state_at(state_out, p.state_dtype, slot, p.state_stride_n, hv, p.state_stride_h);
        }
        kernels.kda_decode_item(task, scratch);
    };
    try {
        if (const int32_t status = check_decode(p)) {
            return status;
        }
        for_each_item(p, kernels, item);
    } catch (const std::bad_alloc&) {
        return fail(FLARE_ERROR_MEMORY, "kda_decode: no memory for a thread's scratch or a list of slots");
    }
    return FLARE_OK;
}

}  // namespace flare::cpu
