"""Gradient variance of every layer, its moving average, and the non-finite flag of a step, in one launch."""

# Without the postponed annotations of other files: Triton 3.2's interpreter needs `tl.constexpr` itself, not its name.

from collections.abc import Sequence

import torch
from torch import Tensor

from triaccel_bench.kernels.backend import require_backend, tl, triton
from triaccel_bench.kernels.segments import AddressTable, Gradients, Segments, in_fp32, is_dense

if triton is not None:
    from triaccel_bench.kernels.segments import load_chunk

FP32_MAX = torch.finfo(torch.float32).max
CHUNKS_AT_ONCE = 1024
"""Chunks of one layer that are merged in one go."""
LEAST_SEGMENTS = 64
"""Segments looked at in one go, so that a few sets of tensors need no more kernels than one."""


@torch.no_grad()
def moments_reference(
    grads: Sequence[Tensor],
    layers: int,
    inverse_scale: Tensor,
    batch_factor: Tensor,
    beta: float,
    nonfinite: Tensor,
    variance: Tensor,
    ema: Tensor,
    updates: Tensor,
) -> None:
    """What ``GradientMoments.update`` computes, in torch operations that can be captured; the last four are written.

    ``layers`` = 0 computes no statistic. Gradients of 16 bits are measured in FP32 copies.
    """
    # A variance in 16 bits would overflow, and multi-tensor calls want one dtype.
    grads = in_fp32(grads)
    # The largest magnitude carries inf and NaN, and unlike a sum it cannot overflow by itself.
    largest = torch.stack(torch._foreach_norm([grad for grad in grads if grad.numel()], float("inf")))
    bad = ~largest.isfinite().all()
    nonfinite.copy_(bad)
    if layers:
        raw = torch.stack([grad.var(correction=0) if grad.numel() else grad.new_zeros(()) for grad in grads[:layers]])
        measured = (raw * inverse_scale * inverse_scale * batch_factor).nan_to_num(nan=FP32_MAX, posinf=FP32_MAX)
        blended = torch.where(updates == 0, measured, ema + (1 - beta) * (measured - ema))
        variance.copy_(torch.where(bad, variance, measured))
        ema.copy_(torch.where(bad, ema, blended))
    updates.add_(~bad)


