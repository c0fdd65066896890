"""Count what no training step can do without, network by network, and write triaccel_bench/bounds.json.

    python scripts/make_bounds.py             # writes it
    python scripts/make_bounds.py --check     # exit code 1 where the file says otherwise

Networks are built on the meta device: they have shapes and no data, so that neither memory nor a card is needed.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from triaccel_bench import bounds, models
from triaccel_bench.bounds import NetworkShape
from triaccel_bench.configuration import compose
from triaccel_bench.files import write_atomically

NETWORKS = (
    ("resnet18", 32),
    ("resnet18", 224),
    ("resnet18_cifar", 32),
    ("efficientnet_b0", 32),
    ("efficientnet_b0", 224),
    ("resnet8", 32),
)

_NORMS = (nn.BatchNorm2d,)


@dataclass
class _Seen:
    normalised: list[int]
    products: list[int]
    head_inputs: int = 0


def count(name: str, input_size: int) -> NetworkShape:
    """The figures of one network, from one forward pass of two images without data.

    Raises:
        ValueError: the last layer is no linear one, which the figures' use takes it for.
    """
    images, classes = 2, 10
    settings = compose([f"model={name}", f"model.input_size={input_size}"])
    with torch.device("meta"):
        network = models.build(settings.model, classes)
        batch = torch.empty(images, 3, input_size, input_size)
    seen = _Seen([], [])
    layers = list(network.layers.values())
    if not isinstance(layers[-1], nn.Linear):
        raise ValueError(f"{name}: expected a linear layer last, got {type(layers[-1]).__name__}")
    for module in network.module.modules():
        if isinstance(module, _NORMS):
            module.register_forward_pre_hook(lambda _, inputs: seen.normalised.append(inputs[0].numel() // images))
    for layer in layers[:-1]:
        layer.register_forward_hook(lambda layer, inputs, result: _see(seen, layer, inputs[0], result))
    network.module.train()(batch)
    forward = sum(seen.products)
    parameters = sum(parameter.numel() for parameter in network.module.parameters())
    return NetworkShape(
        model=name,
        input_size=input_size,
        parameters=parameters - sum(parameter.numel() for parameter in layers[-1].parameters()),
        head_inputs=layers[-1].in_features,
        normalised=sum(seen.normalised),
        normalised_most=max(seen.normalised),
        # Forward, gradient of the weight, and of the input but for the first layer's.
        products=3 * forward - seen.products[0],
    )


def _see(seen: _Seen, layer: nn.Module, x: Tensor, result: Tensor) -> None:
    if isinstance(layer, nn.Linear):
        seen.products.append(layer.in_features * layer.out_features)
        return
    places = 1
    for dimension in range(2):
        places *= _least(x.shape[2 + dimension], result.shape[2 + dimension], *_geometry(layer, dimension))
    seen.products.append(places * layer.out_channels * layer.in_channels // layer.groups)


def _geometry(layer: nn.Conv2d, dimension: int) -> tuple[int, int, int]:
    return layer.kernel_size[dimension], layer.stride[dimension], layer.padding[dimension]


def _least(inputs: int, results: int, kernel: int, stride: int, padding: int) -> int:
    """Multiplications along one dimension, over all results, that a convolution needs at least.

    Taps on padding need none. Winograd's algorithms make m results of a kernel of r taps by m + r - 1
    multiplications, so never fewer than one a result; a kernel that moves by s is s of those at once.
    """
    useful = (sum(0 <= place * stride - padding + tap < inputs for tap in range(kernel)) for place in range(results))
    return sum(min(taps, kernel, stride) for taps in useful)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the file is out of date")
    options = parser.parse_args(arguments)
    path = Path(bounds.__file__).with_name(bounds.FILE)
    content = bounds.dump([count(*network) for network in NETWORKS])
    if options.check:
        current = path.is_file() and path.read_text() == content
        print(f"{path}: {'up to date' if current else 'out of date; run scripts/make_bounds.py'}")
        return 0 if current else 1
    write_atomically(path, content.encode())
    print(f"Written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
