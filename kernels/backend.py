"""The one guarded import of Triton, and the check that a requested backend can run where it is asked to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

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


def compiles_together() -> bool:
    """Whether ``compiled_together`` can be used: early Tritons compile one kernel at a time, the interpreter none."""
    return hasattr(triton, "AsyncCompileMode") and not INTERPRETED


@contextmanager
def compiled_together() -> Iterator[None]:
    """Compile the kernels that are called, as many at a time as this process has cores, and launch none of them.

    One after another the kernels of a network take about a minute. At the end all are there, in memory and in Triton's
    cache on disk. What they would have written is left as it was allocated: for calls whose results nobody reads, or
    takes for indices.

    Raises:
        triton.CompilationError: at the end, of a kernel that cannot be compiled.
    """
    run = triton.JITFunction.run

    def compile_only(kernel, *arguments, grid, warmup, **options):
        return run(kernel, *arguments, grid=grid, warmup=True, **options)

    with (
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
        triton.AsyncCompileMode(pool),
        # Triton's mode holds in the thread that entered it, and a card's backward passes have one of their own.
        torch.autograd.set_multithreading_enabled(False),
    ):
        triton.JITFunction.run = compile_only
        try:
            yield
        finally:
            triton.JITFunction.run = run