if triton is not None:
    LARGEST = tl.constexpr(FP32_MAX)

    @triton.jit
    def _merge_chunks(
        chunk_bad,
        chunk_mean,
        chunk_m2,
        first,
        chunks,
        size,
        STATISTICS: tl.constexpr,
        CHUNK: tl.constexpr,
        AT_ONCE: tl.constexpr,
    ):
        """The flag and the population variance of one segment from those of its chunks, by Chan's formula."""
        bad = 0
        count = 0.0
        mean = 0.0
        m2 = 0.0
        begin = 0
        # `while`, because a range over a loaded bound fails in the interpreter of Triton 3.6 with numpy 2.4.
        while begin < chunks:
            place = begin + tl.arange(0, AT_ONCE)
            live = place < chunks
            # Other programs wrote these: .cg reads them from the L2 cache, past this multiprocessor's L1.
            flags = tl.load(chunk_bad + first + place, mask=live, other=0, cache_modifier=".cg")
            bad = tl.maximum(bad, tl.max(flags, axis=0))
            if STATISTICS:
                means = tl.load(chunk_mean + first + place, mask=live, other=0.0, cache_modifier=".cg")
                m2s = tl.load(chunk_m2 + first + place, mask=live, other=0.0, cache_modifier=".cg")
                rest = size - place.to(tl.int64) * CHUNK
                counts = tl.where(live, tl.minimum(rest, CHUNK), 0).to(tl.float32)
                group_count = tl.sum(counts, axis=0)
                group_mean = tl.sum(counts * means, axis=0) / group_count
                off = means - group_mean
                group_m2 = tl.sum(m2s + counts * off * off, axis=0)
                total = count + group_count
                shift = group_mean - mean
                mean += shift * (group_count / total)
                m2 += group_m2 + shift * shift * (count * (group_count / total))
                count = total
            begin += AT_ONCE
        return bad, m2 / size.to(tl.float32)

    @triton.jit(do_not_specialize=["inverse_scale", "batch_factor", "nonfinite", "layers", "segments", "occupied"])
    def _moments_kernel(
        table,
        segment_of_chunk,
        first_chunk,
        elements,
        inverse_scale,
        batch_factor,
        chunk_bad,
        chunk_mean,
        chunk_m2,
        segment_bad,
        segment_variance,
        arrivals,
        nonfinite,
        variance,
        ema,
        updates,
        blend,
        layers,
        segments,
        occupied,
        STATISTICS: tl.constexpr,
        ALIGNED: tl.constexpr,
        CHUNK: tl.constexpr,
        AT_ONCE: tl.constexpr,
        SEGMENTS: tl.constexpr,
    ):
        """Each program measures a chunk; the last of a segment merges its chunks; the last of all blends."""
        chunk = tl.program_id(0)
        segment = tl.load(segment_of_chunk + chunk)
        first = tl.load(first_chunk + segment)
        chunks = tl.load(first_chunk + segment + 1) - first
        size = tl.load(elements + segment)
        start = (chunk - first).to(tl.int64) * CHUNK
        count = tl.minimum(size - start, CHUNK).to(tl.int32)
        lane = tl.arange(0, CHUNK)
        live = lane < count
        entry = tl.load(table + segment)
        if count == CHUNK:
            grad = load_chunk(entry, start, lane, live, True, ALIGNED)
        else:
            grad = load_chunk(entry, start, lane, live, False, ALIGNED)
        # NaN fails the comparison as inf does.
        tl.store(chunk_bad + chunk, tl.max(tl.where(tl.abs(grad) <= LARGEST, 0, 1), axis=0))
        if STATISTICS:
            unscaled = grad * tl.load(inverse_scale)
            mean = tl.sum(unscaled, axis=0) / count.to(tl.float32)
            off = tl.where(live, unscaled - mean, 0.0)
            tl.store(chunk_mean + chunk, mean)
            tl.store(chunk_m2 + chunk, tl.sum(off * off, axis=0))
        # Every thread has stored before the counter moves; the counter's acquire-release order does the rest.
        tl.debug_barrier()
        if tl.atomic_add(arrivals + 1 + segment, 1, sem="acq_rel") == chunks - 1:
            tl.store(arrivals + 1 + segment, 0)
            bad, spread = _merge_chunks(
                chunk_bad, chunk_mean, chunk_m2, first, chunks, size, STATISTICS, CHUNK, AT_ONCE
            )
            tl.store(segment_bad + segment, bad)
            tl.store(segment_variance + segment, spread)
            tl.debug_barrier()
            if tl.atomic_add(arrivals, 1, sem="acq_rel") == occupied - 1:
                tl.store(arrivals, 0)
                each = tl.arange(0, SEGMENTS)
                flags = tl.load(segment_bad + each, mask=each < segments, other=0, cache_modifier=".cg")
                any_bad = tl.max(flags, axis=0)
                done = tl.load(updates)
                if STATISTICS:
                    keep = (each < layers) & (any_bad == 0)
                    measured = tl.load(segment_variance + each, mask=keep, other=0.0, cache_modifier=".cg")
                    measured = measured * tl.load(batch_factor)
                    measured = tl.where(measured <= LARGEST, measured, LARGEST)
                    old = tl.load(ema + each, mask=keep, other=0.0)
                    blended = tl.where(done == 0, measured, old + blend * (measured - old))
                    tl.store(variance + each, measured, mask=keep)
                    tl.store(ema + each, blended, mask=keep)
                tl.store(nonfinite, any_bad.to(tl.float32))
                # Every thread has read the old count before one of them writes the new one.
                tl.debug_barrier()
                tl.store(updates, done + 1 - any_bad)


