"""Check the models of judges with a `path`: weights, chat template, words of the verdict, and context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhfless.chat.messages import DataFault, Message
from rlhfless.chat.template import ChatTemplate, kwargs_problems
from rlhfless.prepare.model import check_folder, read_config, read_tokenizer
from rlhfless.prepare.model_weights import weight_problems
from rlhfless.records import FinishReason, Prompt
from rlhfless.rewards import RewardSample
from rlhfless.rewards.judge import chat_tokens, request
from rlhfless.rewards.protocol import Unscorable
from rlhfless.spec import JudgeSpec, ModelSpec
from rlhfless.spec.errors import InputError

WORDS = ("yes", "no")
MOST_RENDERED = 64
"""Prompts whose questions are counted: those with the longest texts."""


def judge_faults(judge: JudgeSpec, prompts: Sequence[Prompt]) -> list[str]:
    """Say why a judge with a path cannot judge responses to these prompts."""
    assert judge.path is not None, "others have no model here"
    model = ModelSpec(path=judge.path, trust_remote_code=judge.trust_remote_code)
    try:
        check_folder(judge.path, "")
        tokenizer, config = read_tokenizer(model, ""), read_config(model, "").get_text_config()
        kwargs = judge.body.get("chat_template_kwargs") or {}
        faults = [*weight_problems("", judge.path, "AutoModelForCausalLM", trust_remote_code=judge.trust_remote_code)]
        faults += kwargs_problems("body.chat_template_kwargs", tokenizer, kwargs)
    except InputError as error:
        faults = [*error.problems]
    if faults:
        return [f"{judge.path!r}: {each.what}{f'; {each.hint}' if each.hint else ''}" for each in faults]
    found = [_heads(judge, config), _template(judge, tokenizer, kwargs), _words(judge, tokenizer)]
    return [*filter(None, found)] or [*filter(None, [_context(judge, tokenizer, config, prompts)])]


def _heads(judge: JudgeSpec, config: Any) -> str:
    heads = getattr(config, "num_attention_heads", None)
    if not heads or heads % judge.tensor_parallel_size == 0:
        return ""
    return f"tensor_parallel_size {judge.tensor_parallel_size} does not divide the {heads} heads of {judge.path!r}"


def _template(judge: JudgeSpec, tokenizer: Any, kwargs: dict[str, Any]) -> str:
    """Say why the chat template cannot write a question."""
    if not getattr(tokenizer, "chat_template", None):
        return f"{judge.path!r} has no chat template; take a model that was trained to follow instructions"
    messages = [Message("system", (judge.system or "system",)), Message("user", ("question",))]
    try:
        ChatTemplate(tokenizer, kwargs).render(messages, opens=True, kept=[True, True])
    except DataFault as fault:
        return f"{judge.path!r}: {fault}; take a judge whose chat template writes a system and a user message"
    return ""


def _words(judge: JudgeSpec, tokenizer: Any) -> str:
    if judge.verdict != "yes_no":
        return ""
    tokens = {str(tokenizer.decode([token])).strip().casefold() for token in tokenizer.get_vocab().values()}
    missing = [word for word in WORDS if word not in tokens]
    return f"no token of {judge.path!r} is {missing[0]!r}, which verdict yes_no needs" if missing else ""


def _context(judge: JudgeSpec, tokenizer: Any, config: Any, prompts: Sequence[Prompt]) -> str:
    """Say if the longest question, without its responses, leaves no room for an answer."""
    limits = judge.max_context_tokens, getattr(config, "max_position_embeddings", None)
    limit = min((each for each in limits if each is not None), default=None)
    if limit is None:
        return ""
    longest, where = 0, ""
    for prompt in sorted(prompts, key=lambda prompt: -len(repr(prompt.columns)) - len(prompt.text))[:MOST_RENDERED]:
        sample = RewardSample(prompt.text, "", 0, FinishReason.STOP, prompt.columns, prompt.prompt_id)
        try:
            body, _ = request(judge, [sample])
        except Unscorable:
            continue  # the check of the columns says so
        tokens = len(chat_tokens(tokenizer, body)) + body.get("max_tokens", 1)
        if tokens > longest:
            longest, where = tokens, prompt.where or prompt.prompt_id
    if longest < limit:
        return ""
    return (
        f"the question about {where}, without a response, and an answer of max_tokens have {longest} tokens, and the "
        f"judge reads {limit}; shorten the template, or lower max_tokens"
    )
