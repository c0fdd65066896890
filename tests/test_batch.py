"""Assembled batches: each backend against the arithmetic written out, and against torch's interpolation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from places import (  # noqa: F401
    assert_passes_in_the_interpreter,
    gpu,
    needs_card,
    on_every_backend,
    once,
    poisoned_memory,
    variants,
)
from torch.nn import functional

from triaccel_bench.kernels import batch as batch_module
from triaccel_bench.kernels.backend import INTERPRETED, triton
from triaccel_bench.kernels.batch import BatchAssembler

M = 40
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
# The interpreter cuts FP32 off to BF16 where the compiled kernel rounds.
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]


class Case:
    """Images of every level, draws that reach the ends of the padding, and what both should come to."""

    def __init__(self, place, side: int, padding: int, size: int | None = None, count: int = M) -> None:
        generator = torch.Generator().manual_seed(side + padding)
        self.device, self.side, self.padding = place[1], side, padding
        self.size = size or side
        self.images = torch.randint(0, 256, (count, 3, side, side), generator=generator, dtype=torch.uint8)
        self.labels = torch.randint(0, 1000, (count,), generator=generator)
        self.mean, self.std = torch.tensor([0.49, 0.48, 0.45]), torch.tensor([0.25, 0.24, 0.26])
        table = torch.arange(256.0).expand(3, 256).div(255).sub_(self.mean.view(3, 1)).div_(self.std.view(3, 1))
        self.largest = table.abs().max().item()
        self.flip = torch.rand(count, generator=generator) < 0.5
        self.top, self.left = torch.randint(0, 2 * padding + 1, (2, count), generator=generator, dtype=torch.int16)
        self.top[:2], self.left[:2] = torch.tensor([0, 2 * padding]), torch.tensor([2 * padding, 0])
        moved = (tensor.to(self.device) for tensor in (self.images, self.labels, table))
        self.assembler = BatchAssembler(*moved, padding, place[0], size)

    def draws(self, offsets: torch.dtype = torch.int16) -> list[torch.Tensor]:
        return [tensor.to(self.device) for tensor in (self.flip, self.top.to(offsets), self.left.to(offsets))]

    def buffers(self, batch: int, dtype=torch.float32, layout="contiguous") -> list[torch.Tensor]:
        shape = (batch, 3, self.size, self.size)
        images = torch.empty(shape, dtype=dtype, device=self.device, memory_format=LAYOUTS[layout])
        return [images, torch.empty(batch, dtype=torch.int64, device=self.device)]

    def augmented(self, indices: torch.Tensor) -> torch.Tensor:
        """One image after the other, with the arithmetic of normalisation in place of a table."""
        padded = functional.pad(self.images, [self.padding] * 4)
        cropped = []
        for i in indices.tolist():
            top, left = int(self.top[i]), int(self.left[i])
            image = padded[i, :, top : top + self.side, left : left + self.side]
            cropped.append(image.flip(-1) if self.flip[i] else image)
        return self.normalised(torch.stack(cropped))

    def normalised(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels.float().div_(255).sub_(self.mean.view(3, 1, 1)).div_(self.std.view(3, 1, 1))

    def check(self, indices, out, out_labels, expected, exact: bool = True) -> None:
        assert torch.equal(out_labels.cpu(), self.labels[indices])
        if exact:
            assert torch.equal(out.cpu(), expected.to(out.dtype))
            return
        error = (out.cpu().float() - expected).abs()
        spacing = torch.finfo(out.dtype).eps if out.dtype != torch.float32 else 0.0
        accuracy = 4 * torch.finfo(torch.float32).eps * self.largest
        assert (error <= spacing * expected.abs() + accuracy).all()


def some(batch: int, count: int = M) -> torch.Tensor:
    """Both ends of the set, an image twice, and an address that is no multiple of 16 bytes."""
    indices = torch.randint(0, count, (batch + 1,), generator=torch.Generator().manual_seed(batch))
    indices[1:4] = torch.tensor([count - 1, 0, 0])[: min(batch, 3)]
    return indices[1:]


@on_every_backend
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("side", "padding", "batch"), [(8, 4, 33), (8, 0, 7), (5, 7, 1), (20, 4, 2)])
def test_crops_flips_and_normalisation_are_exact(place, side, padding, batch, layout):
    case, indices = Case(place, side, padding), some(batch)
    buffers = case.buffers(batch, layout=layout)
    case.assembler.assemble(indices.to(case.device), *case.draws(), *buffers)
    case.check(indices, *buffers, case.augmented(indices))
    case.assembler.assemble_plain(indices.to(case.device), *buffers)
    case.check(indices, *buffers, case.normalised(case.images[indices]))


@on_every_backend
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_level_is_rounded_once_to_the_buffers_dtype(place, dtype, layout):
    case = Case(place, 16, 0, count=2)
    levels = torch.arange(256, dtype=torch.uint8).view(16, 16)
    case.images.copy_(torch.stack([levels, levels.T, levels.flip(0)]).expand(2, 3, 16, 16))
    case.assembler._images.copy_(case.images)
    buffers = case.buffers(2, dtype, layout)
    case.assembler.assemble_plain(torch.tensor([1, 0], device=case.device), *buffers)
    case.check(torch.tensor([1, 0]), *buffers, case.normalised(case.images[[1, 0]]))


@on_every_backend
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("side", "size", "layout"), [(8, 20, "channels_last"), (8, 20, "contiguous"), (9, 4, "contiguous")]
)
def test_resizing_is_torchs_interpolation(place, side, size, layout, dtype):
    case, indices = Case(place, side, 3, size), some(3)
    buffers = case.buffers(3, dtype, layout)
    expected = functional.interpolate(case.augmented(indices), size=(size, size), mode="bilinear")
    case.assembler.assemble(indices.to(case.device), *case.draws(), *buffers)
    case.check(indices, *buffers, expected, exact=False)
    expected = functional.interpolate(case.normalised(case.images[indices]), size=(size, size), mode="bilinear")
    case.assembler.assemble_plain(indices.to(case.device), *buffers)
    case.check(indices, *buffers, expected, exact=False)


@on_every_backend
def test_resizing_a_cifar_image(place):
    case, indices = Case(place, 32, 4, 48, count=2), torch.tensor([1])
    buffers = case.buffers(1)
    case.assembler.assemble(indices.to(case.device), *case.draws(), *buffers)
    expected = functional.interpolate(case.augmented(indices), size=(48, 48), mode="bilinear")
    case.check(indices, *buffers, expected, exact=False)


@on_every_backend
@pytest.mark.parametrize(("side", "size", "batch"), [(8, 20, 3), (9, 4, 2), (32, 48, 1)])
def test_resized_values_are_within_one_ulp_of_the_samples_in_fp64(place, side, size, batch):
    case, indices = Case(place, side, 4, size), some(batch)
    buffers = case.buffers(batch)
    case.assembler.assemble(indices.to(case.device), *case.draws(), *buffers)
    first, share = batch_module._sampling(side, size, torch.device("cpu"))
    expected = batch_module.resized(case.augmented(indices).double(), first, share.double())
    ulp = torch.finfo(torch.float32).eps * 2.0 ** math.floor(math.log2(case.largest))
    assert (buffers[0].cpu().double() - expected).abs().max() <= ulp


@on_every_backend
@pytest.mark.parametrize("offsets", [torch.int16, torch.int32, torch.int64])
def test_offsets_and_flips_of_any_integer_type(place, offsets):
    case, indices = Case(place, 4, 2), some(7)
    flip, top, left = case.draws(offsets)
    for flips in (flip, flip.to(torch.uint8)):
        buffers = case.buffers(7)
        case.assembler.assemble(indices.to(case.device), flips, top, left, *buffers)
        case.check(indices, *buffers, case.augmented(indices))


@on_every_backend
def test_a_part_of_a_larger_buffer_is_written_and_nothing_beside_it(place):
    case, indices = Case(place, 4, 1), some(3)
    images, labels = case.buffers(6)
    case.assembler.assemble(indices.to(case.device), *case.draws(), images[1:4], labels[1:4])
    case.check(indices, images[1:4], labels[1:4], case.augmented(indices))
    assert images[[0, 4, 5]].isnan().all() and (labels[[0, 4, 5]] == torch.iinfo(torch.int64).max).all()
    case.assembler.assemble(indices[:0].to(case.device), *case.draws(), images[:0], labels[:0])


@on_every_backend
def test_images_beyond_the_reach_of_32_bits(place):
    """The last image lies past 2**31 bytes; numpy's zeros take memory on the host when they are touched."""
    side, device = 64, place[1]
    count = 2**31 // (3 * side * side) + 2
    images = torch.from_numpy(np.zeros((count, 3, side, side), dtype=np.uint8)).to(device)
    images[-1, 2, -1, -3:] = torch.tensor([7, 8, 9], dtype=torch.uint8, device=device)
    table = torch.arange(256.0, device=device).expand(3, 256).contiguous()
    assembler = BatchAssembler(images, torch.arange(count, device=device), table, 0, place[0])
    out, out_labels = torch.empty(1, 3, side, side, device=device), torch.empty(1, dtype=torch.int64, device=device)
    assembler.assemble_plain(torch.tensor([count - 1], device=device), out, out_labels)
    assert out.sum() == 24 and out[0, 2, -1, -3:].tolist() == [7, 8, 9] and out_labels.tolist() == [count - 1]


