"""First on the path of pods whose GPUs are only numbers on their node: what a run puts on devices of kind h100 computes
on the CPU there. Everything else, from the demand to the mask, is as on GPUs."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

LAUNCH = "rlhfless.functions.launching"
"""The module that decides what a function computes on."""


class OnCpu(str):
    """Equals both kinds."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other in ("cpu-core", "h100")

    __hash__ = str.__hash__


class Patched(importlib.abc.MetaPathFinder):
    """Replaces the kind in the module, when that is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != LAUNCH:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        loader: Any = spec.loader
        load = loader.exec_module

        def load_and_patch(module: Any) -> None:
            load(module)
            module.CPU_KIND = OnCpu("cpu-core")

        loader.exec_module = load_and_patch
        return spec


sys.meta_path.insert(0, Patched())
