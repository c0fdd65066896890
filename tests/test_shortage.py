"""Memory that ran out is known in all of its clothes, and nothing else is taken for it."""

import pytest
import torch

from triaccel_bench.shortage import cause_of, error_of


@pytest.mark.parametrize(
    "error, cause",
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "allocator"),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ..."), "allocator"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"), "allocator"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "allocator"),
        (RuntimeError("CUDA driver error: out of memory"), "allocator"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "cublas"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"), "cublas"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`"), None),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "cudnn"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"), "cudnn_unsupported"),
        (RuntimeError("GET was unable to find an engine to execute this computation"), "cudnn_unsupported"),
        (RuntimeError("CUDA error: device-side assert triggered"), None),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"), None),
        (ValueError("CUDA out of memory"), None),
        (MemoryError(), "allocator"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_who_ran_out_of_memory(error, cause):
    assert cause_of(error) == cause
    if cause is not None:
        assert cause_of(error_of(str(error))) == cause
