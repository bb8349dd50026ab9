"""Writes requirements/gpu-wheels.tsv: of each wheel of gpu.txt what it puts where, and what it needs.

pip installs two wheels with the same file without a word, and the later one wins; and the list is installed without a
look at dependencies. So a test (tests/requirements/test_gpu_wheels.py) reads this table. Run this in the environment of
the tests whenever gpu.txt changes. Wheels of that environment are read from there; of the others, some of which have
hundreds of MB, only the directory and the metadata are fetched, by pip's own client.

A folder stands for all that is in it where no other wheel has a file in it.
"""

from __future__ import annotations

import re
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).parents[1]
PINS = ROOT / "requirements" / "gpu.txt"
TABLE = ROOT / "requirements" / "gpu-wheels.tsv"
INDEX = "https://pypi.org/simple"
PYTHON = {
    "python_version": "3.11",
    "python_full_version": "3.11.13",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "sys_platform": "linux",
    "os_name": "posix",
}


class Wheel(NamedTuple):
    """What is in it, and what it says that it needs."""

    files: frozenset[str]
    requires: tuple[Requirement, ...]


def main() -> None:
    pins = dict(line.split("==") for line in PINS.read_text().split("\n") if line and not line.startswith("#"))
    wheels = {canonicalize_name(name): _installed(name, version) or _fetched(name, version)
              for name, version in pins.items()}  # fmt: skip
    needs, places = _needs(wheels), _places({name: wheel.files for name, wheel in wheels.items()})
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    rows = [f"{name}=={versions[name]}\t{' '.join(places[name])}\t{'; '.join(needs[name])}" for name in sorted(wheels)]
    TABLE.write_text("wheel\tfolders and files\tneeds\n" + "\n".join(rows) + "\n", "utf-8")


def _installed(name: str, version: str) -> Wheel | None:
    """A wheel of this environment; None if it has another one."""
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    if distribution.version != version:
        return None
    files = (
        str(file) for file in distribution.files or () if "__pycache__" not in file.parts and file.parts[0] != ".."
    )
    return Wheel(_packaged(files), tuple(map(Requirement, distribution.requires or ())))


def _fetched(name: str, version: str) -> Wheel:
    from pip._internal.models.target_python import TargetPython
    from pip._internal.network.lazy_wheel import LazyZipOverHTTP
    from pip._internal.network.session import PipSession

    target = TargetPython(platforms=_platforms(), py_version_info=(3, 11), implementation="cp")
    ranks = {str(tag): rank for rank, tag in enumerate(target.get_tags())}
    session = PipSession(retries=3)
    accept = {"Accept": "application/vnd.pypi.simple.v1+json"}
    index = session.get(f"{INDEX}/{canonicalize_name(name)}/", headers=accept).json()
    fitting = []
    for file in index["files"]:
        if not file["filename"].endswith(".whl") or f"-{version}-" not in file["filename"]:
            continue
        tags = parse_wheel_filename(file["filename"])[3]
        if rank := min((ranks[str(tag)] + 1 for tag in tags if str(tag) in ranks), default=0):
            fitting.append((rank, file["url"]))
    if not fitting:
        sys.exit(f"{name}=={version} has no wheel for Python 3.11 on x86_64 Linux")
    archive = zipfile.ZipFile(LazyZipOverHTTP(min(fitting)[1], session))  # type: ignore[arg-type]
    names = archive.namelist()
    (about,) = (each for each in names if re.fullmatch(r"[^/]+\.dist-info/METADATA", each))
    text = archive.read(about).decode().split("\n\n")[0]
    lines = re.findall(r"^Requires-Dist: (.*)$", text, re.MULTILINE)
    return Wheel(_packaged(names), tuple(Requirement(line.strip()) for line in lines))


def _platforms() -> list[str]:
    """Newest first, as pip on a Debian 12 would have them."""
    return [*(f"manylinux_2_{minor}_x86_64" for minor in range(36, 4, -1)), "manylinux2014_x86_64",
            "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]  # fmt: skip


def _packaged(names: Iterable[str]) -> frozenset[str]:
    """Files of packages, without the folders that each wheel has for itself."""
    return frozenset(
        name.partition(".data/purelib/")[2] or name.partition(".data/platlib/")[2] or name
        for name in names
        if not name.endswith("/") and ".dist-info/" not in name
        and not re.search(r"\.data/(?!purelib|platlib)", name)
    )  # fmt: skip


def _needs(wheels: Mapping[str, Wheel]) -> dict[str, list[str]]:
    """What each wheel needs on Linux, also with the extras that it is asked for with."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [Requirement(line) for line in (*project["dependencies"], *project["optional-dependencies"]["gpu"])]
    extras: dict[str, set[str]] = defaultdict(set)
    needed_by: dict[str, set[str]] = {name: set() for name in wheels}
    while asked:
        one = asked.pop()
        name, before = canonicalize_name(one.name), needed_by.get(canonicalize_name(one.name))
        if before is None:
            continue  # not pinned, which the test says
        extras[name] |= one.extras
        for need in wheels[name].requires:
            chosen = ("", *extras[name])
            if need.marker is None or any(need.marker.evaluate({**PYTHON, "extra": extra}) for extra in chosen):
                text = f"{canonicalize_name(need.name)}{need.specifier}"
                if text not in before or not need.extras <= extras[canonicalize_name(need.name)]:
                    before.add(text)
                    asked.append(need)
    return {name: sorted(needs) for name, needs in needed_by.items()}


def _places(files: Mapping[str, frozenset[str]]) -> dict[str, list[str]]:
    """The largest folders that a wheel has for itself, and its files outside of them."""
    owners: dict[str, set[str]] = defaultdict(set)
    for name, paths in files.items():
        for path in paths:
            for folder in PurePosixPath(path).parents:
                owners[f"{folder}/"].add(name)
    places: dict[str, set[str]] = defaultdict(set)
    for name, paths in files.items():
        for path in paths:
            above = [f"{folder}/" for folder in reversed(PurePosixPath(path).parents)]
            places[name].add(next((folder for folder in above if owners[folder] == {name}), path))
    return {name: sorted(places[name]) for name in files}


if __name__ == "__main__":
    main()
