"""Many tensors in one launch: a fixed cut of every tensor into chunks, and a device table of the tensors' addresses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK_ELEMENTS = 4096
"""Elements that one program handles: enough loads in flight for bandwidth, enough programs for a small model."""


class Segments:
    """The cut of tensors ("segments") into chunks; a chunk lies in one segment, a segment's chunks are adjacent.

    Attributes:
        sizes: elements of every segment, as host integers.
        chunk: elements in a full chunk; only the last chunk of a segment is shorter.
        chunks: number of chunks, which is the grid of a launch.
        occupied: number of segments with at least one element; an empty one has no chunk.
        segment_of_chunk: int32 ``[chunks]``.
        first_chunk: int32 ``[segments + 1]``.
        elements: int64 ``[segments]``.

    Raises:
        ValueError: there is not one element in all of them.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.sizes, self.device = tuple(sizes), device
        self.chunk = CHUNK_ELEMENTS
        counts = [-(-size // self.chunk) for size in sizes]
        owners = [segment for segment, count in enumerate(counts) for _ in range(count)]
        if not owners:
            raise ValueError(
                f"sizes={list(sizes)}: expected a tensor with at least one element; pass the model's tensors"
            )
        firsts = [0]
        for count in counts:
            firsts.append(firsts[-1] + count)
        self.chunks = len(owners)
        self.occupied = sum(size > 0 for size in sizes)
        self.segment_of_chunk = _uploaded(owners, torch.empty(self.chunks, dtype=torch.int32, device=device))
        self.first_chunk = _uploaded(firsts, torch.empty(len(firsts), dtype=torch.int32, device=device))
        self.elements = _uploaded(self.sizes, torch.empty(len(self.sizes), dtype=torch.int64, device=device))

    def check(self, grads: Sequence[Tensor]) -> None:
        """Stop a wrong gradient here: kernels see nothing but addresses.

        Raises:
            ValueError: a gradient is missing, or is not FP32 of the segment's size on the device.
        """
        if len(grads) != len(self.sizes):
            raise ValueError(
                f"expected {len(self.sizes)} gradients, got {len(grads)}; pass one for every tensor, in order"
            )
        for index, (grad, size) in enumerate(zip(grads, self.sizes)):
            if grad is None or grad.dtype != torch.float32 or grad.numel() != size or grad.device != self.device:
                got = "None" if grad is None else f"{grad.dtype} with {grad.numel()} elements on {grad.device}"
                raise ValueError(
                    f"gradient {index}: expected torch.float32 with {size} elements on {self.device}, got {got}; "
                    "pass FP32 gradients in the order given at construction"
                )

    def check_values(self, **values: Tensor) -> None:
        """Stop a small input that a kernel would misread.

        Raises:
            ValueError: one is not FP32 on the segments' device.
        """
        for name, value in values.items():
            if value.dtype != torch.float32 or value.device != self.device:
                raise ValueError(
                    f"{name}: expected torch.float32 on {self.device}, got {value.dtype} on {value.device}; convert it"
                )


class AddressTable:
    """Device tables (int64 ``[count]``) of the addresses of ``count`` tensors, written without waiting for the device.

    Eager calls share one table, which is uploaded when an address has changed. A captured graph
    reads its table again at every replay, so each set of addresses met during a capture gets a
    table of its own that is never rewritten (8 bytes a tensor, kept as long as this object).
    A copy from the host has no place in a graph: that table is filled by ``flush`` after the
    capture, or by ``bind`` before it.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._count, self._device = count, device
        self._eager = self._new()
        self._eager_addresses: tuple[int, ...] | None = None
        self._captured: dict[tuple[int, ...], Tensor] = {}
        self._pending: list[tuple[int, ...]] = []
        self._spare: Tensor | None = self._new()

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """The table that a launch on the current stream shall read.

        Raises:
            RuntimeError: a capture meets a second new set of addresses without a ``flush`` between.
        """
        addresses = _addresses(tensors)
        if _capturing(self._device):
            if addresses not in self._captured:
                if self._spare is None:
                    raise RuntimeError(
                        "expected flush() after a capture and before the next one, got a capture with further tensors; "
                        "call flush(), or bind() them before the capture"
                    )
                # Made beforehand: memory taken during a capture would belong to the graph's pool.
                self._captured[addresses], self._spare = self._spare, None
                self._pending.append(addresses)
            return self._captured[addresses]
        if addresses != self._eager_addresses:
            _uploaded(addresses, self._eager)
            self._eager_addresses = addresses
        return self._eager

    def bind(self, tensors: Sequence[Tensor]) -> None:
        """Write, outside of capture, the table that captures with these tensors will read."""
        addresses = _addresses(tensors)
        if addresses not in self._captured:
            self._captured[addresses] = _uploaded(addresses, self._new())

    def flush(self) -> None:
        """Write, on the current stream, the tables of all captures since the last flush; due before a replay.

        A capture that failed is to be followed by a flush as well.
        """
        for addresses in self._pending:
            _uploaded(addresses, self._captured[addresses])
        self._pending.clear()
        if self._spare is None:
            self._spare = self._new()

    def _new(self) -> Tensor:
        return torch.empty(self._count, dtype=torch.int64, device=self._device)


def address_table(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Addresses (int64 ``[tensors]`` on ``device``) of tensors that stay where they are."""
    return _uploaded(_addresses(tensors), torch.empty(len(tensors), dtype=torch.int64, device=device))


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one block of memory without gap or overlap, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _addresses(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)


def _uploaded(values: Sequence[int], out: Tensor) -> Tensor:
    # The caching host allocator keeps the pinned block until the copy is done, so nothing here waits.
    host = torch.tensor(values, dtype=out.dtype, pin_memory=out.is_cuda)
    return out.copy_(host, non_blocking=True)


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
