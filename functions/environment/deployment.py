"""The environment function: sessions of the run's environment on CPU cores, which generation actors call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlhfless.environments.contract import Description, EnvironmentSource
from rlhfless.environments.kept_sessions import GivenAnswer, KeptSessions
from rlhfless.environments.workers import EnvironmentWorkers
from rlhfless.functions.base import CallResult, DeviceBinding, Function, FunctionSettings, admitted
from rlhfless.functions.calls import Call, ReplicaInfo, SharedNow
from rlhfless.functions.launching import Launch, binding
from rlhfless.scaling.function_specs import FunctionSpec
from rlhfless.scaling.placement import Allocation
from rlhfless.spec import EnvironmentSpec
from rlhfless.spec.imports import add_import_paths, import_paths


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSettings(FunctionSettings):
    """Settings of an environment replica."""

    environment: EnvironmentSpec
    binding: DeviceBinding
    import_paths: tuple[str, ...] = ()
    """Folders to import the user's environment from: the driver's own `sys.path`."""


class EnvironmentFunction(Function):
    """A replica with worker processes, one per session."""

    @staticmethod
    def settings_of(launch: Launch, kind: FunctionSpec, allocation: Allocation) -> EnvironmentSettings:  # noqa: ARG004
        """Return a replica's settings for an allocation with bound devices."""
        assert launch.spec.environment is not None
        return EnvironmentSettings(
            run_id=launch.run_id,
            lease=launch.lease,
            environment=launch.spec.environment,
            binding=binding(allocation.devices, exclusive=False),
            import_paths=import_paths(),
        )

    def __init__(self, settings: EnvironmentSettings) -> None:
        super().__init__(settings)
        settings.binding.bind()
        add_import_paths(settings.import_paths)
        spec = settings.environment
        source = EnvironmentSource.of(spec)
        self._workers = EnvironmentWorkers(source, spec.sessions, call_s=spec.call_s, memory_mib=spec.memory_mib)
        self._sessions = KeptSessions(self._workers, spec.episode_s)

    @admitted
    async def describe(self, _: Call) -> CallResult[ReplicaInfo]:
        """Describe this replica. The first call starts a worker; raises InputError if the environment breaks its
        contract."""
        await self._workers.start()
        return CallResult(self.info(self._workers.pids))

    @admitted
    async def about(self, _: Call) -> CallResult[Description]:
        """Describe the environment."""
        return CallResult(self._sessions.description)

    @admitted
    async def ask(self, call: Call, key: str, method: str, number: int, *arguments: Any) -> CallResult[GivenAnswer]:
        """Call a method of a session; see KeptSessions.ask."""
        return CallResult(await self._sessions.ask(key, call.attempt, method, number, *arguments))

    @admitted
    async def answered(self, _: Call, key: str) -> CallResult[None]:
        """Return when all calls of a session have their answers; see KeptSessions.answered."""
        await self._sessions.answered(key)
        return CallResult(None)

    @admitted
    async def end(self, _: Call, key: str, finished: bool) -> CallResult[None]:
        """End a session; see KeptSessions.end."""
        await self._sessions.end(key, finished)
        return CallResult(None)

    @admitted
    async def stop(self, _: Call) -> CallResult[SharedNow | None]:
        """Stop the workers."""
        await self._sessions.stop()
        self._workers.close()
        return CallResult(None)
