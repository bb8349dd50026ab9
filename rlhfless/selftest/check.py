"""Checks, their outcomes, and their subject: a run's spec resolved for this machine, with parts that keep running.

A check that needs another's result is skipped unless that check succeeds.
"""

from __future__ import annotations

import inspect
import json
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from rlhfless.bundled import Recipe, WarmStartRecipe, build
from rlhfless.planning.host_memory import SHARED_MEMORY
from rlhfless.planning.inputs import config_file, local_devices
from rlhfless.planning.memory_plan import Question
from rlhfless.planning.resolve import resolve
from rlhfless.scaling.placement import CPU_KIND
from rlhfless.spec import RunSpec
from rlhfless.spec.errors import InputError, Problem
from rlhfless.weights.store import FolderStore

BUNDLED = "bundled"
"""Name of the model in a self-test without a user's run."""

PROBE_TOKENS = 128


class SubjectPart(Protocol):
    """Processes that keep running from one check to the next."""

    def close(self) -> None: ...


@dataclass
class Subject:
    """The subject on a single node."""

    asked: Question
    """The resolved spec, the model's sizes, and the devices."""
    model: str
    folder: Path
    """A scratch folder, in shared memory like a run's store."""
    vocabulary: int
    engines: SubjectPart | None = None
    ranks: SubjectPart | None = None
    results: dict[str, Any] = field(default_factory=dict)
    """Results for later checks and the report."""

    @property
    def spec(self) -> RunSpec:
        return self.asked.spec

    @property
    def kind(self) -> str:
        return self.asked.sheet.kind

    @property
    def gpus(self) -> int:
        """GPUs of this node."""
        return 0 if self.kind == CPU_KIND else self.asked.count

    @property
    def small(self) -> Subject:
        """The bundled model on the same devices."""
        return self if self.model == BUNDLED else _subject(_bundled(self.folder / "bundled"), BUNDLED, self.folder)

    @property
    def store(self) -> FolderStore:
        return FolderStore(self.folder / "store")

    def tokens(self, count: int, first: int = 0) -> tuple[int, ...]:
        """Return `count` tokens of the vocabulary, different for each `first`."""
        return tuple((7 * (first + index) + 11 * (index + 1)) % self.vocabulary for index in range(count))

    @property
    def probe(self) -> tuple[int, ...]:
        return self.tokens(min(PROBE_TOKENS, self.asked.sequence_tokens - 1))


@contextmanager
def opened(spec: RunSpec | None) -> Iterator[Subject]:
    """Open a subject on this machine. After the block, stop its parts and remove its files.

    Without a spec, builds the bundled model without training it. Raises InputError and PlacementError like a run of
    this spec.
    """
    if spec is not None and spec.supervised:
        what = f"a run of type {spec.type} has no engines, and the self-test is of engines and learner together"
        raise InputError("the self-test", [Problem("type", what, "name a spec of type rlhf, or none")])
    base = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="rlhfless-selftest-", dir=base))
    subject = None
    try:
        name = BUNDLED if spec is None else spec.model.path
        subject = _subject(spec or _bundled(folder / "bundled"), name, folder)
        yield subject
    finally:
        with ExitStack() as ending:
            ending.callback(shutil.rmtree, folder, ignore_errors=True)
            for part in () if subject is None else (subject.ranks, subject.engines):
                if part is not None:
                    ending.callback(part.close)


def _subject(spec: RunSpec, model: str, folder: Path) -> Subject:
    asked = resolve(spec, local_devices(spec), required=True).asked
    assert asked is not None
    config = json.loads(config_file(spec.model.path).read_text("utf-8"))
    return Subject(asked, model, folder, int(config.get("text_config", config)["vocab_size"]))


def _bundled(folder: Path) -> RunSpec:
    paths = build(folder, recipe=Recipe(warm_start=WarmStartRecipe(steps=0)))
    return RunSpec.model_validate(
        {
            "name": "selftest",
            "model": {"path": str(paths.model)},
            "prompts": {"path": str(paths.train), "id_field": "id"},
            "rewards": [{"type": "exact_match"}],
            "prompts_per_step": 8,
            "samples_per_prompt": 8,
            "generation": {"max_tokens": 112, "engine": {"kv_cache_gib": 0.25}},
        }
    )


# -- checks


State = Literal["ok", "failed", "not applicable"]

Measured = Mapping[str, Any]
"""Figures by name; a name ends with its unit. Values are plain, so that JSON can hold them."""


class NotHere(Exception):
    """The check does not apply to this machine. The message gives the reason."""


class Wrong(Exception):
    """The check found a fault. The message names it, and `measured` holds the figures."""

    def __init__(self, why: str, **measured: Any) -> None:
        super().__init__(why)
        self.measured = measured


Run = Callable[[Subject], Measured]
"""Raises NotHere or Wrong. Any other error is a failure as well."""


@dataclass(frozen=True, slots=True)
class Check:
    """A check of one property of the machine. The docstring of `run` is shown as its description."""

    name: str
    remedy: str
    """Advice for a failed check."""
    run: Run
    needs: tuple[str, ...] = ()
    """Checks that must have succeeded."""
    gpus: int = 0
    """Fewest GPUs of a node for the check to apply."""


def check(name: str, remedy: str, *, needs: tuple[str, ...] = (), gpus: int = 0) -> Callable[[Run], Check]:
    """Turn a function into a check."""
    return lambda run: Check(name, remedy, run, needs, gpus)


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """The outcome of a check."""

    name: str
    measures: str
    state: State
    seconds: float
    measured: Measured = field(default_factory=dict)
    why: str = ""
    """Reason for a failure, or for not applying."""
    remedy: str = ""
    """Advice for a failed check."""


def outcomes(subject: Subject, checks: Sequence[Check]) -> Iterator[CheckOutcome]:
    """Run the checks in order."""
    states: dict[str, State] = {}
    for each in checks:
        outcome = _outcome(each, subject, states)
        states[each.name] = outcome.state
        yield outcome


def _outcome(check: Check, subject: Subject, states: Mapping[str, State]) -> CheckOutcome:
    def run() -> Measured:
        if subject.gpus < check.gpus:
            raise NotHere(f"it needs {check.gpus} GPU(s), and this node has {subject.gpus}")
        if missing := [name for name in check.needs if states.get(name) != "ok"]:
            raise NotHere(f"it needs what {' and '.join(missing)} did not find")
        return check.run(subject)

    return outcome_of(check.name, check.remedy, inspect.getdoc(check.run) or "", run)


def outcome_of(name: str, remedy: str, measures: str, run: Callable[[], Measured]) -> CheckOutcome:
    """Run one check."""
    began_s = time.monotonic()

    def ended(state: State, measured: Measured, why: str = "") -> CheckOutcome:
        seconds = time.monotonic() - began_s
        return CheckOutcome(name, measures, state, seconds, measured, why, remedy if state == "failed" else "")

    try:
        return ended("ok", run())
    except NotHere as reason:
        return ended("not applicable", {}, str(reason))
    except Wrong as fault:
        return ended("failed", fault.measured, str(fault))
    except Exception as error:
        return ended("failed", {"trace": traceback.format_exc()}, f"{type(error).__name__}: {error}")
