"""The bundled task for agents: its split, its demonstrations, and its environment, which the demonstrations follow."""

import sys
from pathlib import Path

import numpy as np

from rlhfless.bundled.model import build_tokenizer
from rlhfless.bundled.safe import PROMPT, SafeRecipe
from rlhfless.bundled.warm_start import iterate_batches

sys.path.append(str(Path(__file__).parents[2] / "examples"))

from environments.safe import Blind, Safe

RECIPE = SafeRecipe()


def test_held_out_codes_are_never_trained_on_or_demonstrated():
    rng = np.random.default_rng(0)
    train = {problem.code for problem in RECIPE.problems(rng, 800, held_out=False)}
    held_out = {problem.code for problem in RECIPE.problems(rng, 200, held_out=True)}
    assert (len(train), len(held_out), len(train | held_out)) == (800, 200, 1000)
    opened = [each for each in RECIPE.demonstrations(rng, 3000) if len(each.later) == 3]
    shown = {"".join(answer.split()[1] for answer, _ in each.later) for each in opened}
    assert shown
    assert shown <= train


def test_demonstrations_play_the_game_and_their_first_turn_is_mostly_a_guess():
    demonstrations = RECIPE.demonstrations(np.random.default_rng(1), 4000)
    looks = [len(each.later) for each in demonstrations]
    shares = np.bincount(looks, minlength=4) / len(looks)
    assert np.allclose(shares, [0.6, 0.4 * 0.6, 0.4**2 * 0.6, 0.4**3], atol=0.02)
    for each in demonstrations:
        said = [each.response, *(response for _, response in each.later)]
        safe, code = Safe(), "".join(answer.split()[1] for answer, _ in each.later)
        safe.reset(0, {"code": code.ljust(3, "x")})
        for turn, (answer, _) in zip(said, each.later, strict=False):
            assert safe.observe(turn) == answer
        assert safe.observe(said[-1]) is None
        assert safe.reward() >= len(code) / 3


def test_the_safe_by_hand():
    safe, blind = Safe(), Blind()
    for each in (safe, blind):
        assert each.reset(0, {"code": "704"}) is None
    assert [safe.observe(f"look {place}") for place in (1, 2, 3)] == ["shows 7 :", "shows 0 :", "shows 4 :"]
    assert blind.observe("look 1") == "shows ? :"
    assert (safe.observe("open 7 1 4"), safe.reward()) == (None, 2 / 3)
    assert (safe.observe("look 4"), safe.observe("7 0 4")) == (None, None)


def test_only_the_turns_of_the_policy_are_learned():
    tokenizer = build_tokenizer(RECIPE, 64)
    for example in next(iterate_batches(RECIPE, tokenizer, np.random.default_rng(2), 512)):
        (sequence,) = example.sequences
        learned = example.learned(0)
        pieces, at = [], 0
        while at < len(sequence):
            end = next((i for i in range(at, len(sequence)) if learned[i] != learned[at]), len(sequence))
            pieces.append((learned[at], tokenizer.decode(sequence[at:end])))
            at = end
        assert pieces[0] == (False, PROMPT)
        assert [each for each, _ in pieces] == [number % 2 == 1 for number in range(len(pieces))]
        assert all(
            text.startswith(("look", "open")) and text.endswith("<eos>") for is_learned, text in pieces if is_learned
        )
        assert all(text.startswith("shows") for is_learned, text in pieces[2:] if not is_learned)
