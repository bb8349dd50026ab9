"""A scaling policy of one's own."""

from typing import Annotated

from pydantic import Field

from rlhfless.scaling.policies.fleet import Contexts, assign_groups, rescue, start
from rlhfless.scaling.policy import Lost, StepBegan
from rlhfless.spec import PluginSpec


class BySamples:
    """Run enough actors that each generates at most `samples_per_actor` samples."""

    class Settings(PluginSpec):
        samples_per_actor: Annotated[int, Field(ge=1)] = 64
        """Most samples of an actor per step, if another actor is available."""

    def __init__(self, settings, run):
        self.settings = settings
        self.run = run
        self._contexts = Contexts()

    def decide(self, at_s, event, view):
        now = self._contexts.of(at_s, view)
        if isinstance(event, StepBegan):
            wanted = -(-view.group.size // self.settings.samples_per_actor)
            actors = now.layout.generation[:wanted]
            return [*start(now, actors), *assign_groups(now, actors)]
        return rescue(now, event.slot, event.samples) if isinstance(event, Lost) else []
