"""Digest a run's data, models and code, to compare when it is resumed.

Files are digested by content. A weight file above FULL_BYTES is digested by its size, head and SAMPLES blocks, because
reading it whole takes longer than loading the model. A hub name stands for its commit.
"""

from __future__ import annotations

import ast
import base64
import difflib
import hashlib
import importlib.util
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from rlhfless.spec import JudgeSpec, RewardModelSpec, RunSpec
from rlhfless.spec.data import is_path
from rlhfless.spec.imports import TargetError, load_target
from rlhfless.spec.load import fields_of_targets

Kind = Literal["data", "model", "code"]
KINDS: tuple[str, ...] = get_args(Kind)

FULL_BYTES = 64 << 20
SAMPLES, SAMPLE_BYTES = 64, 64 << 10

WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
MODEL_FILES = WEIGHTS | {".json", ".jinja", ".model", ".txt", ".py", ".tiktoken", ".vocab"}
"""Suffixes of digested files of a model folder; README and the like may change."""

ROW_BYTES = 8
"""Bytes of a row's digest: two of a million rows collide once in 37 million data sets."""

MOST_PARQUET_ROWS = 100_000
"""Rows of a Parquet file that are digested one by one; of larger files only the file is."""

MOST_ALIGNED = 2_000
"""Longest lists of rows that are aligned to count differences, in quadratic time."""

SHOWN = 12
"""Hexadecimal digits of a digest in a message."""

REVISION = "revision"
"""Entry of `files` with the commit of a hub name."""

HUB_S = 10.0


@dataclass(frozen=True, slots=True)
class RunInput:
    field: str
    """The dotted spec field that names it."""
    kind: Kind
    path: str
    """File, folder, hub name or import path."""
    files: Mapping[str, str]
    """Digests by name: a file, the files of a folder, or a hub name's revision."""
    rows: str = ""
    """Digests of its rows in order, ROW_BYTES each, in base64; empty if unknown."""


def inputs_of(spec: RunSpec) -> list[RunInput]:
    """Digest the inputs of a checked spec."""
    makers = [
        *(partial(_data, field, path) for field, path in _data_paths(spec)),
        *(partial(_model, field, path) for field, path in _model_paths(spec)),
        *(partial(_code, field, target) for field, target in fields_of_targets(spec).items()),
    ]
    found: list[RunInput] = []
    for make in makers:
        with suppress(FileNotFoundError):  # the checks of a run name what is missing
            found.append(make())
    return [each for each in found if each.files]


def as_json(inputs: Sequence[RunInput]) -> str:
    return json.dumps([asdict(each) for each in inputs], indent=1)


def from_json(text: str) -> list[RunInput]:
    """Parse the result of `as_json`. Raises ValueError or TypeError."""
    return [RunInput(**each) for each in json.loads(text)]


def _data_paths(spec: RunSpec) -> Iterator[tuple[str, str]]:
    for field, path, _ in spec.data.files:
        yield field, path
    if spec.data.held_out is not None and spec.data.held_out.path is not None:
        yield f"{spec.data.section}.held_out.path", spec.data.held_out.path
    for i, each in enumerate(spec.evaluation.sets):
        yield f"evaluation.sets.{i}.path", each.path


def _model_paths(spec: RunSpec) -> Iterator[tuple[str, str]]:
    yield "model.path", spec.model.path
    if spec.model.tokenizer is not None:
        yield "model.tokenizer", spec.model.tokenizer
    if spec.supervised:
        return
    for i, part in enumerate(spec.rewards):
        if isinstance(part, RewardModelSpec | JudgeSpec) and part.path is not None:
            yield f"rewards.{i}.path", part.path
    if spec.critic is not None and spec.critic_source.path != spec.model.path:
        yield "critic.model", spec.critic_source.path
    for i, teacher in enumerate(spec.teachers):
        if teacher.path is not None and not teacher.is_self:
            yield f"teachers.{i}.path", teacher.path
    drafter = getattr(spec.generation.speculation, "model", None)
    if drafter is not None:
        yield "generation.speculation.model", drafter


