"""Try rewards on responses from a file before a run (`rlhfless rewards test`)."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhfless.prepare.data_rows import Row, read_rows
from rlhfless.prepare.model import PolicyModel, load_policy
from rlhfless.prepare.prompts import load_prompts
from rlhfless.prepare.rewards import reward_problems
from rlhfless.records import FinishReason, Prompt, Score
from rlhfless.rewards import Rewards, RewardSample, combined
from rlhfless.spec import RunSpec
from rlhfless.spec.errors import InputError, Problem
from rlhfless.spec.explain import shown
from rlhfless.util.text import storable_values

if TYPE_CHECKING:
    from rlhfless.functions.generation.engine import Device, Engine
    from rlhfless.functions.scoring.judge import EngineAnswers

# Columns of a row that do not belong to the data set.
_OWN = ("prompt", "response", "response_tokens", "finish_reason", "prompt_id", "sample_index")
_ENDS = (str(FinishReason.STOP), str(FinishReason.LENGTH))


@dataclass(frozen=True, slots=True)
class Trial:
    """Samples with their scores, in file order."""

    places: tuple[str, ...]
    """`samples.jsonl:12`, per sample."""
    samples: tuple[RewardSample, ...]
    scores: tuple[Score, ...]
    wall_s: float
    """Duration of scoring, without the start of workers and models."""


def try_rewards(spec: RunSpec, path: Path) -> Trial:
    """Score every row of a JSONL or Parquet file. Raises InputError for unusable rows or rewards."""
    if not path.is_file():
        raise InputError("the samples cannot be read", [Problem("", f"no such file: {str(path)!r}")])
    read = read_rows("samples", str(path.absolute()), "train", spec.sizes)
    rows = [Row(row.where, storable_values(row.values)) for row in read]
    reader = _Reader(spec)
    samples = reader.samples(rows)
    prompts = [
        Prompt(sample.prompt_id, (), sample.prompt, sample.columns, sample.source, where=sample.where)
        for sample in samples
    ]
    if problems := reader.problems or reward_problems(spec, prompts):
        raise InputError("the samples cannot be scored", problems)
    scores, wall_s = asyncio.run(_score(spec, samples))
    return Trial(tuple(row.where for row in rows), tuple(samples), tuple(scores), wall_s)


class _Reader:
    """Convert rows to samples; model and prompts are read only if needed."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._ids: dict[str, str] = {}
        self._counts: Counter[str] = Counter()
        self.problems: list[Problem] = []

    def samples(self, rows: Sequence[Row]) -> list[RewardSample]:
        """Return one sample per row; unusable if `problems` is not empty."""
        return [sample for row in rows for sample in self._sample(row)]

    @cached_property
    def _tokenizer(self) -> Any:
        return self._policy.tokenizer

    @cached_property
    def _policy(self) -> PolicyModel:
        return load_policy(self._spec.model)

    @cached_property
    def _prompts(self) -> Mapping[str, Prompt]:
        sets = load_prompts(
            self._spec.data,
            self._tokenizer,
            max_context_tokens=None,
            seed=self._spec.seed,
            sizes=self._spec.sizes,
            named_sets=self._spec.evaluation.sets,
            end_token_ids=self._policy.end_token_ids,
        )
        return {prompt.prompt_id: prompt for prompt in (*sets.train, *sets.held_out)}

    def _sample(self, row: Row) -> Iterator[RewardSample]:
        values = row.values
        response = values.get("response")
        if not isinstance(response, str):
            self._fault(row, f"`response` must be a text, got {shown(response)}")
            return
        prompt = self._prompt(row)
        if prompt is None:
            return
        reason = values.get("finish_reason", _ENDS[0])
        if reason not in _ENDS:
            self._fault(row, f"`finish_reason` must be `stop` or `length`, got {shown(reason)}")
            return
        tokens = values.get("response_tokens")
        if tokens is None:
            tokens = len(self._tokenizer(response, add_special_tokens=False, verbose=False)["input_ids"])
        elif not isinstance(tokens, int) or tokens < 0:
            self._fault(row, f"`response_tokens` must be a number of tokens, got {shown(tokens)}")
            return
        index = self._counts[prompt.prompt_id]
        self._counts[prompt.prompt_id] += 1
        given = (prompt.columns, prompt.prompt_id, index, prompt.source)
        yield RewardSample(prompt.text, response, tokens, FinishReason(reason), *given, where=row.where)

    def _prompt(self, row: Row) -> Prompt | None:
        """The prompt in the row, or the spec's prompt with the row's `prompt_id`; None, with a fault, if it has
        neither."""
        text, name = row.values.get("prompt"), row.values.get("prompt_id")
        columns = {key: value for key, value in row.values.items() if key not in _OWN}
        data = self._spec.data
        if data.chat_template and data.prompt_field == "prompt" and text is not None:
            columns["prompt"] = text  # as in a run, whose columns keep the prompt as it was before the template
        if data.chat_template and isinstance(text, list):
            text = self._rendered(row, text)
        if isinstance(text, str):
            own = self._ids.setdefault(text, f"prompt-{len(self._ids) + 1}")
            return Prompt(str(name) if name is not None else own, (), text, columns)
        if text is not None:
            self._fault(row, f"`prompt` must be the text that the policy sees, got {shown(text)}")
            return None
        if name is None:
            self._fault(row, "there is neither `prompt` nor `prompt_id`")
            return None
        prompt = self._prompts.get(str(name))
        if prompt is None:
            self._fault(row, f"no prompt of the spec has the id {shown(name)}")
            return None
        return Prompt(prompt.prompt_id, (), prompt.text, {**prompt.columns, **columns}, prompt.source)

    def _rendered(self, row: Row, messages: Any) -> str | Any:
        """Messages as the policy sees them; as they are if the template does not take them."""
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # a template is a program by the model's author, and may raise any error
            self._fault(row, f"the chat template fails on `prompt`: {type(error).__name__}: {error}")
            return ""

    def _fault(self, row: Row, what: str) -> None:
        self.problems.append(Problem("", what, origin=row.where))


