"""Check teachers against the policy, and tokenise the prompts that only they read.

A teacher computes logprobs of the policy's token ids, so every id must mean the same to both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rlhfless.prepare.data_rows import Row
from rlhfless.prepare.faults import Faults
from rlhfless.prepare.model import PolicyModel, check_folder, read_config, read_tokenizer
from rlhfless.prepare.model_weights import weight_problems
from rlhfless.prepare.prompts import PromptReader, PromptSets
from rlhfless.records import Prompt
from rlhfless.spec import ModelSpec, RunSpec, TeacherSpec
from rlhfless.spec.errors import InputError, Problem

SPECIAL_TOKENS = ("bos_token", "eos_token")
"""Special tokens that are part of prompts and responses. Padding is in neither."""

_OTHER = "take a teacher with the policy's tokenizer, such as a larger model of the same family"


def teacher_faults(spec: RunSpec, policy: PolicyModel, prompts: Sequence[Prompt]) -> list[Problem]:
    """Check the form, vocabulary, special tokens, context and weights of each teacher with a `path`."""
    problems: list[Problem] = []
    for index, teacher in enumerate(spec.teachers):
        if teacher.path is None or teacher.is_self:
            continue
        key = f"teachers.{index}.path"
        try:
            problems += _of_path(key, teacher, teacher.model_of(spec.model), policy)
            problems += _context_problems(key, teacher, spec, prompts)
        except InputError as error:
            problems += error.problems
    return problems


def _of_path(key: str, teacher: TeacherSpec, model: ModelSpec, policy: PolicyModel) -> list[Problem]:
    """Return the problems of a teacher's files. Raises InputError if they cannot be read."""
    check_folder(model.path, key)
    if difference := first_difference(policy.tokenizer, read_tokenizer(model, key)):
        what = f"{model.path!r} of teacher {teacher.name!r} reads other tokens than the policy: {difference}"
        return [Problem(key, what, _OTHER)]
    rows, tokens = getattr(read_config(model, key).get_text_config(), "vocab_size", None), len(policy.tokenizer)
    if rows is not None and rows < policy.tokenizer_info.vocabulary_tokens:
        what = f"{model.path!r} of teacher {teacher.name!r} has {rows} tokens in its vocabulary, the policy {tokens}"
        return [Problem(key, what, _OTHER)]
    trusted = model.trust_remote_code
    return weight_problems(key, model.path, "AutoModelForCausalLM", trust_remote_code=trusted)


def first_difference(policy: Any, teacher: Any) -> str:
    """Describe the first difference between two tokenizers' vocabularies and special tokens; empty if there is none."""
    ours, theirs = ({token: text for text, token in each.get_vocab().items()} for each in (policy, teacher))
    for token in sorted(ours.keys() | theirs.keys()):
        if ours.get(token) != theirs.get(token):
            of_teacher, of_policy = (_shown(vocabulary, token) for vocabulary in (theirs, ours))
            return f"its token {token} is {of_teacher}, and the policy's is {of_policy}"
    for name in SPECIAL_TOKENS:
        of_policy, of_teacher = getattr(policy, name), getattr(teacher, name)
        if of_policy != of_teacher:
            return f"its {name} is {of_teacher!r}, and the policy's is {of_policy!r}"
    return ""


def _shown(vocabulary: dict[int, str], token: int) -> str:
    return repr(vocabulary[token]) if token in vocabulary else "missing"


def _context_problems(key: str, teacher: TeacherSpec, spec: RunSpec, prompts: Sequence[Prompt]) -> Iterator[Problem]:
    """Yield a problem if a sequence may be longer than the teacher's context."""
    limit = getattr(read_config(teacher.model_of(spec.model), key).get_text_config(), "max_position_embeddings", None)
    taught = (prompt for prompt in prompts if teacher.teaches(prompt.source))
    longest = max((len(prompt.read_by.get(teacher.function, prompt.token_ids)) for prompt in taught), default=0)
    longest += spec.generation.max_tokens
    if limit is not None and longest > limit:
        what = f"{teacher.path!r} reads up to {limit} tokens, and prompt and response may have {longest}"
        yield Problem(key, what, f"set generation.max_tokens to {max(limit - longest + spec.generation.max_tokens, 1)}")


def with_teacher_prompts(spec: RunSpec, policy: PolicyModel, sets: PromptSets) -> PromptSets:
    """Add to training prompts the token ids that teachers with a `prompt_field` read instead.

    They are rendered and checked like the policy's; rows with faults are skipped if the spec skips them. Raises
    InputError with the problems of all rows.
    """
    problems: list[Problem] = []
    for index, teacher in enumerate(spec.teachers):
        if teacher.prompt_field is None:
            continue
        reader = PromptReader(
            spec.data.model_copy(update={"prompt_field": teacher.prompt_field}),
            policy.tokenizer,
            policy.end_token_ids,
            answered=False,
        )
        taught = [prompt for prompt in sets.train if teacher.teaches(prompt.source)]
        faults = Faults(f"teachers.{index}.prompt_field", len(taught))
        tokens = _read(reader, taught, faults, _most_tokens(spec, policy))
        problems += faults.problems(spec.data)
        train = tuple(
            replace(prompt, read_by={**prompt.read_by, teacher.function: tokens[prompt.prompt_id]})
            if prompt.prompt_id in tokens
            else prompt
            for prompt in sets.train
            if prompt.where not in faults.places or not teacher.teaches(prompt.source)
        )
        skipped = faults.skipped(spec.data)
        if skipped is not None:
            sets = replace(sets, warnings=(*sets.warnings, str(skipped)), skipped=(*sets.skipped, skipped))
        sets = replace(sets, train=train)
    if problems:
        raise InputError("prompts", problems)
    return sets


def _read(
    reader: PromptReader, prompts: Sequence[Prompt], faults: Faults, most_tokens: int | None
) -> dict[str, tuple[int, ...]]:
    """Return the token ids by prompt id."""
    notes, read = Faults("", 0), list[tuple[Prompt, str]]()
    for prompt in prompts:
        text = reader.text(Row(prompt.where, prompt.columns), faults, notes)
        if text is not None:
            read.append((prompt, text))
    found: dict[str, tuple[int, ...]] = {}
    for (prompt, _), token_ids in zip(read, reader.tokens([text for _, text in read]), strict=True):
        row = Row(prompt.where, prompt.columns)
        reader.check_tokens(row, token_ids, faults, notes)
        if most_tokens is not None and len(token_ids) > most_tokens:
            kind = f"the teacher's prompt has more than {most_tokens} tokens (the context less a response)"
            faults.add(kind, row, f"{len(token_ids)} tokens", "shorten it, or lower generation.max_tokens")
        found[prompt.prompt_id] = tuple(token_ids)
    return found


def _most_tokens(spec: RunSpec, policy: PolicyModel) -> int | None:
    return None if policy.context_tokens is None else policy.context_tokens - spec.generation.max_tokens
