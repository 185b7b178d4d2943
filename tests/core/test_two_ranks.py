"""Two processes with unequal shares of a batch take the step of one process with all of it, with equal bits on both.

One pair of gloo ranks is started for the whole file and answers every question; the tests compare with one process. The
shares have unequal masks, so that a mean of means would show.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from surefoot import (
    A2C,
    GRPO,
    GSPO,
    ONLINE_DPO,
    PPO_CLIP,
    PPO_PENALTY_ADAPTIVE,
    REINFORCE_BASELINE,
    RLOO,
    TRPO,
    NotFiniteError,
    Objective,
    Penalty,
    Reuse,
)
from surefoot.control.normalise import RewardNormaliser
from surefoot.core.credit import assign_credit
from surefoot.core.learner import Learner, LearnerSettings
from surefoot.core.loop import run_loop
from surefoot.core.minibatches import normalised, rows_of
from surefoot.core.optimizer import AdamSettings
from surefoot.core.rollout import Evaluation, LearnerState, Metrics, Policy, Rollout
from surefoot.ranks import collectives as distributed

from .worlds import TinyPolicy, gradient, joined, moved, parameters, random_rollout

RANKS = 2
Answers = dict[str, Any]

ROWS = replace(PPO_CLIP, reuse=Reuse(1, 1), entropy_coefficient=0.01, normalise_advantages="minibatch")
OBJECTIVES: dict[str, tuple[str, Objective]] = {
    "steps": ("step", ROWS),
    "steps, batch normalised": ("step", replace(ROWS, normalise_advantages="batch")),
    "steps, mean baseline": ("step", REINFORCE_BASELINE),
    "token-mean": ("row", ROWS),
    "steps, penalty": ("step", replace(ROWS, trust_region=Penalty(2.0))),
    "rows, penalty": ("row", replace(ROWS, trust_region=Penalty(2.0))),
    "steps, penalty on some": ("step", replace(ROWS, trust_region=Penalty(2.0, fraction=0.3))),
    "rows, penalty on some": ("row", replace(ROWS, trust_region=Penalty(2.0, fraction=0.3))),
    "sequence-mean": ("row", replace(ROWS, aggregation="sequence-mean")),
    "sequence-sum": ("row", replace(ROWS, aggregation="sequence-sum")),
    "constant": ("row", replace(ROWS, aggregation="constant", aggregation_length=8)),
    "groups": ("row", replace(GRPO, reuse=Reuse(1, 1))),
    "sequence ratio": ("row", replace(GSPO, reuse=Reuse(1, 1))),
    "groups without themselves": ("row", RLOO),
    "pairs": ("row", ONLINE_DPO),
}
EARLY = replace(A2C, reuse=Reuse(epochs=8, minibatches=1), normalise_advantages="batch", target_kl=0.0225)
ADAPTIVE = replace(PPO_PENALTY_ADAPTIVE, reuse=Reuse(epochs=4, minibatches=1), normalise_advantages="batch")
NATURAL = replace(TRPO, reuse=Reuse(epochs=2, minibatches=1), normalise_advantages="batch", entropy_coefficient=0.01)


def policy(unit: str = "step") -> TinyPolicy:
    return TinyPolicy(7, memory=unit == "row")


def share(rank: int, unit: str = "step") -> Rollout:
    """What one rank collected: as many rows, but rank 1 keeps a third of the steps, sees larger inputs and earns more."""
    rollout = random_rollout(policy(unit), 10 + rank, rows=5, unit=unit)
    rollout = replace(rollout, rewards=rollout.rewards * (1 + 2 * rank) + rank, inputs=rollout.inputs * (1 + rank))
    rollout = with_old_scores(policy(unit), rollout)
    if rank == 1 and unit == "step":
        thinner = rollout.mask & (torch.arange(6) % 3 == 0)
        rollout = replace(rollout, mask=thinner, steps=int(thinner.sum()))
    return rollout if rollout.group is None else replace(rollout, group=rollout.group + 10 * rank)


def both(unit: str = "step") -> Rollout:
    return joined(*(share(rank, unit) for rank in range(RANKS)))


def trained(
    rollout: Rollout, objective: Objective, seed: int, updates: int = 3, micro_batch: int | None = None
) -> tuple[Tensor, list[Metrics]]:
    """Parameters after some updates on the same experience, and what each update said."""
    learner = Learner(policy(rollout.unit), objective, LearnerSettings(AdamSettings(0.02), micro_batch=micro_batch))
    state = LearnerState.seeded(seed, 100)
    metrics = []
    for _ in range(updates):
        rescored = with_old_scores(learner.policy, rollout)
        metrics.append(learner.update(rescored, assign_credit(rescored, objective), state))
    return parameters(learner.policy), metrics


@torch.no_grad()
def with_old_scores(scorer: Policy, rollout: Rollout) -> Rollout:
    here = scorer(rollout.inputs, rollout.actions, rollout.mask)
    return replace(rollout, old_log_probs=here.log_probs, old_distribution=here.distribution)


class Again:
    """A collector that has one rollout only."""

    def __init__(self, scorer: Policy, rollout: Rollout) -> None:
        self.scorer, self.rollout = scorer, rollout

    def collect(self, state: LearnerState) -> Rollout:
        return with_old_scores(self.scorer, self.rollout)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def looped(rollout: Rollout, total: int) -> tuple[list[int], list[float | None], Tensor]:
    """Steps and learning rate at every iteration of a run with a warm-up, then a linear schedule; the parameters at its end."""
    learner = Learner(policy(), A2C, LearnerSettings(AdamSettings(0.01), schedule="linear", warmup=0.5))
    steps, rates = [], []

    def note(state: LearnerState, metrics: Metrics) -> bool:
        steps.append(state.steps)
        rates.append(metrics["learning_rate"])
        return False

    run_loop(Again(learner.policy, rollout), learner, LearnerState.seeded(0, total), note)
    return steps, rates, parameters(learner.policy)


def exchanges(rollout: Rollout, epochs: int, minibatches: int) -> int:
    """How many exchanges an update of PPO needs."""
    count = 0

    def counted(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            return function(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "all_gather", "all_gather_object", "broadcast", "broadcast_object_list"):
            patch.setattr(dist, name, counted(getattr(dist, name)))
        objective = replace(PPO_CLIP, reuse=Reuse(epochs, minibatches), normalise_advantages="minibatch")
        trained(rollout, objective, seed=0, updates=1)
    return count


class Dropping(TinyPolicy):
    """Scores the marked inputs differently in training."""

    def forward(self, inputs: Tensor, actions: Tensor, mask: Tensor | None = None) -> Evaluation:
        evaluation = super().forward(inputs, actions, mask)
        return replace(evaluation, log_probs=evaluation.log_probs + 0.1 * (inputs[..., 0] == 99))


def rejection(rollout: Rollout, scorer: TinyPolicy) -> str:
    """The message with which an update is rejected."""
    try:
        learner = Learner(scorer, A2C, LearnerSettings(AdamSettings(0.01)))
        learner.update(rollout, assign_credit(rollout, A2C), LearnerState.seeded(0, 1))
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "taken"


def answers(rank: int) -> Answers:
    """What one of two ranks says to everything that is asked below."""
    results: Answers = {}
    for name, (unit, objective) in OBJECTIVES.items():
        results[name] = gradient(policy(unit), moved(share(rank, unit), rank), objective, micro_batch=2 + rank)
    for unit in ("step", "row"):
        batch = rows_of(share(rank, unit), assign_credit(share(rank, unit), A2C))
        results[f"normalised {unit}"] = normalised(batch).advantages
    results["mean baseline"] = assign_credit(share(rank), REINFORCE_BASELINE).advantages
    for estimator in ("k3", "exact"):
        results[f"early {estimator}"] = trained(share(rank), replace(EARLY, kl_estimator=estimator), seed=rank, updates=1)
    results["many updates"] = trained(share(rank), replace(PPO_CLIP, reuse=Reuse(3, 4)), seed=rank)
    results["adaptive"] = trained(share(rank), ADAPTIVE, seed=rank, updates=4)
    for unit in ("step", "row"):
        results[f"natural {unit}"] = trained(share(rank, unit), NATURAL, seed=rank, micro_batch=4 if rank else None)
    results["exchanges"] = exchanges(share(rank), epochs=3, minibatches=4) - exchanges(share(rank), epochs=2, minibatches=4)
    for size in (3, distributed.JOINED + 1):
        parts = [torch.full((2, size), float(rank + 1)), torch.arange(4.0).view(2, 2).T, torch.tensor(rank)]
        distributed.all_sum_together(parts[:2])
        distributed.all_sum_together(parts[2:])
        results[f"together {size}"] = [*parts[:2], parts[2]]
    rewards, kept = share(rank).rewards, share(rank).mask
    results["at limit"] = RewardNormaliser(gamma=0.99, clip=1.0).clipped_fraction(rewards, kept)
    results["loop"] = looped(share(rank), total=100)
    broken = share(rank)
    results["broken"] = rejection(replace(broken, rewards=broken.rewards * (torch.inf if rank else 1.0)), policy())
    marked = share(rank).inputs.clone()
    marked[..., 0] = 99.0 if rank else 1.0
    odd = with_old_scores(policy(), replace(share(rank), inputs=marked))
    results["ratio at start"] = rejection(odd, Dropping(7))
    few = replace(share(rank), mask=torch.arange(30).view(5, 6) < (3 if rank else 30))
    try:
        trained(few, replace(PPO_CLIP, reuse=Reuse(1, 4)), seed=0)
    except ValueError as error:
        results["too few rows"] = str(error)
    except RuntimeError:
        results["too few rows"] = "the other rank left"
    return results


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    meeting, patience = f"file://{folder}/meet", timedelta(seconds=30)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS, timeout=patience)
    try:
        torch.save(answers(rank), f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks() -> Iterator[list[Answers]]:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(work, (folder,), RANKS, start_method="fork")
        yield [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_the_shares_are_unequal() -> None:
    """Else these tests could not tell a mean of means."""
    for unit in ("step", "row"):
        kept = [int(share(rank, unit).mask.sum()) for rank in range(RANKS)]
        assert kept[0] != kept[1]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_is_that_of_one_process_with_all_the_data_on_both_ranks(ranks: list[Answers], name: str) -> None:
    unit, objective = OBJECTIVES[name]
    whole = joined(*(moved(share(rank, unit), rank) for rank in range(RANKS)))
    expected = gradient(policy(unit), whole, objective)
    assert expected.abs().max() > 1e-3
    close(ranks[0][name], expected)
    assert torch.equal(ranks[0][name], ranks[1][name]), "bit for bit"


@pytest.mark.parametrize("unit", ["step", "row"])
def test_advantages_are_normalised_over_both_ranks(ranks: list[Answers], unit: str) -> None:
    whole = normalised(rows_of(both(unit), assign_credit(both(unit), A2C))).advantages
    close(torch.cat([output[f"normalised {unit}"] for output in ranks]), whole)


def test_the_mean_baseline_is_the_mean_over_both_ranks(ranks: list[Answers]) -> None:
    close(torch.cat([rank["mean baseline"] for rank in ranks]), assign_credit(both(), REINFORCE_BASELINE).advantages)


@pytest.mark.parametrize("estimator", ["k3", "exact"])
def test_the_epochs_stop_at_the_same_time_as_in_one_process(ranks: list[Answers], estimator: str) -> None:
    """Though what a rank sees of the KL by itself would stop the one and not the other."""
    objective = replace(EARLY, kl_estimator=estimator)
    expected, (metrics,) = trained(both(), objective, seed=0, updates=1)
    (here, (first,)), (there, (second,)) = (output[f"early {estimator}"] for output in ranks)
    assert metrics["stopped_early"] == 1.0
    assert 0 < metrics["epochs"] < 8
    assert (first["epochs"], first["stopped_early"]) == (second["epochs"], second["stopped_early"])
    assert (first["epochs"], first["stopped_early"]) == (metrics["epochs"], metrics["stopped_early"])
    assert torch.equal(here, there)
    close(here, expected)
    seen = [kl_now(here, share(rank)) > 1.5 * 0.0225 for rank in range(RANKS)]
    assert seen[0] != seen[1], "both ranks agree by themselves: this example proves nothing"


@torch.no_grad()
def kl_now(flat: Tensor, rollout: Rollout) -> float:
    """The exact mean KL from the policy that collected to the one with these parameters, over one rank's share."""
    now = policy()
    torch.nn.utils.vector_to_parameters(flat, now.parameters())
    old, new = (p(rollout.inputs, rollout.actions).distribution for p in (policy(), now))
    return float(old.kl(new)[rollout.mask].mean())


