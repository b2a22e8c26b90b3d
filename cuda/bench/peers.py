#!/usr/bin/env python3
"""Times the peers that a CUDA build of PyTorch has, in the shapes of `flare bench`, and writes them as JSON.

    python3 cuda/bench/peers.py --out peers.json [--group ceilings,attention,window,mla-prefill,decode] [--seconds 0.4]
    flare bench --device cuda:0 --peers peers.json

The rule is that of `flare bench`: 256 MB are written before each call to flush the L2 cache, CUDA events around the call, the
median. Both must run on the same machine, one after the other. Peers: FlashAttention-2 and cuDNN as PyTorch's SDPA backends,
FlexAttention for sliding windows, a
matrix product (cuBLAS) for the up-projection of MLA; copies_bench.cu has the rates of host copies.
"""

import argparse
import json
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

DEVICE = "cuda:0"
BACKENDS = {"FA2": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}


class Timer:
    def __init__(self, seconds):
        self.seconds = seconds
        self.flush = torch.empty(256 << 20, dtype=torch.int8, device=DEVICE)

    def median_us(self, call):
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # A GPU that was idle takes a while to reach its clock.
        begin = time.monotonic()
        while True:
            self.flush.zero_()
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            if time.monotonic() - begin >= 0.01:
                break
        # A launch and its flush; the flush takes about 0.1 ms.
        once = start.elapsed_time(end) / 1e3 + 1e-4
        count = max(11, min(200, int(self.seconds / once)))
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        for start, end in events:
            self.flush.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return 1e3 * statistics.median(start.elapsed_time(end) for start, end in events)


def tensors(batch, heads, n, d, kv_heads=None, n_k=None, dv=None, dtype=torch.bfloat16):
    def make(h, rows, width):
        return torch.randn(batch, rows, h, width, device=DEVICE, dtype=dtype).transpose(1, 2)

    kv_heads = kv_heads or heads
    n_k = n_k or n
    return make(heads, n, d), make(kv_heads, n_k, d), make(kv_heads, n_k, dv or d)


class Report:
    def __init__(self, timer, rows):
        self.timer = timer
        self.rows = rows
        self.results = []

    def wants(self, row):
        return self.rows in row

    def add(self, row, peer, call):
        if not self.wants(row):
            return
        try:
            micros = self.timer.median_us(call)
        except Exception as error:  # a backend that refuses a shape has no time
            print(f"{row:44} {peer:28} refused: {str(error).splitlines()[0][:80]}", file=sys.stderr)
            torch.cuda.synchronize()
            return
        self.results.append({"row": row, "peer": peer, "median_us": micros})
        print(f"{row:44} {peer:28} {micros:10.1f} us", file=sys.stderr, flush=True)

    def sdpa(self, row, peer, q, k, v, **options):
        def call():
            with sdpa_kernel(BACKENDS[peer]):
                F.scaled_dot_product_attention(q, k, v, **options)

        self.add(row, peer, call)


