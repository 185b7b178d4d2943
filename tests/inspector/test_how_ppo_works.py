"""The page "How PPO works" in a real browser: its arithmetic is that of surefoot.functional, its numbers are those of the "
"results."""

import json
import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.compare.plots import RUNGS
from surefoot.functional import (
    clip_active,
    clipped_surrogate,
    discounted_returns,
    gae,
    importance_ratio,
    kl_shaped_rewards,
    place_scores,
    td_residual,
)
from surefoot.language.memory.planner import textbook

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-ppo-works.html"
EPISODE, ANSWER, STEP = (
    json.loads((ROOT / "docs" / "site" / "how" / f"{name}.json").read_text("utf-8")) for name in ("episode", "answer", "step")
)
LAST = len(EPISODE["log_probs"]) - 1
POSITIONS = [(0.98, 0.8, 0.125, LAST), (1.0, 1.0, 0.2, 0), (0.0, 0.95, 0.1, 4), (0.9, 0.0, 0.0, LAST), (0.99, 0.95, 0.5, 7)]
"""γ, λ, ε and epoch"""
LEVEL = """(level) => [...document.querySelectorAll(`[data-level="${level}"]`)]
    .sort((a, b) => a.dataset.t - b.dataset.t).map((cell) => [+cell.dataset.value, cell.dataset.branch])"""


@pytest.fixture
def how(page: Any) -> Any:
    page.goto(PAGE.as_uri())
    return page


def double(name: str, of: Any = EPISODE) -> torch.Tensor:
    return torch.tensor(of[name], dtype=torch.float64)


def test_every_bar_equals_what_functional_computes(how: Any) -> None:
    rewards, values, next_values = (double(name) for name in ("rewards", "values", "next_values"))
    terminated = torch.tensor(EPISODE["terminated"])
    ends: dict[str, Any] = {"terminated": terminated, "truncated": torch.zeros_like(terminated)}
    branches = set()
    for gamma, lam, clip, epoch in POSITIONS:
        for name, value in (("gamma", gamma), ("lambda", lam), ("clip", clip), ("epoch", epoch)):
            how.fill(f"#{name}", f"{value:g}")
        levels = {
            name: how.evaluate(LEVEL, name)
            for name in ("reward", "return", "value", "residual", "advantage", "ratio", "objective")
        }
        shown = {name: torch.tensor([value for value, _ in cells], dtype=torch.float64) for name, cells in levels.items()}
        advantages = gae(rewards, values, next_values, **ends, gamma=gamma, lam=lam)
        ratios = importance_ratio(double("log_probs")[epoch], double("old_log_probs"))
        expected = {
            "reward": rewards,
            "value": values,
            "return": discounted_returns(rewards, torch.zeros_like(rewards), **ends, gamma=gamma),
            "residual": td_residual(rewards, values, next_values, terminated=terminated, gamma=gamma),
            "advantage": advantages,
            "ratio": ratios,
            "objective": clipped_surrogate(ratios, advantages, clip, clip),
        }
        for name, wanted in expected.items():
            torch.testing.assert_close(
                shown[name], wanted, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
            )
        active = clip_active(ratios, advantages, clip, clip)
        assert [branch == "clipped" for _, branch in levels["objective"]] == active.tolist()
        branches |= {branch for _, branch in levels["objective"]}
    assert branches == {"unclipped", "clipped"}


def test_on_text_the_reward_of_a_token_is_its_share_of_the_kl_and_the_score_comes_at_the_end(how: Any) -> None:
    how.select_option("#episode", "1")
    assert how.locator("#tokens span").count() == len(ANSWER["tokens"])
    kl = double("old_log_probs", ANSWER) - double("ref_log_probs", ANSWER)
    ends: dict[str, Any] = {
        "terminated": torch.tensor(ANSWER["terminated"]),
        "truncated": torch.zeros(len(kl), dtype=torch.bool),
    }
    for beta in (ANSWER["beta"], 0.0, 1.0):
        how.fill("#beta", f"{beta:g}")
        mask = torch.ones_like(kl, dtype=torch.bool)
        scores = place_scores(torch.tensor(ANSWER["score"], dtype=torch.float64), mask)
        rewards = kl_shaped_rewards(scores, double("old_log_probs", ANSWER), double("ref_log_probs", ANSWER), mask, beta)
        credit = gae(
            rewards,
            double("values", ANSWER),
            double("next_values", ANSWER),
            **ends,
            gamma=ANSWER["gamma"],
            lam=ANSWER["gae_lambda"],
        )
        for level, wanted in (("kl", kl), ("reward", rewards), ("advantage", credit)):
            shown = torch.tensor([value for value, _ in how.evaluate(LEVEL, level)], dtype=torch.float64)
            torch.testing.assert_close(shown, wanted, rtol=1e-12, atol=1e-12)
        if beta == ANSWER["beta"]:
            torch.testing.assert_close(credit.float(), torch.tensor(ANSWER["advantages"]), rtol=1e-4, atol=1e-4)
    how.locator("#tokens span").last.click()
    assert "The answer ends here" in how.inner_text("#chain")


