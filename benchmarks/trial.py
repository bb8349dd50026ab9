"""The hostile trial: mistakes and attacks of a user against a run, and whether the run withstands them.

    python benchmarks/trial.py MODEL_FOLDER [--parts weights,live,text,models,signals] [--cases N] [--smoke]

MODEL_FOLDER is what `rlhfless models tiny` wrote. Every case is the command line itself on real parts; the table says
what each was to do and what it did, and the exit code is 1 if any did otherwise. About 20 minutes on two cores.

weights   benchmarks/hostile_weights.py: wrong weights x dtypes x heads x learning rates, and honest loads
live      a whole run whose learner publishes the version before
text      a run whose prompts and whose rewards' errors hold arbitrary text, stopped and resumed
models    broken model folders, before anything starts
signals   SIGTERM and SIGINT at every phase of a run, once and twice
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import psutil
from demo_run import demo_command
from smoke import parsed
from where import machine

WRONG_RESULT = 3
"""Exit code of a run that a weight check has stopped (rlhfless.loop.endings)."""

LIMIT_S = 400
"""Longest wait for a run of a few steps: a start takes 50 s, on a crowded machine twice that."""

QUICK = ("steps=3", "prompts_per_step=8", "samples_per_prompt=4", "evaluation.samples_per_prompt=1")

# The learner's process runs this before all else: from publication STALE_FROM on they are one step late.
STALE_LEARNER = """
import importlib.abc, importlib.machinery, os, sys

NAME = "rlhfless.functions.learner.rank"

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != NAME:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            honest = module.LearnerRank.published
            kept = []
            def published(rank):
                kept.append({name: tensor.clone() for name, tensor in honest(rank).tensors})
                stale = len(kept) >= int(os.environ["STALE_FROM"])
                return module.TensorStream.of(kept[-2] if stale else kept[-1])
            module.LearnerRank.published = published
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""

REWARDS = '''
import random

def odd(prompt, response, **columns):
    """Half of the samples fail with text that no file format likes."""
    chance = random.Random(response)
    if chance.random() < 0.5:
        raise ValueError("".join(chr(chance.choice([0, 10, 27, 0x7F, 0xD800, 0xDCFF, 0x1F600])) for _ in range(40)))
    return float(len(response) % 2)
'''


@dataclass(frozen=True)
class Row:
    """One case of the trial."""

    part: str
    case: str
    wanted: str
    seen: str
    holds: bool


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    said: str

    @property
    def last_line(self) -> str:
        lines = [line for line in self.said.splitlines() if line.strip()]
        return lines[-1] if lines else ""


def command(arguments: Sequence[str], **environment: str) -> Ended:
    """Run a command to its end."""
    done = subprocess.run(
        [str(argument) for argument in arguments],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=LIMIT_S,
        check=False,
    )
    return Ended(done.returncode, done.stdout.decode(errors="replace"))


# -- weights


def weights(model: Path, folder: Path) -> Iterator[Row]:
    """See benchmarks/hostile_weights.py."""
    del model, folder
    bench = Path(__file__).with_name("hostile_weights.py")
    done = subprocess.run([sys.executable, bench, "--json"], stdout=subprocess.PIPE, check=False)
    for row in map(json.loads, done.stdout.decode().splitlines()):
        case = f"{row['wrong']}, {row['dtype']}, {row['head']}, lr {row['rate']:g}"
        if row["wrong"] == "honest":
            yield Row("weights", case, "no alarm", f"{row['alarms']} alarms in {row['loads']} loads", not row["alarms"])
        else:
            yield Row("weights", case, "caught", f"caught by {row['caught'] or 'nothing'}", bool(row["caught"]))


# -- live


