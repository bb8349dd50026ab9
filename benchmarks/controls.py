"""Does the demo learn from its reward, and from nothing else? Three kinds of run, three seeds each.

    python benchmarks/controls.py MODEL_FOLDER [--seeds 0 1 2] [--kinds real shuffled frozen] [--smoke]

MODEL_FOLDER is what `rlhfless models tiny` wrote. `real` is examples/demo.yaml as it is; `shuffled` is the same run
with each group's rewards shuffled; `frozen` the same with learning rate 0, for a few steps, as nothing can change.
Printed is the exact match on held-out prompts, at the training temperature and greedy, before and after. All
evaluations draw with the same seeds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from demo_run import run_demo
from smoke import parsed
from where import machine

HERE = Path(__file__).parent
FROZEN_STEPS = 5

EXACT = {"type": "exact_match", "weight": 0}
SHUFFLED = {"type": "python", "target": "controls_rewards:shuffled", "name": "shuffled", "batch": True}

SETTINGS: dict[str, list[str]] = {
    "real": [],
    "shuffled": [f"rewards={json.dumps([EXACT, SHUFFLED])}"],
    "frozen": ["optimizer.learning_rate=0", f"steps={FROZEN_STEPS}"],
}


def run(model: Path, kind: str, seed: int, smoke: bool) -> list[dict[str, float]]:
    """The evaluations of one run: the first and the last."""
    with tempfile.TemporaryDirectory() as output:
        folder = run_demo(model, Path(output), [f"seed={seed}", *SETTINGS[kind]], smoke, imports=HERE)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    evaluations = [row for row in map(json.loads, lines) if "eval/exact_match" in row]
    return [evaluations[0], evaluations[-1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=lambda text: Path(text).absolute())
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--kinds", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    arguments = parsed(parser, seeds=[0], kinds=["shuffled"])
    print(machine())
    print(f"{'run':10} seed   before    after   change   greedy before/after")
    for kind in arguments.kinds:
        for seed in arguments.seeds:
            before, after = run(arguments.model, kind, seed, arguments.smoke)
            first, last = before["eval/exact_match"], after["eval/exact_match"]
            greedy = f"{before['eval/exact_match_greedy']:.3f} {after['eval/exact_match_greedy']:.3f}"
            print(f"{kind:10} {seed:4} {first:8.3f} {last:8.3f} {last - first:+8.3f}   {greedy}", flush=True)


if __name__ == "__main__":
    main()