def _data(field: str, path: str) -> RunInput:
    if not is_path(path):
        return RunInput(field, "data", path, _revision(_dataset_commit(path.partition(":")[0])))
    file = Path(path)
    if file.is_dir():
        files = (each for each in sorted(file.rglob("*")) if each.is_file())
        visible = (each for each in files if not any(part.startswith(".") for part in each.relative_to(file).parts))
        return RunInput(field, "data", path, {str(each.relative_to(file)): _digest(each) for each in visible})
    rows = b"".join(hashlib.blake2b(row, digest_size=ROW_BYTES).digest() for row in _rows(file))
    return RunInput(field, "data", path, {file.name: _digest(file)}, base64.b64encode(rows).decode())


def _model(field: str, path: str) -> RunInput:
    if not is_path(path):
        return RunInput(field, "model", path, _revision(_model_commit(path)))
    files = sorted(each for each in Path(path).iterdir() if each.is_file() and each.suffix in MODEL_FILES)
    digests = {each.name: _digest(each, sampled=each.suffix in WEIGHTS) for each in files}
    return RunInput(field, "model", path, digests)


def _code(field: str, target: str) -> RunInput:
    return RunInput(field, "code", target, code_files(target))


def _revision(commit: str) -> Mapping[str, str]:
    return {REVISION: commit} if commit else {}


def _model_commit(name: str) -> str:
    """Return the commit of a cached model; empty if unknown."""
    from huggingface_hub import try_to_load_from_cache

    with suppress(Exception):  # a cache may be anywhere, and broken in any way
        file = try_to_load_from_cache(name, "config.json")
        return Path(file).parent.name if isinstance(file, str) else ""
    return ""


def _dataset_commit(name: str) -> str:
    """Return the newest commit of a hub data set, which is the one that is loaded; empty if unknown."""
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return ""
    with suppress(Exception):  # network errors of every kind
        return HfApi().dataset_info(name, timeout=HUB_S).sha or ""
    return ""


