"""A sequence-classification model with one label as a reward.

A response's score depends on its own sequence alone: sequences are padded on the right under a mask, so neighbours
change it by rounding at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from rlhfless.functions.loading import load_whole
from rlhfless.functions.policy import TORCH_DTYPES, default_device
from rlhfless.rewards import Failed, Outcome, RewardError, Sample
from rlhfless.spec import RewardModelSpec
from rlhfless.spec.errors import InputError


class RewardModel:
    """Loads `spec.path`. Raises RewardError if weights are missing, odd or not finite, its head has not one label,
    or it has no padding token."""

    def __init__(self, spec: RewardModelSpec, *, threads: int) -> None:
        torch.set_num_threads(threads)
        disable_progress_bar()  # type: ignore[no-untyped-call]  # a function's output is a log
        self._spec = spec
        self._device = default_device()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(spec.path, trust_remote_code=spec.trust_remote_code)
        try:
            model = load_whole(
                AutoModelForSequenceClassification,
                spec.path,
                "path",
                dtype=TORCH_DTYPES[spec.dtype],
                trust_remote_code=spec.trust_remote_code,
            )
        except InputError as error:
            what = "; ".join(problem.what for problem in error.problems)
            raise self._error(f"is no whole reward model: {what}") from error
        if model.config.num_labels != 1:
            raise self._error(f"has {model.config.num_labels} labels; a reward model has one, its score")
        pad = self._tokenizer.pad_token_id
        self._pad = self._tokenizer.eos_token_id if pad is None else pad
        if self._pad is None:
            raise self._error("has a tokenizer with neither a padding nor an end-of-sequence token")
        if spec.chat_template and not self._tokenizer.chat_template:
            raise self._error("has no chat template; leave `chat_template` out")
        # Decoders find the last token of a sequence by it.
        model.config.get_text_config().pad_token_id = self._pad
        self._model: Any = model.eval().to(self._device)

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """One outcome per sample, in their order."""
        outcomes: dict[int, Outcome] = {}
        sequences: dict[int, list[int]] = {}
        for index, sample in enumerate(samples):
            try:
                sequences[index] = self._tokens(sample)
            except Exception as error:  # templates are programs of the model's author, and raise what they like
                outcomes[index] = Failed(f"cannot be written for {self._spec.path!r}: {type(error).__name__}: {error}")
        for batch in _batches({i: len(ids) for i, ids in sequences.items()}, self._spec.micro_batch_tokens):
            values = self._forward([sequences[index] for index in batch])
            outcomes |= zip(batch, values, strict=True)
        return [outcomes[index] for index in range(len(samples))]

    def _tokens(self, sample: Sample) -> list[int]:
        """The sequence to score; its end if it is too long."""
        field = self._spec.prompt_field
        prompt = sample.prompt if field is None else sample.columns[field]
        if self._spec.chat_template:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            messages.append({"role": "assistant", "content": sample.response})
            text = self._tokenizer.apply_chat_template(messages, tokenize=False)
        elif isinstance(prompt, str):
            text = prompt + sample.response
        else:
            raise TypeError("the prompt is no text; set `chat_template: true` for messages")
        # A chat template writes the special tokens itself.
        ids: list[int] = self._tokenizer(text, add_special_tokens=not self._spec.chat_template, verbose=False)[
            "input_ids"
        ]
        if not ids:
            raise ValueError("the tokenizer makes no token of it")
        return ids[-self._spec.max_tokens :]

    @torch.inference_mode()
    def _forward(self, sequences: Sequence[list[int]]) -> list[Outcome]:
        width = max(map(len, sequences))
        tokens = torch.full((len(sequences), width), self._pad)
        mask = torch.zeros(len(sequences), width, dtype=torch.long)
        for row, ids in enumerate(sequences):
            tokens[row, : len(ids)] = torch.tensor(ids)
            mask[row, : len(ids)] = 1
        try:
            logits = self._model(input_ids=tokens.to(self._device), attention_mask=mask.to(self._device)).logits
        except (RuntimeError, IndexError, ValueError) as error:  # such as a sequence longer than its positions
            if len(sequences) > 1:
                return [outcome for ids in sequences for outcome in self._forward([ids])]
            return [Failed(f"{self._spec.path!r} fails on {width} tokens: {str(error).splitlines()[0]}")]
        values: list[float] = logits[:, 0].float().tolist()
        return [value if math.isfinite(value) else Failed(f"{self._spec.path!r} gave {value}") for value in values]

    def _error(self, what: str) -> RewardError:
        return RewardError(self._spec.label, f"{self._spec.path!r} {what}")


def _batches(lengths: Mapping[int, int], most_tokens: int) -> Iterator[list[int]]:
    """Sequences by length, longest first, in batches whose padded size is at most `most_tokens` (or one sequence)."""
    batch: list[int] = []
    width = 0
    for index in sorted(lengths, key=lambda index: -lengths[index]):
        if batch and width * (len(batch) + 1) > most_tokens:
            yield batch
            batch = []
        width = width if batch else lengths[index]
        batch.append(index)
    if batch:
        yield batch