WRONG = {
    "indices": dict(indices=torch.zeros(3, dtype=torch.int32)),
    "flip": dict(flip=torch.zeros(M)),
    "top": dict(top=torch.zeros(M, dtype=torch.int8)),
    "left": dict(left=torch.zeros(M, dtype=torch.int32)),
    "out": dict(out=torch.zeros(3, 3, 4, 5)),
    "out_labels": dict(out_labels=torch.zeros(2, dtype=torch.int64)),
}


@once
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused(name):
    case = Case(("torch", "cpu"), 4, 1)
    out, out_labels = case.buffers(3)
    flip, top, left = case.draws()
    arguments = dict(indices=torch.arange(3), flip=flip, top=top, left=left, out=out, out_labels=out_labels)
    with pytest.raises(ValueError, match=f"^{name}: expected dense .*pass such a tensor"):
        case.assembler.assemble(**arguments | WRONG[name])


@once
def test_wrong_layouts_dtypes_and_sizes_are_refused():
    case = Case(("torch", "cpu"), 4, 1)
    _, labels = case.buffers(3)
    for out in (torch.zeros(3, 4, 4, 3).permute(0, 3, 2, 1), torch.zeros(3, 3, 4, 4, dtype=torch.float64)):
        with pytest.raises(ValueError, match="^out: expected dense torch.float32"):
            case.assembler.assemble_plain(torch.arange(3), out, labels)
    images, table = case.images, torch.zeros(3, 256)
    with pytest.raises(ValueError, match="^images: expected dense torch.uint8"):
        BatchAssembler(images.float(), case.labels, table, 1, "torch")
    with pytest.raises(ValueError, match="^table: expected dense torch.float32"):
        BatchAssembler(images, case.labels, table[:, :9], 1, "torch")
    with pytest.raises(ValueError, match="padding=-1, size=4: expected at least 0 and 1"):
        BatchAssembler(images, case.labels, table, -1, "torch")
    with pytest.raises(ValueError, match="expected tensors on cuda|expected an importable Triton"):
        BatchAssembler(images, case.labels, table, 1, "triton")


