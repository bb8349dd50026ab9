"""Holds an entry of `private_apis` against the installed dependency."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import json
import mmap
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from private_apis import NAMES, VLLM_NAMES, PrivateName, SourceText

UNNAMED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def fault_of_name(entry: PrivateName) -> str:
    """What of an entry the installed dependency does not keep; empty if it keeps all."""
    try:
        value = resolved(entry.name)
    except (ImportError, AttributeError) as error:
        return f"there is none ({error})"
    if lacking := [name for name in entry.has if not _has(value, name)]:
        return f"it has no {', '.join(lacking)}"
    return _fault_of_call(value, entry.takes) if entry.takes else ""


def fault_of_text(entry: SourceText) -> str:
    """The same of a text."""
    file = package_folder(entry.file.partition("/")[0]).parent / entry.file
    if not file.is_file():
        return f"there is no {entry.file}"
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return "" if content.find(entry.text.encode()) >= 0 else f"{entry.file} does not have it"


def message(entry: PrivateName | SourceText, fault: str) -> str:
    """What a failed test says: the dependency, the fault, and which of our files rely on it for what."""
    what, where = (entry.name, entry.name.partition(".")[0]) if isinstance(entry, PrivateName) else (
        repr(entry.text), entry.file.partition("/")[0]
    )  # fmt: skip
    return f"{where} {version_of(where)}: {what}: {fault}; {', '.join(entry.users)} use it: {entry.why}"


def package_folder(package: str) -> Path:
    """Where an installed package is, without importing it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"{package} is not installed"
    assert spec.origin is not None
    return Path(spec.origin).parent


def version_of(package: str) -> str:
    """Of the distribution that a package came with."""
    return metadata.version(metadata.packages_distributions()[package][0])


def resolved(name: str) -> Any:
    """What a dotted name stands for."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            value = getattr(value, part)
        return value
    raise ImportError(name)


def _has(value: Any, name: str) -> bool:
    """Also of an attribute that instances alone have."""
    if hasattr(value, name):
        return True
    if not inspect.isclass(value):
        return name in vars(type(value))
    if dataclasses.is_dataclass(value) and name in {field.name for field in dataclasses.fields(value)}:
        return True
    kinds = [kind for kind in value.__mro__ if kind.__module__ != "builtins"]
    if any(name in vars(kind).get("__annotations__", {}) for kind in kinds):
        return True
    return any(f"self.{name}" in _source(kind) for kind in kinds)


def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""


def _fault_of_call(value: Any, takes: tuple[str, ...]) -> str:
    """Parameters that are missing, in another order, or required beside `takes`."""
    value = getattr(value, "_init_fn", value)  # the function of a custom operator of torch
    if hasattr(value, "default") and hasattr(value, "overloads"):  # an operator of torch
        arguments = value.default._schema.arguments
        names = [argument.name for argument in arguments]
        required = {argument.name for argument in arguments if not argument.has_default_value()}
    else:
        parameters = [each for each in inspect.signature(value).parameters.values() if each.kind not in UNNAMED]
        names = [each.name for each in parameters]
        required = {each.name for each in parameters if each.default is inspect.Parameter.empty}
    if [name for name in names if name in takes] != list(takes):
        return f"it takes ({', '.join(names)}), and not in this order ({', '.join(takes)})"
    if more := required - {*takes, "self", "cls"}:
        return f"it also needs {', '.join(sorted(more))}"
    return ""


def _of_vllm() -> dict[str, str]:
    """By entry; and by class of ours what vLLM's base class asks for beside its methods."""
    faults = {entry.name: fault_of_name(entry) for entry in VLLM_NAMES}  # before ours replace what they are

    from rlhfless.functions.generation.vllm import kv_files, weight_engine

    ours = (kv_files.KvFiles, weight_engine.StoreWeightTransferEngine)
    return faults | {kind.__name__: ", ".join(getattr(kind, "__abstractmethods__", ())) for kind in ours}


if __name__ == "__main__":  # vLLM cannot be imported beside numba, and our own code replaces some of these names
    print(json.dumps(_of_vllm() if "vllm" in sys.argv else {entry.name: fault_of_name(entry) for entry in NAMES}))
