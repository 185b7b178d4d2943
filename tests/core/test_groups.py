"""GRPO and its relatives against the formulas of their papers written out in plain Python.

The formulas below are loops over responses and tokens; nothing in them imports a formula of the product.
"""

import copy
import math
import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean, pvariance, stdev
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surefoot import (
    ALGORITHMS,
    CISPO,
    DAPO,
    DR_GRPO,
    GRPO,
    GSPO,
    KL_COV,
    ONLINE_DPO,
    REINFORCE_PLUS_PLUS,
    RLOO,
    Clip,
    ClippedWeight,
    Objective,
    Penalty,
    Reuse,
    SurefootError,
)
from surefoot import functional as F
from surefoot.core.algorithms import algorithm_named, switches_between
from surefoot.core.credit import assign_credit
from surefoot.core.learner import Learner, LearnerSettings
from surefoot.core.optimizer import AdamSettings
from surefoot.core.rollout import LearnerState, Rollout, map_tensors
from surefoot.functional.masking import keep_only

from .worlds import TinyPolicy, gradient, moved, random_rollout

laws = settings(settings.get_profile("core"))
SEEDS = [0, 1]
LONGEST = 9
BOUND = 1.05
"""of CISPO's weight, which some ratios of these worlds are above"""
BETA = 0.7
"""of online DPO"""
FRACTION = 0.3
"""of the tokens, which KL-Cov's penalty applies to"""


def same(a: Tensor, b: Tensor) -> None:
    assert a.abs().max() > 1e-4, "a gradient of zero would prove nothing"
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def world(seed: int, rows: int = 8) -> tuple[TinyPolicy, Rollout]:
    """Responses of unequal length from another policy, the first of them masked, in groups of two, three and three."""
    policy = TinyPolicy(seed, critic=False, memory=True, exact=False)
    rollout = moved(random_rollout(policy, seed, rows=rows, unit="row"), seed)
    group = torch.tensor([7, 2, 2, 7, 5, 5, 2, 5])[:rows]  # rows of a group need not stand side by side
    return policy, replace(rollout, group=group)


def kept(r: Rollout, row: int) -> list[int]:
    return [t for t in range(r.mask.shape[1]) if r.mask[row, t]]


def earned(r: Rollout, row: int) -> float:
    return sum(float(r.rewards[row, t]) for t in kept(r, row))


def mates(r: Rollout, row: int) -> list[int]:
    """The responses to the same prompt that count, this one among them."""
    assert r.group is not None
    return [other for other in range(len(r.mask)) if r.group[other] == r.group[row] and kept(r, other)]


def centred(r: Rollout, row: int) -> float:
    return earned(r, row) - mean(earned(r, other) for other in mates(r, row))


def scaled(r: Rollout, row: int) -> float:
    if len(mates(r, row)) < 2:
        return 0.0
    return centred(r, row) / (stdev(earned(r, other) for other in mates(r, row)) + 1e-4)


def against_others(r: Rollout, row: int) -> float:
    others = [earned(r, other) for other in mates(r, row) if other != row]
    return earned(r, row) - mean(others) if others else 0.0


# ---- groups -------------------------------------------------------------------------------------------------------------

WORTH: dict[str, tuple[Objective, Callable[[Rollout, int], float]]] = {
    "scaled": (GRPO, scaled),
    "centred": (DR_GRPO, centred),
    "leave one out": (RLOO, against_others),
}


@pytest.mark.parametrize("name", WORTH)
@laws
@given(st.integers(0, 999), st.lists(st.integers(0, 3), min_size=8, max_size=8))
def test_every_token_has_the_group_advantage_of_its_response(name: str, seed: int, group: list[int]) -> None:
    objective, worth = WORTH[name]
    _, r = world(seed)
    r = replace(r, group=torch.tensor(group))
    credit = assign_credit(r, objective)
    for row in range(8):
        for t in range(r.mask.shape[1]):
            expected = worth(r, row) if r.mask[row, t] else 0.0
            assert float(credit.advantages[row, t]) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("objective", [GRPO, RLOO], ids=["GRPO", "RLOO"])