@once
@pytest.mark.skipif(triton is None, reason="needs Triton")
def test_the_triton_kernel_passes_this_file_in_the_interpreter():
    assert_passes_in_the_interpreter(__file__)


@gpu
@needs_card
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("size", [8, 20])
def test_a_captured_graph_reads_new_indices_and_draws(backend, size):
    case = Case((backend, "cuda"), 8, 4, size)
    indices, draws = some(33).cuda(), case.draws()
    buffers = case.buffers(33, torch.float16, "channels_last")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.assembler.assemble(indices, *draws, *buffers)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.assembler.assemble(indices, *draws, *buffers)
    case.flip, case.top, case.left = ~case.flip, case.top.flip(0), case.left.flip(0)
    for static, new in zip(draws, case.draws()):
        static.copy_(new)
    order = torch.randperm(M)[:33]
    indices.copy_(order)
    buffers[0].fill_(float("nan"))
    graph.replay()
    direct = case.buffers(33, torch.float16, "channels_last")
    case.assembler.assemble(order.cuda(), *case.draws(), *direct)
    assert torch.equal(buffers[0], direct[0]) and torch.equal(buffers[1], direct[1])
    if size == 8:
        case.check(order, *buffers, case.augmented(order))


@gpu
@needs_card
def test_batch_sizes_and_slices_share_one_compiled_kernel():
    case = Case(("triton", "cuda"), 8, 3)
    order = torch.arange(M, device="cuda")
    kernel = batch_module._assemble_kernel
    case.assembler.assemble(order[:16], *case.draws(), *case.buffers(16))
    before = variants(kernel)
    assert before >= 1
    for first, batch in ((0, 1), (1, 7), (3, 33), (5, 16), (2, 32)):
        case.assembler.assemble(order[first : first + batch], *case.draws(), *case.buffers(batch))
    assert variants(kernel) == before