def test_after_many_updates_both_ranks_have_the_same_parameters_bit_for_bit(ranks: list[Answers]) -> None:
    """With minibatches that each rank shuffles by a stream of its own."""
    (here, first), (there, second) = (output["many updates"] for output in ranks)
    assert not torch.equal(here, parameters(policy()))
    assert torch.equal(here, there)
    assert first == second, "and tell the same metrics"


def test_a_pass_needs_two_exchanges_and_one_for_each_of_its_minibatches(ranks: list[Answers]) -> None:
    """Counts and moments of the whole pass; then the gradient with the terms of the loss. An exchange is mostly waiting."""
    assert [answers["exchanges"] for answers in ranks] == [2 + 4, 2 + 4]


@pytest.mark.parametrize("size", [3, distributed.JOINED + 1])
def test_tensors_summed_together_have_the_sums_of_each(ranks: list[Answers], size: int) -> None:
    for answers in ranks:
        first, second, number = answers[f"together {size}"]
        assert torch.equal(first, torch.full((2, size), 3.0))
        assert torch.equal(second, 2 * torch.arange(4.0).view(2, 2).T)
        assert number == 1


def test_beta_follows_the_kl_over_both_ranks(ranks: list[Answers]) -> None:
    """Which halves or doubles it where a rank's own would not."""
    expected, expected_metrics = trained(both(), ADAPTIVE, seed=0, updates=4)
    (here, first), (there, second) = (output["adaptive"] for output in ranks)
    assert first == second
    assert torch.equal(here, there)
    close(here, expected)
    assert len({metrics["beta"] for metrics in expected_metrics}) > 1
    for mine, whole in zip(first, expected_metrics, strict=True):
        assert mine["beta"] == whole["beta"]
        assert mine["kl_after"] == pytest.approx(whole["kl_after"], rel=1e-8)


