"""SGD with momentum over all parameters in one launch, with unscaling, a rate per layer and the skip of a bad step."""

# Without the postponed annotations of other files: Triton 3.2's interpreter needs `tl.constexpr` itself, not its name.

from collections.abc import Sequence

import torch
from torch import Tensor

from triaccel_bench.kernels.backend import require_backend, tl, triton
from triaccel_bench.kernels.rounding import random_bits, round_stochastically
from triaccel_bench.kernels.segments import (
    CODES,
    AddressTable,
    Gradients,
    Segments,
    address_table,
    aligned,
    convert,
    entries,
    in_fp32,
    is_dense,
)

if triton is not None:
    from triaccel_bench.kernels.rounding import brain_to_fp32, fp32_to_brain, noise
    from triaccel_bench.kernels.segments import SHIFT, chunk_pointers, load_chunk, load_live, store_copy, store_live

MOMENTUM_DTYPES = torch.float32, torch.bfloat16
"""What momentum may be kept in. FP16 has too small a range for it."""

Window = tuple[slice, ...]
"""An index of a parameter: the part of it that its copy holds."""


@torch.no_grad()
def sgd_reference(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momenta: Sequence[Tensor],
    layer_of: Sequence[int],
    momentum: float,
    weight_decay: float,
    lr: Tensor,
    rates: Tensor,
    inverse_scale: Tensor,
    nonfinite: Tensor,
    copies: Sequence[Tensor | None] = (),
    draw: Tensor | None = None,
) -> None:
    """What ``FusedSGD.step`` computes, by torch's own fused update: one call for each rate.

    ``params`` and ``momenta`` are written, and ``grads`` (in their layout) are unscaled in place
    unless the step is skipped; of those of 16 bits it is an FP32 copy that is. ``copies`` are
    written even then, from parameters that have not changed. Momenta in BF16 are updated in FP32
    copies. All memory is taken before anything is written. Can be captured.
    """
    grads = in_fp32(grads)
    velocities = in_fp32(momenta) if momentum else []
    drawn = [
        (velocity, random_bits(draw, index, velocity.numel()), held)
        for index, (velocity, held) in enumerate(zip(velocities, momenta))
        if velocity is not held
    ]
    groups: dict[int, list[int]] = {}
    for index, (param, layer) in enumerate(zip(params, layer_of)):
        if param.numel():
            groups.setdefault(layer, []).append(index)
    layer_lrs = (lr * rates).unbind()
    scale = inverse_scale.reciprocal()
    for layer, members in groups.items():
        # It leaves every tensor untouched where found_inf is 1; a product with 0 would spread NaN instead.
        torch._fused_sgd_(
            [params[index] for index in members],
            [grads[index] for index in members],
            [velocities[index] for index in members] if momentum else [],
            weight_decay=weight_decay,
            momentum=momentum,
            lr=lr if layer < 0 else layer_lrs[layer],
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
            grad_scale=scale,
            found_inf=nonfinite,
        )
    for velocity, bits, held in drawn:
        # Of a skipped step too: a value that comes from BF16 goes back as it was.
        round_stochastically(velocity, bits, held)
    _write_copies(params, copies)


def _write_copies(params: Sequence[Tensor], copies: Sequence[Tensor | None]) -> None:
    pairs = [(param, copy) for param, copy in zip(params, copies) if copy is not None]
    convert([param for param, _ in pairs], [copy for _, copy in pairs])


