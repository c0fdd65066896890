"""From Hydra's composed configuration to ``Settings``; with ``cli``, the only place that sees a ``DictConfig``."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf

from triaccel_bench.parsing import parse
from triaccel_bench.settings import Settings

CONFIG_PACKAGE = "triaccel_bench.conf"

# Hydra's own folders carry machine and process, so that two sweeps begun in one second do not share one: in containers
# the process's number is the same on all machines.
OmegaConf.register_new_resolver("process_id", lambda: f"{socket.gethostname()}-{os.getpid()}", replace=True)
OmegaConf.register_new_resolver("expanded", os.path.expanduser, replace=True)


def to_settings(config: DictConfig) -> Settings:
    """Raises ``SettingsError`` for values, ``OmegaConfBaseException`` for interpolations that cannot be resolved."""
    return parse(OmegaConf.to_container(config, resolve=True))


def compose(overrides: Sequence[str] = ()) -> Settings:
    """Settings as the command line would make them, for use as a library and in tests."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module

    with initialize_config_module(CONFIG_PACKAGE, version_base="1.3"):
        return to_settings(hydra_compose("config", overrides=list(overrides)))
