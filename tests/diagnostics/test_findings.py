"""Findings: none on healthy runs, the right ones on stored bad runs, and each reported once."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import surefoot
from surefoot.diagnostics.curves import CHECKED_METRICS, RunCurves
from surefoot.diagnostics.findings import RUN_CHECKS, RunMonitor, check_curves, findings_of, of_run
from surefoot.diagnostics.metrics import METRICS
from surefoot.recipes.presets import find_recipe
from surefoot.store.finding import Finding, in_words

from .conftest import stored

TEXT = {"model": "m", "data": {"train": "x"}, "reward": {"terms": [{"function": "x:y"}]}}
HEALTHY = ("control", "sft", "reward_model", "ppo", "ppo_2")


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_no_findings_at_any_step(name: str) -> None:
    rows = stored(name)
    budget = int(rows[-1]["steps"])
    messages: list[str] = []
    for stop in [*range(len(rows) // 20, len(rows), max(1, len(rows) // 20)), len(rows)]:
        curves = RunCurves(rows[:stop], budget)
        messages += [findings.name for check in RUN_CHECKS if (findings := check(curves, None)) is not None]
    assert messages == []


def test_reward_hacking_in_the_demo_without_a_kl_penalty_is_reported() -> None:
    findings = {finding.name: finding for finding in findings_of(stored("hacked"))}
    assert set(findings) == {"reward_hacked", "left_reference"}
    assert "gold score falls and responses repeat each other" in findings["reward_hacked"].what


def test_where_beta_is_adapted_its_first_value_is_not_what_to_raise() -> None:
    fields = TEXT | {"reward": {"terms": [{"model": "x"}]}}
    adapted = find_recipe("reviews", fields | {"reference": {"beta": 0.1, "target": 6.0}})
    for recipe, says in ((find_recipe("reviews", fields), "raise reference.beta (it is"), (adapted, "lower reference.target")):
        findings = {finding.name: finding for finding in findings_of(stored("hacked"), recipe)}
        for name in ("reward_hacked", "left_reference"):
            assert findings[name].advice[0].startswith(says)


def test_reward_hacking_is_reported_while_there_is_time() -> None:
    recipe = find_recipe("reviews", {"model": "m", "data": {"train": "x"}, "reward": {"terms": [{"model": "x"}]}})
    messages: list[str] = []
    monitor = RunMonitor(recipe, messages.append)
    for row in stored("hacked"):
        monitor.add(row)
    steps = {line: int(line.split()[2].replace(",", "")) for line in messages}
    assert list(steps.values()) == sorted(set(steps.values())), "each once, in order"
    assert next(steps[line] for line in messages if "the reward rises" in line) <= recipe.steps / 2
    monitor.end(Path("runs/x"))
    assert messages[-1] == "findings: reward hacked, left reference; more: surefoot check runs/x"


def rows_of(count: int, **values: Any) -> list[dict[str, Any]]:
    """Rows in which a metric is a number, or a function of the iteration."""
    return [
        {"iteration": i, "steps": 100 * i} | {name: value(i) if callable(value) else value for name, value in values.items()}
        for i in range(1, count + 1)
    ]


def names(rows: list[dict[str, Any]]) -> list[str]:
    return [finding.name for finding in findings_of(rows)]


def test_a_ratio_at_start_that_is_not_one_in_float32_is_serious() -> None:
    (findings,) = findings_of(rows_of(3, ratio_at_start=lambda i: 1.0 if i < 3 else 1.02))
    assert (findings.name, findings.severity) == ("wrong_start", "serious")
    assert (findings.evidence[0].first_step, findings.evidence[0].value) == (300, 1.02)


def test_a_ratio_at_start_that_is_nearly_one_is_rounding() -> None:
    (finding,) = findings_of(rows_of(3, ratio_at_start=lambda i: 1.0 if i < 3 else 1.0003))
    assert (finding.name, finding.severity) == ("wrong_start", "note")
    assert "rounding" in finding.cause
    assert "already 1.0003: " in finding.what


def test_a_policy_that_its_entropy_bonus_widens_gets_no_advice_to_explore_more() -> None:
    rows = rows_of(100, episode_return=lambda i: 20 + i % 2, kl=0.01, actions_clipped=0.95, entropy=lambda i: 3 + i / 10)
    recipe = find_recipe("Pendulum-v1", {"steps": 10_000, "objective": {"entropy_coefficient": 0.1}})
    flat = {finding.name: finding for finding in findings_of(rows, recipe)}["return_flat"]
    assert "entropy bonus" in flat.cause
    assert flat.advice[0] == "a smaller objective.entropy_coefficient (it is 0.1)"
    assert not any("explore" in each for each in flat.advice)


def test_a_policy_whose_gradient_drowns_in_the_value_loss_gets_the_advice_to_scale_rewards() -> None:
    rows = rows_of(100, episode_return=lambda i: 1e6 * (i % 2) - i, kl=1e-9, value_loss=1e13, gradient_norm_policy=1e7)
    recipe = find_recipe("CartPole-v1", {"steps": 10_000})
    flat = findings_of(rows, recipe)[0]
    assert flat.advice[0] == "scale rewards to order 1, or set normalise.rewards = true"
    assert flat.evidence[-1].metric == "gradient_norm_policy"
    for other in ({"optimizer": {"critic_learning_rate": 1e-3}}, {"objective": {"value_coefficient": 0.0}}):
        assert "learning_rate" in findings_of(rows, find_recipe("CartPole-v1", {"steps": 10_000, **other}))[0].advice[0]


def test_a_return_that_has_only_fallen_has_not_risen() -> None:
    (flat,) = findings_of(rows_of(200, episode_return=lambda i: -60.0 if i < 3 else -300.0))  # short episodes end first
    assert "has not risen: −276 at first, and since then −300" in flat.what


def test_a_return_that_rises_falls_and_rises_again_has_risen() -> None:
    """The means of a CartPole run in ten parts: its slopes are steep, and no noise."""
    earned = [23.0, 27.0, 33.0, 62.0, 105.0, 141.0, 75.0, 57.0, 104.0, 160.0]
    assert "return_flat" not in names(rows_of(100, episode_return=lambda i: earned[(i - 1) // 10]))
    noisy = [23.0, 80.0, 33.0, 120.0, 25.0, 141.0, 15.0, 97.0, 24.0, 110.0]
    assert "return_flat" in names(rows_of(100, episode_return=lambda i: noisy[(i - 1) // 10]))


def test_a_return_that_rises_by_less_than_a_twentieth_is_flat_even_without_noise() -> None:
    assert "return_flat" in names(rows_of(100, episode_return=lambda i: 100 + 0.03 * i))
    assert "return_flat" not in names(rows_of(100, episode_return=lambda i: 100 + 0.1 * i))


@pytest.mark.parametrize(("kl", "found"), [(0.09, []), (0.3, ["warning"]), (0.6, ["serious"])])
def test_a_kl_above_a_tenth_is_a_warning_and_above_a_half_serious(kl: float, found: list[str]) -> None:
    assert [finding.severity for finding in findings_of(rows_of(30, kl=kl)) if finding.name == "kl_runaway"] == found


def test_a_kl_below_zero_for_long_is_a_finding() -> None:
    (findings,) = findings_of(rows_of(40, kl_reference=-0.02))
    assert (findings.name, findings.severity) == ("negative_kl", "warning")
    assert "not drawn from the policy" in findings.what
    (chance,) = findings_of(rows_of(40, kl_reference=lambda i: 0.01 * (-1) ** i))
    assert (chance.severity, "never negative" in chance.cause) == ("note", True)


def test_an_early_peak_of_few_episodes_is_not_a_lost_improvement() -> None:
    """A healthy preset's first ten iterations: 5, 17, 25 … episodes; the same curve over twenty is a loss."""
    earned = [18.6, 26.0, 24.8, 24.7, 25.3, 24.4, 22.4, 21.5, 21.2, 20.2]
    assert "return_collapsed" not in names(rows_of(10, episode_return=lambda i: earned[i - 1]))
    assert "return_collapsed" in names(rows_of(20, episode_return=lambda i: earned[(i - 1) // 2]))


def test_a_reward_that_rises_after_ten_noisy_iterations_is_not_flat() -> None:
    """A healthy run of CISPO on sorting: its first ten rewards say nothing yet."""
    earned = [0.48, 0.4, 0.59, 0.48, 0.51, 0.48, 0.56, 0.62, 0.58, 0.68, 0.73, 0.8, 0.76, 0.73, 0.67, 0.75, 0.68, 0.71, 0.75]
    for stop in range(1, 20):
        curves = RunCurves(rows_of(stop, reward=lambda i: earned[i - 1]), budget=40)
        assert not [check for check in RUN_CHECKS if check(curves, None)]


def test_gold_that_is_low_in_one_batch_is_not_lost() -> None:
    """The first thirteen iterations of the demo: the gold of 64 answers, and their reward."""
    gold = [0.44, 0.43, 0.43, 0.37, 0.59, 0.6, 0.52, 0.61, 0.59, 0.79, 0.73, 0.51, 0.34]
    rows = rows_of(13, gold=lambda i: gold[i - 1], reward=lambda i: min(0.9, i / 10))
    assert "reward_hacked" not in names(rows)
    lost = rows_of(26, gold=lambda i: gold[(i - 1) // 2], reward=lambda i: min(0.9, i / 20))
    assert "reward_hacked" in names(lost)


def test_gold_that_loses_most_is_lost_however_far_a_learned_reward_rises() -> None:
    rows = rows_of(40, gold=lambda i: 0.55 * 0.95**i + 0.03 * (-1) ** i, reward=lambda i: i / 15 - 1 + 0.1 * (-1) ** i)
    assert "reward_hacked" in names(rows)


def test_preferences_may_be_at_chance_in_the_first_half() -> None:
    """A reward model of the battery: evaluated five times, at chance twice."""
    accuracy, loss = [0.48, 0.54, 0.65, 0.69, 0.67], [0.717, 0.714, 0.656, 0.62, 0.581]
    for stop in range(1, 6):
        rows = [{"steps": 320 * (i + 1), "held_out_accuracy": accuracy[i], "held_out_loss": loss[i]} for i in range(stop)]
        assert [finding.name for finding in check_curves(RunCurves(rows, 1_600))] == []
        rows = [{**row, "held_out_accuracy": 0.48, "held_out_loss": 0.71} for row in rows]
        assert [finding.name for finding in check_curves(RunCurves(rows, 1_600))] == ["preferences_at_chance"] * (stop > 2)


def test_a_few_lucky_episodes_in_a_constant_return_are_no_improvement_to_lose() -> None:
    lucky = {12: -196.1, 18: -196.0}
    assert "return_collapsed" not in names(rows_of(30, episode_return=lambda i: lucky.get(i, -200.0)))
    assert "return_collapsed" in names(rows_of(30, episode_return=lambda i: -120.0 if 9 < i < 22 else -200.0))


@pytest.mark.parametrize(("metric", "name"), [("reward", "reward"), ("gold", "gold score")])
def test_a_run_that_ends_far_below_its_start_has_a_finding_of_its_own(metric: str, name: str) -> None:
    def found(to: float) -> dict[str, Finding]:
        rows = rows_of(40, **{"reward": 0.6, metric: lambda i: (0.6 if i < 4 else to) + 0.03 * (-1) ** i})
        return {each.name: each for each in findings_of(rows, find_recipe("language", TEXT))}

    lost = found(0.2)["return_collapsed"]
    assert lost.what == f"the {name} is far below its start: from 0.6 at first down to 0.2"
    assert lost.advice[0].startswith("a lower optimizer.learning_rate (it is ")
    assert "return_flat" not in found(0.2)
    assert "return_collapsed" not in found(0.55)


def test_a_rise_at_the_first_update_is_a_rise() -> None:
    assert "return_flat" not in names(rows_of(200, reward=lambda i: 0.2 if i < 2 else 0.8))


@pytest.mark.parametrize(("complete", "ended", "found"), [(-2.0, 0.8, ["warning"]), (-0.5, 0.8, []), (-2.0, 1.0, [])])
def test_a_penalty_above_the_scores_of_complete_answers_is_reported(complete: float, ended: float, found: list[str]) -> None:
    rows = rows_of(30, reward=lambda i: ended * complete - (1 - ended) + 0.01 * i, score_std=1.0, eos_rate=ended)
    findings = findings_of(rows, find_recipe("reviews", TEXT))
    assert [each.severity for each in findings if each.what.startswith("truncated responses earn −1, and complete")] == found


@pytest.mark.parametrize(("kl", "lost"), [(1e-9, False), (1e-3, True)])
def test_a_policy_that_has_not_moved_has_lost_nothing(kl: float, lost: bool) -> None:
    found = names(rows_of(30, episode_return=lambda i: 25.0 if 9 < i < 22 else 20.0, kl=kl))
    assert ("return_collapsed" in found) is lost


@pytest.mark.parametrize("algorithm", ["REINFORCE", "A2C"])
def test_one_step_per_batch_is_not_reported_as_no_progress(algorithm: str) -> None:
    risen = rows_of(200, episode_return=lambda i: 20 + i, kl=0.0)
    recipe = find_recipe("CartPole-v1", {"algorithm": algorithm, "steps": 20_000})
    once = find_recipe("CartPole-v1", {"steps": 20_000, "objective": {"reuse": {"epochs": 1, "minibatches": 1}}})
    for one_step in (recipe, once):
        assert "return_flat" not in {finding.name for finding in findings_of(risen, one_step)}
    flat = {
        findings.name: findings for findings in findings_of(rows_of(200, episode_return=lambda i: 20 + i % 2, kl=0.0), recipe)
    }
    assert "the policy moves" in flat["return_flat"].cause
    assert not any("epochs" in advice for advice in flat["return_flat"].advice)
    assert [evidence.metric for evidence in flat["return_flat"].evidence] == ["episode_return"]


def test_nearly_constant_returns_excuse_a_critic() -> None:
    """A solved task: hardly any variance is left to explain, so nothing is said about failing to."""
    solved = rows_of(60, value_loss=lambda i: 100.0 if i < 20 else 1e-3, explained_variance=lambda i: 0.9 if i < 20 else -3.0)
    unsolved = rows_of(60, value_loss=100.0, explained_variance=lambda i: 0.9 if i < 20 else -3.0)
    assert names(solved) == []
    assert names(unsolved) == ["critic_misleads"]
    untrained = find_recipe("CartPole-v1", {"objective": {"value_coefficient": 0.0}})
    assert findings_of(unsolved, untrained) == [], "there is no value loss"


def test_a_critic_that_is_bad_only_at_first_is_excused() -> None:
    assert names(rows_of(100, value_loss=1.0, explained_variance=lambda i: -5.0 if i < 10 else 0.5)) == []


def test_a_short_problem_that_is_over_is_not_a_finding() -> None:
    risen = {"reward": lambda i: i / 200, "eos_rate": lambda i: 0.0 if i <= 4 else 0.95}
    assert names(rows_of(200, groups_without_signal=lambda i: 1.0 if i <= 4 else 0.3, **risen)) == []
    silent, cut = {"groups_without_signal": lambda i: float(i > 190 or i < 15)}, {"eos_rate": lambda i: float(15 <= i <= 190)}
    for going_on in (silent, cut):
        findings = findings_of(rows_of(200, **{"reward": lambda i: 0.1 * (i % 2), **going_on}))
        assert [f.severity for f in findings if f.name in ("no_reward_signal", "responses_cut")] == ["serious"]


def test_a_reward_that_differs_by_the_penalty_of_truncated_responses_alone_has_no_signal() -> None:
    recipe = find_recipe("reviews", TEXT)

    def found(ended: float, scores: list[float], **more: float) -> list[str]:
        every = [-1.0] * round(32 * (1 - ended)) + scores * round(32 * ended / len(scores))
        rows = rows_of(30, reward=float(np.mean(every)), score_std=float(np.std(every)), eos_rate=lambda i: ended, **more)
        return [finding.severity for finding in findings_of(rows, recipe) if finding.name == "no_reward_signal"]

    assert found(0.875, [0.3]) == ["serious"]
    assert found(0.875, [0.25, 0.35]) == []
    assert found(0.0625, [0.3]) == [], "two responses may be equal by chance"
    assert found(0.875, [0.3], without_score=0.25) == [], "the share that ends is that of others too"


def test_a_task_that_is_solved_is_a_note_and_no_failure() -> None:
    solved = rows_of(100, reward=lambda i: min(1.0, i / 80), groups_without_signal=lambda i: float(i >= 80))
    assert [(f.name, f.severity) for f in findings_of(solved)] == [("no_reward_signal", "note")]
    never = rows_of(100, reward=0.0, groups_without_signal=1.0)
    lost = rows_of(100, reward=lambda i: max(0.0, 0.8 - i / 100), groups_without_signal=lambda i: float(i >= 80))
    for rows in (never, lost):
        assert findings_of(rows)[0].severity == "serious"


def test_a_deterministic_policy_has_collapsed_unless_its_return_rises() -> None:
    entropy = {"entropy": lambda i: max(0.01, 0.69 - 0.03 * i)}
    assert "entropy_collapsed" in names(rows_of(40, episode_return=20.0, **entropy))
    assert names(rows_of(40, episode_return=lambda i: float(i), **entropy)) == []


def test_forgetting_shows_in_the_likelihood_of_demonstrations() -> None:
    held_out = {"held_out_log_likelihood": lambda i: -0.4 - i / 50 if i % 10 == 0 else None}
    assert names(rows_of(50, reward=lambda i: i / 10, **held_out)) == ["reward_hacked"]
    assert names(rows_of(50, reward=lambda i: i / 10, held_out_log_likelihood=-0.4)) == []
    early = {"held_out_log_likelihood": lambda i: -0.4 - i / 25 if i > 20 and i % 10 == 0 else None}
    assert names(rows_of(50, reward=lambda i: min(1.0, i / 10), **early)) == [], "the reward rose before"


def noisy(seed: int) -> Callable[[int], float]:
    """Up to 1 in the first tenth, and down to 0.6 in the last third."""
    draw = random.Random(seed)
    return lambda i: (0.0 if i < 5 else 1.0 if i < 29 else 0.6) + draw.gauss(0, 0.05)


@pytest.mark.parametrize("gold", ["gold", "held_out_gold"])
def test_a_gold_score_that_falls_with_the_reward_is_no_hacking(gold: str) -> None:
    """Both curves are compared between the same steps: from the highest gold to now."""
    both = {"reward": noisy(0), gold: noisy(0), **({"held_out_reward": noisy(0)} if gold == "held_out_gold" else {})}
    assert names(rows_of(40, **both)) == []
    held_out = both | {"held_out_reward": lambda i: min(1.0, i / 10)}
    assert names(rows_of(40, **held_out)) == ([] if gold == "gold" else ["reward_hacked"])
    assert names(rows_of(40, **{**both, "reward": lambda i: min(1.0, i / 10)})) == (["reward_hacked"] if gold == "gold" else [])


def test_answers_that_are_alike_are_no_hacking_where_success_rises() -> None:
    """Calls of a tool: the right ones are equal, and scores are 0 or 1; truncated responses may earn a penalty."""
    alike = {"repeated": lambda i: min(0.9, i / 50), "entropy": lambda i: max(0.01, 1 - i / 40)}

    def success(penalty: float, cut: float = 0.2) -> dict[str, Any]:
        right = {i: (1 - cut) * min(0.95, i / 60) for i in range(1, 101)}
        mean = {i: p + cut * penalty for i, p in right.items()}
        std = {i: (p + cut * penalty**2 - mean[i] ** 2) ** 0.5 for i, p in right.items()}
        return {"reward": mean.__getitem__, "score_std": std.__getitem__, "eos_rate": 1 - cut}

    assert names(rows_of(100, **alike, **success(-1.0))) == []
    assert names(rows_of(100, **alike, **success(0.0))) == []
    assert names(rows_of(100, **alike, **success(-1.0) | {"score_std": 0.1})) == ["reward_hacked"]
    by_gold = {"reward": lambda i: i / 50, "gold": lambda i: i / 50}
    assert names(rows_of(100, **alike, **by_gold)) == []
    assert "entropy_collapsed" in names(rows_of(100, **alike, **success(-1.0) | {"reward": 0.1}))


def test_answers_to_one_prompt_may_be_equal_and_those_to_others_may_not() -> None:
    fields = {"model": "m", "data": {"train": "x"}, "algorithm": "GRPO", "sampling": {"prompts": 4, "samples": 8}}
    for term, severity in (({"model": "x"}, "serious"), ({"function": "x.py:f"}, "warning")):
        recipe = find_recipe("language", {**fields, "steps": 6_400, "reward": {"terms": [term]}})
        for most, found in ((7 / 8, {}), (31 / 32, {"reward_hacked": severity})):
            rows = rows_of(64, reward=lambda i: i / 10, repeated=lambda i, most=most: min(most, i / 40))
            assert {finding.name: finding.severity for finding in findings_of(rows, recipe)} == found


ROWS = {"model": "m", "steps": 10_000, "data": {"train": "x"}}


@pytest.mark.parametrize("kind", ["reward", "dpo"])
def test_preferences_that_are_ranked_by_guessing_are_serious(kind: str) -> None:
    recipe = find_recipe(kind, ROWS)

    def named(**values: Any) -> dict[str, str]:
        return {finding.name: finding.severity for finding in findings_of(rows_of(100, **values), recipe)}

    at_times = lambda value: lambda i: value(i) if i % 20 == 0 else None  # noqa: E731
    guess = named(held_out_accuracy=at_times(lambda i: 0.48 + i / 2000), held_out_loss=at_times(lambda i: 0.693))
    assert guess == {"preferences_at_chance": "serious"}
    assert named(held_out_accuracy=at_times(lambda i: 0.5 + i / 500), held_out_loss=at_times(lambda i: 0.69 - i / 1000)) == {}
    assert named(held_out_accuracy=at_times(lambda i: 0.2), held_out_loss=at_times(lambda i: 0.9)) == guess, "labels reversed"
    assert named(policy_loss=lambda i: 0.69 + 0.01 * (i % 2)) == ({} if kind == "dpo" else guess)
    assert named(policy_loss=lambda i: 0.69 - i / 1000) == {}
    few = {"held_out_accuracy": at_times(lambda i: 0.54), "held_out_loss": at_times(lambda i: 0.65)}
    margin = {"held_out_margin": at_times(lambda i: i / 1000)} if kind == "dpo" else {}
    assert named(**few, **margin) == {}, "an accuracy of few pairs is noise"


def test_chosen_answers_may_lose_likelihood_but_less_than_the_margin_gains() -> None:
    recipe = find_recipe("dpo", {**ROWS, "reference": {"beta": 0.2}})

    def named(moved: float, margin: float) -> list[str]:
        rows = rows_of(50, held_out_accuracy=0.8, held_out_chosen_moved=moved, held_out_margin=margin)
        return [finding.name for finding in findings_of(rows, recipe)]

    assert named(-9.0, 2.0) == named(3.0, 0.1) == named(-0.5, 0.01) == []
    assert named(-11.0, 2.0) == ["chosen_less_likely"]


def test_a_loss_that_does_not_fall_or_rises_again_is_a_finding() -> None:
    sft = find_recipe("sft", ROWS)

    def named(**values: Any) -> dict[str, str]:
        return {finding.name: finding.severity for finding in findings_of(rows_of(100, **values), sft)}

    falls = {"policy_loss": lambda i: 1 + 1 / i + 0.02 * (i % 2)}
    assert named(**falls) == {}
    assert named(policy_loss=lambda i: 1 + 0.02 * (i % 2)) == {"loss_flat": "warning"}
    assert named(policy_loss=lambda i: 4.6 + 0.02 * (i % 2)) == {"unusable_start": "serious"}
    assert named(**falls, held_out_loss=lambda i: 1 + abs(i - 50) / 100 if i % 10 == 0 else None) == {"loss_rose": "warning"}
    early = {"policy_loss": lambda i: 4.6 if i == 1 else 9 if i < 15 else 2.8 + 1 / i}
    assert named(**early) == {"loss_rose": "warning"}, "and falls again, to what no model is needed for"
    assert named(policy_loss=lambda i: 1 + i / 50) == {"loss_rose": "serious", "loss_flat": "warning"}


def test_a_model_that_answers_at_random_is_no_start_for_ppo() -> None:
    fields = {"data": {"train": "x"}, "reward": {"terms": [{"function": "x.py:f"}]}, "steps": 10_000}
    rows = rows_of(100, reward=lambda i: i / 50, entropy=lambda i: 4.6 - i / 100)
    for model, found in (("m", ["unusable_start"]), ("pocket", [])):
        recipe = find_recipe("language", {**fields, "model": model})
        assert [finding.name for finding in findings_of(rows, recipe)] == found
    assert names(rows_of(100, reward=lambda i: i / 50, entropy=0.5)) == []


def test_missing_and_undefined_numbers_are_not_findings() -> None:
    assert names([]) == []
    assert names(rows_of(30)) == []
    assert names(rows_of(30, **dict.fromkeys(CHECKED_METRICS))) == []
    assert names(rows_of(30, **{name: float("nan") for name in CHECKED_METRICS})) == []


def test_an_unknown_metric_is_not_a_finding() -> None:
    """A mean of nothing is no number, and comparing with it says nothing."""
    assert "clip_idle" not in names(rows_of(50, clip_active=0.0, kl=1e-4))
    rows = rows_of(40, epochs=lambda i: 0.0 if i > 20 else None, stopped_early=lambda i: 1.0 if i <= 20 else None)
    assert "passes_end_at_once" not in names(rows)


def test_curves_are_the_finite_values_of_metrics_that_may_begin_late_or_never() -> None:
    rows = [
        {"steps": 10, "entropy": 0.1},
        {"steps": 20, "kl": 0.5},
        {"steps": 30, "kl": None},
        {"steps": 40, "kl": float("nan")},
    ]
    curves = RunCurves([*rows, {"steps": 50, "kl": 2.0, "entropy": 3.0}])
    assert curves["kl"].steps.tolist() == [20, 50]
    assert curves["kl"].values.tolist() == [0.5, 2.0]
    assert curves["entropy"].values.tolist() == [0.1, 3.0]
    assert curves["entropy"].steps.tolist() == [10, 50]
    assert len(curves["gold"]) == 0


def test_the_worst_stretch_decides_and_other_curves_are_read_in_its_steps() -> None:
    curves = RunCurves(rows := rows_of(100, step_taken=lambda i: float(not 40 < i <= 60)))
    assert names(rows) == ["no_step_taken"]
    worst = curves.worst(curves["step_taken"], 0.1, 10, largest=False)
    assert worst is not None
    assert curves["step_taken"].during(worst).steps.tolist() == worst.steps.tolist()


def test_numbers_are_rounded_before_they_are_abbreviated() -> None:
    text = {999.4: "999", 999.7: "1,000", -999.7: "−1,000", 1234.5: "1,234", 0.00012: "0.00012", 123.45: "123"}
    assert {value: in_words(value) for value in text} == text


def test_rules_read_existing_metrics() -> None:
    assert set(CHECKED_METRICS) - set(METRICS) == set()


def test_findings_are_plain_values_with_evidence_and_advice(tmp_path: Path) -> None:
    for finding in findings_of(stored("hacked")):
        table = json.loads(json.dumps(finding.to_json()))
        assert table["name"] == finding.name
        assert table["evidence"]
        assert all(each["first_step"] <= each["last_step"] for each in table["evidence"])
        assert table["advice"]
        assert table["advice"][0] in finding.line


def test_checks_of_a_run_folder_name_the_values_of_its_recipe(tmp_path: Path) -> None:
    optimizer, rollout = {"learning_rate": 1e-9}, {"environments": 4, "steps": 32}
    surefoot.train(
        "CartPole-v1", steps=3_840, optimizer=optimizer, rollout=rollout, evaluation={"episodes": 0}, run_dir=tmp_path / "a"
    )
    flat, idle = of_run(tmp_path / "a")
    assert (flat.name, idle.name, "hardly moves" in flat.cause) == ("return_flat", "clip_idle", True)
    assert "learning_rate" in flat.advice[0]
    with pytest.raises(surefoot.SurefootError, match="no such run"):
        of_run(tmp_path / "b")


def test_a_check_that_fails_does_not_end_training_and_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("surefoot.diagnostics.findings.check_curves", broken)
    messages: list[str] = []
    monitor = RunMonitor(find_recipe("CartPole-v1", {"steps": 4_096}), messages.append)
    for row in rows_of(40):
        monitor.add(row)
    monitor.end(None)
    assert len(messages) == 1
    assert "a check failed (ZeroDivisionError: division by zero)" in messages[0]
