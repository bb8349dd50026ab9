"""A demo run on a model that is there, for benchmarks that start whole runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SMALLEST = (
    "steps=1",
    "prompts_per_step=2",
    "samples_per_prompt=2",
    "mini_batches=1",
    "generation.max_tokens=16",
    "evaluation.samples_per_prompt=1",
    "learner.ranks=1",
    "scaling.generation={min_actors: 1, max_actors: 1}",
)
"""Settings with which the demo still does all that it does."""


def demo_command(model: Path, output: Path, settings: Sequence[str], smoke: bool = False) -> list[str]:
    """`rlhfless run examples/demo.yaml` into `output`, silent. `model` is the folder that `rlhfless models tiny` wrote,
    `settings` are more of `key=value`; with `smoke` the run has the smallest size that they leave."""
    told = [
        f"model.path={model / 'model'}",
        f"prompts.path={model / 'train.jsonl'}",
        f"prompts.held_out.path={model / 'heldout.jsonl'}",
        f"output={output}",
        "logging.console=off",
        *(SMALLEST if smoke else ()),
        *settings,
    ]
    program, demo = Path(sys.executable).with_name("rlhfless"), Path(__file__).parent.parent / "examples" / "demo.yaml"
    return [str(program), "run", str(demo), *(part for setting in told for part in ("--set", setting))]


def run_demo(model: Path, output: Path, settings: Sequence[str], smoke: bool, imports: Path | None = None) -> Path:
    """Runs `demo_command` to its end; returns the run's folder. Rewards of the user's own are imported from `imports`.

    Raises subprocess.CalledProcessError where it fails.
    """
    subprocess.run(demo_command(model, output, settings, smoke), check=True, cwd=imports)
    return next(output.iterdir())
