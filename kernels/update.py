"""SGD with momentum over all parameters in one launch, with unscaling, a rate per layer and the skip of a bad step."""

# Without the postponed annotations of other files: Triton 3.2's interpreter needs `tl.constexpr` itself, not its name.

from collections.abc import Sequence

import torch
from torch import Tensor

from triaccel_bench.kernels.backend import require_backend, tl, triton
from triaccel_bench.kernels.segments import AddressTable, Segments, address_table, is_dense


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
) -> None:
    """What ``FusedSGD.step`` computes, by torch's own fused update: one call for each rate, no extra memory.

    ``params`` and ``momenta`` are written, and ``grads`` (in their layout) are unscaled in place
    unless the step is skipped. Can be captured.
    """
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
            [momenta[index] for index in members] if momentum else [],
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


if triton is not None:

    @triton.jit(do_not_specialize=["lr", "rates", "inverse_scale", "nonfinite"])
    def _sgd_kernel(
        grad_addresses,
        param_addresses,
        momentum_addresses,
        segment_of_chunk,
        first_chunk,
        elements,
        layer_of,
        lr,
        rates,
        inverse_scale,
        nonfinite,
        momentum,
        weight_decay,
        CHUNK: tl.constexpr,
    ):
        """Each program updates one chunk of one parameter, or returns at once if the step is to be skipped."""
        if tl.load(nonfinite) == 0.0:
            chunk = tl.program_id(0)
            segment = tl.load(segment_of_chunk + chunk)
            start = (chunk - tl.load(first_chunk + segment)).to(tl.int64) * CHUNK
            place = start + tl.arange(0, CHUNK)
            live = place < tl.load(elements + segment)
            grads = tl.load(grad_addresses + segment).to(tl.pointer_type(tl.float32)) + place
            params = tl.load(param_addresses + segment).to(tl.pointer_type(tl.float32)) + place
            momenta = tl.load(momentum_addresses + segment).to(tl.pointer_type(tl.float32)) + place
            layer = tl.load(layer_of + segment)
            rate = tl.load(lr) * tl.load(rates + layer, mask=layer >= 0, other=1.0)
            param = tl.load(params, mask=live, other=0.0)
            grad = tl.load(grads, mask=live, other=0.0) * tl.load(inverse_scale) + weight_decay * param
            velocity = momentum * tl.load(momenta, mask=live, other=0.0) + grad
            tl.store(momenta, velocity, mask=live)
            tl.store(params, param - rate * velocity, mask=live)


class FusedSGD:
    """SGD with momentum over FP32 parameters, without a wait for the device (rates: section 3.2 of the paper).

    g = grad / scale + weight_decay w;  m = momentum m + g;  w = w - lr r_l m, as
    ``torch.optim.SGD`` computes with dampening 0 (m starts at zero), times the rate r_l of the
    layer that the parameter belongs to. A step whose ``nonfinite`` is 1 leaves parameters and
    momenta as they are, bit for bit.

    Args:
        params: the parameters; their storage and layout must stay as they are.
        layer_of: for each parameter the index into ``rates``, or -1 for the rate 1.
        backend: ``"triton"`` (one launch) or ``"torch"`` (the reference).
        momentum: factor of the old momentum, in [0, 1).
        weight_decay: factor of the L2 term.

    Attributes:
        momenta: the momentum buffers, FP32, each in its parameter's layout; to restore them, copy into them.
            Without momentum they mean nothing.

    Raises:
        ValueError: a parameter is not dense FP32 on one device, ``layer_of`` does not fit, there is no
            element at all, or the backend cannot run on the device.
    """

    def __init__(
        self, params: Sequence[Tensor], layer_of: Sequence[int], backend: str, momentum: float, weight_decay: float
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
            self._param_addresses = address_table(self._params, device)
            self._momentum_addresses = address_table(self.momenta, device)
            self._layers = torch.tensor(self._layer_of, dtype=torch.int32, device=device)

    def step(
        self, grads: Sequence[Tensor], lr: Tensor, rates: Tensor, inverse_scale: Tensor, nonfinite: Tensor
    ) -> None:
        """Apply one update; may be captured in a CUDA graph, then see ``flush``.

        Args:
            grads: FP32, in the order of the parameters, with any strides. Scratch afterwards: the
                reference unscales them in place.
            lr: f32 scalar on the device.
            rates: f32 ``[layers]`` on the device.
            inverse_scale: f32 scalar on the device, 1 / loss scale.
            nonfinite: f32 ``[1]`` on the device; 1.0 skips the step.

        Raises:
            ValueError: a gradient is missing or differs from its parameter in shape, an argument is not
                FP32 on the device, or ``rates`` is too short.
        """
        self._segments.check(grads)
        self._segments.check_values(lr=lr, rates=rates, inverse_scale=inverse_scale, nonfinite=nonfinite)
        if rates.numel() <= max(self._layer_of):
            raise ValueError(
                f"rates: expected at least {max(self._layer_of) + 1} elements, got {rates.numel()}; "
                "pass one rate for each layer"
            )
        grads = [_laid_out_as(param, grad, index) for index, (param, grad) in enumerate(zip(self._params, grads))]
        if self._table is None:
            sgd_reference(
                self._params,
                grads,
                self.momenta,
                self._layer_of,
                self._momentum,
                self._weight_decay,
                lr,
                rates,
                inverse_scale,
                nonfinite,
            )
            return
        cut = self._segments
        with torch.cuda.device_of(lr):
            _sgd_kernel[(cut.chunks,)](
                self._table.of(grads),
                self._param_addresses,
                self._momentum_addresses,
                cut.segment_of_chunk,
                cut.first_chunk,
                cut.elements,
                self._layers,
                lr,
                rates,
                inverse_scale,
                nonfinite,
                self._momentum,
                self._weight_decay,
                CHUNK=cut.chunk,
                num_warps=8,
            )

    def bind(self, grads: Sequence[Tensor]) -> None:
        """Prepare, outside of capture, for captures that will ``step`` with exactly these tensors.

        They are to be laid out as the parameters: a copy made for layout has another address.
        """
        if self._table is not None:
            self._table.bind(grads)

    def flush(self) -> None:
        """Finish a capture: write the addresses its graph reads. Call it after the capture, before the first replay."""
        if self._table is not None:
            self._table.flush()


def _laid_out_as(param: Tensor, grad: Tensor, index: int) -> Tensor:
    if grad.shape != param.shape:
        raise ValueError(
            f"gradient {index}: expected shape {tuple(param.shape)}, got {tuple(grad.shape)}; "
            "pass gradients in the parameters' order"
        )
    if grad.stride() == param.stride():
        return grad
    if any(a != b for a, b, size in zip(grad.stride(), param.stride(), param.shape) if size != 1):
        return torch.empty_like(param).copy_(grad)
    # Alike in memory: a dimension of one element may carry any stride.
    return grad.as_strided(param.shape, param.stride())