def test_a_group_with_equal_returns_has_exactly_zero_advantages(objective: Objective) -> None:
    _, r = world(3)
    last = r.terminated | r.truncated
    credit = assign_credit(replace(r, rewards=torch.where(last, 0.1, 0.0).to(r.rewards.dtype)), objective)
    assert credit.advantages.abs().max() <= (0.0 if objective.baseline == "group" else 1e-15)


@pytest.mark.parametrize("objective", [GRPO, RLOO], ids=["GRPO", "RLOO"])
def test_a_masked_response_is_left_out_of_its_group(objective: Objective) -> None:
    _, r = world(4)
    assert not r.mask[0].any()
    poisoned = replace(r, rewards=torch.where(r.mask, r.rewards, torch.nan))
    without = map_tensors(lambda x: x[1:], r)
    here, there = assign_credit(poisoned, objective).advantages, assign_credit(without, objective).advantages
    assert torch.equal(here[1:], there)
    assert (here[0] == 0).all()


def test_a_rollout_without_groups_is_rejected() -> None:
    _, r = world(1)
    with pytest.raises(SurefootError, match=r"objective\.baseline='group': this rollout has no groups"):
        assign_credit(replace(r, group=None), GRPO)


# ---- the papers' formulas -----------------------------------------------------------------------------------------------


def clipped(rho: Tensor, a: float, low: float, high: float) -> Tensor:
    return torch.minimum(rho * a, rho.clamp(1 - low, 1 + high) * a)


def grpo(r: Rollout, row: int, new: Tensor, old: Tensor, ref: Tensor) -> Tensor:
    """DeepSeekMath, equations 3 and 4: the mean over a response's tokens, less β times k3."""
    rho, x = (new - old).exp(), ref - new
    return (clipped(rho, scaled(r, row), 0.2, 0.2) - 0.04 * (x.exp() - x - 1)).mean()


def dr_grpo(r: Rollout, row: int, new: Tensor, old: Tensor, ref: Tensor) -> Tensor:
    """Dr. GRPO: the sum, by one length for all, and no standard deviation."""
    return clipped((new - old).exp(), centred(r, row), 0.2, 0.2).sum() / LONGEST


def dapo(r: Rollout, row: int, new: Tensor, old: Tensor, ref: Tensor) -> Tensor:
    """DAPO, equation 8: every token weighs alike, whatever the length of its response."""
    responses = [other for other in range(len(r.mask)) if kept(r, other)]
    tokens = sum(len(kept(r, other)) for other in responses)
    return clipped((new - old).exp(), scaled(r, row), 0.2, 0.28).sum() * len(responses) / tokens


def gspo(r: Rollout, row: int, new: Tensor, old: Tensor, ref: Tensor) -> Tensor:
    """GSPO, equations 5 and 7: the likelihood ratio of the response, to the power 1/length."""
    s = (new.sum() - old.sum()).exp() ** (1 / len(new))
    return clipped(s, scaled(r, row), 3e-4, 4e-4)


def cispo(r: Rollout, row: int, new: Tensor, old: Tensor, ref: Tensor) -> Tensor:
    """MiniMax-M1, equations 4 and 5: REINFORCE with a bounded weight, over the tokens of all responses."""
    weight = (new - old).exp().detach().clamp(max=BOUND)
    responses = [other for other in range(len(r.mask)) if kept(r, other)]
    return (weight * scaled(r, row) * new).sum() * len(responses) / sum(len(kept(r, other)) for other in responses)


def kl_cov(r: Rollout, row: int, new: Tensor, old: Tensor, ref: Tensor) -> Tensor:
    """Cui et al., equations 10 to 13: the ratio, less a KL at the tokens whose term of the covariance of log π and Â is among
    the largest of all; over the tokens of all responses. Their π in equation 10 is π_old here, as it is before the first step.
    """
    assert r.old_log_probs is not None
    tokens = [(other, t) for other in range(len(r.mask)) for t in kept(r, other)]
    likely, worth = [float(r.old_log_probs[at]) for at in tokens], [scaled(r, other) for other, _ in tokens]
    terms = [(x - mean(likely)) * (a - mean(worth)) for x, a in zip(likely, worth, strict=True)]
    chosen = sorted(range(len(tokens)), key=lambda i: -terms[i])[: int(FRACTION * len(tokens))]
    penalised = torch.tensor([tokens.index((row, t)) in chosen for t in kept(r, row)])
    rho = (new - old).exp()
    gain = rho * scaled(r, row) - penalised * 3.0 * (rho - 1 - (new - old))
    return gain.sum() * len({other for other, _ in tokens}) / len(tokens)


