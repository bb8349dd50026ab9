"""Where models and prompts are that a spec names: an absolute path is on this machine; anything else is of the hub.

`load_spec` makes what is there, counted from the spec's folder, absolute. Libraries take what the working directory has
under a name of the hub; so such a name is refused, and is only ever asked of the hub.
"""

from __future__ import annotations

import os

NOT_HERE = "name it by its absolute path, or start rlhfless in another folder"
"""The hint of what `shadowed` finds."""


def is_path(name: str) -> bool:
    """The name is of this machine, not of the hub."""
    return os.path.isabs(name)


def shadowed(name: str) -> str:
    """Why a name must not be asked of the hub; empty if it may be."""
    if is_path(name) or not os.path.lexists(name):
        return ""
    return f"{name!r} is no absolute path, so it is a name of the hub; but the working directory has it, too"
