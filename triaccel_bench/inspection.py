"""Preflight's side that asks torch and the device: every check of a sweep's cells, and the time that steps take.

Runs in a child. Nothing here fetches anything, and weights are built without memory where only shapes are asked for.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torchvision

from triaccel_bench import curvature, hardware, models, preflight, tracker
from triaccel_bench.data import DataError, load
from triaccel_bench.fisher import FisherEstimator
from triaccel_bench.hardware import DeviceError, Hardware, executed_dtype
from triaccel_bench.jacobian import JacobianEstimator, piecewise_linear
from triaccel_bench.meters import TensorMeter
from triaccel_bench.preflight import Check, Report, failed, megabytes
from triaccel_bench.settings import DatasetSettings, ModelSettings, Settings, SettingsError
from triaccel_bench.sources import cifar_archive, cifar_fault
from triaccel_bench.weights import WeightsError

PLENTY_BYTES = 10_000_000_000
"""Free on a disk, room enough for checkpoints of any model here; no network is built to know it better."""

Members = list[tuple[int, Settings]]
"""Cells by their number in the sweep."""


def look(cells: Sequence[Settings], thorough: bool) -> Report:
    """Check every cell; ``thorough`` also reads the data and the weights that a run would read."""
    checks: list[Check] = []
    devices: dict[tuple[str, str], str] = {}
    numbered = list(enumerate(cells))
    shapes = _Shapes()
    for key in dict.fromkeys((settings.device, settings.kernels) for settings in cells):
        members = [(i, s) for i, s in numbered if (s.device, s.kernels) == key]
        try:
            found = hardware.inspect(*key)
        except DeviceError as error:
            checks.append(failed("device", str(error), _numbers(members)))
            continue
        devices[key] = found.name
        checks += _on_card(found, members, shapes) if found.device.type == "cuda" else _on_cpu(found, members)
    for dataset in dict.fromkeys(settings.dataset for settings in cells):
        checks.append(_data(dataset, [i for i, s in numbered if s.dataset == dataset], thorough))
    for model in dict.fromkeys(_as_weights_fit(s.model) for s in cells if s.model.weights != "none"):
        checks.append(_weights(model, [(i, s) for i, s in numbered if _as_weights_fit(s.model) == model], thorough))
    checks += _curvature(numbered if thorough else [(i, s) for i, s in numbered if _may_be_slow(s)], shapes)
    checks += _tracker([i for i, s in numbered if s.tracker == "tensorboard"])
    for scratch in dict.fromkeys(s.results.scratch for s in cells if s.results.scratch is not None):
        members = [(i, s) for i, s in numbered if s.results.scratch == scratch]
        checks += _written("scratch", "results.scratch", Path(scratch), members, shapes, thorough)
    for root in dict.fromkeys(settings.results.root for settings in cells):
        members = [(i, s) for i, s in numbered if s.results.root == root]
        checks += _written("folder", "results.root", Path(root), members, shapes, thorough)
    return Report(tuple(checks), devices)


def _tracker(cells: list[int]) -> list[Check]:
    if not cells:
        return []
    try:
        tracker.writer_class()
    except SettingsError as error:
        return [failed("tracker", str(error), cells)]
    return [Check("tracker", "ok", "TensorBoard can be written", cells=tuple(cells))]


def _numbers(members: Members) -> tuple[int, ...]:
    return tuple(number for number, _ in members)


def _label(settings: Settings) -> str:
    return f"{settings.dataset.name}/{settings.model.name}/{settings.method.name}"


def _on_cpu(found: Hardware, members: Members) -> list[Check]:
    checks = [Check("device", "ok", found.name)]
    if any(settings.memory.meter == "vram" for _, settings in members):
        finding = "there is no VRAM on a CPU, so memory figures stay empty and the batch size where it starts"
        checks.append(Check("meter", "warning", finding, "use memory.meter=tensors", by_the_run=True))
    checks.append(Check("kernels", "ok", f"{found.kernels}: {found.kernels_reason}"))
    if any(settings.method.precision.cpu_executes == "fp32" for _, settings in members):
        checks.append(Check("dtypes", "ok", "every layer executes FP32 here (method.precision.cpu_executes)"))
    return checks


def _on_card(found: Hardware, members: Members, shapes: _Shapes) -> list[Check]:
    sm = "sm_{}{}".format(*found.capability)
    driver = f", driver {found.driver}" if found.driver else ""
    checks = [
        Check("device", "ok", f"{found.device} is {found.name}, {megabytes(found.total_bytes)}"),
        Check("build", "ok", f"torch {torch.__version__} for CUDA {torch.version.cuda} runs on {sm}{driver}"),
        *_dtypes(found, [settings for _, settings in members]),
    ]
    fell_back = found.kernels == "torch" and members[0][1].kernels == "auto"
    if fell_back and found.capability >= hardware.TRITON_FROM:
        remedy = "steps are slower so: mend Triton and its C compiler, or leave it at that"
        checks.append(Check("kernels", "warning", f"torch, since {found.kernels_reason}", remedy))
    else:
        checks.append(Check("kernels", "ok", f"{found.kernels}: {found.kernels_reason}"))
    if found.nvml is None:
        remedy = "memory of other processes is not recorded: pip install nvidia-ml-py, and see that nvidia-smi works"
        checks.append(Check("NVML", "warning", f"NVML is off ({found.nvml_reason})", remedy, by_the_run=True))
    else:
        checks.append(Check("NVML", "ok", "watches the same card"))
    return [*checks, *_memory(found, members, shapes)]


def _dtypes(found: Hardware, cells: list[Settings]) -> list[Check]:
    checks = []
    asking = [s for s in cells if s.method.dtype == "bf16" or s.method.precision.adaptive]
    instead = {executed_dtype("bf16", found, s.method.precision) for s in asking} - {"bf16"}
    if found.bf16_native:
        checks.append(Check("BF16", "ok", "native"))
    elif instead:
        runs = " or ".join(sorted(instead)).upper()
        finding = f"{found.name} has no native BF16, so layers that ask for it execute {runs}"
        remedy = "choose what they execute by method.precision.bf16_substitute"
        checks.append(Check("BF16", "warning", finding, remedy, by_the_run=True))
    elif asking:
        finding = f"{found.name} has no native BF16 and emulates it, which is slow"
        remedy = "use method.precision.bf16_substitute=fp16 or fp32"
        checks.append(Check("BF16", "warning", finding, remedy))
    if found.fp16_units:
        checks.append(Check("FP16", "ok", "matrix units"))
    elif any(_executes_fp16(found, settings) for settings in cells):
        finding = f"{found.name} has no matrix units for FP16, which saves memory there and perhaps no time"
        checks.append(Check("FP16", "warning", finding, "preflight=only times it against FP32"))
    return checks


def _executes_fp16(found: Hardware, settings: Settings) -> bool:
    method = settings.method
    levels = {method.dtype} | ({"bf16", method.precision.narrowest} if method.precision.adaptive else set())
    return "fp16" in {executed_dtype(level, found, method.precision) for level in levels}


@dataclass(frozen=True)
class _Shape:
    """Bytes in FP32: of parameters and buffers, of parameters, of the layers' weights."""

    resident: int
    parameters: int
    layers: int


