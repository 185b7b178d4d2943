"""Rows that share a prompt read it once, with the same results as if each row read it. The padded pass is the reference."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

transformers = pytest.importorskip("transformers")

import surefoot.language.models.policy as policies  # noqa: E402
from surefoot.core.minibatches import groups_by_length  # noqa: E402
from surefoot.core.rollout import Shared  # noqa: E402
from surefoot.language.data.batches import left_padded, right_padded  # noqa: E402
from surefoot.language.models.padding_free import RowMask, prompts_once, reads_prompts_once  # noqa: E402
from surefoot.language.models.policy import LanguagePolicy  # noqa: E402
from surefoot.language.models.policy.critic import Critic  # noqa: E402
from surefoot.language.models.policy.passes import in_micro_batches  # noqa: E402
from surefoot.language.supervised.preferences import DpoPolicy, side_tensors  # noqa: E402

from .test_padding_free import OTHERS, both, family, passes_of  # noqa: E402
from .test_policy import PAD, gradients, make, near  # noqa: E402

Rows = list[tuple[int, int, int]]
"""per row: prompt index, response length, and number of trailing tokens that the policy did not sample"""


def batch_of(rows: Rows, prompts: int = 5) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """A batch of prompts of 1 to 5 tokens with responses; prompt 2 is a prefix of prompt 4."""
    draw = torch.Generator().manual_seed(3)
    texts = [torch.randint(2, 90, (number % 5 + 1,), generator=draw).tolist() for number in range(prompts)]
    texts[4] = [*texts[2], 7, 8]
    answers = [torch.randint(2, 90, (length,), generator=draw).tolist() for _, length, _ in rows]
    prompt, prompt_mask = left_padded([texts[number] for number, _, _ in rows], PAD)
    actions, mask = right_padded([[*answer, 9] for answer in answers], PAD)
    mask = mask.bool()
    for row, (_, length, unread) in enumerate(rows):
        mask[row, max(0, length + 1 - unread) :] = False
    return {"prompt": prompt, "prompt_mask": prompt_mask.bool()}, actions, mask


ROWS: Rows = [(2, 6, 0), (0, 3, 0), (2, 1, 0), (4, 4, 1), (2, 6, 9), (0, 5, 0), (4, 0, 0), (2, 8, 2)]
"""several rows for each of three prompts; one row has no sampled token"""


def outputs_and_gradients(policy: LanguagePolicy, batch: Any) -> tuple[list[Tensor], list[Tensor | None]]:
    outputs = policy(*batch)
    mask, scale = batch[2], torch.linspace(1, 2, batch[2].numel()).view(batch[2].shape)
    total = ((outputs.log_probs + 0.3 * outputs.entropy + outputs.values) * scale * mask).sum()
    found = torch.autograd.grad(total, list(policy.parameters()), allow_unused=True)
    return [outputs.log_probs, outputs.entropy, outputs.values], list(found)


def check_same(wanted: LanguagePolicy, actual: LanguagePolicy, batch: Any) -> None:
    assert actual.prompts_once
    of_wanted, of_actual = (outputs_and_gradients(policy, batch) for policy in (wanted, actual))
    for a, b in zip(of_actual[0], of_wanted[0], strict=True):
        near(a, b)
    for a, b in zip(of_actual[1], of_wanted[1], strict=True):  # type: ignore[assignment]
        assert (a is None) == (b is None)
        if a is not None:
            near(a, b, 1e-4)


LLAMA: dict[str, Any] = {}
"""the two policies of the property test, built once for all examples"""


@settings(max_examples=25, deadline=None)
@given(rows=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 7), st.integers(0, 8)), min_size=1, max_size=9))
def test_sharing_prompts_does_not_change_outputs_or_gradients(rows: Rows) -> None:
    if not LLAMA:
        LLAMA["policies"] = both(make("llama"), "head")
    batch = batch_of(rows)
    if batch[2].any():
        check_same(*LLAMA["policies"], batch)


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", *OTHERS])
def test_other_model_families_match_the_padded_pass(kind: str) -> None:
    check_same(*both(family(kind), "head"), batch_of(ROWS))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_critics_values_after_and_checkpointing_match_the_padded_pass(checkpointing: bool) -> None:
    model, batch = make("llama"), batch_of(ROWS)
    wanted, actual = both(model, Critic.from_policy(model), checkpointing=checkpointing)
    near(*(gradients(policy, policy(*batch)) for policy in (actual, wanted)), 1e-4)
    with torch.no_grad():
        near(actual.values_after(*batch), wanted.values_after(*batch))


def test_a_pass_reads_every_prompt_once() -> None:
    model, batch = make("llama"), batch_of(ROWS)
    seen = passes_of(model)
    policy = both(model)[1]
    seen.clear()
    policy(*batch)
    (shape, mask), (inputs, _, sampled) = seen[0], batch
    read = sampled.flip(-1).cumsum(-1).flip(-1) > 0
    prompts = {tuple(row[kept_].tolist()) for row, kept_ in zip(inputs["prompt"], inputs["prompt_mask"], strict=True)}
    assert shape == (1, sum(map(len, prompts)) + int(read.sum()))
    assert isinstance(mask, RowMask)


def test_rows_without_shared_prompts_keep_exact_results_and_micro_batches() -> None:
    policy, batch = both(make("llama"))[1], batch_of([(0, 4, 0), (1, 2, 0), (2, 6, 0)])
    first = policy(*batch).log_probs
    assert policy.shared(batch[0], batch[2]) is None
    policy.prompts_once = False
    assert torch.equal(policy(*batch).log_probs, first)


def test_models_without_shared_prompt_support_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reads_prompts_once(make("llama").base_model)
    assert not reads_prompts_once(family("mamba").base_model)
    monkeypatch.setattr(policies, "reads_prompts_once", lambda trunk: False)
    wanted, actual = both(make("llama"), "head")
    assert not actual.prompts_once
    batch = batch_of(ROWS)
    near(actual(*batch).log_probs, wanted(*batch).log_probs)
    assert actual.shared(batch[0], batch[2]) is None


def test_router_losses_disable_prompt_sharing() -> None:
    # a router loss counts every token, so every row must read its own prompt
    batch = batch_of(ROWS)
    wanted, actual = both(family("mixtral"), None, balanced=True)
    assert actual.shared(batch[0], batch[2]) is None
    near(actual(*batch).router_loss, wanted(*batch).router_loss)


def test_at_maps_padded_positions_and_the_longest_row_is_contiguous() -> None:
    ids, mask = right_padded([[1, 2, 3, 4], [5, 6], [1, 2, 3, 7, 8, 9], [1, 2, 3], [5, 6, 7]], 0)
    read = prompts_once(ids, mask.bool(), torch.tensor([3, 2, 3, 3, 1]))
    rows, columns = mask.bool().nonzero(as_tuple=True)
    places = read.at(rows, columns)
    assert torch.equal(read.ids[places], ids[rows, columns])
    assert torch.equal(read.options["position_ids"][places], columns)
    assert read.ids.shape == (1, 6 + 1 + 0 + 2 + 3)
    assert read.layout is not None
    start, longest = read.layout.longest()
    assert read.ids[0, start : start + longest].tolist() == [1, 2, 3, 7, 8, 9]


# ---- micro-batches ------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), min_size=1, max_size=20),
    tokens=st.integers(1, 60),
    size=st.none() | st.integers(1, 5),
)
def test_micro_batches_partition_the_rows_within_the_token_budget(
    rows: list[tuple[int, int]], tokens: int, size: int | None
) -> None:
    prompt = [3 * (group + 1) for group, _ in rows]
    costs = torch.tensor([length + begin for (_, length), begin in zip(rows, prompt, strict=True)])
    shared = Shared(torch.tensor([group for group, _ in rows]), torch.tensor(prompt))
    parts = [part.tolist() for part in groups_by_length(costs, tokens, size, shared)]
    assert sorted(row for part in parts for row in part) == list(range(len(rows)))
    for part in parts:
        groups = {rows[row][0]: prompt[row] for row in part}
        read = sum(groups.values()) + sum(rows[row][1] for row in part)
        assert read <= tokens or len(part) == 1
        assert size is None or len(part) <= size


def test_each_row_counts_an_eighth_of_its_shared_prompt_for_copied_keys() -> None:
    policy = both(make("llama"))[1]
    prompt = torch.arange(2, 42).repeat(2, 1)
    shared = policy.shared({"prompt": prompt, "prompt_mask": torch.ones_like(prompt).bool()}, torch.ones(2, 3).bool())
    assert shared is not None
    assert (shared.group.tolist(), shared.saved.tolist()) == ([0, 0], [35, 35])


def test_rows_that_share_a_prompt_stay_together_and_count_it_once() -> None:
    shared = Shared(torch.tensor([0, 1] * 4), torch.tensor([10, 10] * 4))
    parts = groups_by_length(torch.tensor([12, 13] * 4), 22, None, shared)
    assert [sorted(part.tolist()) for part in parts] == [[1, 3, 5, 7], [0, 2, 4, 6]]


def test_micro_batches_do_not_change_log_probs_or_values() -> None:
    wanted, actual = both(make("llama"), "head")
    batch = batch_of(ROWS)
    shared = actual.shared(batch[0], batch[2])
    assert shared is not None
    found = in_micro_batches(actual, *batch, 14, shared=shared)
    near(found.log_probs, wanted(*batch).log_probs)
    near(found.values, wanted(*batch).values)


# ---- pairs --------------------------------------------------------------------------------------------------------------


def test_both_answers_of_a_pair_read_their_prompt_once() -> None:
    chosen, rejected = batch_of([(2, 6, 0), (0, 3, 0), (4, 2, 0)]), batch_of([(2, 1, 0), (0, 7, 0), (3, 2, 0)])
    inputs = {**side_tensors("chosen", chosen), **side_tensors("rejected", rejected)}
    wanted, actual = (DpoPolicy(policy, 0.1) for policy in both(make("llama")))
    inputs["reference"] = torch.zeros(3, 2)
    near(actual.scores(inputs), wanted.scores(inputs))
    kept = torch.ones(3, 1).bool()
    once = (wanted.costs(inputs, kept) - actual.costs(inputs, kept)).tolist()
    assert once == [3, 1, 0], "the prompts of the third pair differ"


# ---- runs ---------------------------------------------------------------------------------------------------------------
