"""Read rows of a data set, each with its place in the source for messages.

An absolute path is a JSONL or Parquet file, or a data set folder. Anything else is a hub name, with its configuration
after a colon as in `openai/gsm8k:main`. Folders and hub names go through `datasets`.

An Arrow struct has every key of its type, null where a row had none; a chat template would render those nulls, so a
null inside a struct is dropped. Nulls in lists, maps, JSON values and whole columns are the author's, and stay.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np
import yaml

from rlhfless.spec import SizesSpec
from rlhfless.spec.base import too_large
from rlhfless.spec.data import MOST_SKIPPED, RELATIVE, is_path
from rlhfless.spec.errors import InputError, Problem
from rlhfless.spec.explain import nearest, shown
from rlhfless.util.errors import class_and_line
from rlhfless.util.text import parsed_json

if TYPE_CHECKING:
    import pyarrow as pa

# With an owner: without one, `datasets` takes `json` and `text` for its own readers of files in the working directory.
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
_FILE_SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet", ".csv", ".txt")
PARQUET_ROWS = 256
"""Rows decompressed at a time."""

# The number of faulty lines that a message names; the others are counted.
_MAX_NAMED = 3


@dataclass(frozen=True, slots=True)
class Row:
    """One row. `where` is `train.jsonl:12` or `train.parquet row 12`, counted from 1."""

    where: str
    values: Mapping[str, Any]


def read_rows(
    field: str, path: str, split: str, sizes: SizesSpec, broken: list[tuple[Row, str]] | None = None
) -> list[Row]:
    """Read all rows of a data set. `field` is the spec's field that names it; `broken` collects JSONL lines that hold
    no row, which are refused otherwise.

    Raises InputError if it is missing, unreadable, empty, or larger than `sizes`, which is checked before rows are
    created.
    """
    file = Path(path)
    if is_path(path) and os.path.isfile(path):
        rows = _parquet(field, file, sizes) if _is_parquet(field, file) else _jsonl(field, file, sizes, broken)
    elif os.path.isdir(path) if is_path(path) else _HUB_NAME.fullmatch(path) and not path.endswith(_FILE_SUFFIXES):
        rows = _dataset(field, path, split, sizes)
    else:
        siblings = os.listdir(file.parent) if is_path(path) and os.path.isdir(file.parent) else []
        raise _error(field, f"{path!r}: no such file", f"{nearest(file.name, siblings)}{RELATIVE}")
    if not rows and not broken:
        raise _error(field, f"{path!r} is empty", "give it at least one row")
    return rows


def _is_parquet(field: str, file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            return stream.read(4) == b"PAR1"
    except OSError as error:
        raise _error(
            field, f"{str(file)!r} cannot be read: {error}", "check its owner and mode, and the disk"
        ) from error


def _require_size(field: str, path: str, sizes: SizesSpec, data_bytes: int, rows: int = 0) -> None:
    for bound, figure, noun in (("data_mib", -(-data_bytes // 2**20), "MiB"), ("prompts", rows, "rows")):
        if figure > getattr(sizes, bound):
            raise _error(field, *too_large(f"the number of {noun} of {path!r}", figure, bound, sizes))


def _jsonl(field: str, file: Path, sizes: SizesSpec, broken: list[tuple[Row, str]] | None) -> list[Row]:
    rows, faults = [], list[tuple[Row, str]]()
    try:
        _require_size(field, str(file), sizes, file.stat().st_size)
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise _error(field, f"{str(file)!r} cannot be read as UTF-8 text: {error}", _FORMATS) from error
    _require_size(field, str(file), sizes, 0, rows=text.count("\n"))
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            values = parsed_json(line, as_written=True)
        except ValueError as error:
            faults.append((Row(f"{file.name}:{number}", {}), f"not JSON: {error}"))
            continue
        if isinstance(values, dict):
            rows.append(Row(f"{file.name}:{number}", values))
        else:
            faults.append((Row(f"{file.name}:{number}", {}), f"an object is needed, got {shown(values)}"))
    if broken is not None:
        broken += faults
    elif faults:
        named = "; ".join(f"{file.parent / row.where}: {what}" for row, what in faults[:_MAX_NAMED])
        more = f" (and {len(faults) - _MAX_NAMED} more)" if len(faults) > _MAX_NAMED else ""
        few = "." in field and len(faults) <= MOST_SKIPPED * (len(rows) + len(faults))
        way_out = "; or set `on_bad_row: skip` to run without these lines" if few else ""
        raise _error(field, named + more, _FORMATS + way_out)
    return rows


def _parquet(field: str, file: Path, sizes: SizesSpec) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with file.open("rb") as stream:  # pyarrow itself takes no path that is not UTF-8
            table = pyarrow.parquet.ParquetFile(stream)
            _require_size(field, str(file), sizes, 0, rows=table.metadata.num_rows)
            values: list[dict[str, Any]] = []
            size_bytes = 0
            for batch in table.iter_batches(PARQUET_ROWS):  # what is compressed can be a thousand times as large
                size_bytes += batch.nbytes
                _require_size(field, str(file), sizes, size_bytes)
                values += arrow_rows(batch)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise _error(field, f"{str(file)!r} cannot be read as Parquet: {error}", _FORMATS) from error
    return [Row(f"{file.name} row {i}", row) for i, row in enumerate(values, start=1)]


def _dataset(field: str, path: str, split: str, sizes: SizesSpec) -> list[Row]:
    if importlib.util.find_spec("datasets") is None:
        hint = "install it with `pip install 'rlhfless[data]'`, or name a file"
        raise _error(field, f"{path!r} is not a file here, and hub data sets need the package `datasets`", hint)
    import datasets

    name, _, configuration = (path, "", "") if is_path(path) else path.partition(":")
    try:
        revision, foreign = foreign_files(name)
        if foreign:
            what = f"the card of {path!r} names data outside of it: {shown(foreign)}"
            raise _error(field, what, "copy the file into the data set, or fetch it and name it as prompts.path")
        # What begins so is not looked for in the working directory.
        source = name if is_path(path) else f"hf://datasets/{name}"
        data = datasets.load_dataset(source, configuration or None, split=split, revision=revision)
        _require_size(field, path, sizes, data.data.nbytes, rows=data.num_rows)
        rows = list(arrow_rows(data.with_format("arrow")[:]))
    except InputError:
        raise
    except Exception as error:  # datasets raises dozens of kinds of error, including network errors
        what = f"{path!r} could not be loaded as a data set: {class_and_line(error.__cause__ or error)}"
        hint = "check the name, the split and the network; a configuration is given as `name:configuration`"
        raise _error(field, what, hint) from error
    return [Row(f"{path} ({split}) row {i}", values) for i, values in enumerate(rows, start=1)]


_FORMATS = "prompts are read from JSONL (one JSON object per line) or Parquet"


def _error(field: str, what: str, hint: str) -> InputError:
    return InputError("prompts", [Problem(field, what, hint)])


_HUB_ANSWER_S = 10.0
_CARDS = ("README.md", ".huggingface.yaml")
_FILES = ("data_files", "data_dir")


def foreign_files(name: str) -> tuple[str | None, str]:
    """Find files outside a data set that its card names: `datasets` would fetch them from any URL, also of this
    machine.

    `name`: a folder or hub name. Returns the revision that was read (None for a folder) and the first such file, or an
    empty string. Raises what `huggingface_hub` raises.
    """
    from huggingface_hub import HfApi, constants, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    cards, revision = [], None
    if is_path(name):
        cards = [Path(name, card) for card in _CARDS]
    elif not constants.HF_HUB_OFFLINE:  # else only what was loaded before is there
        revision = HfApi().dataset_info(name, timeout=_HUB_ANSWER_S).sha
        for card in _CARDS:
            with contextlib.suppress(EntryNotFoundError):
                cards.append(Path(hf_hub_download(name, card, repo_type="dataset", revision=revision)))
    texts = [text for card in cards if card.is_file() for text in _named(_values(card))]
    return revision, next((text for text in texts if _is_foreign(text)), "")


def _values(card: Path) -> Any:
    from huggingface_hub import DatasetCard

    if card.suffix == ".md":
        return DatasetCard.load(card, ignore_metadata_errors=True).data.to_dict()
    return yaml.safe_load(card.read_text("utf-8"))


def _named(values: Any, within: bool = False) -> Iterator[str]:
    """Yield texts below keys that name files, at any depth."""
    if isinstance(values, Mapping):
        for key, inner in values.items():
            yield from _named(inner, within or key in _FILES)
    elif isinstance(values, list):
        for inner in values:
            yield from _named(inner, within)
    elif within and isinstance(values, str):
        yield values


def _is_foreign(text: str) -> bool:
    text = unquote(text)
    return "://" in text or "::" in text or text.startswith(("/", "~")) or ".." in text.split("/")


# -- Arrow tables


_Read = Callable[[Any], Any]


def arrow_rows(batch: pa.RecordBatch | pa.Table) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table. Raises ValueError for a value that Python lacks, or duplicate columns."""
    names = batch.schema.names
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two columns are called {twice[0]!r}")
    columns = []
    for field, column in zip(batch.schema, batch.columns, strict=True):
        try:
            values = column.to_pylist()
        except (ValueError, OverflowError) as error:  # bytes that are no text, a date after the year 9999
            raise ValueError(f"the column {field.name!r} of type {field.type}: {error}") from error
        read = _reader(field.type)
        columns.append(values if read is None else map(read, values))
    for row in zip(*columns, strict=True):
        yield dict(zip(names, row, strict=True))


