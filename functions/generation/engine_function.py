"""The base of functions with an engine: its start on the function's devices, its sleep, and its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from rlhfless.functions.base import CallResult, DeviceBinding, Function, FunctionSettings, admitted
from rlhfless.functions.calls import Call, FunctionBroken, ReplicaInfo, SharedNow
from rlhfless.functions.devices import Planned, cuda_fault, engine_fault
from rlhfless.functions.generation.engine import Engine, EngineDead, EngineSettings, EngineTimeout, engine_class
from rlhfless.functions.generation.engine_log import log_file
from rlhfless.records import SleepTier, Slept
from rlhfless.spec.imports import add_import_paths
from rlhfless.weights.check import WeightFileError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFunctionSettings(FunctionSettings):
    engine: EngineSettings
    binding: DeviceBinding
    run_folder: str
    """The run's own folder; the engine's log is written there if the replica's machine has it."""
    planned: Planned = field(default_factory=dict)
    import_paths: tuple[str, ...] = ()
    """Folders from which to import a user-defined engine: the driver's `sys.path`."""


class EngineFunction(Function):
    """A replica with an engine; ready when the engine is."""

    async def __init__(self, settings: EngineFunctionSettings) -> None:  # type: ignore[misc]
        from ray import serve  # takes seconds to import, and a driver that only makes calls does not need it

        super().__init__(settings)
        settings.binding.bind()
        add_import_paths(settings.import_paths)
        with self.starting():
            settings.binding.require_usable()
            log_of_replica = log_file(settings.run_folder, settings.run_id, serve.get_replica_context().app_name)
            try:
                self._engine: Engine = await engine_class(settings.engine).start(settings.engine, log_of_replica)
            except EngineDead as error:
                fault = engine_fault(str(error), settings.planned) or cuda_fault(str(error))
                raise fault or error from error

    @admitted
    async def describe(self, call: Call) -> CallResult[ReplicaInfo]:
        """Describe the replica. Raises FunctionBroken if the engine is dead."""
        if not self._engine.usable:
            raise FunctionBroken("the engine is dead")
        engine = self._engine
        about = replace(
            self.info(engine.pids, metered_s=self.metered_s(call)),
            kv_capacity_tokens=engine.kv_capacity_tokens,
            start_seconds=engine.start_seconds,
            log=str(engine.log),
        )
        return CallResult(about)

    @admitted
    async def sleep(self, _: Call, tier: SleepTier) -> CallResult[Slept]:
        """Put the idle engine to sleep; see Engine.sleep. Raises EngineBusy."""
        with self.engine_faults("falling asleep"):
            return CallResult(await self._engine.sleep(tier))

    @admitted
    async def wake(self, _: Call) -> CallResult[None]:
        """Wake the engine."""
        with self.engine_faults("waking up"):
            await self._engine.wake()
        return CallResult(None)

    @admitted
    async def stop(self, _: Call) -> CallResult[SharedNow | None]:
        """Shut the engine down. The replica answers nothing afterwards."""
        await self._engine.stop()
        return CallResult(None)

    @contextmanager
    def engine_faults(self, doing: str) -> Iterator[None]:
        """Convert engine failures to FunctionBroken.

        An engine that died, hangs or failed mid-load cannot recover, but a new one may. WeightCheckFailed passes
        through: another engine would not load the right weights either.
        """
        try:
            yield
        except (EngineDead, EngineTimeout, WeightFileError) as error:
            self._engine.kill()
            raise FunctionBroken(f"the engine failed during {doing}: {error}") from error
