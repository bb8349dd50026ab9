"""What the benchmarks share: the machine in words, a model and prompts of a given size, and a live run."""

from __future__ import annotations

import io
import statistics
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhfless.bundled.model import ModelSize, build_random
from rlhfless.bundled.task import TaskRecipe, draw_problems, write_jsonl
from rlhfless.functions.generation.engine import EngineSettings
from rlhfless.orchestrator.run import RLRun
from rlhfless.orchestrator.session import Session, open_session
from rlhfless.planning.preflight import preflight
from rlhfless.spec import RunSpec, TimeoutsSpec
from rlhfless.telemetry.console import Console
from rlhfless.telemetry.sinks import MetricSinks
from rlhfless.weights.address import StoreAddress

LOGIT_SCALE = 50.0
"""Random heads give nearly equal logits; scaled up they prefer some tokens, and the end token is not among them."""


@contextmanager
def assets(prompts: int) -> Iterator[Path]:
    """A folder with model/ (0.8 M random parameters that never generate an end token) and train.jsonl."""
    with tempfile.TemporaryDirectory(prefix="rlhfless-bench-") as name:
        folder = Path(name)
        build_random(folder / "model", seed=0, size=ModelSize())
        random_head(folder / "model")
        problems = draw_problems(TaskRecipe(), np.random.default_rng(0), prompts, held_out=False)
        write_jsonl(folder / "train.jsonl", problems)
        yield folder


def random_head(path: Path) -> None:
    """Make a random model prefer some tokens, and never the end token."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path)
    end = AutoTokenizer.from_pretrained(path).eos_token_id
    with torch.no_grad():
        model.lm_head.weight.mul_(LOGIT_SCALE)
        model.lm_head.weight[end] = 0
    model.save_pretrained(path)


def spec_of(folder: Path, **changes: Any) -> RunSpec:
    """GRPO on the benchmark's model: 16 prompts x 8 samples x 64 tokens unless changed."""
    values: dict[str, Any] = {
        "name": "bench",
        "model": {"path": str(folder / "model")},
        "prompts": {"path": str(folder / "train.jsonl"), "shuffle": False},
        "rewards": [{"type": "regex", "pattern": "7"}],
        "generation": {"max_tokens": 64},
        "steps": 1000,
        "prompts_per_step": 16,
        "samples_per_prompt": 8,
        "scaling": {"generation": {"min_actors": 2, "max_actors": 2}},
        "logging": {"console": "off"},
    }
    return RunSpec.model_validate(values | changes)


def engine_settings(model: Path, store: Path, **changes: Any) -> EngineSettings:
    """Of an engine on a CPU core, in float32, that loads from the files of `store`."""
    values: dict[str, Any] = {
        "model": str(model),
        "tokenizer": str(model),
        "dtype": "float32",
        "max_model_len": 256,
        "seed": 0,
        "trust_remote_code": False,
        "device": "cpu",
        "store": StoreAddress("file", str(store)),
        "timeouts": TimeoutsSpec(),
    }
    return EngineSettings(**values | changes)


@asynccontextmanager
async def live_run(spec: RunSpec, folder: Path) -> AsyncIterator[RLRun]:
    """A run with its fleet up."""
    console = Console("off", "bench", spec.steps, stream=io.StringIO())
    (folder / "run").mkdir(exist_ok=True)
    session = Session(preflight(spec), "bench", folder / "run", console, MetricSinks([]))
    async with open_session(session) as (run, _):
        assert isinstance(run, RLRun)
        yield run


def spread(values: Sequence[float]) -> str:
    """Median, with the smallest and largest."""
    return f"{statistics.median(values):8.3f}  ({min(values):.3f} .. {max(values):.3f})"


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of the ratios of neighbours in time: what the machine did meanwhile cancels out."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