if triton is not None:

    @triton.jit
    def _update_chunk(
        grad_entry,
        param_entry,
        momentum_entry,
        copy_entry,
        segment,
        draw,
        start,
        lane,
        live,
        rate,
        inverse_scale,
        momentum,
        weight_decay,
        NARROW: tl.constexpr,
        FULL: tl.constexpr,
        ALIGNED: tl.constexpr,
    ):
        params = chunk_pointers(param_entry, start, lane, tl.float32, ALIGNED)
        momenta = chunk_pointers(momentum_entry, start, lane, tl.float32, ALIGNED)
        param = load_live(params, live, FULL)
        if not NARROW:
            old = load_live(momenta, live, FULL)
        elif FULL:
            # By masks: a branch would wait in its conversion before the next load is begun. They are one number for
            # all lanes, so that accesses stay wide; with the end of a tensor in them they would take the registers.
            brains = chunk_pointers(momentum_entry, start, lane, tl.int16, ALIGNED)
            is_brain = momentum_entry >> SHIFT != 0
            old = tl.load(momenta, mask=momentum_entry >> SHIFT == 0, other=0.0)
            bits = tl.load(brains, mask=is_brain, other=0)
        else:
            old = load_chunk(momentum_entry, start, lane, live, FULL, ALIGNED)
        grad = load_chunk(grad_entry, start, lane, live, FULL, ALIGNED) * inverse_scale + weight_decay * param
        if NARROW and FULL:
            old = tl.where(is_brain, brain_to_fp32(bits), old)
        velocity = momentum * old + grad
        if NARROW:
            if momentum_entry >> SHIFT == 0:
                store_live(momenta, velocity, live, FULL)
            else:
                rounded = fp32_to_brain(velocity, noise(draw, segment, start, lane))
                store_live(chunk_pointers(momentum_entry, start, lane, tl.int16, ALIGNED), rounded, live, FULL)
        else:
            store_live(momenta, velocity, live, FULL)
        param = param - rate * velocity
        store_live(params, param, live, FULL)
        store_copy(copy_entry, start, lane, param, live, FULL, ALIGNED)

    @triton.jit(do_not_specialize=["lr", "rates", "inverse_scale", "nonfinite", "draw"])
    def _sgd_kernel(
        grad_table,
        param_table,
        momentum_table,
        copy_table,
        segment_of_chunk,
        first_chunk,
        elements,
        layer_of,
        lr,
        rates,
        inverse_scale,
        nonfinite,
        draw,
        momentum,
        weight_decay,
        NARROW: tl.constexpr,
        ALIGNED: tl.constexpr,
        CHUNK: tl.constexpr,
    ):
        """Each program updates one chunk of one parameter, or returns at once if the step is to be skipped.

        NARROW: a momentum may be in BF16; otherwise ``draw`` is not read.
        """
        # Before the flag is looked at: lookups that wait for each other cost more than the few that a skip wastes.
        chunk = tl.program_id(0)
        segment = tl.load(segment_of_chunk + chunk)
        size = tl.load(elements + segment)
        start = (chunk - tl.load(first_chunk + segment)).to(tl.int64) * CHUNK
        grad = tl.load(grad_table + segment)
        param = tl.load(param_table + segment)
        velocity = tl.load(momentum_table + segment)
        copy = tl.load(copy_table + segment)
        layer = tl.load(layer_of + segment)
        rate = tl.load(lr) * tl.load(rates + layer, mask=layer >= 0, other=1.0)
        scale = tl.load(inverse_scale)
        drawn = 0
        if NARROW:
            drawn = tl.load(draw)
        if tl.load(nonfinite) == 0.0:
            count = tl.minimum(size - start, CHUNK).to(tl.int32)
            lane = tl.arange(0, CHUNK)
            live = lane < count
            # fmt: off
            if count == CHUNK:
                _update_chunk(
                    grad, param, velocity, copy, segment, drawn, start, lane, live,
                    rate, scale, momentum, weight_decay, NARROW, True, ALIGNED,
                )
            else:
                _update_chunk(
                    grad, param, velocity, copy, segment, drawn, start, lane, live,
                    rate, scale, momentum, weight_decay, NARROW, False, ALIGNED,
                )
            # fmt: on


