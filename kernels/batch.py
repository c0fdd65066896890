"""A batch out of uint8 images: gather, crop, flip, normalise, resize and write the input buffer, in one launch."""

# Without the postponed annotations of other files: Triton 3.2's interpreter needs `tl.constexpr` itself, not its name.

import torch
from torch import Tensor

from triaccel_bench.kernels.backend import require_backend, tl, triton

LEVELS = 256
"""Values of a uint8, hence entries of the table for each channel."""


def assemble_reference(
    images: Tensor,
    labels: Tensor,
    table: Tensor,
    padding: int,
    indices: Tensor,
    draws: tuple[Tensor, Tensor, Tensor] | None,
    out: Tensor,
    out_labels: Tensor,
    sampling: tuple[Tensor, Tensor] | None = None,
) -> None:
    """What ``BatchAssembler`` computes, in torch operations that can be captured; ``out`` and its labels are written.

    ``draws`` holds flip, top and left, or is ``None`` for the images as they are; ``sampling`` is where a
    resized image looks, ``None`` for one that is not.
    """
    batch, side = len(indices), images.shape[-1]
    levels = images.index_select(0, indices).view(batch, 3, -1)
    if draws is not None:
        flip, top, left = (draw[indices].unsqueeze(1) for draw in draws)
        pixels = torch.arange(side, device=images.device)
        rows = (pixels + (top - padding)).unsqueeze(2)
        columns = (torch.where(flip != 0, pixels.flip(0), pixels) + (left - padding)).unsqueeze(1)
        inside = (rows >= 0) & (rows < side) & (columns >= 0) & (columns < side)
        place = rows.clamp(0, side - 1) * side + columns.clamp(0, side - 1)
        levels = levels.gather(2, place.view(batch, 1, -1).expand(-1, 3, -1)) * inside.view(batch, 1, -1)
    normalised = table.expand(batch, 3, LEVELS).gather(2, levels.long()).view(batch, 3, side, side)
    out.copy_(normalised if sampling is None else resized(normalised, *sampling))
    out_labels.copy_(labels[indices])


def resized(images: Tensor, first: Tensor, share: Tensor) -> Tensor:
    """Bilinear samples ``[..., size, size]`` of square images: between ``first`` and its neighbour, its ``share``.

    Not ``interpolate``, whose source coordinates on a CUDA device are rounded otherwise than on a CPU.
    """
    first = first.long()
    second = (first + 1).clamp(max=images.shape[-1] - 1)
    rows = (1 - share) * images.index_select(-1, first) + share * images.index_select(-1, second)
    down = share.unsqueeze(1)
    return (1 - down) * rows.index_select(-2, first) + down * rows.index_select(-2, second)


