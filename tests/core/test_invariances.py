"""The gradient of a batch does not depend on its layout.

Not on the size of micro-batches, the amount and content of padding, the order of rows, or what masked entries hold. All in
float64, where equal means equal to rounding, for every aggregation, with every term of the loss on and ratios that clip.
"""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surefoot import GRPO, PPO_CLIP, RLOO, Clip, Objective, Penalty, Reuse
from surefoot.core.rollout import Rollout, map_tensors

from .worlds import ACTIONS, DOUBLE, FEATURES, TinyPolicy, gradient, moved, random_rollout

laws = settings(settings.get_profile("core"))
SEEDS = st.integers(0, 999)

EVERYTHING = replace(
    PPO_CLIP,
    reuse=Reuse(1, 1),
    trust_region=Clip(0.2, clip_high=0.3, dual_clip=2.0),
    normalise_advantages="minibatch",
    value_clip=0.3,
    value_lambda=0.7,
    entropy_coefficient=0.05,
    reference_coefficient=0.1,
    kl_estimator="exact",
)
MODES = {
    "token-mean": EVERYTHING,
    "sequence-mean": replace(EVERYTHING, aggregation="sequence-mean"),
    "sequence-sum": replace(EVERYTHING, aggregation="sequence-sum"),
    "constant": replace(EVERYTHING, aggregation="constant", aggregation_length=9),
}
OBJECTIVES = {
    **MODES,
    "normalised over the batch": replace(EVERYTHING, normalise_advantages="batch"),
    "mean baseline": Objective(baseline="mean", entropy_coefficient=0.05),
    "penalty": replace(EVERYTHING, trust_region=Penalty(3.0)),
    "penalty on some": replace(EVERYTHING, trust_region=Penalty(3.0, fraction=0.3)),
    "reference by ratio_k3": replace(EVERYTHING, reference_estimator="ratio_k3"),
}
ONLY_ROWS = {
    "sequence ratio": replace(MODES["sequence-mean"], ratio="sequence"),
    "sequence ratio, reference by ratio_k3": replace(EVERYTHING, ratio="sequence", reference_estimator="ratio_k3"),
    "groups": replace(GRPO, reuse=Reuse(1, 1)),
    "groups without themselves": replace(RLOO, entropy_coefficient=0.05),
}
rows_objectives = st.sampled_from([*OBJECTIVES.values(), *ONLY_ROWS.values()])
step_objectives = st.sampled_from([o for o in OBJECTIVES.values() if o.aggregation == "token-mean"])


def world(seed: int, unit: str) -> tuple[TinyPolicy, Rollout]:
    """A policy, and five rows of experience from another one; the first row of text is wholly masked."""
    policy = TinyPolicy(seed, memory=unit == "row", shared=seed % 2 == 0)
    return policy, moved(random_rollout(policy, seed, rows=5, unit=unit), seed)


def same(a: Tensor, b: Tensor) -> None:
    assert a.abs().max() > 1e-4, "a gradient of zero would prove nothing"
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def noise(seed: int, *shape: int) -> Tensor:
    return 100 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def padded(rollout: Rollout, extra: int, seed: int) -> Rollout:
    """The same rows with more columns, all masked: NaN in every number, garbage in every flag, input and action."""
    rows = rollout.mask.shape[0]

    def wider(x: Tensor) -> Tensor:
        if x.dtype == torch.bool:
            return torch.cat([x, noise(seed, rows, extra) > 0], 1)
        return torch.cat([x, torch.full((rows, extra, *x.shape[2:]), torch.nan, dtype=x.dtype)], 1)

    actions = torch.randint(0, ACTIONS, (rows, extra), generator=torch.Generator().manual_seed(seed))
    changed = {name: wider(x) for name, x in vars(rollout).items() if isinstance(x, Tensor) and x.is_floating_point()}
    return replace(
        rollout,
        **changed
        | {
            "inputs": torch.cat([rollout.inputs, noise(seed, rows, extra, FEATURES)], 1),
            "actions": torch.cat([rollout.actions, actions], 1),
            "mask": torch.cat([rollout.mask, torch.zeros(rows, extra, dtype=torch.bool)], 1),
            "terminated": wider(rollout.terminated),
            "truncated": wider(rollout.truncated),
            "old_distribution": map_tensors(wider, rollout.old_distribution),
        },
    )