class FusedSGD:
    """SGD with momentum over FP32 parameters, without a wait for the device (rates: section 3.2 of the paper).

    g = grad / scale + weight_decay w;  m = momentum m + g;  w = w - lr r_l m, as
    ``torch.optim.SGD`` computes with dampening 0 (m starts at zero), times the rate r_l of the
    layer that the parameter belongs to. A step whose ``nonfinite`` is 1 leaves parameters and
    momenta as they are, bit for bit.

    A parameter may have a copy of 16 bits, for a layer that computes in that dtype: the same
    launch writes w, rounded to nearest even, into it. It is never read. A copy of a part of w, for a
    layer that reads no more, is written after that launch; its gradient is zero elsewhere.

    Momenta may be kept in BF16 (``set_momentum_dtypes``). A step computes with them in FP32, w moves
    by the m that has not been rounded, and m is stored by stochastic rounding: up or down, such that
    its mean is m. Rounded to nearest, (1 - momentum) m of an old m and small gradients would be lost.

    Args:
        params: the parameters; their storage and layout must stay as they are.
        layer_of: for each parameter the index into ``rates``, or -1 for the rate 1.
        backend: ``"triton"`` (one launch) or ``"torch"`` (the reference).
        momentum: factor of the old momentum, in [0, 1).
        weight_decay: factor of the L2 term.
        copies: as for ``set_copies``; ``None`` for no copy at all.

    Attributes:
        momenta: the momentum buffers, FP32 at first, each in its parameter's layout; to restore them, copy
            into them. Without momentum they mean nothing.

    Raises:
        ValueError: a parameter is not dense FP32 on one device, ``layer_of`` or a copy does not fit, there is
            no element at all, or the backend cannot run on the device.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        layer_of: Sequence[int],
        backend: str,
        momentum: float,
        weight_decay: float,
        copies: Sequence[Tensor | None] | None = None,
    ) -> None:
        if len(layer_of) != len(params) or any(layer < -1 for layer in layer_of):
            raise ValueError(
                f"layer_of={list(layer_of)}: expected an index or -1 for each of {len(params)} parameters; "
                "pass one for every parameter"
            )
        for index, param in enumerate(params):
            if param.dtype != torch.float32 or param.device != params[0].device or not is_dense(param):
                raise ValueError(
                    f"parameter {index}: expected dense torch.float32 on {params[0].device}, got {param.dtype} with "
                    f"strides {param.stride()} on {param.device}; keep FP32 parameters on one device"
                )
        device = params[0].device if params else torch.device("cpu")
        require_backend(backend, device)
        self._params, self._layer_of = [param.detach() for param in params], list(layer_of)
        self._momentum, self._weight_decay = float(momentum), float(weight_decay)
        self._segments = Segments([param.numel() for param in params], device)
        self.momenta = [torch.zeros_like(param) for param in self._params]
        self._table: AddressTable | None = None
        if backend == "triton":
            self._table = AddressTable(len(params), device)
            self._param_table = address_table(self._params, device)
            self._momentum_tables = AddressTable(len(params), device)
            self._copy_tables = AddressTable(len(params), device)
            self._layers = torch.tensor(self._layer_of, dtype=torch.int32, device=device)
        self.set_copies([None] * len(params) if copies is None else copies)

    @torch.no_grad()
    def set_copies(self, copies: Sequence[Tensor | None], windows: Sequence[Window | None] | None = None) -> None:
        """Replace the copies, outside of capture; the new ones are written at once, so that they are in step.

        A graph captured before goes on to write the copies that it was captured with: they have to
        live as long as it is replayed.

        Args:
            copies: for each parameter FP16 or BF16 in its shape and layout, or ``None``. A leaf of autograd
                is welcome; values restored into a parameter reach its copy with the next step, or by this.
            windows: for each parameter the index of the part that its copy holds (in any layout), or ``None``:
                the copy holds all of it.

        Raises:
            ValueError: there is not one for each parameter, or one is not as its parameter.
        """
        windows = [None] * len(copies) if windows is None else list(windows)
        if not len(copies) == len(windows) == len(self._params):
            raise ValueError(
                f"copies and windows: expected {len(self._params)}, got {len(copies)} and {len(windows)}; "
                "pass one or None for every parameter"
            )
        parts = [param if window is None else param[window] for param, window in zip(self._params, windows)]
        for index, (part, copy, window) in enumerate(zip(parts, copies, windows)):
            if copy is not None and not _is_copy(part, copy, window is not None):
                raise ValueError(
                    f"copy {index}: expected torch.float16 or torch.bfloat16 of shape {tuple(part.shape)} with "
                    f"strides {part.stride() if window is None else 'of any layout'} on {part.device}, got "
                    f"{copy.dtype} of shape {tuple(copy.shape)} with strides {copy.stride()} on {copy.device}; "
                    f"make it with param{'' if window is None else '[window]'}.to(dtype)"
                )
        plain = [None if copy is None else copy.detach() for copy in copies]
        self._windows = windows
        self._copies = [copy if window is None else None for copy, window in zip(plain, windows)]
        self._parts = [(part, copy) for part, copy, kept in zip(parts, plain, self._copies) if copy is not kept]
        _write_copies(self._params, self._copies)
        self._write_parts()
        self._bind()

    @torch.no_grad()
    def set_momentum_dtypes(self, dtypes: Sequence[torch.dtype]) -> None:
        """Say, outside of capture, what each momentum is kept in; its value stays, to nearest where it narrows.

        A momentum whose dtype stays is left alone; another is a new tensor in ``momenta``. A graph
        captured before would go on with the old tensors: it must not be replayed any more.

        Args:
            dtypes: for each parameter ``torch.float32`` or ``torch.bfloat16``.

        Raises:
            ValueError: there is not one for each parameter, or another dtype.
        """
        if len(dtypes) != len(self._params):
            raise ValueError(
                f"momentum dtypes: expected {len(self._params)}, got {len(dtypes)}; pass one for every parameter"
            )
        for index, dtype in enumerate(dtypes):
            if dtype not in MOMENTUM_DTYPES:
                raise ValueError(
                    f"momentum dtype {index}: expected torch.float32 or torch.bfloat16, got {dtype}; pass one of them"
                )
        # All of them before the first is replaced: memory may not suffice.
        self.momenta[:] = [momentum.to(dtype) for momentum, dtype in zip(self.momenta, dtypes)]
        self._bind()

    def _bind(self) -> None:
        if self._table is not None:
            # Never rewritten, as graphs read them too; the few sets of tensors in a run cost 8 bytes a tensor each.
            self._copy_table = self._copy_tables.bind(self._copies)
            self._momentum_table = self._momentum_tables.bind(self.momenta)
            self._aligned = all(map(aligned, map(entries, (self._params, self.momenta, self._copies))))

    def gather(self, grads: Sequence[Tensor]) -> Gradients:
        """Check and lay out one step's gradients once, for ``GradientMoments.update`` and ``step``.

        Args:
            grads: FP32, FP16 or BF16 (which may differ between them and from step to step, and from the
                copies), in the order of the parameters, with any strides; where a copy holds a part of its
                parameter, of all of it or of that part.

        Raises:
            ValueError: a gradient is missing, differs from its parameter in shape or has another dtype.
        """
        if len(grads) == len(self._windows):
            grads = [_whole(param, grad, window) for param, grad, window in zip(self._params, grads, self._windows)]
        self._segments.check(grads)
        laid_out = [_laid_out_as(param, grad, index) for index, (param, grad) in enumerate(zip(self._params, grads))]
        # The reference computes in FP32 throughout: converted here, both passes read the same copy.
        return Gradients(in_fp32(laid_out) if self._table is None else laid_out, self._segments, self._table)

    def step(
        self,
        grads: Sequence[Tensor] | Gradients,
        lr: Tensor,
        rates: Tensor,
        inverse_scale: Tensor,
        nonfinite: Tensor,
        draw: Tensor | None = None,
    ) -> None:
        """Apply one update; may be captured in a CUDA graph, then see ``flush``.

        Args:
            grads: as for ``gather``, or what it returned. Scratch afterwards: the reference unscales
                them in place.
            lr: f32 scalar on the device.
            rates: f32 ``[layers]`` on the device.
            inverse_scale: f32 scalar on the device, 1 / loss scale.
            nonfinite: f32 ``[1]`` on the device; 1.0 skips the step.
            draw: int32 of one element on the device, another value for every step that is applied, as
                ``GradientMoments.updates`` has; due while a momentum is in BF16. Momenta are rounded by random
                bits that are a function of it, the parameter's index and the element's place.

        Raises:
            ValueError: a gradient is refused by ``gather``, another optimizer gathered them, an argument is not
                FP32 on the device, ``rates`` is too short, or ``draw`` is not as told or missing.
        """
        gathered = grads if isinstance(grads, Gradients) else self.gather(grads)
        if gathered.segments is not self._segments:
            raise ValueError(
                "gathered gradients: expected those of this optimizer's own gather(), got another's; "
                "call gather() of the optimizer that steps"
            )
        self._segments.check_values(lr=lr, rates=rates, inverse_scale=inverse_scale, nonfinite=nonfinite)
        if rates.numel() <= max(self._layer_of):
            raise ValueError(
                f"rates: expected at least {max(self._layer_of) + 1} elements, got {rates.numel()}; "
                "pass one rate for each layer"
            )
        narrow = any(momentum.dtype != torch.float32 for momentum in self.momenta)
        if narrow or draw is not None:
            self._check_draw(draw)
        if self._table is None:
            sgd_reference(
                self._params,
                gathered.tensors,
                self.momenta,
                self._layer_of,
                self._momentum,
                self._weight_decay,
                lr,
                rates,
                inverse_scale,
                nonfinite,
                self._copies,
                draw,
            )
            self._write_parts()
            return
        cut = self._segments
        with torch.cuda.device_of(lr):
            _sgd_kernel[(cut.chunks,)](
                gathered.on_device(self._table),
                self._param_table,
                self._momentum_table,
                self._copy_table,
                cut.segment_of_chunk,
                cut.first_chunk,
                cut.elements,
                self._layers,
                lr,
                rates,
                inverse_scale,
                nonfinite,
                self._layers if draw is None else draw,
                self._momentum,
                self._weight_decay,
                NARROW=narrow,
                ALIGNED=self._aligned and gathered.aligned,
                CHUNK=cut.chunk,
                # Eight elements a thread: with more of its four operands in registers one program would fill a
                # multiprocessor, which then idles while the program looks up its addresses.
                num_warps=16,
                # Two programs of 512 threads a multiprocessor; left alone, the compiler takes more for BF16 momenta.
                maxnreg=64 if narrow else None,
            )
        self._write_parts()

    @torch.no_grad()
    def _write_parts(self) -> None:
        # Of a skipped step too: from parameters that have not changed.
        convert([part for part, _ in self._parts], [copy for _, copy in self._parts])

    def _check_draw(self, draw: Tensor | None) -> None:
        device = self._segments.device
        if draw is None or draw.dtype != torch.int32 or draw.numel() != 1 or draw.device != device:
            got = "None" if draw is None else f"{draw.dtype} with {draw.numel()} elements on {draw.device}"
            raise ValueError(
                f"draw: expected torch.int32 with 1 element on {device}, got {got}; "
                "pass a count of steps, such as GradientMoments.updates, while a momentum is in torch.bfloat16"
            )

    def flush(self) -> None:
        """Finish a capture: write the addresses its graph reads. Call it after the capture, before the first replay."""
        if self._table is not None:
            self._table.flush()


def _is_copy(part: Tensor, copy: Tensor, any_layout: bool) -> bool:
    return (
        copy.dtype != part.dtype
        and copy.dtype in CODES
        and copy.device == part.device
        and copy.shape == part.shape
        and (any_layout or _lies_as(part, copy))
    )


def _whole(param: Tensor, grad: Tensor, window: Window | None) -> Tensor:
    """The gradient of all of ``param``, where ``grad`` is that of a part of it."""
    if window is None or grad is None or grad.shape == param.shape or grad.shape != param[window].shape:
        return grad
    whole = torch.zeros_like(param, dtype=grad.dtype)
    whole[window] = grad
    return whole


def _lies_as(param: Tensor, tensor: Tensor) -> bool:
    """Whether element follows element alike; a dimension of one element may carry any stride."""
    return all(a == b for a, b, size in zip(param.stride(), tensor.stride(), param.shape) if size != 1)


def _laid_out_as(param: Tensor, grad: Tensor, index: int) -> Tensor:
    if grad.shape != param.shape:
        raise ValueError(
            f"gradient {index}: expected shape {tuple(param.shape)}, got {tuple(grad.shape)}; "
            "pass gradients in the parameters' order"
        )
    if grad.stride() == param.stride():
        return grad
    if not _lies_as(param, grad):
        return torch.empty_like(param).copy_(grad)
    return grad.as_strided(param.shape, param.stride())
