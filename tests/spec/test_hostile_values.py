"""Whatever a user writes into any field is taken or refused; no validator raises anything else."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from rlhfless.control.errors import ApiError
from rlhfless.control.settings import ServiceSettings
from rlhfless.control.spec_admission import posted_spec
from rlhfless.prepare.rewards import reward_problems
from rlhfless.spec import HttpSpec, RunSpec
from rlhfless.spec.explain import explain, models, tag_of

NESTED: Any = {}
for _ in range(300):
    NESTED = {"a": [NESTED]}

HOSTILE: tuple[Any, ...] = (
    *(None, True, 0, -1, 2**31, 2**63, -(10**30), 10**30, 1e308, -1e308, math.nan, math.inf),
    *("", "\0", "\ud800", "x" * 100_000, "../../x", "/dev/zero", "/proc/self/mem", "a:b", "a.b:c", "~nobody/x"),
    *("a{99999999999}", "(" * 5000, "(" * 200 + ")" * 200, "[", "(?<=a+)b", "(?P<a>x)" * 2, "x{4294967294}"),
    *("http://", "http://[::1", "http://a b/", "http://x:99999999/", "http://x:y/", "http://" + "a" * 70 + ".com/"),
    *("http://\u2028/", "http://xn--\ufffd/", "http://..", "http://\ud800/", "http://a\0b/", "https://[v1.x]/"),
    *([], [None], [[]], [10**30], ["x"] * 2000, {}, {"type": None}, {"type": "x"}, {"": ""}, {1: 2}, NESTED),
)

NEEDED: dict[str, dict[str, Any]] = {
    "regex": {"pattern": "a"},
    "length_penalty": {"free_tokens": 1, "max_tokens": 2},
    "python": {"target": "a:b"},
    "http": {"url": "http://a/"},
    "reward_model": {"path": "a"},
    "json_schema": {"json_schema": {}},
    "cheapest": {"deadline_s": 1.0},
    "fastest": {"budget_usd": 1.0},
    "held_out": {"fraction": 0.5},
}
"""What a section needs to be valid, by its type or key."""


def spec() -> dict[str, Any]:
    return {"model": {"path": "m"}, "prompts": {"path": "p"}, "rewards": [{"type": "exact_match"}]}


def sections(model: type[BaseModel], path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """(path, section) of every section that a spec may have, and of each type of it."""
    for name, field in model.model_fields.items():
        below = (*path, name, 0) if name == "rewards" else (*path, name)
        for part in models(field.annotation):
            tag = tag_of(part)
            yield below, (part, ({"type": tag} if tag else {}) | NEEDED.get(tag or name, {}))
            yield from sections(part, below)


FEW = 4


def values_of(field: FieldInfo, seen: Counter[str]) -> Sequence[Any]:
    """All values for the first field of a kind; for each field like it a quarter of them, another one each time."""
    kind = f"{field.annotation} {field.metadata}"
    seen[kind] += 1
    return HOSTILE if seen[kind] == 1 else HOSTILE[seen[kind] % FEW :: FEW]


def written() -> Iterator[tuple[str, dict[str, Any]]]:
    """Specs with one hostile value, each with its field."""
    seen = Counter[str]()
    for name, field in RunSpec.model_fields.items():
        for value in values_of(field, seen):
            yield name, spec() | {name: value}
    tried = set[type[BaseModel]]()
    for path, (model, section) in sections(RunSpec, ()):
        if model in tried:  # algorithms have sections in common
            continue
        tried.add(model)
        for name, field in model.model_fields.items():
            for value in values_of(field, seen):
                whole = spec()
                here: Any = whole
                for key in path[:-1]:
                    here = here[key] if isinstance(key, int) else here.setdefault(key, {})
                kept = here[path[-1]] if isinstance(path[-1], str) and path[-1] in here else {}
                here[path[-1]] = kept | section | {name: value}
                yield ".".join(map(str, (*path, name))), whole


def refusal(place: str, values: dict[str, Any], settings: ServiceSettings) -> ApiError | None:
    """Why a POST of a spec is refused."""
    try:
        posted_spec(values, settings)
    except ApiError as error:
        return error
    except Exception as error:
        pytest.fail(f"{place}: {type(error).__name__}: {error}"[:500])
    return None


def test_a_spec_with_any_value_is_taken_or_refused() -> None:
    """When it is POSTed; and by itself, if a POST refuses it before it is read."""
    settings = ServiceSettings(http_hosts=("localhost:1",))
    taken = refused = 0
    for place, values in written():
        error = refusal(place, values, settings)
        if error is None:
            taken += 1
            continue
        refused += 1
        assert error.status == 422, place
        assert all(map(str, error.problems)), place
        if not isinstance(error.__cause__, ValidationError):
            with contextlib.suppress(ValidationError):
                RunSpec.model_validate(values)
    assert taken > 300
    assert refused > 3000


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"type": "regex", "pattern": "a{99999999999}"}, "not a regular expression: "),
        ({"type": "regex", "pattern": "(" * 5000}, "not a regular expression: "),
        ({"type": "http", "url": "http://x:99999999/"}, "not a URL: "),
        ({"type": "http", "url": "http://" + "a" * 70 + ".com/"}, "not a URL: "),
        ({"type": "http", "url": "http:///x"}, "not a URL: it names no host"),
    ],
)
def test_a_reward_that_cannot_be_is_named(reward: dict[str, Any], message: str) -> None:
    values = spec() | {"rewards": [reward]}
    with pytest.raises(ValidationError) as caught:
        RunSpec.model_validate(values)
    (problem,) = explain(caught.value, RunSpec, {}, values)
    assert problem.where == f"rewards.0.{'url' if reward['type'] == 'http' else 'pattern'}"
    assert message in problem.what


def test_any_host_that_a_spec_may_name_can_be_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its name is looked up."""
    for url in (value for value in HOSTILE if isinstance(value, str)):
        try:
            reward = HttpSpec(type="http", url=url)
        except ValidationError:
            continue
        checked = RunSpec.model_validate(spec() | {"scoring": {"http_hosts": []}})
        reward_problems(checked.model_copy(update={"rewards": (reward,)}), [])
