"""Samples to read: what a model saw and wrote, what was expected, and what each reward gave."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Locator, Page, expect

from fakes import filled_database as filled

Opened = Callable[..., Page]
VIEW = f"#/runs/{filled.RUN_ID}/samples"


def samples(opened: Opened, width: int = 1440) -> Page:
    page = opened(VIEW, width)
    page.wait_for_selector(".response")
    return page


def heads(page: Page) -> Locator:
    return page.locator(".samples h2")


def test_special_tokens_stand_apart_and_texts_lose_nothing(opened: Opened) -> None:
    first = samples(opened).locator(".samples article").first
    assert first.locator(".prompt .token").all_inner_texts()[:2] == ["<|im_start|>", "<|im_end|>"]
    expect(first.locator(".prompt")).to_have_text(filled.CHAT.format(filled.TRAIN))
    expect(first.locator(".response .text").first).to_have_text(f"{filled.SAMPLES[0][2]}<|im_end|>")
    assert first.locator(".response").first.locator(".token").all_inner_texts() == ["<think>", "</think>", "<|im_end|>"]


def test_what_was_expected_and_why_a_reward_failed_is_there(opened: Opened) -> None:
    page = samples(opened)
    first, second = (page.locator(".samples article").nth(at) for at in (0, 1))
    expect(first.locator(".expected")).to_have_text("math expects205")
    first.locator(".row summary").click()
    expect(first.locator(".row")).to_contain_text("#### 205")
    failed = second.locator(".response").nth(1)
    expect(failed.locator(".why")).to_have_text("math failed: the answer was not compared within cpu_s (5 s)")
    expect(failed.locator(".parts .bad")).to_have_text("math failed")
    expect(failed.locator(".facts")).to_contain_text("cut off")


@pytest.mark.parametrize(
    ("choose", "value", "responses", "head"),
    [
        ("Data set", "held_out", 3, "Step 220 · held out · amc · prompt amc/7"),
        ("Data set", "amc", 3, "Step 220 · held out · amc · prompt amc/7"),
        ("Data set", "train", 2, "Step 231 · training · prompt gsm8k/trai…e5e/4100"),
        ("Result", "failed", 1, "Step 231 · training · prompt gsm8k/trai…e5e/4101"),
        ("Result", "nonzero", 2, "Step 231 · training · prompt gsm8k/trai…e5e/4100"),
    ],
)
def test_samples_are_filtered(opened: Opened, choose: str, value: str, responses: int, head: str) -> None:
    page = samples(opened)
    page.get_by_role("combobox", name=choose).select_option(value)
    expect(page.get_by_role("button", name="Clear filters")).to_be_visible()
    expect(heads(page).first).to_have_text(head)
    expect(page.locator(".samples article").first.locator(".response")).to_have_count(responses)


def test_a_result_is_of_one_reward_or_of_all(opened: Opened) -> None:
    page = samples(opened)
    reward = page.get_by_role("combobox", name="Reward", exact=True)
    expect(reward).to_be_hidden()
    page.get_by_role("combobox", name="Result").select_option("zero")
    expect(page.locator(".empty")).to_have_text("No sample matches these filters.")
    reward.select_option("math")
    expect(page.locator(".response").first).to_contain_text("math 0")
    expect(page.locator(".response .total").first).to_have_text("0.100")


def test_texts_are_searched_and_what_was_found_is_marked(opened: Opened) -> None:
    page = samples(opened)
    page.get_by_role("searchbox").fill("SQUARE")
    expect(page.locator("mark").first).to_have_text("square")
    assert "Complete the square" in page.locator(".response").first.inner_text()
    page.get_by_role("searchbox").fill("no such text")
    expect(page.locator(".empty")).to_have_text("No sample matches these filters.")
    page.get_by_role("button", name="Clear filters").click()
    expect(heads(page).first).to_contain_text("Step 231")
    expect(page.get_by_role("searchbox")).to_have_value("")


def test_a_prompt_is_followed_over_the_steps(opened: Opened) -> None:
    page = samples(opened)
    page.get_by_role("combobox", name="Data set").select_option("held_out")
    page.get_by_role("button", name="Prompt amc/7 over the steps").first.click()
    expect(page.get_by_role("heading", name="Prompt amc/7 over the steps")).to_be_visible()
    expect(page.locator(".prompt")).to_have_count(1)
    expect(heads(page)).to_have_text([f"Step {step} · held out · amc" for step in range(220, -1, -20)])
    page.get_by_role("button", name="All prompts").click()
    expect(page.locator(".prompt").nth(1)).to_be_visible()


def test_a_step_is_chosen_and_older_ones_are_read_on_without_repetition(opened: Opened) -> None:
    page = samples(opened)
    seen = heads(page).all_inner_texts()
    page.get_by_role("button", name="Show older samples").click()
    expect(heads(page).last).to_contain_text("Step 0")
    both = heads(page).all_inner_texts()
    assert both[: len(seen)] == seen
    assert len(set(both)) == len(both)
    expect(page.get_by_role("button", name="Show older samples")).to_be_hidden()
    page.get_by_role("spinbutton", name="Step").fill("228")
    page.get_by_role("spinbutton", name="Step").press("Enter")
    expect(heads(page)).to_have_count(2)
    expect(heads(page).first).to_contain_text("Step 228")


def test_samples_show_no_long_ids(opened: Opened) -> None:
    text = samples(opened).locator(".samples").inner_text()
    assert "weights of step 230" in text
    assert not re.search(r"\w{25}", text)


def test_a_phone_has_all_filters(opened: Opened) -> None:
    page = samples(opened, 390)
    for name in ("Data set", "Result"):
        expect(page.get_by_role("combobox", name=name)).to_be_visible()
    expect(page.get_by_role("searchbox")).to_be_visible()


def test_texts_are_shown_whatever_they_are(opened: Opened) -> None:
    page = opened(f"#/runs/{filled.PPO_ID}/samples", 390)
    page.wait_for_selector(".response")
    first = page.locator(".samples article").first
    expect(first.locator(".prompt")).to_have_text(str(filled.HOSTILE["prompt"]))
    assert first.locator(".prompt .token").all_inner_texts() == ["[.*]", "(", "a|b", "("]
    assert first.locator(".response .token").all_inner_texts() == ["</s>", "</s>"]
    assert first.locator(".response .text").text_content() == filled.HOSTILE["response"]
    expect(first.locator(".expected")).to_have_text("<u> expects<script>alert(1)</script>")
    expect(first.locator(".why")).to_have_text("<u> failed: <script>alert(1)</script>")
    expect(first.locator(".parts")).to_contain_text("constructor 0")
    assert first.locator("img, script, i, u").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.get_by_role("searchbox").fill("$&")
    expect(page.locator("mark")).to_have_text("$&")


def test_samples_of_an_earlier_driver_are_shown(opened: Opened) -> None:
    page = opened(f"#/runs/{filled.PPO_ID}/samples")
    page.wait_for_selector(".response")
    last = page.locator(".samples article").last
    expect(last.locator(".text")).to_have_text("(empty)")
    expect(last.locator(".total")).to_have_text("–")  # noqa: RUF001
    expect(last.locator("h2")).to_have_text("Step 1 · training · prompt old")
