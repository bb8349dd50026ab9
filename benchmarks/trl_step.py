"""TRL's GRPOTrainer on the benchmark's model: seconds of each step, as a JSON list on the last line.

python benchmarks/trl_step.py FOLDER STEPS
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Stopwatch(TrainerCallback):
    """When each step ended."""

    def __init__(self) -> None:
        self.ended = [time.perf_counter()]

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.ended = [time.perf_counter()]

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ended.append(time.perf_counter())


def has_seven(completions: Any, **_: Any) -> list[float | None]:
    return [float("7" in text) for text in completions]


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    prompts = [json.loads(line)["prompt"] for line in (folder / "train.jsonl").open()]
    stopwatch = Stopwatch()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model"),
        processing_class=AutoTokenizer.from_pretrained(folder / "model", padding_side="left"),
        reward_funcs=has_seven,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=128,
            num_generations=8,
            max_completion_length=64,
            max_steps=steps,
            learning_rate=1e-4,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        callbacks=[stopwatch],
    )
    trainer.train()
    print(json.dumps([end - begin for begin, end in zip(stopwatch.ended, stopwatch.ended[1:], strict=False)]))


if __name__ == "__main__":
    main()