@pytest.mark.parametrize("unit", ["step", "row"])
def test_the_natural_step_is_that_of_one_process_and_the_same_on_both_ranks_bit_for_bit(
    ranks: list[Answers], unit: str
) -> None:
    """One rank in micro-batches, the other not: both still make as many sums."""
    expected, metrics = trained(both(unit), NATURAL, seed=0)
    (here, first), (there, second) = (output[f"natural {unit}"] for output in ranks)
    assert torch.equal(here, there)
    assert first == second
    torch.testing.assert_close(here, expected, rtol=1e-7, atol=1e-9)
    for mine, whole in zip(first, metrics, strict=True):
        assert mine["step_taken"] == whole["step_taken"] == 1.0
        for name in ("kl_after", "surrogate_improvement", "line_search_tries", "gradient_norm_policy"):
            assert mine[name] == pytest.approx(whole[name], rel=1e-6)


def test_the_share_that_is_clipped_is_that_of_both_ranks(ranks: list[Answers]) -> None:
    shares = [
        RewardNormaliser(gamma=0.99, clip=1.0).clipped_fraction(share(rank).rewards, share(rank).mask) for rank in range(RANKS)
    ]
    assert shares[0] != shares[1]
    whole = float((both().rewards[both().mask].abs() >= 1.0).double().mean())
    assert [output["at limit"] for output in ranks] == [whole, whole]


def test_the_budget_counts_the_steps_of_both_ranks(ranks: list[Answers]) -> None:
    """So the schedules agree, and the ranks leave the loop together."""
    expected = looped(both(), total=100)
    for steps, rates, _ in (rank["loop"] for rank in ranks):
        assert steps == expected[0]
        assert rates == expected[1]
    assert torch.equal(ranks[0]["loop"][2], ranks[1]["loop"][2])
    close(ranks[0]["loop"][2], expected[2])


def test_what_is_not_finite_on_one_rank_stops_the_update_on_both(ranks: list[Answers]) -> None:
    assert ranks[0]["broken"] == ranks[1]["broken"]
    assert ranks[0]["broken"].startswith(NotFiniteError.__name__)


def test_a_ratio_that_is_off_on_one_rank_is_rejected_on_both(ranks: list[Answers]) -> None:
    assert ranks[0]["ratio at start"] == ranks[1]["ratio at start"]
    assert "ratio_at_start=1.105171" in ranks[0]["ratio at start"]


def test_a_rank_with_fewer_rows_than_minibatches_is_rejected(ranks: list[Answers]) -> None:
    assert "objective.reuse.minibatches=4: this rank has only 3 rows" in ranks[1]["too few rows"]
