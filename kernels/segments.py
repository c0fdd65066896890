"""Many tensors in one launch: a fixed cut of every tensor into chunks, and a device table of where the tensors lie."""

# Without the postponed annotations of other files: Triton 3.2's interpreter needs `tl.constexpr` itself, not its name.

from collections.abc import Sequence

import torch
from torch import Tensor

from triaccel_bench.kernels.backend import tl, triton

CHUNK_ELEMENTS = 4096
"""Elements that one program handles: enough loads in flight for bandwidth, enough programs for a small model."""
CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""The dtypes that the kernels read and write, as a table's entry tells them."""
CODE_SHIFT = 60
"""Addresses end far below this bit."""


if triton is not None:
    SHIFT = tl.constexpr(CODE_SHIFT)
    ADDRESS = tl.constexpr((1 << CODE_SHIFT) - 1)

    @triton.jit
    def chunk_pointers(entry, start, lane, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
        """Pointers to the elements ``start + lane`` of the tensor of a table's entry; ALIGNED: it lies at 16 bytes."""
        first = (entry & ADDRESS).to(tl.pointer_type(DTYPE)) + start
        if ALIGNED:
            # Four elements an access, whatever their dtype: tensors of two dtypes then spread over the threads
            # alike, and nothing has to change threads where they meet.
            first = tl.multiple_of(first, 16 if DTYPE == tl.float32 else 8)
        # A 64-bit start and 32-bit lanes: with 64 bits in each lane the addresses fill the registers.
        return first + lane

    @triton.jit
    def load_live(pointers, live, FULL: tl.constexpr):
        """What the pointers point at, 0 where not ``live``; FULL: all are live, so no mask narrows the access."""
        if FULL:
            values = tl.load(pointers)
        else:
            values = tl.load(pointers, mask=live, other=0.0)
        return values

    @triton.jit
    def store_live(pointers, values, live, FULL: tl.constexpr):
        """The counterpart of ``load_live``."""
        if FULL:
            tl.store(pointers, values)
        else:
            tl.store(pointers, values, mask=live)

    @triton.jit
    def load_chunk(entry, start, lane, live, FULL: tl.constexpr, ALIGNED: tl.constexpr):
        """The elements ``start + lane`` of the tensor of a table's entry, in FP32; 0 where not ``live``."""
        code = entry >> SHIFT
        if code == 0:
            values = load_live(chunk_pointers(entry, start, lane, tl.float32, ALIGNED), live, FULL)
        else:
            bits = load_live(chunk_pointers(entry, start, lane, tl.int16, ALIGNED), live, FULL)
            # BF16 in integers, because before sm_80 Triton 3.2 compiles no conversion from or to it.
            brain = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
            values = tl.where(code == 1, bits.to(tl.float16, bitcast=True).to(tl.float32), brain)
        return values

    @triton.jit
    def store_copy(entry, start, lane, values, live, FULL: tl.constexpr, ALIGNED: tl.constexpr):
        """FP32 ``values``, rounded to nearest even, into the 16-bit tensor of a table's entry; nowhere if it is 0."""
        code = entry >> SHIFT
        if code != 0:
            half = values.to(tl.float16).to(tl.int16, bitcast=True)
            bits = values.to(tl.int32, bitcast=True)
            # Half a unit of the last place that stays, less one bit where that place is even; NaN would carry over.
            brain = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            brain = tl.where(values == values, brain, 0x7FC0).to(tl.int16)
            rounded = tl.where(code == 1, half, brain)
            store_live(chunk_pointers(entry, start, lane, tl.int16, ALIGNED), rounded, live, FULL)


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
            ValueError: a gradient is missing, or is not FP32, FP16 or BF16 of the segment's size on the device.
        """
        if len(grads) != len(self.sizes):
            raise ValueError(
                f"expected {len(self.sizes)} gradients, got {len(grads)}; pass one for every tensor, in order"
            )
        for index, (grad, size) in enumerate(zip(grads, self.sizes)):
            if grad is None or grad.dtype not in CODES or grad.numel() != size or grad.device != self.device:
                got = "None" if grad is None else f"{grad.dtype} with {grad.numel()} elements on {grad.device}"
                raise ValueError(
                    f"gradient {index}: expected torch.float32 with {size} elements on {self.device}, or float16 or "
                    f"bfloat16, got {got}; pass gradients in the order given at construction"
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
    """Device tables (int64 ``[count]``) of ``count`` tensors' ``entries``, written without waiting for the device.

    Eager calls share one table, which is uploaded when an entry has changed. A captured graph
    reads its table again at every replay, so each set of entries met during a capture gets a
    table of its own that is never rewritten (8 bytes a tensor, kept as long as this object).
    A copy from the host has no place in a graph: that table is filled by ``flush`` after the
    capture, or by ``bind`` before it.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._count, self._device = count, device
        self._eager = self._new()
        self._eager_entries: tuple[int, ...] | None = None
        self._captured: dict[tuple[int, ...], Tensor] = {}
        self._pending: list[tuple[int, ...]] = []
        self._spare: Tensor | None = self._new()

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """The table that a launch on the current stream shall read; ``holding`` with the tensors' entries."""
        return self.holding(entries(tensors))

    def holding(self, wanted: tuple[int, ...]) -> Tensor:
        """The table of these entries that a launch on the current stream shall read.

        Raises:
            RuntimeError: a capture meets a second new set of entries without a ``flush`` between.
        """
        if _capturing(self._device):
            if wanted not in self._captured:
                if self._spare is None:
                    raise RuntimeError(
                        "expected flush() after a capture and before the next one, got a capture with further tensors; "
                        "call flush(), or bind() them before the capture"
                    )
                # Made beforehand: memory taken during a capture would belong to the graph's pool.
                self._captured[wanted], self._spare = self._spare, None
                self._pending.append(wanted)
            return self._captured[wanted]
        if wanted != self._eager_entries:
            _uploaded(wanted, self._eager)
            self._eager_entries = wanted
        return self._eager

    def bind(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Write, outside of capture, the table that captures with these tensors will read; it is never rewritten."""
        wanted = entries(tensors)
        if wanted not in self._captured:
            self._captured[wanted] = _uploaded(wanted, self._new())
        return self._captured[wanted]

    def flush(self) -> None:
        """Write, on the current stream, the tables of all captures since the last flush; due before a replay.

        A capture that failed is to be followed by a flush as well.
        """
        for wanted in self._pending:
            _uploaded(wanted, self._captured[wanted])
        self._pending.clear()
        if self._spare is None:
            self._spare = self._new()

    def _new(self) -> Tensor:
        return torch.empty(self._count, dtype=torch.int64, device=self._device)


class Gradients:
    """One step's gradients, checked and laid out: several passes take them in place of the list.

    ``FusedSGD.gather`` makes them. Their addresses are looked up once, and uploaded once.

    Attributes:
        tensors: the gradients; a kernel reads each as it lies in memory.
        segments: the cut that they have been checked against.
        aligned: every one begins at a multiple of 16 bytes.
    """

    def __init__(self, tensors: Sequence[Tensor], segments: Segments, table: AddressTable | None) -> None:
        self.tensors, self.segments = tensors, segments
        self._table, self._entries = table, entries(tensors)
        self.aligned = aligned(self._entries)

    def on_device(self, table: AddressTable) -> Tensor:
        """Their table for a launch on the current stream: one of their maker's, or of ``table`` if it has none."""
        return (self._table or table).holding(self._entries)


def entries(tensors: Sequence[Tensor | None]) -> tuple[int, ...]:
    """For each tensor its address, which for FP32 is all, and its dtype's code from bit 60 on; 0 for ``None``.

    Both in one integer, so that no table can hold a tensor's address with the dtype of another.
    """
    return tuple(0 if tensor is None else tensor.data_ptr() | CODES[tensor.dtype] << CODE_SHIFT for tensor in tensors)


def aligned(wanted: Sequence[int]) -> bool:
    """Whether every entry's tensor begins at a multiple of 16 bytes."""
    return not any(entry % 16 for entry in wanted)


def address_table(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The entries (int64 ``[tensors]`` on ``device``) of tensors that stay where they are."""
    return _uploaded(entries(tensors), torch.empty(len(tensors), dtype=torch.int64, device=device))


def convert(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """``targets`` = ``sources``, rounded to nearest even: one multi-tensor call for each pair of dtypes."""
    alike: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for source, target in zip(sources, targets):
        group = alike.setdefault((source.dtype, target.dtype), ([], []))
        group[0].append(source)
        group[1].append(target)
    for group_sources, group_targets in alike.values():
        torch._foreach_copy_(group_targets, group_sources)


def in_fp32(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, those of 16 bits as FP32 copies."""
    wide = [t if t.dtype == torch.float32 else torch.empty_like(t, dtype=torch.float32) for t in tensors]
    changed = [index for index, tensor in enumerate(tensors) if wide[index] is not tensor]
    convert([tensors[index] for index in changed], [wide[index] for index in changed])
    return wide


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


def _uploaded(values: Sequence[int], out: Tensor) -> Tensor:
    # The caching host allocator keeps the pinned block until the copy is done, so nothing here waits.
    host = torch.tensor(values, dtype=out.dtype, pin_memory=out.is_cuda)
    return out.copy_(host, non_blocking=True)


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