def _digest(file: Path, *, sampled: bool = False) -> str:
    size = file.stat().st_size
    with file.open("rb") as stream:
        if not sampled or size <= FULL_BYTES:
            return hashlib.file_digest(stream, "sha256").hexdigest()
        digest = hashlib.sha256(str(size).encode())
        for i in range(SAMPLES):
            stream.seek(i * (size - SAMPLE_BYTES) // (SAMPLES - 1))
            digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _rows(file: Path) -> Iterator[bytes]:
    with file.open("rb") as stream:
        if stream.read(4) != b"PAR1":
            stream.seek(0)
            yield from filter(None, map(bytes.strip, stream))
            return
        import pyarrow.parquet

        table = pyarrow.parquet.ParquetFile(stream)
        if table.metadata.num_rows <= MOST_PARQUET_ROWS:
            for batch in table.iter_batches():
                yield from (json.dumps(row, default=str, sort_keys=True).encode() for row in batch.to_pylist())


@dataclass(frozen=True, slots=True)
class InputChange:
    """A difference between the inputs of two attempts."""

    field: str
    kind: Kind
    what: str
    """The files that changed, with digests, and the number of changed rows."""


def changes(before: Sequence[RunInput], now: Sequence[RunInput]) -> list[InputChange]:
    """Compare inputs with equal field and path. A data file with the same rows is unchanged, whatever its line ends or
    compression."""
    known = {(each.field, each.path): each for each in before}
    pairs = [(known.get((each.field, each.path)), each) for each in now]
    return [
        InputChange(new.field, new.kind, _told(old, new))
        for old, new in pairs
        if old is not None and dict(old.files) != dict(new.files) and not (old.rows and old.rows == new.rows)
    ]


def _told(old: RunInput, new: RunInput) -> str:
    names = dict.fromkeys((*old.files, *new.files))
    different = [name for name in names if old.files.get(name) != new.files.get(name)]
    files = ", ".join(_told_file(name, old.files.get(name), new.files.get(name)) for name in different[:8])
    more = f" and {len(different) - 8} more files" if len(different) > 8 else ""
    rows = f": {_told_rows(_split(old.rows), _split(new.rows))}" if old.rows and new.rows else ""
    return f"{new.path!r} is not what the run started with: {files}{more}{rows}"


def _told_file(name: str, old: str | None, new: str | None) -> str:
    if old is None:
        return f"{name} is new"
    if new is None:
        return f"{name} is gone"
    return f"{name} had {old[:SHOWN]} and has {new[:SHOWN]}"


def _split(rows: str) -> list[bytes]:
    digests = base64.b64decode(rows)
    return [digests[i : i + ROW_BYTES] for i in range(0, len(digests), ROW_BYTES)]


def _told_rows(old: Sequence[bytes], new: Sequence[bytes]) -> str:
    """Describe how many rows changed, were added and removed, and the first difference."""
    start = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    tails = zip(reversed(old[start:]), reversed(new[start:]), strict=False)
    end = next((i for i, (a, b) in enumerate(tails) if a != b), min(len(old), len(new)) - start)
    left, right = old[start : len(old) - end], new[start : len(new) - end]
    if Counter(left) == Counter(right):
        return f"the same {len(new)} rows in another order"
    changed, added, removed = _counts(left, right)
    return f"of {len(old)} rows {changed} changed, {removed} removed, {added} added; the first is row {start + 1}"


def _counts(old: Sequence[bytes], new: Sequence[bytes]) -> tuple[int, int, int]:
    """Count changed, added and removed rows; in long lists, a removed row pairs with an added one."""
    if max(len(old), len(new)) > MOST_ALIGNED:
        gone, come = (Counter(old) - Counter(new)).total(), (Counter(new) - Counter(old)).total()
        changed = min(gone, come)
        return changed, come - changed, gone - changed
    changed = added = removed = 0
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag != "equal":
            both = min(i2 - i1, j2 - j1)
            changed, added, removed = changed + both, added + (j2 - j1) - both, removed + (i2 - i1) - both
    return changed, added, removed


# -- files of user code


PACKAGE = "rlhfless"
"""Code of the package itself changes with its version."""


def code_files(target: str) -> Mapping[str, str]:
    """Digest the module of an import path and the local modules it imports, by path below their folder.

    Empty for code of rlhfless, and for a target that cannot be imported.
    """
    module = target.partition(":")[0]
    top = module.partition(".")[0]
    if top == PACKAGE:
        return {}
    with suppress(TargetError):
        load_target(target)  # searches the current folder, too
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return {}
    if spec is None or spec.origin is None:
        return {}
    origin = Path(spec.origin)
    root = origin.parent.parent if spec.submodule_search_locations else origin.parent
    installed = "site-packages" in root.parts or "dist-packages" in root.parts
    found: dict[Path, str] = {}
    _follow(root, module, top if installed else None, found)
    return {str(file.relative_to(root)): digest for file, digest in sorted(found.items())}


def _follow(root: Path, module: str, within: str | None, found: dict[Path, str]) -> None:
    """Add the files of a module, its packages, and what they import from `root` (with `within`, only from that
    package)."""
    parts = module.split(".")
    if within is not None and parts[0] != within:
        return
    for length in range(1, len(parts) + 1):
        path = root.joinpath(*parts[:length])
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file() and file not in found:
                content = file.read_bytes()
                found[file] = hashlib.sha256(content).hexdigest()
                package = parts[:length] if file.name == "__init__.py" else parts[: length - 1]
                for name in _imported(content, package):
                    _follow(root, name, within, found)


def _imported(content: bytes, package: list[str]) -> Iterator[str]:
    """Yield modules that a file may import, anywhere in it."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            names = [*base, *(node.module.split(".") if node.module else [])]
            if names:
                yield ".".join(names)
            yield from (".".join([*names, alias.name]) for alias in node.names if alias.name != "*")
