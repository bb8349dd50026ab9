"""A sequence-classification model with one label as a reward.

The score is read at a sequence's last token, found by length regardless of the token. It depends only on its own
sequence: sequences are padded on the right under a mask, so neighbours change it by rounding at most. The model may be
split over ranks (rlhfless.functions.sharding); each scores its share of the sequences, and all ranks run the same
number of forward passes.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from rlhfless.chat.encoding import Encoder
from rlhfless.chat.messages import ASSISTANT, Message, conversation, tools_of
from rlhfless.chat.template import ChatTemplate, kwargs_problems
from rlhfless.functions import sharding
from rlhfless.functions.attention_check import ignored_by_sdpa, load_fused
from rlhfless.functions.host_offload import kept_by
from rlhfless.functions.lm_head import at_least_float32
from rlhfless.functions.loading import load_whole
from rlhfless.functions.policy import CHECK_TOLERANCE, TORCH_DTYPES
from rlhfless.functions.policy_loading import choose_frequencies
from rlhfless.records.fields import field_value
from rlhfless.rewards import Failed, Outcome, RewardError, RewardSample
from rlhfless.spec import RewardModelSpec
from rlhfless.spec.errors import InputError
from rlhfless.util.errors import first_line

log = logging.getLogger(__name__)

_POSITIONS = re.compile(r"position|wpe")
"""Matches names of learned position tables: `wpe` (GPT-2), `embed_positions` (OPT), `position_embeddings` (BERT)."""


class RewardModel:
    """Loads `spec.path`; with a mesh, this rank's shard. *Collective* with a mesh.

    Raises RewardError if weights are missing, unexpected or not finite, or the head does not have one label.
    """

    def __init__(self, spec: RewardModelSpec, *, threads: int, mesh: DeviceMesh | None = None) -> None:
        torch.set_num_threads(threads)
        disable_progress_bar()  # type: ignore[no-untyped-call]  # a function's output is a log
        self._spec = spec
        self._mesh = mesh
        self._device = sharding.default_device()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(spec.path, trust_remote_code=spec.trust_remote_code)
        dtype = TORCH_DTYPES[spec.dtype]
        try:
            model = load_fused(
                lambda attention: load_whole(
                    AutoModelForSequenceClassification,
                    spec.path,
                    "path",
                    prepare=None if mesh is None else partial(sharding.shard, mesh=mesh, compute_dtype=dtype),
                    dtype=dtype,
                    attn_implementation=attention,
                    trust_remote_code=spec.trust_remote_code,
                )
            )
        except InputError as error:
            what = "; ".join(problem.what for problem in error.problems)
            raise self._error(f"is no whole reward model: {what}") from error
        if model.config.num_labels != 1:
            raise self._error(f"has {model.config.num_labels} labels; a reward model has one, its score")
        if spec.chat_template and not self._tokenizer.chat_template:
            raise self._error("has no chat template; leave `chat_template` out")
        if problems := kwargs_problems("chat_template_kwargs", self._tokenizer, spec.chat_template_kwargs):
            raise self._error("; ".join(f"{problem.where}: {problem.what}. {problem.hint}" for problem in problems))
        self._template = ChatTemplate(self._tokenizer, spec.chat_template_kwargs)
        self._encoder = Encoder(self._tokenizer, (), templated=spec.chat_template)
        self._model: Any = model.eval().to(self._device)
        choose_frequencies(self._model, spec.max_tokens)
        self._configs = (model.config, model.config.get_text_config())
        self._vocabulary = int(model.get_input_embeddings().weight.shape[0])
        tables = (table for name, table in model.named_modules() if isinstance(table, torch.nn.Embedding)
                  and _POSITIONS.search(name))  # fmt: skip
        self._positions = min((table.num_embeddings for table in tables), default=math.inf)
        """Most tokens per sequence, if the model has a learned position table."""
        if reason := ignored_by_sdpa(self._model, lambda: self._forward([[0] * 8])):
            log.warning("reward model %r is computed with eager attention, because sdpa has no %s", spec.path, reason)
            self._model.set_attn_implementation("eager")
        self._pads = self._scores_padded_sequences()

    def _scores_padded_sequences(self) -> bool:
        """Return whether padding leaves scores unchanged. *Collective* with a mesh.

        It changes them in models that score the last position of a row, such as XLNet with its left padding.
        """
        short, long = ([number % self._vocabulary for number in range(1, 1 + length)] for length in (3, 8))
        (alone,), (_, padded) = self._forward([short]), self._forward([long, short])
        if self._mesh is not None:
            sharding.settle(self._model)
        if isinstance(alone, Failed) or isinstance(padded, Failed):
            return True  # scoring the samples will report the error
        limit = CHECK_TOLERANCE[TORCH_DTYPES[self._spec.dtype]] * max(abs(alone), abs(padded))
        if abs(alone - padded) <= limit:
            return True
        log.info(
            "reward model %r: scores change with padding; batching only sequences of equal length", self._spec.path
        )
        return False

    def score(self, samples: Sequence[RewardSample]) -> list[Outcome | None]:
        """Return an outcome per sample in order, None if the reward does not apply. Only for an unsplit model."""
        outcomes = self.share(samples)
        return [outcomes.get(index) for index in range(len(samples))]

    def kept_on_device(self) -> Iterator[torch.Tensor]:
        """Return the model's parameters and buffers."""
        return kept_by(self._model)

    def share(self, samples: Sequence[RewardSample]) -> dict[int, Outcome]:
        """Return outcomes by sample index for this rank's share (all samples without a mesh). *Collective*.

        Samples that cannot be formatted for the model are reported on every rank.
        """
        outcomes: dict[int, Outcome] = {}
        sequences: dict[int, list[int]] = {}
        for index, sample in enumerate(samples):
            if not self._spec.scores(sample.source):
                continue
            try:
                sequences[index] = self._tokens(sample)
            except Exception as error:  # templates are code of the model's author, and may raise anything
                outcomes[index] = Failed(f"cannot be written for {self._spec.path!r}: {type(error).__name__}: {error}")
        for batch in self._passes({i: len(ids) for i, ids in sequences.items()}):
            values = self._forward([sequences[index] for index in batch] or [[0]])
            outcomes |= zip(batch, values, strict=False)
        if self._mesh is not None:
            sharding.settle(self._model)
        return outcomes

    def _passes(self, lengths: Mapping[int, int]) -> list[list[int]]:
        """Return this rank's batches, longest first, padded with empty ones to the same number on all ranks.

        Every rank knows all lengths, so they agree without communication.
        """
        ranks, rank = (1, 0) if self._mesh is None else (self._mesh.size(), self._mesh.get_local_rank())
        order = sorted(lengths, key=lambda index: -lengths[index])
        shares = [{index: lengths[index] for index in order[number::ranks]} for number in range(ranks)]
        # Fewer rows than tokens in the vocabulary, so that some token ends no sequence and can pad.
        limits = self._spec.micro_batch_tokens, max(self._vocabulary - 1, 1)
        passes = [list(_batches(share, *limits, one_length=not self._pads)) for share in shares]
        return passes[rank] + [[]] * (max(map(len, passes)) - len(passes[rank]))

    def _tokens(self, sample: RewardSample) -> list[int]:
        """Return the tokens to score; only the end of a sequence that is too long."""
        field = self._spec.prompt_field
        prompt = sample.prompt if field is None else field_value(sample.columns, field)
        if self._spec.chat_template:
            messages = conversation(prompt, field or "prompt", sample.columns)
            answer = Message(ASSISTANT, (sample.response,))
            tools = tools_of(sample.columns) if self._template.reads_tools else None
            text = self._template.scored([*messages, answer], tools).text
        elif isinstance(prompt, str):
            text = prompt + sample.response
        else:
            raise TypeError("the prompt is no text; set `chat_template: true` for messages")
        ids = self._encoder.scored(text)
        if not ids:
            raise ValueError("the tokenizer makes no token of it")
        ids = ids[-self._spec.max_tokens :]
        if len(ids) > self._positions:
            raise ValueError(f"{len(ids)} tokens, and it knows {self._positions} positions")
        return ids

    def _padding(self, sequences: Sequence[list[int]]) -> int:
        """Return a padding token that ends no sequence and, if possible, is in none.

        transformers scores the last token other than `pad_token_id`. If a token of the text pads as well, such as the
        end-of-sequence token, that is not the sequence's last token.
        """
        inside, last = set().union(*sequences), {ids[-1] for ids in sequences}
        own = self._tokenizer.pad_token_id
        tokens = [*([] if own is None or own >= self._vocabulary else [own]), *range(self._vocabulary)]
        return next((t for t in tokens if t not in inside), next((t for t in tokens if t not in last), 0))

    @torch.no_grad()
    def _forward(self, sequences: Sequence[list[int]]) -> list[Outcome]:
        width, pad = max(map(len, sequences)), self._padding(sequences)
        for config in self._configs:
            config.pad_token_id = pad
        tokens = torch.full((len(sequences), width), pad)
        mask = torch.zeros(len(sequences), width, dtype=torch.long)
        for row, ids in enumerate(sequences):
            tokens[row, : len(ids)] = torch.tensor(ids)
            mask[row, : len(ids)] = 1
        try:
            logits = self._model(input_ids=tokens.to(self._device), attention_mask=mask.to(self._device)).logits
        except (RuntimeError, IndexError, ValueError) as error:
            if self._mesh is not None:  # the other ranks wait inside the pass, which cannot be split
                raise
            if len(sequences) > 1:
                return [outcome for ids in sequences for outcome in self._forward([ids])]
            return [Failed(f"{self._spec.path!r} fails on {width} tokens: {first_line(error)}")]
        values: list[float] = at_least_float32(logits[:, 0]).tolist()
        return [value if math.isfinite(value) else Failed(f"{self._spec.path!r} gave {value}") for value in values]

    def _error(self, what: str) -> RewardError:
        return RewardError(self._spec.label, f"{self._spec.path!r} {what}")


def _batches(
    lengths: Mapping[int, int], most_tokens: int, most_rows: int, *, one_length: bool = False
) -> Iterator[list[int]]:
    """Yield batches of sequences, longest first, with a padded size of at most `most_tokens` (or one sequence)."""
    batch: list[int] = []
    width = 0
    for index in sorted(lengths, key=lambda index: -lengths[index]):
        full = width * (len(batch) + 1) > most_tokens or len(batch) >= most_rows
        if batch and (full or (one_length and lengths[index] != width)):
            yield batch
            batch = []
        width = width if batch else lengths[index]
        batch.append(index)
    if batch:
        yield batch