def poisoned(rollout: Rollout, seed: int) -> Rollout:
    """NaN wherever the mask is False, in every number but the inputs (which the policy does read there)."""

    def nan(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        mask = rollout.mask.reshape(rollout.mask.shape + (1,) * (x.dim() - 2))
        return torch.where(mask, x, torch.nan)

    flags = {
        name: torch.where(rollout.mask, getattr(rollout, name), noise(seed + i, *rollout.mask.shape) > 0)
        for i, name in enumerate(("terminated", "truncated"))
    }
    hidden = rollout.mask.unsqueeze(-1)
    inputs = torch.where(hidden, rollout.inputs, noise(seed, *rollout.inputs.shape))
    return replace(map_tensors(nan, rollout), inputs=inputs, **flags)


# ---- micro-batches ------------------------------------------------------------------------------------------------------


@laws
@given(SEEDS, st.integers(1, 6), rows_objectives)
def test_micro_batches_of_rows_do_not_change_the_gradient(seed: int, size: int, objective: Objective) -> None:
    policy, rollout = world(seed, "row")
    same(gradient(policy, rollout, objective, micro_batch=size), gradient(policy, rollout, objective))


@laws
@given(SEEDS, st.integers(1, 31), step_objectives)
def test_micro_batches_of_steps_do_not_change_the_gradient(seed: int, size: int, objective: Objective) -> None:
    policy, rollout = world(seed, "step")
    same(gradient(policy, rollout, objective, micro_batch=size), gradient(policy, rollout, objective))


@laws
@given(SEEDS, st.integers(1, 40), st.sampled_from([None, 2]), rows_objectives)
def test_a_token_budget_does_not_change_the_gradient_of_rows(
    seed: int, tokens: int, size: int | None, objective: Objective
) -> None:
    policy, rollout = world(seed, "row")
    parts = gradient(policy, rollout, objective, micro_batch=size, micro_batch_tokens=tokens)
    same(parts, gradient(policy, rollout, objective))


# ---- padding and masked entries -----------------------------------------------------------------------------------------


@laws
@given(SEEDS, st.integers(1, 4), rows_objectives)
def test_padding_does_not_change_the_gradient_whatever_it_holds(seed: int, extra: int, objective: Objective) -> None:
    policy, rollout = world(seed, "row")
    same(gradient(policy, padded(rollout, extra, seed), objective), gradient(policy, rollout, objective))


@laws
@given(SEEDS, rows_objectives)
def test_masked_entries_of_rows_may_be_nan(seed: int, objective: Objective) -> None:
    policy, rollout = world(seed, "row")
    assert not rollout.mask.all()
    same(gradient(policy, poisoned(rollout, seed), objective), gradient(policy, rollout, objective))


@laws
@given(SEEDS, step_objectives)
def test_masked_steps_may_be_nan_in_their_inputs_too(seed: int, objective: Objective) -> None:
    policy, rollout = world(seed, "step")
    other = poisoned(rollout, seed)
    other = replace(other, inputs=torch.where(rollout.mask.unsqueeze(-1), rollout.inputs, torch.nan))
    same(gradient(policy, other, objective), gradient(policy, rollout, objective))


# ---- order --------------------------------------------------------------------------------------------------------------


@laws
@given(SEEDS, st.sampled_from(["row", "step"]), st.permutations(range(5)), st.data())
def test_the_order_of_rows_does_not_change_the_gradient(seed: int, unit: str, order: list[int], data: st.DataObject) -> None:
    objective = data.draw(rows_objectives if unit == "row" else step_objectives)
    policy, rollout = world(seed, unit)
    same(gradient(policy, map_tensors(lambda x: x[order], rollout), objective), gradient(policy, rollout, objective))


@laws
@given(SEEDS, rows_objectives)
def test_a_wholly_masked_row_adds_nothing(seed: int, objective: Objective) -> None:
    policy, rollout = world(seed, "row")
    cut = map_tensors(lambda x: x[1:], rollout)
    assert not rollout.mask[0].any()
    same(gradient(policy, cut, objective), gradient(policy, rollout, objective))


# ---- what the aggregations mean -----------------------------------------------------------------------------------------


def test_the_aggregations_differ_and_weigh_as_documented() -> None:
    """A short and a long response: the policy gradient of each alone, and how each mode adds them up."""
    policy, rollout = world(1, "row")
    lengths = rollout.mask.sum(-1)
    short, long = int(torch.where(lengths > 0, lengths, 99).argmin()), int(lengths.argmax())
    n, m = int(lengths[short]), int(lengths[long])
    assert 0 < n < m

    def only(rows: list[int], mode: str) -> Tensor:
        plain = replace(MODES[mode], normalise_advantages=None)
        return gradient(policy, map_tensors(lambda x: x[rows], rollout), plain)

    a, b = only([short], "token-mean"), only([long], "token-mean")
    same(only([short, long], "token-mean"), (n * a + m * b) / (n + m))
    same(only([short, long], "sequence-mean"), (a + b) / 2)
    same(only([short, long], "sequence-sum"), (n * a + m * b) / 2)
    same(only([short, long], "constant"), (n * a + m * b) / (2 * 9))
