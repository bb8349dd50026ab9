"""The rewards that run in worker processes, by their specs."""

from __future__ import annotations

from rlhfless.rewards.code import CodeReward
from rlhfless.rewards.json_schema import JsonSchemaReward
from rlhfless.rewards.mathematics import MathReward
from rlhfless.rewards.protocol import Verifier
from rlhfless.rewards.python import PythonReward
from rlhfless.spec import CodeSpec, JsonSchemaSpec, MathSpec, PythonRewardSpec

VerifierSpec = CodeSpec | JsonSchemaSpec | MathSpec | PythonRewardSpec


def verifier(spec: VerifierSpec) -> Verifier:
    """Make the verifier of a spec. Raises RewardError."""
    if isinstance(spec, CodeSpec):
        return CodeReward(spec)
    if isinstance(spec, JsonSchemaSpec):
        return JsonSchemaReward(spec)
    if isinstance(spec, MathSpec):
        return MathReward(spec)
    return PythonReward(spec)
