"""Laws of micro-batches by token budget. That they change no gradient is in ``test_invariances.py``."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot import PPO_CLIP
from surefoot.core.credit import assign_credit
from surefoot.core.minibatches import groups_by_length, micro_batches, random_order, rows_of, shuffled

from .worlds import TinyPolicy, random_rollout

laws = settings(settings.get_profile("core"))
costs_of_rows = st.lists(st.integers(0, 30), min_size=1, max_size=40)


@laws
@given(costs_of_rows, st.integers(1, 100), st.none() | st.integers(1, 5))
def test_every_row_is_in_one_group_and_every_group_within_its_bounds(costs: list[int], tokens: int, size: int | None) -> None:
    groups = groups_by_length(torch.tensor(costs), tokens, size)
    assert sorted(int(i) for group in groups for i in group) == list(range(len(costs)))
    for group in groups:
        longest = max(costs[i] for i in group)
        assert len(group) * longest <= tokens or len(group) == 1
        assert size is None or len(group) <= size


@laws
@given(costs_of_rows, st.integers(1, 100))
def test_groups_are_of_like_length_longest_first_and_full(costs: list[int], tokens: int) -> None:
    groups = groups_by_length(torch.tensor(costs), tokens)
    lengths = [[costs[i] for i in group] for group in groups]
    assert [x for group in lengths for x in group] == sorted(costs, reverse=True)
    for one, after in itertools.pairwise(lengths):
        assert (len(one) + 1) * max(1, one[0]) > tokens, f"the first of {after} had still fitted"


def test_rows_of_equal_length_stay_in_their_order() -> None:
    groups = groups_by_length(torch.tensor([3, 5, 3, 5]), 10)
    assert [group.tolist() for group in groups] == [[1, 3], [0, 2]]


@pytest.mark.parametrize("unit", ["row", "step"])
def test_a_part_holds_whole_rows_of_the_batch(unit: str) -> None:
    """Matched by their old log-probabilities, which are all different."""
    policy = TinyPolicy(memory=unit == "row")
    rollout = random_rollout(policy, 0, rows=7, unit=unit)
    batch = rows_of(rollout, assign_credit(rollout, PPO_CLIP))
    costs = None if batch.mask is None else batch.mask.sum(-1)
    parts = list(micro_batches(batch, None, tokens=8, costs=costs))
    assert len(parts) > 1
    count = 0
    for part in parts:
        for row in range(len(part.advantages)):
            (here,) = [i for i in range(len(batch.advantages)) if torch.equal(batch.old_log_probs[i], part.old_log_probs[row])]
            for name in ("inputs", "actions", "advantages", "returns", "old_values"):
                assert torch.equal(getattr(part, name)[row], getattr(batch, name)[here])
            count += 1
    assert count == len(batch.advantages)


@pytest.mark.parametrize(("rows", "parts"), [(1, 1), (7, 3)])
def test_each_row_is_in_one_part_of_a_shuffled_batch_and_parts_are_nearly_equal(rows: int, parts: int) -> None:
    rollout = random_rollout(TinyPolicy(memory=True), 0, rows=rows, unit="row")
    batch = rows_of(rollout, assign_credit(rollout, PPO_CLIP))
    batch.advantages[:] = torch.arange(rows).unsqueeze(-1)
    drawn = [
        part.advantages[:, 0].tolist()
        for part in shuffled(batch, parts, random_order(len(batch.advantages), torch.Generator().manual_seed(1)))
    ]
    assert sorted(row for part in drawn for row in part) == list(range(rows))
    assert len(drawn) == parts
    assert max(map(len, drawn)) - min(map(len, drawn)) <= 1
