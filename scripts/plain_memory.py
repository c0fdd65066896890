#!/usr/bin/env python3
"""Peak memory of plain PyTorch: one torchvision model under FP16 autocast, and what a run's set-up adds to it.

python scripts/plain_memory.py [--model NAME] [--layout nchw|channels_last] [--graph] [--workspace LIBRARY|SMALL]

Prints GB allocated at the peak of a training step, and the part of it that is cuBLAS workspace. PyTorch
gives each pair of handle and stream its own: on a Hopper card 32 MiB for cuBLAS and as much for cuBLASLt,
and a capture runs on a stream of its own. SMALL is what our runs have.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--model", default="efficientnet_b0")
parser.add_argument("--layout", default="nchw", choices=["nchw", "channels_last"])
parser.add_argument("--graph", action="store_true", help="capture the step in a CUDA graph after eager ones")
parser.add_argument("--workspace", default="library", choices=["library", "small"])
parser.add_argument("--batch", type=int, default=96)


def main(options: argparse.Namespace) -> dict[str, float]:
    import torch
    import torchvision
    from torch.nn import functional

    from triaccel_bench.graphs import Graph, peak_allocated, reset_peak

    if not torch.cuda.is_available():
        sys.exit("expected a CUDA device to measure, got none; run this on a machine with an NVIDIA GPU")
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    layout = torch.channels_last if options.layout == "channels_last" else torch.contiguous_format
    model = getattr(torchvision.models, options.model)(num_classes=10).to(device, memory_format=layout).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    images = torch.randn(options.batch, 3, 32, 32, device=device).to(memory_format=layout)
    labels = torch.randint(10, (options.batch,), device=device)

    def step() -> None:
        with torch.autocast("cuda", torch.float16):
            loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(3):
        step()
    reset_peak(device)
    replayed = 0
    if options.graph:
        graph = Graph(step)
        graph.replay()
        replayed = graph.peak_bytes
    else:
        step()
    torch.cuda.synchronize()
    peak = max(peak_allocated(device), torch.cuda.memory_allocated(device) + replayed)
    held = torch.cuda.memory_allocated(device)
    if options.graph:
        graph.release()
    torch._C._cuda_clearCublasWorkspaces()
    return {"peak_gb": peak / 1e9, "workspace_gb": (held - torch.cuda.memory_allocated(device)) / 1e9}


if __name__ == "__main__":
    chosen = parser.parse_args()
    if chosen.workspace == "small":
        from triaccel_bench.worker import CUBLAS_WORKSPACES

        os.environ |= CUBLAS_WORKSPACES
    else:
        for name in ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"):
            os.environ.pop(name, None)
    print(json.dumps(main(chosen)))