def test_the_recorded_step_of_trpo_is_the_first_try_within_the_bound(how: Any) -> None:
    kls = [float(x) for x in how.evaluate("() => [...document.querySelectorAll('[data-try]')].map((x) => x.dataset.kl)")]
    assert all(kl > STEP["delta"] for kl in kls[:-1])
    assert kls[-1] <= STEP["delta"]
    assert [each["length"] for each in STEP["tries"]] == pytest.approx([0.8**power for power in range(len(kls))])
    assert STEP["curvature"]["gradient"] > STEP["curvature"]["full"] > 0
    assert how.locator(".ring.bound").count() >= 1


def test_as_recorded_the_advantages_are_those_that_the_run_had(how: Any) -> None:
    how.fill("#gamma", "0.5")
    how.click("#recorded")
    shown = torch.tensor([value for value, _ in how.evaluate(LEVEL, "advantage")])
    torch.testing.assert_close(shown, torch.tensor(EPISODE["advantages"]), rtol=1e-4, atol=1e-4)
    assert how.input_value("#gamma") == "0.98"


def test_a_step_that_is_chosen_shows_its_arithmetic(how: Any) -> None:
    last = len(EPISODE["rewards"]) - 1
    how.focus("#step")
    how.keyboard.press("End")
    assert f"Step {last}:" in how.inner_text("#chain")
    assert "V′ and everything after it is 0" in how.inner_text("#chain")
    how.keyboard.press("ArrowLeft")
    assert f"Step {last - 1}:" in how.inner_text("#chain")
    how.locator('[data-level="advantage"][data-t="3"]').click()
    text = how.inner_text("#chain")
    gamma = EPISODE["gamma"]
    delta = EPISODE["rewards"][3] + gamma * EPISODE["next_values"][3] - EPISODE["values"][3]
    assert f"{delta:.3f}".replace("-", "−") in text
    assert how.locator("#chain .taken").count() == 1


@pytest.mark.slow
def test_the_memory_of_every_role_is_the_planners(how: Any) -> None:
    for size in (0.5, 7, 70):
        for way, roles in textbook(int(size * 1e9)).items():
            how.select_option("#size", f"{size:g}")
            how.select_option("#way", way)
            how.select_option("#critic", "own")
            held = how.evaluate(
                "() => Object.fromEntries([...document.querySelectorAll('[data-role]')].map((x) => [x.dataset.role, "
                "+x.dataset.bytes]))"
            )
            assert held == pytest.approx(roles)
            assert float(how.get_attribute("#total", "data-bytes")) == pytest.approx(sum(roles.values()))
            how.select_option("#critic", "none")
            assert float(how.get_attribute("#total", "data-bytes")) == pytest.approx(sum(roles.values()) - roles["value"])


def test_the_loop_can_be_stepped_through_and_restarts(how: Any) -> None:
    stages = []
    for _ in range(7):
        stages.append(how.inner_text("#stage"))
        how.click("#next")
    assert stages[0].startswith("1 of 6. The policy samples")
    assert stages[6] == stages[0]
    assert len(set(stages)) == 6
    how.click("#back")
    how.select_option("#critic", "none")
    while not how.inner_text("#stage").startswith("4 of 5"):
        how.click("#next")
    assert "mean of its group" in how.inner_text("#stage")
    assert how.query_selector("[data-role=value], [data-edge*=value]") is None


def test_the_points_of_the_frontier_are_the_runs(how: Any) -> None:
    shown = how.evaluate(
        "() => [...document.querySelectorAll('#frontier [data-score]')].map(({dataset: d}) => [d.label, d.score, +d.kl, "
        "+d.value])"
    )
    for line in (ROOT / "benchmarks" / "results" / "language.jsonl").read_text("utf-8").splitlines():
        result = json.loads(line)
        known, free = result["known_products"], result["without_anchor"]["known_products"]
        for label, of in (("SFT", known["start"]), ("β = 0.3", known["trained"]), ("β = 0", free["trained"])):
            for score in ("gold", "reward"):
                assert [label, score, max(0.0, of["kl"]), of[score]] in shown
    assert all(math.isfinite(value) for *_, value in shown)


def test_the_page_fits_a_phone_and_has_a_light_and_a_dark_theme(how: Any) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    light = how.evaluate(paper)
    how.click("#theme")
    assert how.evaluate(paper) != light
    how.set_viewport_size({"width": 390, "height": 844})
    how.reload()
    assert how.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert how.locator('[data-role="policy"]').is_visible()


def test_an_algorithm_has_the_colour_that_it_has_in_plots() -> None:
    style = (ROOT / "docs" / "site" / "how" / "how.css").read_text("utf-8")
    for rung, colour in enumerate(RUNGS):
        shown = "var(--ink)" if colour == "#000000" else colour  # black is white on a dark page
        assert f".line.rung{rung} {{ stroke: {shown};" in style


def test_the_page_loads_nothing_else() -> None:
    text = PAGE.read_text("utf-8")
    assert text.replace("http://www.w3.org/2000/svg", "").count("http") == 1, "the one in http-equiv"


def test_curves_of_seeds_are_joined_at_steps_that_all_reach() -> None:
    summary = runpy.run_path(str(ROOT / "docs" / "how_ppo_works.py"))["summary"]
    curves = [{"steps": [0, 10, 20], "return": [None, 1.0, 2.0]}, {"steps": [5, 15], "return": [3.0, 5.0]}]
    joined = summary(curves)
    assert (joined["steps"][0], joined["steps"][-1]) == (10, 15)
    assert joined["low"][0] == 1.0
    assert joined["high"][0] == 4.0
    assert joined["mean"][-1] == 3.25