def reinforce_plus_plus(r: Rollout, row: int, new: Tensor, old: Tensor, ref: Tensor) -> Tensor:
    """REINFORCE++: the sum of the rewards still to come, less the batch's mean, by its standard deviation."""
    to_come = {
        other: [sum(float(r.rewards[other, u]) for u in kept(r, other) if u >= t) for t in kept(r, other)]
        for other in range(len(r.mask))
    }
    of_all = [x for returns in to_come.values() for x in returns]
    advantages = [(x - mean(of_all)) / math.sqrt(pvariance(of_all) + 1e-8) for x in to_come[row]]
    responses = sum(bool(returns) for returns in to_come.values())
    rho = (new - old).exp()
    return sum(clipped(rho[t], a, 0.2, 0.2) for t, a in enumerate(advantages)) * responses / len(of_all)  # type: ignore[return-value]


def online_dpo(r: Rollout, row: int, new: Tensor, old: Tensor, ref: Tensor) -> Tensor:
    """Online DPO: log σ(β(h_c − h_r)) of the best against the worst answer to each prompt, differentiated by hand, with the
    weight σ(−β(h_c − h_r)) of θ_old, which is not θ here.
    """
    assert r.old_log_probs is not None
    assert r.ref_log_probs is not None
    ranked = sorted(mates(r, row), key=lambda other: earned(r, other))
    rejected, chosen = ranked[0], ranked[-1]
    if row not in (rejected, chosen) or earned(r, rejected) == earned(r, chosen):
        return 0 * new.sum()
    h = {other: float((r.old_log_probs - r.ref_log_probs)[other, kept(r, other)].sum()) for other in (rejected, chosen)}
    weight = len(ranked) * BETA / (1 + math.exp(BETA * (h[chosen] - h[rejected])))
    return new.sum() * (weight if row == chosen else -weight)


def rloo(r: Rollout, row: int, new: Tensor, old: Tensor, ref: Tensor) -> Tensor:
    """RLOO: the response is one action, and log π of it a sum."""
    return new.sum() * against_others(r, row)


PAPERS = {
    "GRPO": (GRPO, grpo),
    "DR_GRPO": (replace(DR_GRPO, aggregation_length=LONGEST), dr_grpo),
    "DAPO": (DAPO, dapo),
    "GSPO": (GSPO, gspo),
    "CISPO": (replace(CISPO, trust_region=ClippedWeight(BOUND)), cispo),
    "KL_COV": (replace(KL_COV, trust_region=Penalty(3.0, fraction=FRACTION)), kl_cov),
    "RLOO": (RLOO, rloo),
    "ONLINE_DPO": (replace(ONLINE_DPO, pair_beta=BETA), online_dpo),
    "REINFORCE_PLUS_PLUS": (REINFORCE_PLUS_PLUS, reinforce_plus_plus),
}


@pytest.mark.parametrize("name", PAPERS)
def test_the_gradient_is_that_of_the_papers_formula_written_out(name: str) -> None:
    objective, formula = PAPERS[name]
    policy, r = world(1)
    r = replace(r, old_distribution=None)  # as on text
    assert r.old_log_probs is not None
    assert r.ref_log_probs is not None
    rows = [row for row in range(8) if kept(r, row)]
    total = torch.zeros(())
    for row in rows:
        steps = kept(r, row)
        new = policy(r.inputs[row : row + 1], r.actions[row : row + 1]).log_probs[0, steps]
        total = total - formula(r, row, new, r.old_log_probs[row, steps], r.ref_log_probs[row, steps]) / len(rows)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(total, list(policy.parameters()))])
    same(gradient(policy, r, objective), expected)
    same(gradient(policy, r, objective, micro_batch=3), expected)


