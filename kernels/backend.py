"""The one guarded import of Triton, and the check that a requested backend can run where it is asked to."""

from __future__ import annotations

import os

import torch

try:
    import triton
    import triton.language as tl
except Exception as error:  # a broken installation fails in many ways, and the torch path needs none of it
    triton = tl = None
    _missing = str(error)

INTERPRETED = triton is not None and os.environ.get("TRITON_INTERPRET") == "1"
"""Triton fixes this when it is imported: kernels then run on CPU tensors, in Python."""


def require_backend(backend: str, device: torch.device) -> None:
    """Refuse a backend that cannot run on ``device``; nothing is replaced silently.

    Raises:
        ValueError: an unknown backend, Triton not importable, or a device its kernels cannot reach.
    """
    if backend == "torch":
        return
    if backend != "triton":
        raise ValueError(f"backend={backend!r}: expected 'triton' or 'torch'; pass one of them")
    if triton is None:
        raise ValueError(
            f"backend='triton': expected an importable Triton, got {_missing!r}; "
            "install triton>=3.2 or pass backend='torch'"
        )
    reachable = "cpu" if INTERPRETED else "cuda"
    if device.type != reachable:
        how = "with TRITON_INTERPRET=1" if INTERPRETED else "without TRITON_INTERPRET=1"
        raise ValueError(
            f"backend='triton' {how}: expected tensors on {reachable}, got {device.type}; "
            "move them or pass backend='torch'"
        )