def live(model: Path, folder: Path) -> Iterator[Row]:
    """In the command itself, by way of Ray: the learner's process is patched."""
    hook = folder / "stale"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(STALE_LEARNER)
    path = os.pathsep.join(filter(None, (str(hook), os.environ.get("PYTHONPATH"))))
    settings = (*QUICK, "model.dtype=bfloat16", "optimizer.learning_rate=1.0e-6")
    # The first publication is the perturbed one.
    done = command(demo_command(model, folder / "stale", settings), PYTHONPATH=path, STALE_FROM="3")
    found = re.search(r"weight check `(\w+)` failed", done.said)
    seen = f"exit {done.code}, stopped by {found[1] if found else 'nothing'}"
    holds = done.code == WRONG_RESULT and found is not None and found[1] == "read_back"
    yield Row("live", "stale weights, bfloat16, lr 1e-6", f"exit {WRONG_RESULT}, stopped by read_back", seen, holds)


# -- text


def text(model: Path, folder: Path) -> Iterator[Row]:
    """Arbitrary text in what rewards say, through journal, trace, logs and a resume."""
    (folder / "odd_rewards.py").write_text(REWARDS)
    reward = '[{"type": "python", "target": "odd_rewards:odd"}]'
    settings = (*QUICK, f"rewards={reward}", "scoring.on_failure=drop", "scoring.max_failed=1.0")
    output = folder / "text"
    done = command(demo_command(model, output, settings), PYTHONPATH=_with(folder))
    yield Row("text", "reward errors of arbitrary text", "exit 0", f"exit {done.code}", done.code == 0)
    (run,) = output.iterdir()
    program = str(Path(sys.executable).with_name("rlhfless"))
    resumed = command([program, "run", "--resume", str(run), "--set", "steps=4"], PYTHONPATH=_with(folder))
    yield Row("text", "the same, resumed for a step", "exit 0", f"exit {resumed.code}", resumed.code == 0)
    summary = command([program, "trace", "summary", str(run)])
    yield Row("text", "its trace", "can be read", f"exit {summary.code}", summary.code == 0)


def _with(folder: Path) -> str:
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


# -- models


def models(model: Path, folder: Path) -> Iterator[Row]:
    """Broken copies of the model, each with one fault."""
    for case, fault in _FAULTS.items():
        broken = folder / case.replace(" ", "-")
        shutil.copytree(model, broken)
        fault(broken / "model")
        validate = ["validate" if part == "run" else part for part in demo_command(broken, folder, ())]
        done = command(validate)
        named = "safetensors" in done.said and done.code == 2
        yield Row("models", case, "refused, with the file", done.last_line.strip()[:90], named)


def _changed(change: Callable[[dict], dict]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        file = folder / "model.safetensors"
        save_file(change(load_file(file)), file, metadata={"format": "pt"})

    return apply


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)


_TENSOR = "model.layers.0.mlp.up_proj.weight"
_FAULTS: dict[str, Callable[[Path], object]] = {
    "a tensor is missing": _changed(lambda tensors: {n: t for n, t in tensors.items() if n != _TENSOR}),
    "a tensor too many": _changed(lambda tensors: tensors | {"model.layers.9.extra.weight": tensors[_TENSOR].clone()}),
    "a shape is wrong": _changed(lambda tensors: tensors | {_TENSOR: tensors[_TENSOR][:-1].clone()}),
    "NaN in a tensor": _changed(lambda tensors: tensors | {_TENSOR: tensors[_TENSOR] * float("nan")}),
    "the file is truncated": _cut,
    "the file is empty": lambda folder: (folder / "model.safetensors").write_bytes(b""),
    "the file is gone": lambda folder: (folder / "model.safetensors").unlink(),
}


# -- signals