# ---- the KL to the reference, in the loss and in the reward -------------------------------------------------------------


def test_a_kl_in_the_reward_is_part_of_the_return_that_is_compared() -> None:
    """And of nothing else: the same score less the whole response's KL, at one token or spread over all."""
    policy, r = world(2)
    assert r.old_log_probs is not None
    assert r.ref_log_probs is not None
    cost = torch.where(r.mask, 0.3 * (r.old_log_probs - r.ref_log_probs), 0.0)
    last = r.terminated | r.truncated
    spread = replace(r, rewards=r.rewards - cost)
    at_once = replace(r, rewards=r.rewards - torch.where(last, cost.sum(-1, keepdim=True), 0.0))
    same(gradient(policy, spread, RLOO), gradient(policy, at_once, RLOO))
    assert (gradient(policy, spread, RLOO) - gradient(policy, r, RLOO)).abs().max() > 1e-3


def test_a_kl_in_the_loss_is_weighted_by_the_ratio_of_tokens_also_where_the_surrogate_has_that_of_responses() -> None:
    policy, r = world(1)
    parts = []
    for ratio in ("token", "sequence"):
        plain = replace(GRPO, ratio=ratio, reference_coefficient=0.0)  # type: ignore[arg-type]
        with_kl = replace(plain, reference_coefficient=0.5, reference_estimator="ratio_k3")
        parts.append(gradient(policy, r, with_kl) - gradient(policy, r, plain))
    same(*parts)


# ---- the ratio of whole responses ---------------------------------------------------------------------------------------

SEQUENCE = replace(GSPO, trust_region=Clip(0.1))


def metrics_of(policy: TinyPolicy, r: Rollout, objective: Objective) -> dict[str, Any]:
    learner = Learner(policy, replace(objective, reuse=Reuse(1, 1)), LearnerSettings(AdamSettings(1e-3)))
    return dict(learner.update(r, assign_credit(r, objective), LearnerState.seeded(0, 1)))


def mean_log_ratio(policy: TinyPolicy, r: Rollout) -> tuple[Tensor, dict[int, float]]:
    """log ρ of every token, and its mean over each response."""
    assert r.old_log_probs is not None
    with torch.no_grad():
        of_tokens = policy(r.inputs, r.actions).log_probs - r.old_log_probs
    rows = [row for row in range(8) if kept(r, row)]
    return of_tokens, {row: mean(float(of_tokens[row, t]) for t in kept(r, row)) for row in rows}


def pushed_far(r: Rollout, of_rows: dict[int, float]) -> list[int]:
    """Responses that moved further than the clip of ``SEQUENCE``, the way they were pushed."""
    return [
        row
        for row, x in of_rows.items()
        if (math.exp(x) > 1.1 and scaled(r, row) > 0) or (math.exp(x) < 0.9 and scaled(r, row) < 0)
    ]


def far_world() -> tuple[TinyPolicy, Rollout]:
    """The first in which some responses are clipped, some are outside the band the other way, and some are inside."""
    for seed in range(100):
        policy, r = world(seed)
        of_rows = mean_log_ratio(policy, r)[1]
        outside = [row for row, x in of_rows.items() if not 0.9 <= math.exp(x) <= 1.1]
        if 0 < len(pushed_far(r, of_rows)) < len(outside) < len(of_rows):
            return policy, r
    raise AssertionError("no such world")


def test_clip_metrics_count_responses_where_the_ratio_is_theirs() -> None:
    policy, r = far_world()
    of_rows = mean_log_ratio(policy, r)[1]
    rho = [math.exp(x) for x in of_rows.values()]
    metrics = metrics_of(policy, r, SEQUENCE)
    assert metrics["clip_active"] == pytest.approx(len(pushed_far(r, of_rows)) / len(rho))
    assert metrics["ratio_outside"] == pytest.approx(sum(not 0.9 <= x <= 1.1 for x in rho) / len(rho))
    assert metrics["ratio_max"] == pytest.approx(max(rho))
    assert metrics["ratio_min"] == pytest.approx(min(rho))