if triton is not None:

    @triton.jit
    def _normalised(
        image,
        table,
        channel,
        row,
        column,
        flip,
        top,
        left,
        live,
        SIDE: tl.constexpr,
        AUGMENT: tl.constexpr,
        LEVELS: tl.constexpr,
    ):
        """table[channel, level] of the cropped and flipped image's pixel; the padding around the image has level 0."""
        inside = live
        if AUGMENT:
            row = row + top
            column = tl.where(flip != 0, SIDE - 1 - column, column) + left
            inside = live & (row >= 0) & (row < SIDE) & (column >= 0) & (column < SIDE)
        level = tl.load(image + (channel * SIDE + row) * SIDE + column, mask=inside, other=0).to(tl.int32)
        return tl.load(table + channel * LEVELS + level, mask=live, other=0.0)

    # Batches are slices: whether such an address is a multiple of 16 bytes must not decide which kernel runs.
    @triton.jit(do_not_specialize=["indices", "flips", "tops", "lefts", "out_labels"])
    def _assemble_kernel(
        images,
        labels,
        table,
        first_neighbour,
        second_share,
        indices,
        flips,
        tops,
        lefts,
        out,
        out_labels,
        SIDE: tl.constexpr,
        SIZE: tl.constexpr,
        PADDING: tl.constexpr,
        AUGMENT: tl.constexpr,
        CHANNELS_LAST: tl.constexpr,
        LEVELS: tl.constexpr,
        CHUNKS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """Each program writes one chunk of one sample, in the order in which ``out`` lies in memory."""
        sample = tl.program_id(0) // CHUNKS
        chunk = tl.program_id(0) % CHUNKS
        index = tl.load(indices + sample).to(tl.int64)
        if chunk == 0:
            tl.store(out_labels + sample, tl.load(labels + index))
        element = chunk * BLOCK + tl.arange(0, BLOCK)
        live = element < 3 * SIZE * SIZE
        if CHANNELS_LAST:
            channel = element % 3
            pixel = element // 3
        else:
            channel = element // (SIZE * SIZE)
            pixel = element % (SIZE * SIZE)
        row = pixel // SIZE
        column = pixel % SIZE
        image = images + index * (3 * SIDE * SIDE)
        flip = 0
        top = 0
        left = 0
        if AUGMENT:
            flip = tl.load(flips + index).to(tl.int32)
            top = tl.load(tops + index).to(tl.int32) - PADDING
            left = tl.load(lefts + index).to(tl.int32) - PADDING
        if SIZE == SIDE:
            value = _normalised(image, table, channel, row, column, flip, top, left, live, SIDE, AUGMENT, LEVELS)
        else:
            row0 = tl.load(first_neighbour + row, mask=live, other=0)
            column0 = tl.load(first_neighbour + column, mask=live, other=0)
            row1 = tl.minimum(row0 + 1, SIDE - 1)
            column1 = tl.minimum(column0 + 1, SIDE - 1)
            down = tl.load(second_share + row, mask=live, other=0.0)
            right = tl.load(second_share + column, mask=live, other=0.0)
            value00 = _normalised(image, table, channel, row0, column0, flip, top, left, live, SIDE, AUGMENT, LEVELS)
            value01 = _normalised(image, table, channel, row0, column1, flip, top, left, live, SIDE, AUGMENT, LEVELS)
            value10 = _normalised(image, table, channel, row1, column0, flip, top, left, live, SIDE, AUGMENT, LEVELS)
            value11 = _normalised(image, table, channel, row1, column1, flip, top, left, live, SIDE, AUGMENT, LEVELS)
            # Spelled out, because the compiler would choose for itself which of two products to fuse.
            upper = tl.fma(1.0 - right, value00, right * value01)
            lower = tl.fma(1.0 - right, value10, right * value11)
            value = tl.fma(1.0 - down, upper, down * lower)
        place = out + sample.to(tl.int64) * (3 * SIZE * SIZE) + element
        tl.store(place, value.to(out.dtype.element_ty), mask=live)


class BatchAssembler:
    """Batches of one set of images, written into buffers that the caller owns; never waits for the device.

    out[b, c, y, x] = table[c, u], with u the level of image ``indices[b]`` at row y + top - padding
    and column x' + left - padding, where x' = S - 1 - x in a mirrored sample and x in others, and
    u = 0 outside of the image. Without draws u is the image's own level at (y, x). The table makes
    normalisation exact: every value is rounded once, to the dtype of ``out``.

    If ``size`` is not S the result is resized as ``torch.nn.functional.interpolate`` does it on a CPU
    (bilinear, without aligned corners and antialiasing), in FP32 with the same coordinates. Before the
    rounding to ``out``'s dtype either backend is within 1 ulp, of the table's largest magnitude, of the
    same samples in FP64; torch's own kernels differ from each other by more.

    Indices and draws are read on the device at launch time, so that a captured graph sees what they
    hold when it is replayed. Nothing checks that indices lie in [0, M).

    Args:
        images: uint8 ``[M, 3, S, S]``, contiguous.
        labels: int64 ``[M]``.
        table: f32 ``[3, 256]``, the normalised value of every level of each channel.
        padding: pixels of level 0 around the image, from which crops are taken.
        backend: ``"triton"`` (one launch) or ``"torch"`` (the reference).
        size: R, the side of the images in a batch; ``None`` is S.

    Raises:
        ValueError: an argument is not of the kind above, or the backend cannot run on the device.
    """

    def __init__(
        self, images: Tensor, labels: Tensor, table: Tensor, padding: int, backend: str, size: int | None = None
    ) -> None:
        count, side = len(images), images.shape[-1]
        self._device = images.device
        self._expect("images", images, torch.uint8, (count, 3, side, side))
        self._expect("labels", labels, torch.int64, (count,))
        self._expect("table", table, torch.float32, (3, LEVELS))
        size = side if size is None else size
        if padding < 0 or size < 1:
            raise ValueError(f"padding={padding}, size={size}: expected at least 0 and 1; pass numbers of pixels")
        require_backend(backend, self._device)
        self._images, self._labels, self._table = images, labels, table
        self._padding, self._size, self._backend = padding, size, backend
        self._sampling = _sampling(side, size, self._device)

    def assemble(
        self, indices: Tensor, flip: Tensor, top: Tensor, left: Tensor, out: Tensor, out_labels: Tensor
    ) -> None:
        """Write the augmented images ``indices`` and their labels; may be captured in a CUDA graph.

        Args:
            indices: int64 ``[B]``, in [0, M).
            flip: bool or uint8 ``[M]`` by image, not zero where it is mirrored.
            top, left: int16, int32 or int64 ``[M]`` by image, the crop's corner in the padded image.
            out: fp16, bf16 or fp32 ``[B, 3, R, R]``, contiguous or channels_last.
            out_labels: int64 ``[B]``.

        Raises:
            ValueError: an argument differs in shape, dtype, layout or device.
        """
        count = (len(self._images),)
        self._expect("flip", flip, torch.uint8 if flip.dtype == torch.uint8 else torch.bool, count)
        kind = top.dtype if top.dtype in (torch.int32, torch.int64) else torch.int16
        self._expect("top", top, kind, count)
        self._expect("left", left, kind, count)
        self._write(indices, (flip, top, left), out, out_labels)

    def assemble_plain(self, indices: Tensor, out: Tensor, out_labels: Tensor) -> None:
        """Write the images ``indices`` without crop and flip, and their labels; else as ``assemble``."""
        self._write(indices, None, out, out_labels)

    def _write(
        self, indices: Tensor, draws: tuple[Tensor, Tensor, Tensor] | None, out: Tensor, out_labels: Tensor
    ) -> None:
        batch, size = len(indices), self._size
        self._expect("indices", indices, torch.int64, (batch,))
        self._expect("out_labels", out_labels, torch.int64, (batch,))
        channels_last = not out.is_contiguous()
        dtype = out.dtype if out.dtype in (torch.float16, torch.bfloat16) else torch.float32
        layout = torch.channels_last if channels_last and out.dim() == 4 else torch.contiguous_format
        self._expect("out", out, dtype, (batch, 3, size, size), layout)
        if batch == 0:
            return
        side = self._images.shape[-1]
        if self._backend == "torch":
            where = None if size == side else self._sampling
            given = self._images, self._labels, self._table, self._padding
            assemble_reference(*given, indices, draws, out, out_labels, where)
            return
        elements = 3 * size * size
        # Eight elements a thread store 16 bytes of a half type at once; a resized one takes four times the registers.
        block = min(1024 if size == side else 512, triton.next_power_of_2(elements))
        chunks = triton.cdiv(elements, block)
        # Stand-ins that are not read.
        flip, top, left = draws or (self._images, self._images, self._images)
        with torch.cuda.device_of(out):
            _assemble_kernel[(batch * chunks,)](
                self._images,
                self._labels,
                self._table,
                *self._sampling,
                indices,
                flip.view(torch.uint8),
                top,
                left,
                out,
                out_labels,
                SIDE=side,
                SIZE=size,
                PADDING=self._padding,
                AUGMENT=draws is not None,
                CHANNELS_LAST=channels_last,
                LEVELS=LEVELS,
                CHUNKS=chunks,
                BLOCK=block,
                num_warps=4 if block >= 512 else 1,
            )

    def _expect(
        self,
        name: str,
        tensor: Tensor,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        layout: torch.memory_format = torch.contiguous_format,
    ) -> None:
        if (
            tensor.dtype != dtype
            or tensor.shape != shape
            or tensor.device != self._device
            or not tensor.is_contiguous(memory_format=layout)
        ):
            raise ValueError(
                f"{name}: expected dense {dtype} {list(shape)} on {self._device}, got {tensor.dtype} "
                f"{list(tensor.shape)} with strides {tensor.stride()} on {tensor.device}; pass such a tensor"
            )


def _sampling(side: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """By destination pixel: the first of two neighbours, int32 ``[size]``, and the second one's share, f32 ``[size]``.

    The source coordinate max((pixel + 1/2) side/size - 1/2, 0) with its FP32 scale, rounded once at the end, as
    torch's compiled code has it: with the scale's rounding, up to 1e-5 of a pixel off the exact one.
    """
    scale = (torch.tensor(float(side)) / size).double()
    # Exact in FP64, so that the only rounding is that of the fused multiply-add.
    source = (scale * (torch.arange(size, dtype=torch.float64) + 0.5) - 0.5).float().clamp(min=0)
    first = source.int().clamp(max=side - 1)
    share = (source - first).clamp(0, 1)
    return first.to(device), share.to(device)
