#!/usr/bin/env python3
"""DLPack against PyTorch, both ways and both forms, on the CPU and on a GPU where there is one.

    python3 cuda/tests/dlpack_torch.py build/native/libflare.so

Exports of libflare go through torch.from_dlpack, tensors of PyTorch through flare_dlpack_import; holds and storage show who frees what.
"""

import ctypes
import gc
import sys

import torch

VERSIONED, LEGACY = 0, 1
NAMES = {VERSIONED: b"dltensor_versioned", LEGACY: b"dltensor"}
DTYPES = {1: torch.float32, 2: torch.float16, 3: torch.bfloat16, 4: torch.float8_e4m3fn, 5: torch.uint8, 6: torch.int32, 7: torch.int64}
READ_ONLY = 1


class Tensor(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("device", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("reserved0", ctypes.c_int32),
        ("data", ctypes.c_void_p),
        ("shape", ctypes.c_int64 * 8),
        ("stride", ctypes.c_int64 * 8),
    ]


flare = ctypes.CDLL(sys.argv[1])
python = ctypes.pythonapi
python.PyCapsule_New.restype = ctypes.py_object
python.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
python.PyCapsule_GetPointer.restype = ctypes.c_void_p
python.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
python.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]


def check(status):
    if status != 0:
        text = ctypes.create_string_buffer(512)
        flare.flare_last_error(text, ctypes.c_uint64(512))
        raise AssertionError(f"status {status}: {text.value.decode()}")


def describe(tensor, code):
    t = Tensor(struct_size=ctypes.sizeof(Tensor), dtype=code, rank=tensor.dim(), data=tensor.data_ptr())
    t.device = tensor.device.index if tensor.is_cuda else -1
    for i in range(tensor.dim()):
        t.shape[i], t.stride[i] = tensor.shape[i], tensor.stride(i)
    return t


def exported(kind, device, code):
    """What torch makes of an export is the same memory, and ends it when it goes."""
    ours = torch.arange(24, device=device).to(DTYPES[code]).reshape(2, 3, 4).transpose(0, 2)
    holds = ctypes.c_int64(0)
    managed = ctypes.c_void_p()
    check(flare.flare_dlpack_export(ctypes.byref(describe(ours, code)), kind, ctypes.byref(holds), ctypes.byref(managed)))
    theirs = torch.from_dlpack(python.PyCapsule_New(managed, NAMES[kind], None))
    assert theirs.data_ptr() == ours.data_ptr() and theirs.dtype == ours.dtype and theirs.device == ours.device
    assert theirs.shape == ours.shape and theirs.stride() == ours.stride()
    assert torch.equal(theirs.float(), ours.float())
    assert holds.value == 1
    del theirs
    gc.collect()
    assert holds.value == 0, holds.value


def imported(kind, device, code):
    """What flare makes of torch's tensor is the same memory, which torch keeps until it is released."""
    theirs = torch.arange(40, device=device).to(DTYPES[code])[8:].reshape(4, 8)[:, ::2]
    capsule = theirs.__dlpack__(max_version=(1, 0)) if kind == VERSIONED else torch.utils.dlpack.to_dlpack(theirs)
    managed = python.PyCapsule_GetPointer(capsule, NAMES[kind])
    python.PyCapsule_SetName(capsule, b"used_" + NAMES[kind])
    t = Tensor(struct_size=ctypes.sizeof(Tensor))
    check(flare.flare_dlpack_import(ctypes.c_void_p(managed), kind, ctypes.byref(t)))
    assert t.data == theirs.data_ptr() and t.dtype == code and t.rank == 2
    assert list(t.shape[:2]) == [4, 4] and list(t.stride[:2]) == [8, 2]
    assert t.device == (0 if theirs.is_cuda else -1)
    assert t.flags & READ_ONLY == 0
    check(flare.flare_dlpack_release(ctypes.c_void_p(managed), kind))


def main():
    devices = ["cpu"] + (["cuda:0"] if torch.cuda.is_available() else [])
    count = 0
    for device in devices:
        for kind in (VERSIONED, LEGACY):
            for code in DTYPES:
                exported(kind, device, code)
                imported(kind, device, code)
                count += 2
    print(f"dlpack_torch: {count} exchanges with PyTorch {torch.__version__} on {' and '.join(devices)}, 0 failures")


main()
