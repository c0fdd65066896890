"""The four architectures, their named layers, their normalisation, and the places where two branches meet.

A *layer* is a module with a weight matrix or kernel (convolution, linear); it is what the
paper's index l runs over. A *join* is where two branches of unlike dtype may meet: the
residual addition, and the squeeze-and-excitation product. Layers and joins alike hand their
results on in the dtype of the layer that consumes them. What is kept for the backward pass
then exists once, in the dtype its consumer reads; a cast on the way in would keep two copies
at every change of dtype, and a mixed plan would need more memory than FP32.

In the known blocks a BatchNorm, the activation behind it, the stochastic depth and the residual
addition are one call, so that a kernel can do them in one pass over memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.efficientnet import MBConv
from torchvision.models.resnet import BasicBlock, ResNet
from torchvision.ops import Conv2dNormActivation, SqueezeExcitation, StochasticDepth

from triaccel_bench import checkpointing, weights
from triaccel_bench.checkpointing import Checkpointed
from triaccel_bench.kernels.affine import affine_norm_act
from triaccel_bench.kernels.excite import excite, squeeze
from triaccel_bench.kernels.norm import batch_norm_act, finished
from triaccel_bench.kernels.pool import max_pool2d
from triaccel_bench.settings import ModelSettings

LAYER_TYPES = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)


@dataclass(frozen=True)
class Network:
    module: nn.Module
    layers: dict[str, nn.Module]
    """Named layers in order of definition, which is the order of the forward pass."""
    consumers: dict[str, str]
    """For each layer the one that reads its result, through norms, activations or a join; the last reads its own."""
    joins: tuple[tuple[nn.Module, str], ...]
    """(module with a ``join_dtype``, name of the layer that consumes its result)."""
    classes: int | None = None
    """Logits a sample; ``None``: not known."""


def build(model: ModelSettings, num_classes: int) -> Network:
    """Build an architecture on the CPU, initialised from torch's global generator.

    Raises:
        WeightsError: ``model.weights`` names a file that does not fit.
    """
    module = _BUILDERS[model.name](num_classes)
    weights.load(module, model.weights, model.name, _HEADS.get(model.name, "fc."))
    network = replace(describe(module), classes=num_classes)
    checkpointing.switch(module, model.checkpointing)
    return network


def describe(module: nn.Module) -> Network:
    """Find the layers of any module, and the joins of the residual blocks known here.

    A layer's consumer is the next one in order of definition, except on the branches of a known
    block, whose consumer is the join's. In a module with other branches some results may be
    cast twice; values and gradients stay right.
    """
    layers = {name: child for name, child in module.named_modules() if isinstance(child, LAYER_TYPES)}
    names = list(layers)
    consumers = dict(zip(names, [*names[1:], *names[-1:]], strict=True))
    _fuse(module)
    joins = []
    for path, child in module.named_modules():
        join_type = _JOIN_TYPES.get(type(child), type(child) if type(child) in _JOIN_TYPES.values() else None)
        if join_type is None or not join_type.fits(child):
            continue
        inside = [index for index, name in enumerate(names) if name.startswith(f"{path}.")]
        if inside[-1] + 1 == len(names):
            continue
        consumer = names[inside[-1] + 1]
        child.__class__ = join_type
        child.join_dtype = None
        joins.append((child, consumer))
        for name in join_type.branch_ends(path, names, inside):
            consumers[name] = consumer
    return Network(module, layers, consumers, tuple(joins))


class Norm(nn.BatchNorm2d):
    """BatchNorm with what follows it: ``activation((normalised x) * sample_scale + residual)``.

    With two ``branches`` the result comes twice, for two readers. ``kernels`` is the backend of
    training passes, and of evaluation where nobody differentiates twice or by weight and bias;
    elsewhere evaluation is torch's own operations.
    """

    kernels = "torch"
    differentiated_once = False
    """Whether nobody will differentiate twice what it computes in evaluation mode either."""
    counted = False
    """Whether somebody else counts this layer's batches."""

    def forward(
        self,
        x: Tensor,
        activation: str = "none",
        residual: Tensor | None = None,
        sample_scale: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        branches: int = 1,
    ) -> Tensor | tuple[Tensor, Tensor]:
        if not self.training and sample_scale is None and self._evaluates_by_kernel(x):
            y = affine_norm_act(
                x, self.weight, self.bias, self.running_mean, self.running_var, self.eps,
                activation=activation, residual=self._fitting(residual, x), out_dtype=out_dtype, backend=self.kernels,
            )  # fmt: skip
            return y if branches == 1 else (y, y)
        if not self.training or self.momentum is None:
            # Without a momentum the running statistics are averages over all batches so far.
            y = finished(super().forward(x), activation, residual, sample_scale, out_dtype)
            return y if branches == 1 else (y, y)
        known = checkpointing.recomputing()
        if not self.counted and not known:
            self.num_batches_tracked.add_(1)
        # A share of 0 leaves finite running statistics as they are, and needs no other kernel.
        momentum = 0.0 if known else self.momentum
        return batch_norm_act(
            x, self.weight, self.bias, self.running_mean, self.running_var, momentum, self.eps,
            activation=activation, residual=self._fitting(residual, x), sample_scale=sample_scale,
            out_dtype=out_dtype, branches=branches, backend=self.kernels,
        )  # fmt: skip

    def _evaluates_by_kernel(self, x: Tensor) -> bool:
        if self.kernels != "triton" or not x.is_cuda:
            return False
        frozen = not (self.weight.requires_grad or self.bias.requires_grad)
        return not torch.is_grad_enabled() or (self.differentiated_once and frozen)

    def _fitting(self, residual: Tensor | None, x: Tensor) -> Tensor | None:
        """The residual in the dtype of x: a kernel for every pair would be compiled in the middle of training."""
        return residual if residual is None or self.kernels != "triton" else residual.to(x.dtype)


class MaxPool(nn.MaxPool2d):
    """Max pooling over square windows. ``kernels`` is its backend unless somebody may differentiate twice."""

    kernels = "torch"
    differentiated_once = False

    @staticmethod
    def fits(pool: nn.MaxPool2d) -> bool:
        plain = all(isinstance(size, int) for size in (pool.kernel_size, pool.stride, pool.padding))
        return plain and pool.dilation == 1 and not pool.ceil_mode and not pool.return_indices

    def forward(self, x: Tensor) -> Tensor:
        once = self.training or self.differentiated_once or not torch.is_grad_enabled()
        backend = self.kernels if x.is_cuda and once else "torch"
        return max_pool2d(x, self.kernel_size, self.stride, self.padding, backend=backend)


_ACTIVATION_NAMES = {nn.ReLU: "relu", nn.SiLU: "silu"}


def _normalised(
    norm: nn.Module,
    x: Tensor,
    activation: str,
    residual: Tensor | None = None,
    sample_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    branches: int = 1,
) -> Tensor | tuple[Tensor, Tensor]:
    """``norm`` and what follows it in one call, or one after the other if it has been made something else since."""
    if isinstance(norm, Norm):
        return norm(x, activation, residual, sample_scale, out_dtype, branches)
    return finished(norm(x), activation, residual, sample_scale, out_dtype)


def _count_batches(module: nn.Module, inputs: tuple) -> None:
    """One launch for the counters of all ``Norm`` layers that train, where each would add to its own."""
    norms = [part for part in module.modules() if isinstance(part, Norm) and part.training]
    if norms:
        torch._foreach_add_([norm.num_batches_tracked for norm in norms], 1)


class _JoinedBasicBlock(Checkpointed, BasicBlock):
    join_dtype: torch.dtype | None = None

    @staticmethod
    def fits(block: BasicBlock) -> bool:
        return isinstance(block.bn1, Norm) and isinstance(block.bn2, Norm) and type(block.relu) is nn.ReLU

    @staticmethod
    def branch_ends(path: str, names: list[str], inside: list[int]) -> list[str]:
        return [name for name in (f"{path}.conv2", f"{path}.downsample.0") if name in names]

    forked = False
    """Whether the result goes in two to the next block, which reads it twice."""

    def run(self, x: Tensor, side: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        side = x if side is None else side
        out = _normalised(self.bn1, self.conv1(x), "relu")
        identity = side if self.downsample is None else self.downsample(side)
        branches = 2 if self.forked else 1
        out = self.conv2(out)
        return _normalised(self.bn2, out, "relu", identity, out_dtype=self.join_dtype, branches=branches)


class _JoinedMBConv(Checkpointed, MBConv):
    join_dtype: torch.dtype | None = None

    @staticmethod
    def fits(block: MBConv) -> bool:
        ends = len(block.block[-1]) == 2 and isinstance(block.block[-1][1], Norm)
        depth = block.stochastic_depth
        return block.use_res_connect and ends and type(depth) is StochasticDepth and depth.mode == "row"

    @staticmethod
    def branch_ends(path: str, names: list[str], inside: list[int]) -> list[str]:
        return [names[inside[-1]]]

    def run(self, x: Tensor) -> Tensor:
        *expansion, (convolution, norm) = self.block
        out = x
        for part in expansion:
            out = part(out)
        return _normalised(norm, convolution(out), "none", x, self._survival(x), self.join_dtype)

    def _survival(self, x: Tensor) -> Tensor | None:
        """Stochastic depth: for each sample 0, or 1 / (1 - p) with probability 1 - p."""
        dropped = self.stochastic_depth.p
        if not self.training or dropped == 0.0:
            return None

        def draw() -> Tensor:
            survival = torch.empty(x.shape[0], device=x.device).bernoulli_(1.0 - dropped)
            return survival.div_(1.0 - dropped) if dropped < 1.0 else survival

        return checkpointing.drawn(draw)


class _UnjoinedMBConv(Checkpointed, MBConv):
    """One whose result is no sum: without a residual, and so without stochastic depth."""

    run = MBConv.forward


class _JoinedSqueezeExcitation(SqueezeExcitation):
    join_dtype: torch.dtype | None = None
    kernels = "torch"

    @staticmethod
    def fits(block: SqueezeExcitation) -> bool:
        return type(block.scale_activation) is nn.Sigmoid

    @staticmethod
    def branch_ends(path: str, names: list[str], inside: list[int]) -> list[str]:
        # The layer before the module feeds the product; its pooled copy is small.
        return [names[inside[0] - 1], names[inside[-1]]]

    def forward(self, x: Tensor) -> Tensor:
        backend = self.kernels if self.training else "torch"
        pooled, x = squeeze(x, backend=backend)
        gate = self.fc2(self.activation(self.fc1(pooled)))
        return excite(x, gate, out_dtype=self.join_dtype, backend=backend)


class _FusedConvNormActivation(Conv2dNormActivation):
    def forward(self, x: Tensor) -> Tensor:
        return _normalised(self[1], self[0](x), _ACTIVATION_NAMES[type(self[2])] if len(self) == 3 else "none")


class _FusedResNet(Checkpointed, ResNet):
    """Its stem is its first block: the largest images of all are what it keeps."""

    forked = False
    """Whether the stem's result goes in two to the first block, which reads it twice."""

    def run(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = _normalised(self.bn1, self.conv1(x), "relu", branches=2 if self.forked else 1)
        return x if isinstance(x, tuple) else self.maxpool(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer4(self.layer3(self.layer2(self.layer1(super().forward(x)))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def _fuse(module: nn.Module) -> None:
    """One call for norm and activation where torchvision's blocks make two; any other module stays as it is."""
    for child in module.modules():
        if type(child) is nn.BatchNorm2d and child.affine and child.track_running_stats and child.momentum is not None:
            child.__class__ = Norm
    for child in module.modules():
        if type(child) is MBConv and not child.use_res_connect:
            child.__class__ = _UnjoinedMBConv
        if type(child) is ResNet and isinstance(child.bn1, Norm) and type(child.relu) is nn.ReLU:
            child.__class__ = _FusedResNet
            if type(child.maxpool) is nn.MaxPool2d and MaxPool.fits(child.maxpool):
                child.maxpool.__class__ = MaxPool
        if type(child) is Conv2dNormActivation and len(child) in (2, 3) and isinstance(child[1], Norm):
            if len(child) == 2 or type(child[2]) in _ACTIVATION_NAMES:
                child.__class__ = _FusedConvNormActivation


def use_kernels(network: Network, backend: str) -> None:
    """Run normalisation, excitation and convolutions of training passes on ``backend``; the whole module is called.

    It is then its root that counts batches, and results fork from residual block to residual block.
    """
    module = network.module
    if not any(hook is _count_batches for hook in module._forward_pre_hooks.values()):
        module.register_forward_pre_hook(_count_batches)
    for child in module.modules():
        if hasattr(type(child), "kernels"):
            child.kernels = backend
        if isinstance(child, Norm):
            child.counted = True
    if isinstance(module, (_FusedResNet, ResNet8)):
        # Each block but the last is followed by another, which reads its result twice.
        blocks = [child for child in module.modules() if isinstance(child, BasicBlock)]
        if all(isinstance(block, _JoinedBasicBlock) for block in blocks):
            for block in blocks[:-1]:
                block.forked = backend == "triton"
            if isinstance(module, _FusedResNet):
                module.forked = backend == "triton" and type(module.maxpool) is nn.Identity


def parameters_in_order_of_use(module: nn.Module) -> Iterator[nn.Parameter]:
    """As a forward pass about comes to them; a residual block is defined with its shortcut last, and calls it third."""
    yield from module.parameters(recurse=False)
    children = module.children()
    if isinstance(module, _JoinedBasicBlock):
        parts = module.conv1, module.bn1, module.downsample, module.conv2, module.bn2
        children = (part for part in parts if part is not None)
    for child in children:
        yield from parameters_in_order_of_use(child)


_JOIN_TYPES = {
    BasicBlock: _JoinedBasicBlock,
    MBConv: _JoinedMBConv,
    SqueezeExcitation: _JoinedSqueezeExcitation,
}


def _resnet18(num_classes: int) -> nn.Module:
    return torchvision.models.resnet18(num_classes=num_classes)


def _resnet18_cifar(num_classes: int) -> nn.Module:
    module = torchvision.models.resnet18(num_classes=num_classes)
    module.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
    nn.init.kaiming_normal_(module.conv1.weight, mode="fan_out", nonlinearity="relu")
    module.maxpool = nn.Identity()
    return module


def _efficientnet_b0(num_classes: int) -> nn.Module:
    return torchvision.models.efficientnet_b0(num_classes=num_classes)


class ResNet8(Checkpointed, nn.Module):
    """CIFAR ResNet of He et al. (2016), section 4.2, with n = 1: three stages of one block, 16-32-64 channels."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = Norm(16)
        self.layer1 = BasicBlock(16, 16)
        self.layer2 = BasicBlock(16, 32, stride=2, downsample=_shortcut(16, 32))
        self.layer3 = BasicBlock(32, 64, stride=2, downsample=_shortcut(32, 64))
        self.fc = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def run(self, x: Tensor) -> Tensor:
        return self.bn1(self.conv1(x), "relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(super().forward(x))))
        return self.fc(x.mean(dim=(2, 3)))


def _shortcut(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=2, bias=False), nn.BatchNorm2d(outputs))


_BUILDERS = {
    "resnet18": _resnet18,
    "resnet18_cifar": _resnet18_cifar,
    "efficientnet_b0": _efficientnet_b0,
    "resnet8": ResNet8,
}
_HEADS = {"efficientnet_b0": "classifier."}
"""Prefix of the classifier's tensors, where it is not ``fc``."""