async def _score(spec: RunSpec, samples: Sequence[RewardSample]) -> tuple[list[Score], float]:
    """Scores and the seconds they took. Samples are scored in batches of the size of a step of the run."""
    size = spec.prompts_per_step * spec.samples_per_prompt
    batches = [samples[first : first + size] for first in range(0, len(samples), size)]
    models = _models(spec)
    weights = {part.label: part.weight for part in spec.reward_models}
    scores: list[Score] = []
    async with _engines(spec) as engines:
        rewards = Rewards(spec.rewards, spec.scoring, engines)
        try:
            await rewards.start()
            began = time.perf_counter()
            for batch in batches:
                columns = [await asyncio.to_thread(model.score, batch) for model in models]
                networks = combined(weights, columns, len(batch), spec.scoring.on_failure)
                scores += [a.plus(b) for a, b in zip(await rewards.score(batch), networks, strict=True)]
            return scores, time.perf_counter() - began
        finally:
            rewards.close()


@asynccontextmanager
async def _engines(spec: RunSpec) -> AsyncIterator[Mapping[str, EngineAnswers]]:
    """Start the engines of judges with a path on this machine's devices. Raises InputError if one fails."""
    if not spec.judges:
        yield {}
        return
    import torch

    from rlhfless.functions.generation.engine import EngineDead, EngineTimeout, engine_class
    from rlhfless.functions.scoring.judge import EngineAnswers, engine_settings

    device: Device = "cuda" if torch.cuda.is_available() else "cpu"
    engines: dict[str, Engine] = {}
    with tempfile.TemporaryDirectory(prefix="rlhfless-judges-") as folder:
        try:
            for judge in spec.judges:
                settings = engine_settings(judge, spec, device, folder)
                engines[judge.label] = await engine_class(settings).start(settings)
            yield {judge.label: EngineAnswers(judge, engines[judge.label]) for judge in spec.judges}
        except (EngineDead, EngineTimeout) as error:
            hint = "try the judge on a machine whose memory or GPUs hold its model"
            raise InputError("a judge's engine failed", [Problem("rewards", str(error), hint)]) from error
        finally:
            for engine in engines.values():
                await engine.stop()


def _models(spec: RunSpec) -> list[Any]:
    if not spec.reward_models:
        return []
    import torch

    from rlhfless.functions.scoring.reward_model import RewardModel

    return [RewardModel(part, threads=torch.get_num_threads()) for part in spec.reward_models]
