"""Runs each named layer in the dtype a plan assigns to it (section 3.1 of the paper).

Weights stay FP32; a layer casts its input and its weights on the way in, as autocast does, and
its result to the dtype of the layer that consumes it on the way out (``models`` says why).
Normalisation and activations in between run in the dtype of their input, with FP32 parameters
and statistics. A uniform FP16 or BF16 plan therefore computes what ``torch.autocast`` computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from triaccel_bench.models import LAYER_TYPES, Network

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class _CastConvolution:
    compute_dtype = output_dtype = torch.float32

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.compute_dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return self._conv_forward(x.to(dtype), self.weight.to(dtype), bias).to(self.output_dtype)


class _CastConv1d(_CastConvolution, nn.Conv1d): ...


class _CastConv2d(_CastConvolution, nn.Conv2d): ...


class _CastConv3d(_CastConvolution, nn.Conv3d): ...


class _CastLinear(nn.Linear):
    compute_dtype = output_dtype = torch.float32

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.compute_dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return functional.linear(x.to(dtype), self.weight.to(dtype), bias).to(self.output_dtype)


_CAST_TYPES = dict(zip(LAYER_TYPES, (_CastConv1d, _CastConv2d, _CastConv3d, _CastLinear), strict=True))


def prepare(network: Network) -> None:
    """Let every named layer take a dtype; the network's output is FP32 whatever its last layer runs in.

    State dicts, deep copies and parameters are untouched: only the layers' class changes.
    A layer of a subclass of our own or of the user's is left as it is and runs in FP32.
    """
    for layer in network.layers.values():
        layer.__class__ = _CAST_TYPES.get(type(layer), type(layer))
    network.module.register_forward_hook(_to_fp32)


def _to_fp32(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
    return output.float()


def apply(network: Network, executed: Sequence[str]) -> None:
    """Put a plan in force: one executed dtype for each of ``network.layers``, in order.

    Raises:
        ValueError: the plan's length or a dtype's name is wrong.
    """
    if len(executed) != len(network.layers) or not set(executed) <= DTYPES.keys():
        raise ValueError(f"plan {list(executed)}: expected {len(network.layers)} of {list(DTYPES)}")
    by_name = {}
    for (name, layer), level in zip(network.layers.items(), executed, strict=True):
        if hasattr(type(layer), "compute_dtype"):
            layer.compute_dtype = by_name[name] = DTYPES[level]
        else:
            by_name[name] = torch.float32
    for name, layer in network.layers.items():
        if hasattr(type(layer), "output_dtype"):
            layer.output_dtype = by_name[network.consumers[name]]
    for module, consumer in network.joins:
        module.join_dtype = by_name[consumer]


def current(network: Network) -> tuple[str, ...]:
    """The executed plan now in force."""
    names = {dtype: level for level, dtype in DTYPES.items()}
    return tuple(names[getattr(layer, "compute_dtype", torch.float32)] for layer in network.layers.values())


@contextmanager
def strict_fp32(network: Network) -> Iterator[None]:
    """Every layer in FP32 without TF32, for the curvature probe; the plan and flags come back afterwards."""
    plan = current(network)
    flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    apply(network, ["fp32"] * len(plan))
    allow_tf32(False)
    try:
        yield
    finally:
        apply(network, plan)
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = flags


def allow_tf32(allowed: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed
