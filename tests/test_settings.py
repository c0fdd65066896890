"""One validator: every kind of wrong configuration ends in one sentence that names key, value and remedy."""

import pytest

from triaccel_bench.configuration import compose
from triaccel_bench.settings import SettingsError

METHODS = [
    "fp32", "tf32", "amp", "triaccel", "triaccel_batch", "triaccel_precision", "triaccel_curvature",
    "triaccel_precision_batch", "triaccel_precision_curvature", "triaccel_curvature_batch",
]  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_every_method_composes_and_carries_its_name(method):
    settings = compose([f"method={method}"]).method
    assert settings.name == method
    switches = {
        "batch": settings.batch.elastic,
        "precision": settings.precision.adaptive,
        "curvature": settings.curvature.rates,
    }
    named = set(method.split("_")[1:]) or ({"batch", "precision", "curvature"} if method == "triaccel" else set())
    assert {name for name, on in switches.items() if on} == named
    assert settings.curvature.promotion == settings.curvature.rates


@pytest.mark.parametrize("group, names", [
    ("dataset", ["cifar10", "cifar100", "digits", "synthetic"]),
    ("model", ["resnet18", "efficientnet_b0", "resnet18_cifar", "resnet8"]),
    ("+experiment", ["smoke", "demo", "table1", "table2"]),
])  # fmt: skip
def test_every_group_composes(group, names):
    for name in names:
        settings = compose([f"{group}={name}"])
        assert group == "+experiment" or getattr(settings, group).name == name


@pytest.mark.parametrize(
    "own, checkpointing", [("", 2), ("model:\n  checkpointing: 1\n", 1), ("model:\n  checkpointing: false\n", False)]
)
def test_a_method_of_an_experiment_gets_its_pair_and_the_experiment_goes_first(tmp_path, own, checkpointing):
    path = tmp_path / "experiment" / "mine.yaml"
    path.parent.mkdir()
    path.write_text(f"# @package _global_\ndefaults:\n  - override /method: triaccel_plus\n{own}")
    settings = compose([f"hydra.searchpath=[{tmp_path}]", "+experiment=mine", "model=resnet18"])
    assert (settings.method.name, settings.model.checkpointing) == ("triaccel_plus", checkpointing)
    given = compose([f"hydra.searchpath=[{tmp_path}]", "+experiment=mine", "model=resnet18", "model.checkpointing=3"])
    assert given.model.checkpointing == 3


def test_defaults_are_the_papers_where_it_states_them():
    settings = compose()
    curvature = settings.method.curvature
    assert settings.seeds == (0, 1, 2)
    assert settings.method.batch.initial == 96
    assert (curvature.k, curvature.every, curvature.batch) == (5, 200, 32)
    assert (settings.optimizer.momentum, settings.optimizer.warmup_epochs) == (0.9, 5)


