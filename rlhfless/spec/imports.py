"""Import user code that a spec names as `package.module:name`.

The spec's folder and then the current folder are searched last, so that a user's own file is found without installation
and cannot hide an installed package of the same name. Other processes have a different current folder: they receive
`import_paths()` and call `add_import_paths` before they import user code.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import traceback
from collections.abc import Iterable
from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import Any

from rlhfless.spec.explain import nearest

IMPORT_PATH = re.compile(r"[\w.]+:[\w.]+")
"""Pattern of an import path. Short names of built-in classes have no colon."""

# Frames between our call and the user's code: our own files and the import system.
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_NOT_THEIRS = (
    *(os.path.join(_PACKAGE, folder) for folder in ("spec", "rewards", "environments")),
    os.path.dirname(importlib.__file__),
    "<frozen",
)


_spec_folders: list[str] = []
"""The folders of the most recently read spec."""


class TargetError(Exception):
    """The target cannot be imported; `what` says which part of it fails, and why."""

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what, hint)
        self.what = what
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.what}. {self.hint}".rstrip(" .")


def search_in(folders: Iterable[str]) -> None:
    """Search the user's modules in a spec's folders too, before the current folder, instead of in the previous
    spec's."""
    for folder in set(_spec_folders) & set(sys.path):
        sys.path.remove(folder)
    _spec_folders[:] = [folder for folder in dict.fromkeys(folders) if folder not in sys.path]
    current = os.getcwd()
    place = sys.path.index(current) if current in sys.path[1:] else len(sys.path)
    sys.path[place:place] = _spec_folders


def folders_in_use() -> list[str]:
    """Return the spec's folders from which modules were imported."""
    files = [file for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))]
    return [folder for folder in _spec_folders if any(file.startswith(folder + os.sep) for file in files)]


def load_target(target: str) -> Any:
    """Import and return the target. Raises TargetError."""
    module_name, _, attribute = target.partition(":")
    loaded = _module(target, module_name)
    for name in attribute.split("."):
        if not hasattr(loaded, name):
            names = [key for key in vars(loaded) if not key.startswith("_")] if hasattr(loaded, "__dict__") else []
            where = getattr(loaded, "__file__", None) or module_name
            raise TargetError(f"{target!r}: there is no `{name}` in {where}", nearest(name, names).strip())
        loaded = getattr(loaded, name)
    return loaded


def cause(error: BaseException) -> str:
    """Return `ValueError: text (file.py:12)`, with the last line of the user's own code in the traceback."""
    text = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, SyntaxError):
        return f"{text} ({error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    theirs = next((frame for frame in frames if not frame.filename.startswith(_NOT_THEIRS)), None)
    return f"{text} ({theirs.filename}:{theirs.lineno})" if theirs else text


def is_importable(module: str) -> bool:
    """Return whether `load_target` would find a module or package, without importing user code."""
    current = os.getcwd()
    folders: Iterable[str] | None = [*sys.path, *([current] if current not in sys.path else [])]
    name = ""
    for part in module.split("."):
        first, name = not name, f"{name}.{part}".lstrip(".")
        if folders is None:
            return False  # inside a module that is not a package
        module_spec = PathFinder.find_spec(name, list(folders))
        if module_spec is None and first and part != "__main__":
            module_spec = find_spec(name)  # installed in another way, such as editable
        if module_spec is None:
            return False
        folders = module_spec.submodule_search_locations
    return True


def import_paths() -> tuple[str, ...]:
    """Return the folders from which this process imports, for `add_import_paths` in another process."""
    return tuple(path for path in sys.path if path)


def add_import_paths(paths: Iterable[str]) -> None:
    """Search these folders before others on every import in this process."""
    sys.path[:0] = [path for path in paths if path not in sys.path]


def _module(target: str, module_name: str) -> Any:
    if (current := os.getcwd()) not in sys.path:
        sys.path.append(current)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(f"{missing}."):
            folders = " or ".join(dict.fromkeys([*_spec_folders, current]))
            what = f"{target!r}: there is no module {missing!r}, installed or in {folders}"
            hint = "Modules are searched in the spec's folder, in the current folder and on PYTHONPATH"
            raise TargetError(what, hint) from error
        what = f"{target!r}: importing {module_name!r} needs the module {missing!r}, which is not installed"
        raise TargetError(what) from error
    except (Exception, SystemExit) as error:  # the user's module may raise any error while it is imported
        raise TargetError(f"{target!r}: importing {module_name!r} failed: {cause(error)}") from error