def attention(report):
    for d in (64, 128, 256):
        for n in (512, 1024, 2048, 4096, 8192, 16384):
            q, k, v = tensors(16384 // n, 2048 // d, n, d)
            for causal in (False, True):
                mask = "causal" if causal else "full"
                for peer in BACKENDS:
                    report.sdpa(f"attention bf16 d{d} n{n} {mask}", peer, q, k, v, is_causal=causal)
    q, k, v = tensors(2, 16, 8192, 192, dv=128)
    report.sdpa("attention bf16 d192/128 n8192 causal", "cuDNN", q, k, v, is_causal=True)
    for d in (64, 128):
        q, k, v = tensors(1, 2048 // d, 16384, d, dtype=torch.float16)
        for causal in (False, True):
            mask = "causal" if causal else "full"
            for peer in BACKENDS:
                report.sdpa(f"attention fp16 d{d} n16384 {mask}", peer, q, k, v, is_causal=causal)


def window(report):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    flex = torch.compile(flex_attention, dynamic=False)
    for d, heads, n, batch, width in (
        (128, 16, 8192, 2, 1024),
        (128, 16, 16384, 1, 1024),
        (128, 16, 16384, 1, 4096),
        (128, 16, 65536, 1, 4096),
        (64, 32, 16384, 1, 512),
    ):
        q, k, v = (t.contiguous() for t in tensors(batch, heads, n, d))
        row = f"window bf16 d{d} n{n} w{width}"
        if not report.wants(row):
            continue
        mask = create_block_mask(lambda b, h, i, j, w=width: (i >= j) & (i - j < w), None, None, n, n, device=DEVICE)
        report.add(row, "FlexAttention", lambda: flex(q, k, v, block_mask=mask))


def mla_prefill(report):
    """Two passes: K and V by a matrix product, the rope part joined, then attention."""
    for batch, n, heads in ((1, 4096, 16), (1, 8192, 128)):
        row = f"mla-prefill bf16 b{batch} n{n} h{heads}"
        c_kv = torch.randn(batch * n, 512, device=DEVICE, dtype=torch.bfloat16)
        k_rope = torch.randn(batch, n, 1, 64, device=DEVICE, dtype=torch.bfloat16)
        w = torch.randn(512, heads * 256, device=DEVICE, dtype=torch.bfloat16)
        kv = torch.empty(batch * n, heads * 256, device=DEVICE, dtype=torch.bfloat16)
        k = torch.empty(batch, n, heads, 192, device=DEVICE, dtype=torch.bfloat16)
        q = torch.randn(batch, n, heads, 192, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2)

        def up():
            torch.mm(c_kv, w, out=kv)

        def join():
            up()
            k[..., :128] = kv.view(batch, n, heads, 256)[..., :128]
            k[..., 128:] = k_rope

        def two_passes():
            join()
            v = kv.view(batch, n, heads, 256)[..., 128:]
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), is_causal=True)

        report.add(row, "cuBLAS up-projection alone", up)
        report.add(row, "cuBLAS + cuDNN", two_passes)


def decode(report):
    """Contiguous caches: PyTorch has no paged decode of its own."""
    for batch, context, heads, kv_heads in (
        (1, 8192, 32, 8),
        (1, 131072, 32, 8),
        (16, 8192, 32, 8),
        (64, 8192, 32, 8),
        (128, 4096, 64, 8),
        (64, 8192, 32, 32),
    ):
        q, k, v = tensors(batch, heads, 1, 128, kv_heads, context)
        row = f"decode bf16 b{batch} n{context} h{heads}/{kv_heads} page64"
        for peer in BACKENDS:
            report.sdpa(row, peer, q, k, v, enable_gqa=heads != kv_heads)


def ceilings(report):
    a = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    report.add("ceiling bf16 matrix product 8192", "cuBLAS", lambda: a @ a)
    source = torch.empty(1 << 30, dtype=torch.int8, device=DEVICE)
    target = torch.empty_like(source)
    report.add("ceiling device copy 1 GiB", "cudaMemcpyAsync", lambda: target.copy_(source))


GROUPS = {
    "ceilings": ceilings,
    "attention": attention,
    "window": window,
    "mla-prefill": mla_prefill,
    "decode": decode,
}


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", required=True)
    options.add_argument("--group", default=",".join(GROUPS))
    options.add_argument("--seconds", type=float, default=0.4, help="time to spend on each row")
    options.add_argument("--row", default="", help="only rows whose name contains this")
    given = options.parse_args()
    torch.manual_seed(0x5EED)
    report = Report(Timer(given.seconds), given.row)
    for group in given.group.split(","):
        GROUPS[group](report)
        torch.cuda.empty_cache()
    environment = {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": str(torch.backends.cudnn.version()),
    }
    with open(given.out, "w") as out:
        json.dump({"environment": environment, "results": report.results}, out, indent=1)


if __name__ == "__main__":
    main()