@pytest.mark.parametrize("overrides, parts", [
    (["epochs=many"], ["epochs=many", "whole number"]),
    (["epochs=0"], ["epochs=0", "1"]),
    (["epochs=1.5"], ["epochs=1.5", "whole number"]),
    (["epochs=1e400"], ["epochs=Infinity", "whole number"]),
    (["epochs=99999999999999999999"], ["epochs=99999999999999999999", "at most 2147483647"]),
    (["epochs=''"], ['epochs="": expected a whole number']),
    (["epochs=null"], ["epochs=null"]),
    (["seeds=[]"], ["seeds=[]: expected at least 1 value"]),
    (["seeds=[1,1]"], ["seeds=[1, 1]", "distinct"]),
    (["seeds=[-1]"], ["seeds.0=-1"]),
    (["seeds=3"], ["seeds=3: expected a list; write seeds=[3]"]),
    (["seeds=null"], ["seeds=null: expected a list; write seeds=[...]"]),
    (["dataset.mean=[0.5]"], ["dataset.mean=[0.5]: expected 3 values, one a colour channel"]),
    (["dataset.std=[1,1,1,1]"], ["expected 3 values"]),
    (["dataset.std=[1,0,1]"], ["dataset.std.1=0", "above 0"]),
    (["dataset.mirrors=[1]"], ["dataset.mirrors.0=1: expected text"]),
    (["dataset.path=''"], ['dataset.path="": expected a path, got nothing']),
    (["dataset.path=7"], ["dataset.path=7: expected a path; write dataset.path=./7"]),
    (["dataset.path='~nobody-of-that-name/x'"], ["expected a home folder that exists; write the whole path"]),
    (["results.root=''"], ["results.root", "got nothing"]),
    (["results.root=2024"], ["write results.root=./2024"]),
    (["results.root=null"], ["results.root=null: expected a path"]),
    (["dataset.image_size=5000"], ["dataset.image_size=5000", "at most 4096"]),
    (["dataset=synthetic", "dataset.num_classes=1"], ["num_classes=1", "at least 2"]),
    (["method.name=A/b"], ["method.name=A/b", "lower-case letters"]),
    (["method.precision.tau_low=0.2", "method.precision.tau_high=0.1"], ["tau_low=0.2", "tau_high=0.1", "tau_low < tau_high"]),
    (["method.precision.tau_low=0.1", "method.precision.tau_high=0.1"], ["tau_low < tau_high"]),
    (["tuned=none", "method.precision.tau_low=0.1"], ["tau_high=auto", "both"]),
    (["method.precision.tau_low=-1", "method.precision.tau_high=1"], ["tau_low=-1"]),
    (["optimizer.lr=-0.1"], ["optimizer.lr=-0.1", "above 0"]),
    (["optimizer.lr=nan"], ["optimizer.lr", "finite"]),
    (["optimizer.momentum=1"], ["optimizer.momentum=1"]),
    (["method.batch.min=128"], ["min=128", "initial=96"]),
    (["method.batch.rho_low=0.95"], ["rho_low=0.95", "rho_high=0.9"]),
    (["method.batch.elastic=maybe"], ["elastic=maybe", "true or false"]),
    (["method.curvature.k=0"], ["curvature.k=0"]),
    (["method.curvature.product=jacobian", "model=efficientnet_b0"], ["name=efficientnet_b0", "product=auto"]),
    (["method.curvature.product=jacobian", "dataset=cifar100"], ["batch=32", "num_classes=100", "got 3200"]),
    (["method.curvature.estimator=fisher", "method.curvature.product=exact"], ["estimator=fisher", "product=auto"]),
    (["method.control.interval=0"], ["method.control.interval=0: expected a number of at least 1"]),
    (["device=tpu"], ["device=tpu: expected cpu, cuda or cuda:N"]),
    (["device=3"], ["device=3: expected cpu, cuda or cuda:N"]),
    (["method.curvature=null"], ["method.curvature=null: expected a group of settings"]),
    (["device=cpu", "kernels=triton"], ["kernels=triton", "kernels=auto"]),
    (["model.weights=/no/such/file"], ["/no/such/file", "no such file"]),
    (["model=resnet8", "model.weights=imagenet"], ["weights=imagenet", "resnet18"]),
    (["model=resnet18", "model.stem=cifar"], ["model.stem=cifar", "model.name=resnet18", "model=resnet18_cifar"]),
    (["memory.budget=lots"], ["memory.budget=lots: expected 'fp32', 'paper' or 'device' or a number"]),
    (["memory.budget=400000000"], ["memory.budget=400000000", "at most 1000000"]),
    (["memory.budget=paper", "model=resnet8"], ["memory.budget=paper", "model.name=resnet8", "Table 1"]),
    (["memory.budget=device", "device=cpu"], ["memory.budget=device", "device=cpu", "memory.budget=fp32"]),
    (["memory.budget=-1"], ["memory.budget=-1"]),
    (["memory.enforce=true", "device=cpu"], ["memory.enforce=true", "device=cpu", "CUDA"]),
    (["memory.enforce=true", "memory.meter=tensors"], ["memory.enforce=true", "memory.meter=tensors", "use vram"]),
    (["memory.enforce=true", "memory.budget=paper", "model=resnet8", "method=fp32"], ["memory.budget=paper", "Table 1"]),
    (["dataset.evaluate_on=validation"], ["validation_fraction=0"]),
    (["dataset.train_size=50"], ["initial=96", "train_size=50"]),
    (["+colour=blue"], ["colour=blue", "unknown key"]),
])  # fmt: skip
def test_wrong_values_are_named(overrides, parts):
    with pytest.raises(SettingsError) as caught:
        compose(overrides)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


def test_several_faults_are_all_named():
    with pytest.raises(SettingsError) as caught:
        compose(["epochs=0", "optimizer.lr=-1"])
    assert "epochs=0" in str(caught.value) and "optimizer.lr=-1" in str(caught.value)


def test_a_budget_of_the_paper_is_no_matter_of_methods_with_a_fixed_batch():
    assert compose(["memory.budget=paper", "model=resnet8", "method=fp32"]).memory.budget == "paper"


def test_paths_in_the_home_folder_are_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    settings = compose(["dataset.path='~/a.npz'", "results.root='~'"])
    assert (settings.dataset.path, settings.results.root) == ("/somewhere/a.npz", "/somewhere")


def test_bytes_that_are_no_text_are_refused_in_a_sentence():
    with pytest.raises(SettingsError, match="expected settings in UTF-8"):
        compose(["dataset.path='/a\udcff'"])