def signals(model: Path, folder: Path) -> Iterator[Row]:
    """At four phases; the last run is resumed."""
    both = {"SIGTERM": (signal.SIGTERM,), "SIGINT twice": (signal.SIGINT, signal.SIGINT)}
    for phase, reached in _PHASES.items():
        for name, sent in both.items():
            output = folder / f"{phase}-{name}".replace(" ", "-")
            code, said = _signalled(demo_command(model, output, (*QUICK, "steps=200")), output, reached, sent)
            left = _left_over(output)
            wanted = 143 if signal.SIGTERM in sent else 130
            seen = f"exit {code}" + (f"; left: {left}" if left else "") + ("" if "resume" in said else "; no hint")
            yield Row("signals", f"{name} {phase}", f"exit {wanted}, nothing left", seen, code == wanted and not left)
    (run,) = output.iterdir()
    program = str(Path(sys.executable).with_name("rlhfless"))
    steps = 1 + sum('"step_s"' in line for line in (run / "metrics.jsonl").open())
    done = command([program, "run", "--resume", str(run), "--set", f"steps={steps}"])
    yield Row("signals", "the last one, resumed", "exit 0", f"exit {done.code}", done.code == 0)


def _signalled(
    arguments: Sequence[str], output: Path, reached: Callable[[Path, float], bool], sent: Sequence[int]
) -> tuple[int, str]:
    """Exit code, and what the run said."""
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    began_s = time.monotonic()
    while not reached(output, time.monotonic() - began_s) and process.poll() is None:
        if time.monotonic() - began_s > LIMIT_S:
            raise TimeoutError(f"waited {LIMIT_S} s for a phase of the run")
        time.sleep(0.1)
    for number in sent:
        process.send_signal(number)
        time.sleep(0.3)
    said, _ = process.communicate(timeout=LIMIT_S)
    return process.returncode, said.decode(errors="replace")


def _left_over(output: Path) -> str:
    """Processes and store folders of the runs in `output` that are still there 5 s later."""
    names = [run.name for run in output.glob("*")]
    for _ in range(20):
        time.sleep(0.25)
        stores = [path.name for path in Path("/dev/shm").glob("rlhfless-*") if any(name in path.name for name in names)]
        processes = [process for process in psutil.process_iter() if _belongs(process, names)]
        if not stores and not processes:
            return ""
    return ", ".join([*stores, *(f"pid {process.pid}" for process in processes)])


def _belongs(process: psutil.Process, names: Sequence[str]) -> bool:
    """A replica of one of the runs, an engine of such a replica, or an engine whose replica is gone."""
    try:
        words = " ".join(process.cmdline())
        if "vllm.loop" in words:
            parent = process.parent()
            return parent is None or parent.pid == 1 or _belongs(parent, names)
        return any(name in words for name in names) and "trial.py" not in words
    except psutil.Error:
        return False


def _mentions(output: Path, words: str) -> bool:
    return any(words in file.read_text() for file in output.glob("*/metrics.jsonl"))


_PHASES: dict[str, Callable[[Path, float], bool]] = {
    "before Ray is up": lambda output, _: any(output.glob("*/spec.yaml")),
    "while the fleet starts": lambda output, _: any(output.glob("*/journal.sqlite")) and _replicas_of(output) > 0,
    "in a step": lambda output, _: _mentions(output, '"step_s"'),
}


def _replicas_of(output: Path) -> int:
    names = [run.name for run in output.glob("*")]
    return sum(_belongs(process, names) and process.name() != "rlhfless" for process in psutil.process_iter())


PARTS = {"weights": weights, "live": live, "text": text, "models": models, "signals": signals}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--cases", type=int, help="only the first so many of each part")
    options = parsed(parser, parts="models", cases=1)
    # A shell's background commands ignore SIGINT, and so would the runs that this one starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rows = []
    print(machine())
    for part in options.parts.split(","):
        with tempfile.TemporaryDirectory(prefix=f"rlhfless-trial-{part}-") as name:
            for row in islice(PARTS[part](options.model.absolute(), Path(name)), options.cases):
                rows.append(row)
                print(
                    f"| {row.part} | {row.case} | {row.wanted} | {row.seen} | {'yes' if row.holds else 'NO'} |",
                    flush=True,
                )
    failed = sum(not row.holds for row in rows)
    print(f"{len(rows)} cases, {failed} did not hold")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
