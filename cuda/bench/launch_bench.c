/* What a call costs when there is nothing to compute: attention on an empty batch. The JMH benchmark LaunchOverhead does the same from Java. */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "flare.h"

static double thread_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return 1e9 * (double)t.tv_sec + (double)t.tv_nsec;
}

int main(void) {
    enum { kRounds = 9, kCalls = 2000000 };
    flare_attention_params p;
    memset(&p, 0, sizeof(p));
    p.struct_size = sizeof(p);
    p.device = FLARE_DEVICE_CPU;
    p.dtype = FLARE_BF16;
    p.seqlen_q = p.seqlen_k = 128;
    p.heads_q = p.heads_kv = 8;
    p.head_dim_qk = p.head_dim_v = 64;
    p.mask = FLARE_MASK_CAUSAL;
    p.q_stride_s = p.k_stride_s = p.v_stride_s = p.out_stride_s = 512;
    p.q_stride_h = p.k_stride_h = p.v_stride_h = p.out_stride_h = 64;

    double best = 1e30;
    for (int round = 0; round < kRounds; ++round) {
        const double start = thread_ns();
        for (int i = 0; i < kCalls; ++i) {
            const int32_t status = flare_attention_forward(&p);
            if (status != FLARE_OK) {
                fprintf(stderr, "%s\n", flare_status_string(status));
                return 1;
            }
        }
        const double ns = (thread_ns() - start) / kCalls;
        best = ns < best ? ns : best;
    }
    printf("flare_attention_forward, batch 0: %.1f ns a call\n", best);
    return 0;
}