def _reader(kind: pa.DataType) -> _Read | None:
    """Return the conversion of an Arrow type's values; None if pyarrow's form is kept."""
    import pyarrow as pa

    types = pa.types
    if isinstance(kind, pa.JsonType):
        return lambda value: None if value is None else parsed_json(value, as_written=True)
    if types.is_dictionary(kind):
        return _reader(kind.value_type)
    if types.is_float16(kind) or types.is_float32(kind):
        # 0.1 as a person writes it, and not 0.10000000149
        narrow = np.float16 if types.is_float16(kind) else np.float32
        return lambda value: None if value is None else float(str(narrow(value)))
    if types.is_struct(kind):
        readers = ((field.name, _reader(field.type)) for field in kind)
        return _struct_reader([(name, read) for name, read in readers if read is not None])
    if types.is_map(kind):
        texts = (types.is_string, types.is_large_string, types.is_string_view)
        return _map_reader(_reader(kind.item_type)) if any(each(kind.key_type) for each in texts) else None
    lists = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view)
    if any(each(kind) for each in lists):
        read = _reader(kind.value_type)
        return None if read is None else lambda value: None if value is None else list(map(read, value))
    return None


def _struct_reader(readers: list[tuple[str, _Read]]) -> _Read:
    """`readers`: of the fields whose values change."""

    def read(value: Any) -> Any:
        if value is None:
            return None
        given = {name: item for name, item in value.items() if item is not None}
        for name, change in readers:
            if name in given:
                given[name] = change(given[name])
        return given

    return read


def _map_reader(inner: _Read | None) -> _Read:
    """Convert key-value pairs to a mapping."""

    def read(value: Any) -> Any:
        if value is None:
            return None
        mapping = {key: item if inner is None else inner(item) for key, item in value}
        if len(mapping) < len(value):
            raise ValueError(f"a map has a key twice: {[key for key, _ in value]}")
        return mapping

    return read
