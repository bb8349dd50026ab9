"""A function of one's own: logprobs under a second frozen policy, as a column of the batch."""

from rlhfless.functions.kinds import frozen_phase
from rlhfless.records import FunctionRole
from rlhfless.scaling.function_specs import Bounds, FunctionSpec, MemoryTerms
from rlhfless.scaling.memory import MemoryPhase, on_device
from rlhfless.scaling.placement import ReplicaRequest, Site
from rlhfless.spec import RunSpec
from rlhfless.spec.extension import PluginSpec


class Settings(PluginSpec):
    """Its keys in the spec."""

    path: str
    """The model's folder, or its name on the hub."""
    ranks: int = 1


class SecondPolicy:
    """The declaration."""

    Settings = Settings

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def kind(self, name: str) -> FunctionSpec:
        """Return the specification of the function that the spec calls `name`."""
        ranks = self._settings.ranks

        def wanted(_: RunSpec) -> ReplicaRequest:
            return ReplicaRequest(name, Site.LEARNER_SHARED, ranks=ranks, ranks_key=f"functions.{name}.ranks")

        def phases(terms: MemoryTerms) -> tuple[MemoryPhase, ...]:
            # Of the policy's sizes.
            return on_device([frozen_phase(terms, terms.shape, ranks)], terms.sheet.kind, ranks)

        return FunctionSpec(
            name,
            FunctionRole.ANNOTATES,
            "rlhfless.functions.per_token:PerTokenFunction",
            wanted,
            lambda _: Bounds(),
            phases,
            output=f"{name}_logprobs",
            worker="second_policy.worker:SecondPolicyWorker",
            settings=self._settings,
        )
