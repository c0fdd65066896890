"""Whether an error says that memory ran out: by its type, or in the words of the library that noticed."""

from __future__ import annotations

import torch

_WORDS = {
    "allocator": ("CUDA out of memory", "can't allocate memory", "error: out of memory", "[CUDA]: out of memory"),
    "cublas": ("CUBLAS_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate"),
    "cudnn": ("CUDNN_STATUS_ALLOC_FAILED", "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
    "cudnn_unsupported": ("CUDNN_STATUS_NOT_SUPPORTED", "unable to find an engine to execute this computation"),
}
"""What CUDA's driver, torch's allocators, cuBLAS (which makes its handle when first used) and cuDNN say."""
DOUBTFUL = "cudnn_unsupported"
"""The cause that may be no shortage: cuDNN says so where no algorithm's workspace fits, and where it has none."""


def cause_of(error: BaseException) -> str | None:
    """``allocator``, ``cublas``, ``cudnn``: who ran out of memory, or ``DOUBTFUL``; ``None`` for any other error.

    A device-side assertion or a wrong shape is none: smaller batches would not help.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return "allocator"
    if not isinstance(error, RuntimeError):
        return None
    return next((cause for cause, words in _WORDS.items() if any(word in str(error) for word in words)), None)


def error_of(said: str) -> Exception:
    """An error in those words, which ``cause_of`` takes for what it took the first one for."""
    error = RuntimeError(said)
    return torch.OutOfMemoryError(said) if cause_of(error) in (None, "allocator") else error