@pytest.mark.parametrize("aggregation", ["token-mean", "constant"])
def test_metrics_are_means_however_the_loss_is_reduced(aggregation: Any) -> None:
    """A share stays a share and nats stay nats per token, so that a threshold means the same in every algorithm."""
    policy, r = world(1)
    length = 1000 if aggregation == "constant" else None
    objective = replace(DR_GRPO, aggregation=aggregation, aggregation_length=length, entropy_coefficient=0.01)
    of_tokens, of_rows = mean_log_ratio(policy, r)
    with torch.no_grad():
        entropy = policy(r.inputs, r.actions).entropy
    metrics = metrics_of(policy, r, objective)

    def averaged(x: Tensor) -> float:
        rows = [[float(x[row, t]) for t in kept(r, row)] for row in of_rows]
        return mean(y for row in rows for y in row) if aggregation == "token-mean" else mean(map(mean, rows))

    assert metrics["entropy"] == pytest.approx(averaged(entropy))
    assert metrics["kl"] == pytest.approx(averaged(of_tokens.exp() - 1 - of_tokens))
    assert metrics["ratio_outside"] == pytest.approx(averaged(((of_tokens.exp() - 1).abs() > 0.2).double()))
    assert 0 < metrics["ratio_outside"] <= 1


# ---- pairs (online DPO) -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_at_the_sampling_policy_the_gradient_of_pairs_is_that_of_the_dpo_loss(seed: int) -> None:
    """The loss of ``dpo_loss``, differentiated by autograd; prompts weigh by their number of responses."""
    policy, r = world(seed)
    with torch.no_grad():
        r = replace(r, old_log_probs=policy(r.inputs, r.actions).log_probs)
    assert r.ref_log_probs is not None
    assert r.group is not None
    new, ref = (keep_only(x, r.mask).sum(-1) for x in (policy(r.inputs, r.actions).log_probs, r.ref_log_probs))
    total, count, right = torch.zeros(()), 0, []
    for prompt in set(r.group.tolist()):
        rows = sorted(mates(r, r.group.tolist().index(prompt)), key=lambda row: earned(r, row))
        count += len(rows)
        if len(rows) > 1:
            pair = (new[rows[-1]], new[rows[0]], ref[rows[-1]], ref[rows[0]])
            total = total + len(rows) * F.dpo_loss(*pair, beta=BETA)
            margin = float((pair[0] - pair[1] - pair[2] + pair[3]).detach())
            right.append((math.log1p(math.exp(-BETA * margin)), margin > 0))
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(total / count, list(policy.parameters()))])
    objective = replace(ONLINE_DPO, pair_beta=BETA)
    same(gradient(policy, r, objective), expected)
    same(gradient(policy, r, objective, micro_batch=3), expected)
    trained = copy.deepcopy(policy)
    metrics = Learner(trained, objective, LearnerSettings(AdamSettings(1e-3))).update(
        r, assign_credit(r, objective), LearnerState.seeded(0, 1)
    )
    assert metrics["preference_loss"] == pytest.approx(mean(loss for loss, _ in right))
    assert metrics["preference_accuracy"] == pytest.approx(mean(ranked for _, ranked in right))


def test_only_the_best_and_worst_answers_of_unequal_groups_have_a_gradient() -> None:
    rewards, ratios = torch.tensor([[1.0, 0.0, 2.0], [1.0, 1.0, 1.0]]), torch.zeros(2, 3)
    assert F.pair_advantages(rewards, ratios, 0.2).tolist() == [pytest.approx([0, -0.3, 0.3]), [0, 0, 0]]
    assert F.pair_advantages(rewards, ratios, 0.2, torch.tensor([[1, 1, 0], [1, 0, 0]])).tolist()[0] == pytest.approx(
        [0.2, -0.2, 0]
    )


def test_without_a_reference_pairs_are_an_error_of_one_line() -> None:
    _, r = world(1)
    with pytest.raises(SurefootError, match=r"objective.baseline='pair': compares with a reference"):
        assign_credit(replace(r, ref_log_probs=None), ONLINE_DPO)


