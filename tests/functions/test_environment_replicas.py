"""Calls to an environment replica that is lost: each ends, also those that Serve would let wait for ever."""

import asyncio
from typing import Any

import pytest

from rlhfless.environments.protocol import EnvironmentFailed
from rlhfless.functions.calls import Call
from rlhfless.functions.environment import remote
from rlhfless.functions.environment.remote import EnvironmentReplicas, SessionLeft
from rlhfless.functions.generation.messages import replica_of
from rlhfless.sim.virtual_loop import run_virtual

CALL = Call("run", 1, 1)


class Serve:
    """Replicas that answer after some seconds. One that is lost never answers, or fails the call."""

    def __init__(self, **answers: float | BaseException | None) -> None:
        self.answers = answers
        self.made: list[str] = []

    async def send(self, name: str, call: Call, method: str, *arguments: Any) -> Any:
        self.made.append(method)
        answer = self.answers[method]
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, BaseException):
            await asyncio.sleep(1)
            raise answer
        await asyncio.sleep(answer)
        return method, name, arguments


async def ended(replicas: EnvironmentReplicas, *methods: str) -> list[tuple[str, float]]:
    """Return how each call ended, and when."""

    async def one(method: str) -> tuple[str, float]:
        try:
            end = str((await replicas.ask(asyncio.Event(), "e-0", CALL, method, 7))[0])
        except Exception as error:
            end = type(error).__name__
        return end, asyncio.get_running_loop().time()

    return list(await asyncio.gather(*map(one, methods)))


def test_sessions_keep_their_replica_and_spread_evenly():
    names = ["e-0", "e-1", "e-2"]
    chosen = [replica_of(names, f"prompt/{number}") for number in range(3000)]
    assert chosen == [replica_of(names, f"prompt/{number}") for number in range(3000)]
    assert all(900 < chosen.count(name) < 1100 for name in names)
    assert replica_of(["e-0"], 7) == "e-0"


def test_a_call_that_finds_the_replica_lost_ends_all_others():
    async def main():
        replicas = EnvironmentReplicas(Serve(fails=SessionLeft(), waits=None, slow=2.0, about=0.0).send)
        ends = await ended(replicas, "waits", "fails", "waits")
        assert ends == [("SessionLeft", 1.0)] * 3
        assert await ended(replicas, "slow") == [("SessionLeft", 1.0)]
        replicas.trust("e-0")
        assert await ended(replicas, "slow") == [("slow", 3.0)]
        assert (await replicas.ask(asyncio.Event(), "e-1", CALL, "about", 7))[1] == "e-1"

    run_virtual(main())


def test_a_silent_replica_is_lost_after_a_question_that_costs_nothing():
    async def main():
        serve = Serve(waits=None, about=None)
        assert await ended(EnvironmentReplicas(serve.send), "waits") == [
            ("SessionLeft", remote.SILENT_S + remote.ANSWER_S)
        ]
        assert serve.made == ["waits", "about"]

    run_virtual(main())


def test_a_long_call_of_a_replica_that_answers_is_waited_for():
    async def main():
        serve = Serve(slow=3 * remote.SILENT_S + 1, about=0.0)
        assert await ended(EnvironmentReplicas(serve.send), "slow") == [("slow", 3 * remote.SILENT_S + 1)]
        assert serve.made == ["slow", "about", "about", "about"]

    run_virtual(main())


def test_a_sample_that_leaves_does_not_wait_for_its_call_and_takes_no_other_with_it():
    async def main():
        replicas, left = EnvironmentReplicas(Serve(waits=None, slow=5.0, about=0.0).send), asyncio.Event()
        asyncio.get_running_loop().call_later(2.0, left.set)
        other = asyncio.create_task(ended(replicas, "slow"))
        with pytest.raises(SessionLeft):
            await replicas.ask(left, "e-0", CALL, "waits")
        assert asyncio.get_running_loop().time() == 2.0
        assert await other == [("slow", 5.0)]

    run_virtual(main())


@pytest.mark.parametrize("error", [EnvironmentFailed("it broke"), ValueError("no")])
def test_an_error_of_the_method_is_no_loss(error):
    async def main():
        replicas = EnvironmentReplicas(Serve(fails=error, slow=5.0, about=0.0).send)
        assert [end for end, _ in await ended(replicas, "fails", "slow")] == [type(error).__name__, "slow"]

    run_virtual(main())
