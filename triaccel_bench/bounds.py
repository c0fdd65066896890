"""Lower bounds on the memory and the time of training, from figures that ``scripts/make_bounds.py`` counts.

A bound takes every assumption in favour of the figure that is held against it, so that what lies below it did not
happen. Imports no torch.

Memory. Weights and momentum are there throughout. At the end of the forward pass each normalisation's input is kept
for its backward pass, or something of that size to get it back from; at the end of the backward pass every gradient
is there, unless updates take them one at a time. Where blocks may be run twice, all that is sure is one normalisation's
input beside its gradient. Inputs of layers, other results, workspace, copies and buffers are left out.

Time. Multiply-adds of the forward and the backward pass, by the fewest multiplications that a fast convolution could
come to, at every unit of the card busy in every clock at its highest rate. Data, normalisation, updates and launches
are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

from pydantic import TypeAdapter

Arithmetic = Literal["fp32", "tf32", "16 bit"]

FILE = "bounds.json"


@dataclass(frozen=True)
class NetworkShape:
    """What a step of one network needs at least, in elements, and in products an image."""

    model: str
    input_size: int
    parameters: int
    """Without the last layer, whose size goes with the classes."""
    head_inputs: int
    normalised: int
    """Inputs of all normalisations, an image."""
    normalised_most: int
    """The largest of them."""
    products: int
    """Multiply-adds forward and backward, an image, without the last layer."""

    def parameters_for(self, classes: int) -> int:
        return self.parameters + classes * (self.head_inputs + 1)

    def products_for(self, classes: int) -> int:
        return self.products + 3 * classes * self.head_inputs


@dataclass(frozen=True)
class Widths:
    """Bytes an element that a run keeps at least; 0 for what it need not keep."""

    weights: int = 4
    momentum: int = 4
    gradients: int = 4
    activations: int = 4


FP32 = Widths()
MASTERED = Widths(gradients=2, activations=2)
"""Mixed precision as AMP has it: FP32 weights, 16 bit in between."""
NARROWEST = Widths(2, 2, 2, 2)


@dataclass(frozen=True)
class Card:
    multiprocessors: int
    clock_hz: float
    """The highest that the card allows itself."""
    operations: dict[Arithmetic, int]
    """Floating-point operations a clock and multiprocessor: two a multiply-add."""

    def rate(self, arithmetic: Arithmetic) -> float:
        """Operations a second. What a card has no units for runs at its rate for FP32."""
        return self.multiprocessors * self.clock_hz * self.operations.get(arithmetic, self.operations["fp32"])


CARDS = {
    "T4": Card(40, 1.59e9, {"fp32": 128, "16 bit": 1024}),
    "P100": Card(56, 1.48e9, {"fp32": 128, "16 bit": 256}),
    "A100": Card(108, 1.41e9, {"fp32": 128, "tf32": 1024, "16 bit": 2048}),
    "H100": Card(132, 1.98e9, {"fp32": 256, "tf32": 2048, "16 bit": 4096}),
    "H200": Card(132, 1.98e9, {"fp32": 256, "tf32": 2048, "16 bit": 4096}),
}
"""The fastest of each name; a slower board of that name is bounded by it all the same."""


def memory_bytes(shape: NetworkShape, classes: int, batch: int, widths: Widths, rerun: bool) -> int:
    """Bytes at the peak of a step, at least; ``rerun``: blocks may be run again for their backward pass."""
    parameters = shape.parameters_for(classes)
    kept = min(2 * shape.normalised_most, shape.normalised) if rerun else shape.normalised
    most = max(parameters * widths.gradients, kept * batch * widths.activations)
    return parameters * (widths.weights + widths.momentum) + most


def seconds(shape: NetworkShape, classes: int, images: int, rate: float) -> float:
    """Seconds that training on so many images takes at least, at ``rate`` operations a second."""
    return 2 * shape.products_for(classes) * images / rate


def shape_of(model: str, input_size: int | None) -> NetworkShape | None:
    """The counted network of that name at that many pixels a side; None where none was."""
    return next((shape for shape in _shapes() if (shape.model, shape.input_size) == (model, input_size)), None)


def card_of(device_name: str | None) -> Card | None:
    """The card that a device's name tells of; None where its rates are not known."""
    words = (device_name or "").replace("-", " ").split()
    return next((card for name, card in CARDS.items() if name in words), None)


def dump(shapes: Iterable[NetworkShape]) -> str:
    """The data file's text, a network a line."""
    return "[\n" + ",\n".join(json.dumps(asdict(shape)) for shape in shapes) + "\n]\n"


@cache
def _shapes() -> tuple[NetworkShape, ...]:
    content = (files("triaccel_bench") / FILE).read_bytes()
    return TypeAdapter(tuple[NetworkShape, ...]).validate_json(content)