class GradientMoments:
    """Variance of each layer's gradient and its moving average (section 3.1 of the paper); never waits for the device.

    v_l(t) = beta v_l(t-1) + (1 - beta) b Var[g_l(t) / scale], with the population variance over
    the elements of layer l's weight gradient and b the batch factor. The first finite step sets
    v_l to its variance. A step with an inf or NaN in any gradient changes no statistic. The
    variance comes from centred chunks merged by Chan's formula in a fixed order: it does not
    suffer cancellation and is the same bit for bit from launch to launch. One beyond FP32's
    range is stored as FP32's largest number; that of a layer without elements is 0.

    Args:
        sizes: elements of every gradient tensor, in the order used by ``update``.
        layers: the first ``layers`` of them are the layers' weight gradients; the others
            (biases, normalisation) take part in the search for non-finite elements alone.
        device: where the gradients live.
        backend: ``"triton"`` (one launch) or ``"torch"`` (the reference).
        beta: share of the old average, in [0, 1).
        statistics: False leaves ``variance`` and ``ema`` at NaN and only looks for inf and NaN.
        nonfinite: f32 ``[1]`` on the device to hold the flag, perhaps a part of a larger tensor; ``None``: a new one.

    Attributes:
        nonfinite: f32 ``[1]``, 1.0 if the last step had an inf or NaN anywhere, else 0.0.
        variance: f32 ``[layers]``, of the last finite step, times the batch factor; NaN before the first.
        ema: f32 ``[layers]``, the moving average; NaN before the first finite step.
        updates: int32 ``[1]``, finite steps so far.

    Raises:
        ValueError: the backend cannot run on the device, ``layers`` exceeds the tensors, or no tensor has
            an element.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        layers: int,
        device: torch.device | str,
        backend: str,
        beta: float,
        statistics: bool = True,
        nonfinite: Tensor | None = None,
    ) -> None:
        if not 0 <= layers <= len(sizes):
            raise ValueError(
                f"layers={layers}: expected 0 to {len(sizes)}, the number of sizes; list the layers' tensors first"
            )
        self.nonfinite = torch.zeros(1, device=device) if nonfinite is None else nonfinite
        self.variance = torch.full((layers,), float("nan"), device=device)
        self.ema = torch.full((layers,), float("nan"), device=device)
        self.updates = torch.zeros(1, dtype=torch.int32, device=device)
        device = self.ema.device
        require_backend(backend, device)
        self._layers, self._beta, self._statistics = layers, float(beta), statistics
        self._segments = Segments(sizes, device)
        self._table: AddressTable | None = None
        if backend == "triton":
            self._table = AddressTable(len(sizes), device)
            self._chunk_bad = torch.empty(self._segments.chunks, dtype=torch.int32, device=device)
            self._chunk_mean, self._chunk_m2 = torch.empty(2, self._segments.chunks, device=device)
            # Zeros, because an empty segment has no program that would write its flag and variance.
            self._segment_bad = torch.zeros(len(sizes), dtype=torch.int32, device=device)
            self._segment_variance = torch.zeros(len(sizes), device=device)
            self._arrivals = torch.zeros(1 + len(sizes), dtype=torch.int32, device=device)

    @property
    def state(self) -> list[Tensor]:
        """All that ``update`` writes and keeps, where it stays: the four attributes."""
        return [self.nonfinite, self.variance, self.ema, self.updates]

    def update(self, grads: Sequence[Tensor] | Gradients, inverse_scale: Tensor, batch_factor: Tensor) -> None:
        """Take in one step's gradients; may be captured in a CUDA graph, then see ``flush``.

        Args:
            grads: the gradients of the scaled mean loss; left as they are. Each FP32, FP16 or BF16, which
                may differ between them and from step to step, with any strides; or what ``FusedSGD.gather``
                made of them, and then ``flush`` of that object is the one that counts.
            inverse_scale: f32 scalar on the device, 1 / loss scale.
            batch_factor: f32 scalar on the device, by which variances are multiplied (B / B_0, or 1).

        Raises:
            ValueError: a gradient is missing, differs from ``sizes`` in elements or has another dtype, or an
                argument is not FP32 on the device.
        """
        gathered = self._gathered(grads)
        self._segments.check_values(inverse_scale=inverse_scale, batch_factor=batch_factor)
        if self._table is None:
            layers = self._layers if self._statistics else 0
            moments_reference(
                gathered.tensors,
                layers,
                inverse_scale,
                batch_factor,
                self._beta,
                self.nonfinite,
                self.variance,
                self.ema,
                self.updates,
            )
            return
        cut = self._segments
        with torch.cuda.device_of(self.ema):
            _moments_kernel[(cut.chunks,)](
                gathered.on_device(self._table),
                cut.segment_of_chunk,
                cut.first_chunk,
                cut.elements,
                inverse_scale,
                batch_factor,
                self._chunk_bad,
                self._chunk_mean,
                self._chunk_m2,
                self._segment_bad,
                self._segment_variance,
                self._arrivals,
                self.nonfinite,
                self.variance,
                self.ema,
                self.updates,
                1 - self._beta,
                self._layers,
                len(cut.sizes),
                cut.occupied,
                STATISTICS=self._statistics,
                ALIGNED=gathered.aligned,
                CHUNK=cut.chunk,
                AT_ONCE=CHUNKS_AT_ONCE,
                SEGMENTS=max(LEAST_SEGMENTS, triton.next_power_of_2(len(cut.sizes))),
                num_warps=8,
            )

    def _gathered(self, grads: Sequence[Tensor] | Gradients) -> Gradients:
        cut = self._segments
        if not isinstance(grads, Gradients):
            cut.check(grads)
            # The order of elements does not matter to moments, so a dense tensor is read as it lies in memory.
            if self._table is not None:
                grads = [grad if is_dense(grad) else grad.contiguous() for grad in grads]
            return Gradients(grads, cut, self._table)
        if grads.segments.sizes != cut.sizes or grads.segments.device != cut.device:
            raise ValueError(
                f"gathered gradients: expected {len(cut.sizes)} tensors of the sizes given at construction on "
                f"{cut.device}, got {len(grads.segments.sizes)} on {grads.segments.device}; "
                "gather them with the optimizer of the same tensors"
            )
        return grads

    def flush(self) -> None:
        """Finish a capture: write the addresses its graph reads. Call it after the capture, before the first replay."""
        if self._table is not None:
            self._table.flush()
