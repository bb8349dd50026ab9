"""The demo through the service, beside `rlhfless run`, in interleaved pairs.

    python benchmarks/demo_api.py MODEL_FOLDER [--pairs 3] [--steps 60] [--smoke]

MODEL_FOLDER is what `rlhfless models tiny` wrote; the run is examples/demo.yaml. Both sides count the same span, from
the command (`rlhfless run`, and `rlhfless runs create --watch`) to its exit, with the run's tables printed; and the
steps alone, from the traces: the span also has the starts, of which `rlhfless run` starts a Ray of its own, and the
service's is there already. The service is there in both halves of a pair; the order changes from pair to pair. Ratios
are of the service to `rlhfless run`: the median of the pairs, and each. About 5 minutes a pair on two cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from api import COMMAND, up
from demo_run import SMALLEST, demo_command
from smoke import parsed
from where import machine

from rlhfless.records.traces import read_trace

DEMO = Path(__file__).parents[1] / "examples" / "demo.yaml"


@dataclass(frozen=True)
class Took:
    """One run."""

    span_s: float
    steps_s: float


def steps_s(folder: Path) -> float:
    """Of all steps of a run's folder together."""
    return sum(step.end_s - step.start_s for step in read_trace(folder / "trace", tokens=False).steps)


def by_run(model: Path, output: Path, settings: list[str], smoke: bool) -> Took:
    """`rlhfless run`."""
    command = demo_command(model, output, [*settings, "logging.console=lines"], smoke)
    return Took(timed(command, output.parent / "run.log"), steps_s(next(output.iterdir())))


def by_service(model: Path, url: str, data: Path, settings: list[str], smoke: bool) -> Took:
    """`rlhfless runs create --watch`."""
    told = [f"model.path={model / 'model'}", f"prompts.path={model / 'train.jsonl'}"]
    told += [f"prompts.held_out.path={model / 'heldout.jsonl'}", *(SMALLEST if smoke else ()), *settings]
    command = [COMMAND, "runs", "create", str(DEMO), "--watch", "--url", url]
    span_s = timed([*command, *(word for one in told for word in ("--set", one))], data / "watch.log")
    newest = max((data / "runs").iterdir(), key=lambda folder: folder.stat().st_ctime)
    return Took(span_s, steps_s(newest))


def timed(command: list[str], log: Path) -> float:
    """Seconds until the command has ended. Raises subprocess.CalledProcessError if that was badly."""
    began_s = time.monotonic()
    with log.open("ab") as stream:
        subprocess.run(command, check=True, stdout=stream, stderr=stream, env=os.environ)
    return time.monotonic() - began_s


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=lambda text: Path(text).absolute())
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    asked = parsed(parser, pairs=1, steps=2)
    print(machine())
    settings = [f"steps={asked.steps}"]
    pairs: list[tuple[Took, Took]] = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        try:
            url, _, _ = up(data, asked.model)
            for number in range(asked.pairs):
                output = Path(folder) / f"runs-{number}"
                sides = [
                    lambda output=output: by_run(asked.model, output, settings, asked.smoke),  # type: ignore[misc]
                    lambda: by_service(asked.model, url, data, settings, asked.smoke),
                ]
                found = {index: sides[index]() for index in ((0, 1) if number % 2 == 0 else (1, 0))}
                pairs.append((found[0], found[1]))
                run, service = pairs[-1]
                print(
                    f"pair {number + 1}: run {run.span_s:.1f} s, {run.steps_s:.1f} s of it steps; "
                    f"service {service.span_s:.1f} s, {service.steps_s:.1f} s of it steps",
                    flush=True,
                )
        except subprocess.CalledProcessError as error:
            sys.exit(f"{error}; {[log.read_text()[-2000:] for log in Path(folder).rglob('*.log')][:2]}")
        finally:
            subprocess.run([COMMAND, "down", "--data", str(data)], check=False, stderr=subprocess.DEVNULL)
    for name, figure in (("command to exit", "span_s"), ("steps alone", "steps_s")):
        ratios = [getattr(service, figure) / getattr(run, figure) for run, service in pairs]
        each = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        print(f"{name:<16} service / run {statistics.median(ratios):.3f} ({each}), asked <= 1.02")


if __name__ == "__main__":
    main()
