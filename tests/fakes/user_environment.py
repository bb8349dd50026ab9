"""The environment that a user installs: the pinned list without packages that only checks and tests need."""

from __future__ import annotations

import sysconfig
import venv
from importlib import metadata
from pathlib import Path

from fakes.repository import pinned


def user_environment(folder: Path) -> Path:
    """Create the environment from links into the current one, and return its command `rlhfless`."""
    venv.EnvBuilder(symlinks=True).create(folder)
    (packages,) = (folder / "lib").glob("python3*/site-packages")
    hidden = {place for name in pinned("test.txt") for place in _places(name)}
    for place in Path(sysconfig.get_path("purelib")).iterdir():
        if place.name not in hidden:
            (packages / place.name).symlink_to(place)
    command = folder / "bin" / "rlhfless"
    command.write_text(f"#!{folder}/bin/python\nfrom rlhfless.cli.main import main\nmain()\n")
    command.chmod(0o755)
    return command


def _places(name: str) -> set[str]:
    """Return the folders and files of a distribution in site-packages."""
    return {file.parts[0] for file in metadata.files(name) or () if file.parts[0] not in ("..", "__pycache__")}
