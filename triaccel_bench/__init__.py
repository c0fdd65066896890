"""triaccel-bench: reproduces Tri-Accel against FP32 and AMP. Importing this module imports no torch."""

from __future__ import annotations

__version__ = "0.1.0"

_EXPORTS = {"TriAccel": "triaccel_bench.loop"}
__all__ = ["TriAccel", "__version__"]


def __getattr__(name: str):
    if name in _EXPORTS:
        from importlib import import_module

        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