class _Shapes:
    """Networks without memory, each built once whatever its number of classes, and their bytes."""

    def __init__(self) -> None:
        self._networks: dict[ModelSettings, models.Network] = {}
        self._saved: dict[tuple[ModelSettings, int], int] = {}

    def network(self, model: ModelSettings, classes: int) -> models.Network:
        key = model.model_copy(update={"weights": "none"})
        if key not in self._networks:
            with torch.device("meta"):
                self._networks[key] = models.build(key, classes)
        return self._networks[key]

    def of(self, model: ModelSettings, classes: int) -> _Shape:
        network = self.network(model, classes)
        head = list(network.layers.values())[-1]
        more = (classes - network.classes) * head.weight.element_size()
        layers = sum(layer.weight.nbytes for layer in network.layers.values()) + more * head.in_features
        parameters = sum(p.nbytes for p in network.module.parameters()) + more * (head.in_features + 1)
        buffers = sum(buffer.nbytes for buffer in network.module.buffers())
        return _Shape(parameters + buffers, parameters, layers)

    def saved(self, model: ModelSettings, classes: int, batch: int) -> int:
        """FP32 bytes that a step of ``batch`` images saves for its backward pass."""
        key = model, batch
        if key not in self._saved:
            self._saved[key] = _saved(self.network(model, classes), model, batch)
        return self._saved[key]


def _saved(network: models.Network, model: ModelSettings, batch: int) -> int:
    meter = TensorMeter(network.module)
    images = torch.empty(batch, 3, model.input_size, model.input_size, device="meta")
    with meter.recording():
        logits = network.module.train()(images)
        if model.checkpointing:
            # Blocks are run again there, and save then.
            logits.sum().backward()
    network.module.zero_grad(set_to_none=True)
    return meter.largest.saved