# ---- clipped weights, and responses that are left out ----------------------------------------------------------------


def test_the_share_of_bounded_weights_is_a_metric() -> None:
    policy, r = world(1)
    of_tokens, of_rows = mean_log_ratio(policy, r)
    above = [math.exp(float(of_tokens[row, t])) > BOUND for row in of_rows for t in kept(r, row)]
    metrics = metrics_of(policy, r, replace(CISPO, trust_region=ClippedWeight(BOUND)))
    assert 0 < metrics["weight_clipped"] < 1
    assert metrics["weight_clipped"] == pytest.approx(mean(above))


def test_masked_off_policy_bad_responses_still_count_in_the_mean() -> None:
    plain = replace(GRPO, aggregation="token-mean", reference_coefficient=0.0, trust_region=None)
    for seed in range(100):
        policy, r = world(seed)
        moved_by = {row: -x for row, x in mean_log_ratio(policy, r)[1].items()}
        bad = [row for row in moved_by if scaled(r, row) < 0]
        dropped = [row for row in bad if moved_by[row] > 0.02]
        if 0 < len(dropped) < len(bad) and any(moved_by[row] > 0.02 for row in set(moved_by) - set(bad)):
            break
    masked = replace(plain, drop_above_kl=0.02)
    rest = assign_credit(r, plain)
    rest = replace(rest, advantages=rest.advantages.index_fill(0, torch.tensor(dropped), 0.0))
    learners = [
        Learner(copy.deepcopy(policy), replace(o, reuse=Reuse(1, 1)), LearnerSettings(AdamSettings(1e-3)))
        for o in (masked, plain)
    ]
    metrics = [
        dict(learner.update(r, credit, LearnerState.seeded(0, 1)))
        for learner, credit in zip(learners, (assign_credit(r, plain), rest), strict=True)
    ]
    same(*(learner.optimizers["policy"].gradients for learner in learners))
    of_dropped = sum(len(kept(r, row)) for row in dropped)
    assert metrics[0]["left_out"] == pytest.approx(of_dropped / sum(len(kept(r, row)) for row in moved_by))
    assert "left_out" not in metrics[1]
    same(gradient(policy, r, replace(plain, drop_above_kl=1e9)), gradient(policy, r, plain))
    same(gradient(policy, r, masked), gradient(policy, r, masked, micro_batch=3))


# ---- names ---------------------------------------------------------------------------------------------------------------

REGIONS = {"max_weight": ClippedWeight, "fraction": Penalty}


def test_the_page_on_the_math_shows_each_as_the_diff_that_it_is() -> None:
    page = (Path(__file__).parents[2] / "docs" / "math.md").read_text("utf-8").partition("### Algorithms without a critic")[2]
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (.*) \|$", page, flags=re.M)
    shown = ["GRPO", "DR_GRPO", "DAPO", "GSPO", "CISPO", "KL_COV", "RLOO", "ONLINE_DPO", "REINFORCE_PLUS_PLUS"]
    assert [name for name, _, _ in rows] == shown
    for name, base, cells in rows:
        switches: dict[str, Any] = tomllib.loads("\n".join(re.findall(r"`([^`]*)`", cells)))
        switches = {key: None if value == "none" else value for key, value in switches.items()}
        region = next((kind for key, kind in REGIONS.items() if key in cells), Clip)
        made = {"trust_region": region, "reuse": Reuse}
        switches |= {key: made[key](**switches[key]) for key in made if key in switches}
        assert set(switches) == set(switches_between(ALGORITHMS[base], ALGORITHMS[name])), name
        assert replace(ALGORITHMS[base], **switches) == ALGORITHMS[name], name


def test_all_group_algorithms_are_available_by_name_and_differ() -> None:
    assert set(PAPERS) <= set(ALGORITHMS)
    assert algorithm_named("reinforce++") == "REINFORCE_PLUS_PLUS"
    assert len(set(ALGORITHMS.values())) == len(ALGORITHMS)
