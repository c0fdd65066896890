"""Where the tests of kernels run: torch on a CPU and on a card, Triton on a card.

On a machine without a card the Triton kernels run in Triton's interpreter. It must be chosen
before Triton is imported, so a file of tests runs itself once more in a process that has chosen it.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from triaccel_bench.kernels.backend import INTERPRETED

gpu = pytest.mark.gpu
needs_card = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")
if INTERPRETED:
    PLACES = [pytest.param(("triton", "cpu"), id="triton-interpreted")]
else:
    PLACES = [
        pytest.param(("torch", "cpu"), id="torch-cpu"),
        pytest.param(("torch", "cuda"), id="torch-cuda", marks=[gpu, needs_card]),
        pytest.param(("triton", "cuda"), id="triton-cuda", marks=[gpu, needs_card]),
    ]
on_every_backend = pytest.mark.parametrize("place", PLACES)
on_kernels = pytest.mark.parametrize("place", PLACES[-1:])
once = pytest.mark.skipif(INTERPRETED, reason="not about the interpreter")


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Deterministic mode fills new uninitialised tensors with NaN or the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def assert_passes_in_the_interpreter(file: str) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "triton-interpreted", file]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and "skipped" not in done.stdout


def variants(kernel) -> int:
    """Compiled forms of a kernel; Triton 3.2 keeps them in another place than later ones."""
    if hasattr(kernel, "device_caches"):
        return sum(len(caches[0]) for caches in kernel.device_caches.values())
    return sum(len(cache) for cache in kernel.cache.values())