def _step_bytes(settings: Settings, executed: str, shapes: _Shapes, batch: int) -> int:
    initial, update = settings.method.batch.initial, settings.method.update
    shape = shapes.of(settings.model, settings.dataset.num_classes)
    whole = shapes.saved(settings.model, settings.dataset.num_classes, initial)
    narrow = executed != "fp32"
    halved = shape.layers // 2 if narrow else 0
    gradients = 0 if update.in_backward else shape.parameters - halved
    momentum = shape.parameters - (halved if update.momentum_dtype == "bf16" else 0)
    saved = whole * batch // initial // (2 if narrow else 1)
    return shape.resident + halved + gradients + momentum + saved


def _dataset_bytes(dataset: DatasetSettings) -> int:
    return ((dataset.train_size or 0) + (dataset.test_size or 0)) * (3 * dataset.image_size**2 + 8)


def _memory(found: Hardware, members: Members, shapes: _Shapes) -> list[Check]:
    """Free memory against what training needs as it begins, at least: no library's workspace is in it."""
    free = hardware.cuda_free_bytes(found.device.index)
    told = f"{megabytes(free)} of {megabytes(found.total_bytes)} are free on {found.name}"
    remedy = "end what else runs on the card, or use"
    checks, fitting = [], {}
    for number, settings in members:
        batch, data = settings.method.batch, _dataset_bytes(settings.dataset)
        executed = executed_dtype(settings.method.dtype, found, settings.method.precision)
        wanted, least = (_step_bytes(settings, executed, shapes, size) + data for size in (batch.initial, batch.min))
        measured = 0
        if settings.uses_budget and settings.memory.budget == "fp32":
            measured = _step_bytes(settings.without_savings, "fp32", shapes, batch.initial) + data
        needs = f"{_label(settings)} needs at least"
        if least > free:
            finding = f"{needs} {megabytes(least)} at method.batch.min={batch.min}, {told}"
            fit = f"{remedy} model.checkpointing=true or a smaller model.input_size"
            checks.append(Check("memory", "fails", finding, fit, (number,)))
        elif measured > free:
            what = f"for the FP32 steps of memory.budget=fp32 at B={batch.initial}"
            finding = f"{needs} {megabytes(measured)} {what}, {told}"
            fit = f"{remedy} a memory.budget in GB or a smaller method.batch.initial"
            checks.append(Check("memory", "fails", finding, fit, (number,)))
        elif wanted > free:
            finding = f"{needs} {megabytes(wanted)} at B={batch.initial} and would run in smaller batches, {told}"
            checks.append(Check("memory", "warning", finding, f"{remedy} a smaller method.batch.initial"))
        else:
            fitting[_label(settings)] = max(wanted, measured)
    if fitting:
        most = max(fitting, key=fitting.get)
        checks.append(Check("memory", "ok", f"{most} needs about {megabytes(fitting[most])}, {told}"))
    return checks


def _data(dataset: DatasetSettings, cells: list[int], thorough: bool) -> Check:
    """Whether a data set is there, or can be fetched as far as this machine is concerned: no network is asked."""
    of_files = dataset.name not in ("digits", "synthetic")
    fault = None
    if of_files and dataset.path is None:
        fault = cifar_fault(dataset.name, Path(dataset.root), whole=thorough)
        if fault is not None and dataset.download:
            return _download(dataset, fault, cells)
    missing = of_files and dataset.path is not None and not Path(dataset.path).exists()
    unfit = not of_files and dataset.path is not None
    unmade = dataset.name == "digits" and importlib.util.find_spec("sklearn") is None
    if not (thorough or fault or missing or unfit or unmade):
        where = dataset.path or (dataset.root if of_files else "made as a run begins")
        return Check("data", "ok", f"{dataset.name}: {where}", cells=tuple(cells))
    try:
        images = load(dataset.model_copy(update={"download": False}))
    except DataError as error:
        return failed("data", str(error), cells)
    counts = f"{len(images.y_train):,} + {len(images.y_eval):,} images"
    return Check("data", "ok", f"{dataset.name}: {counts} of {len(images.classes)} classes from {images.source}")


def _download(dataset: DatasetSettings, fault: str, cells: list[int]) -> Check:
    root, archive = Path(dataset.root), cifar_archive(dataset.name)
    needed = archive.bytes + archive.unpacked_bytes
    free = preflight.free_bytes(root)
    start = f"{fault}, and {archive.name} ({megabytes(archive.bytes)})"
    if not preflight.can_write(root):
        return failed("data", f"{start} cannot be fetched into {root}; name a writable folder by dataset.root", cells)
    if free < needed:
        finding = f"{start} takes {megabytes(needed)} with what is in it, of which {megabytes(free)} are free in {root}"
        return failed("data", f"{finding}; free space there or name another disk by dataset.root", cells)
    finding = f"{start} will be fetched by the first run, from {(*dataset.mirrors, archive.url)[0]} into {root}"
    return Check("data", "warning", finding, "without a network put it there, or name a copy by dataset.path")


