"""From Hydra's composed configuration to ``Settings``; with ``cli``, the only place that sees a ``DictConfig``."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from triaccel_bench.parsing import parse
from triaccel_bench.recording import with_recorded_method
from triaccel_bench.settings import Settings

CONFIG_PACKAGE = "triaccel_bench.conf"

FOLDERS_OF_HYDRA: set[Path] = set()
"""Those that this command has told Hydra to make, whether it has come to that or not."""
_COMMAND = secrets.token_hex(4)


def _folder_of_hydra(root: str, started: str) -> str:
    """A folder that no other command has, whatever its clock says and whichever machine's process number it has."""
    folder = Path(os.path.expanduser(root)) / f".hydra-{started}-{_COMMAND}"
    FOLDERS_OF_HYDRA.add(folder)
    return str(folder)


OmegaConf.register_new_resolver("folder_of_hydra", _folder_of_hydra, use_cache=True, replace=True)


def to_settings(config: DictConfig) -> Settings:
    """Raises ``SettingsError`` for values, ``OmegaConfBaseException`` for interpolations that cannot be resolved."""
    return parse(with_recorded_method(OmegaConf.to_container(config, resolve=True)))


def compose(overrides: Sequence[str] = ()) -> Settings:
    """Settings as the command line would make them, for use as a library and in tests."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module

    with initialize_config_module(CONFIG_PACKAGE, version_base="1.3"):
        return to_settings(hydra_compose("config", overrides=list(overrides)))
