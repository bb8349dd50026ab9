"""A function of one's own: logprobs under a second frozen policy, as a column of the batch."""

from rlhfless.functions.reference.kind import frozen_phase
from rlhfless.records import FunctionRole
from rlhfless.scaling.function_kinds import Bounds, FunctionKind, MemoryTerms
from rlhfless.scaling.memory import MemoryPhase, on_device
from rlhfless.scaling.placement import Site, Wanted
from rlhfless.spec import RunSpec
from rlhfless.spec.extension import OwnSpec


class Settings(OwnSpec):
    """Its keys in the spec."""

    path: str
    """The model's folder, or its name on the hub."""
    ranks: int = 1


class SecondPolicy:
    """The declaration."""

    Settings = Settings

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def kind(self, name: str) -> FunctionKind:
        """What the function that the spec calls `name` is."""
        ranks = self._settings.ranks

        def wanted(_: RunSpec) -> Wanted:
            return Wanted(name, Site.BESIDE, ranks=ranks, ranks_key=f"functions.{name}.ranks")

        def phases(terms: MemoryTerms) -> tuple[MemoryPhase, ...]:
            # Of the policy's sizes.
            return on_device([frozen_phase(terms, terms.shape, ranks)], terms.sheet.kind, ranks)

        return FunctionKind(
            name,
            FunctionRole.COLUMN,
            "rlhfless.functions.column.deployment:ColumnFunction",
            wanted,
            lambda _: Bounds(),
            phases,
            column=f"{name}_logprobs",
            worker="second_policy.worker:SecondPolicyWorker",
            settings=self._settings,
        )
