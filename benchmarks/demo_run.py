"""The command of a demo run on a model that is there, for benchmarks that start whole runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path


def demo_command(model: Path, output: Path, settings: Sequence[str]) -> list[str]:
    """`rlhfless run examples/demo.yaml` into `output`, silent. `model` is the folder that `rlhfless models tiny` wrote,
    `settings` are more of `key=value`."""
    told = [
        f"model.path={model / 'model'}",
        f"prompts.path={model / 'train.jsonl'}",
        f"prompts.held_out.path={model / 'heldout.jsonl'}",
        f"output={output}",
        "logging.console=off",
        *settings,
    ]
    program, demo = Path(sys.executable).with_name("rlhfless"), Path(__file__).parent.parent / "examples" / "demo.yaml"
    return [str(program), "run", str(demo), *(part for setting in told for part in ("--set", setting))]
