"""Games of gymnasium. `pip install 'rlhfless[gymnasium]'` first: without the package only its error is tested."""

from __future__ import annotations

import importlib.util

import pytest

from fakes.local_environments import played, text_of
from rlhfless.environments.contract import EnvironmentSource
from rlhfless.environments.loading import load
from rlhfless.prepare.environment_trial import TrialSettings, try_environment
from rlhfless.records import EpisodeStatus
from rlhfless.spec import EnvironmentSpec
from rlhfless.spec.errors import InputError

INSTALLED = importlib.util.find_spec("gymnasium") is not None
needs_it = pytest.mark.skipif(not INSTALLED, reason="the package gymnasium is not installed")
DIRECTIONS = ["left", "down", "right", "up"]


def source(**values: object) -> EnvironmentSource:
    return EnvironmentSource.of(EnvironmentSpec.model_validate({"type": "gymnasium", **values}))


@pytest.mark.skipif(INSTALLED, reason="the package gymnasium is installed")
def test_without_the_package_the_error_names_the_extra() -> None:
    with pytest.raises(InputError, match=r"pip install 'rlhfless\[gymnasium\]'"):
        load(source(id="FrozenLake-v1"))


def test_its_keys_are_checked() -> None:
    with pytest.raises(ValueError, match="`id` is missing, and type gymnasium needs it; write, for example, id: Froz"):
        source()
    with pytest.raises(ValueError, match="`actions` belongs to type gymnasium, and the type is 'mcp'"):
        EnvironmentSpec.model_validate({"type": "mcp", "servers": ["http://a"], "actions": ["a"]})


@needs_it
async def test_a_lake_is_crossed_by_hand() -> None:
    environment = load(source(id="FrozenLake-v1", options={"is_slippery": False}, actions=DIRECTIONS))
    assert environment.description.tools == ()
    lake = environment.code
    said = ["First left, no: down!", "DOWN", "right", "sideways", "Right it is.", "down", "right"]
    episode, _, _ = await played(lake, *(f"{each}<|im_end|>" for each in said), seed=4)
    assert (episode.status, episode.reward) == (EpisodeStatus.DONE, 1.0)
    assert "user\nAnswer with an action: left, down, right, up.\n[S]FFF\nFHFH\nFFFH\nHFFG<|im_end|>" in text_of(
        episode.token_ids
    )
    answers = [call.answer for call in episode.calls]
    assert answers[0].text.endswith("SFFF\n[F]HFH\nFFFH\nHFFG")
    assert (answers[3].text, answers[3].outcome) == (
        "there is no such action. Answer with an action: left, down, right, up.",
        "refused",
    )
    assert [answer.reward for answer in answers] == [0.0, 0.0, 0.0, None, 0.0, 0.0, 1.0]


@needs_it
async def test_numbers_are_actions_without_names_and_observations_are_json() -> None:
    cards = load(source(id="Blackjack-v1")).code
    episode, _, _ = await played(cards, "7<|im_end|>", "I take 1<|im_end|>", "0<|im_end|>", seed=1)
    assert episode.calls[0].answer.text == "there is no such action. Answer with an action, a number from 0 to 1."
    assert episode.status is EpisodeStatus.DONE
    assert episode.reward in (-1.0, 0.0, 1.0)
    assert episode.calls[-1].answer.text.startswith("[")


@needs_it
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"id": "FrozenLak-v1"}, "id: is 'FrozenLak-v1', which cannot be made: .*FrozenLak"),
        ({"id": "FrozenLake-v1", "options": {"slippery": 1}}, "cannot be made: .*slippery"),
        ({"id": "FrozenLake-v1", "actions": ["a", "b"]}, "actions: has 2 names, and the game has 4 actions"),
        ({"id": "Pendulum-v1"}, "neither discrete nor texts"),
    ],
)
def test_what_cannot_be_played_is_refused_by_name(values: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        load(source(**values))


@needs_it
def test_episodes_are_tried_in_worker_processes_and_are_replayable() -> None:
    cliff = source(id="CliffWalking-v1", actions=["up", "right", "down", "left"])
    trial = try_environment(TrialSettings(cliff, episodes=2))
    assert not trial.faults
    assert len(trial.episodes) == 2
