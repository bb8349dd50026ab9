"""Which of the groups that become complete a step learns from: all that it has asked for, or those that come first."""

from __future__ import annotations

from rlhfless.loop.rollout_request import RolloutRequest


class Gate:
    """Lets the groups of one draw pass, as they become complete, until the step has as many as it learns from."""

    def __init__(self, request: RolloutRequest) -> None:
        self.left = request.groups
        """Groups that are still to pass."""
        self.passed: list[str] = []
        """Their prompts."""
        self._awaited = set(request.selection.awaited) if request.selection else set()

    def passes(self, prompt_id: str) -> bool:
        """Whether a group that is complete now is learned from. The places of those that are waited for stay free."""
        if prompt_id not in self._awaited and self.left <= len(self._awaited):
            return False
        self._awaited.discard(prompt_id)
        self.left -= 1
        self.passed.append(prompt_id)
        return True
