"""Check a run's environment before it starts: its contract, and that the model's conversations can be extended."""

from __future__ import annotations

import asyncio

from rlhfless.environments.chat_format import chat_format
from rlhfless.environments.contract import Description, EnvironmentSource
from rlhfless.environments.workers import EnvironmentWorkers
from rlhfless.prepare.model import PolicyModel
from rlhfless.spec import EnvironmentSpec, RunSpec
from rlhfless.spec.errors import InputError, Problem


def environment_problems(spec: RunSpec, policy: PolicyModel | None) -> list[Problem]:
    """Report why episodes could not be played. Loads the environment in a process of its own."""
    if spec.environment is None:
        return []
    try:
        description = asyncio.run(_described(spec.environment))
        if policy is not None:
            data, ends = spec.data, policy.end_token_ids
            chat = chat_format(policy.tokenizer, ends, template=data.chat_template, kwargs=data.chat_template_kwargs)
            chat.check([*description.tools, *({},) * description.offers])
    except InputError as error:
        return [
            Problem("environment.type", f"{problem.where} {problem.what}".strip(), problem.hint)
            for problem in error.problems
        ]
    return []


async def _described(spec: EnvironmentSpec) -> Description:
    workers = EnvironmentWorkers(EnvironmentSource.of(spec), 1, call_s=spec.call_s, memory_mib=spec.memory_mib)
    try:
        await workers.start()
        return workers.description
    finally:
        workers.close()