def _as_weights_fit(model: ModelSettings) -> ModelSettings:
    """Alike for models that take the same weights, however much of them methods run again."""
    return model.model_copy(update={"checkpointing": False})


def _weights(model: ModelSettings, members: Members, thorough: bool) -> Check:
    if model.weights == "imagenet":
        weights = torchvision.models.get_model_weights(model.name).DEFAULT
        folder = Path(torch.hub.get_dir()) / "checkpoints"
        name, size = weights.url.rsplit("/", 1)[1], weights.meta["_file_size"]
        if (folder / name).is_file():
            return Check("weights", "ok", f"{model.name}: {folder / name}")
        finding = f"{folder / name}: no such file yet, so that {size:.0f} MB will be fetched from {weights.url}"
        return Check("weights", "warning", finding, "without a network put it there, or use model.weights=none")
    if thorough:
        try:
            models.build(model, members[0][1].dataset.num_classes)
        except WeightsError as error:
            return failed("weights", str(error), _numbers(members))
    return Check("weights", "ok", f"{model.name}: {model.weights}")


def _may_be_slow(settings: Settings) -> bool:
    return settings.method.curvature.product in ("exact", "difference")


def _curvature(numbered: Members, shapes: _Shapes) -> list[Check]:
    """What the chosen readings of curvature cost; cells that are told alike share a row."""
    told: dict[Check, list[str]] = {}
    for number, settings in numbered:
        if not settings.method.probes_curvature:
            continue
        network = shapes.network(settings.model, settings.dataset.num_classes)
        labels = told.setdefault(_price(settings, network, number), [])
        label = f"{settings.dataset.name}/{settings.model.name}"
        if label not in labels:
            labels.append(label)
    return [
        Check(c.name, c.verdict, f"{', '.join(labels)}: {c.finding}", c.remedy, c.cells) for c, labels in told.items()
    ]


def _price(settings: Settings, network: models.Network, number: int) -> Check:
    chosen, classes = settings.method.curvature, settings.dataset.num_classes
    share = f"within {chosen.max_overhead:.0%} of training time (method.curvature.max_overhead)"
    module, rows = network.module, chosen.batch * classes
    try:
        estimator = curvature.build(module, network.layers, chosen, 0, rows=rows, trusted=True)
    except ValueError as error:
        return failed("curvature", str(error), [number])
    if isinstance(estimator, FisherEstimator):
        return Check("curvature", "ok", f"cheap, fisher reads all layers by one forward and one backward pass, {share}")
    if isinstance(estimator, JacobianEstimator):
        how = f"cheap, jacobian reads all layers at once by {classes} backward passes a group of them"
        return Check("curvature", "ok", f"{how}, {share}")
    turns = f"dear, {estimator.product} reads {len(network.layers)} layers in turn"
    cheaper = "use method.curvature.product=auto or method.curvature.estimator=fisher"
    if estimator.product == "difference":
        if piecewise_linear(module):
            finding = f"{turns}, and at the kinks of a ReLU network its values are many times too large"
            return Check("curvature", "warning", finding, cheaper)
        return Check("curvature", "ok", f"{turns} by gradients at two points a product, {share}")
    if any(getattr(part, "groups", 1) > 1 for part in module.modules()):
        finding = f"{turns} by double backward, very slow for grouped convolutions, so that few are read {share}"
        return Check("curvature", "warning", finding, cheaper)
    return Check("curvature", "ok", f"{turns} by double backward, as many as fit {share}")


def _written(name: str, key: str, root: Path, members: Members, shapes: _Shapes, thorough: bool) -> list[Check]:
    """A folder that ``members`` write their records and checkpoints to, and its disk."""
    numbers = _numbers(members)
    written = preflight.folder(name, root, key, numbers)
    if written.verdict == "fails":
        return [written]
    records = preflight.RECORD_BYTES * sum(len(settings.seeds) for _, settings in members)
    keeping = [settings for _, settings in members if settings.results.resume]
    if not thorough and preflight.free_bytes(root) > records + PLENTY_BYTES:
        return [written]
    sizes = [shapes.of(settings.model, settings.dataset.num_classes) for settings in keeping]
    # Weights and momentum; the old file is there until the new one is whole.
    checkpoints = 2 * max((shape.resident + shape.parameters for shape in sizes), default=0)
    return [written, preflight.space(root, key, records, checkpoints, numbers)]
