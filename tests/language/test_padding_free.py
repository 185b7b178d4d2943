"""Padding-free passes and runs match padded ones. The padded pass is the reference."""

from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

import surefoot  # noqa: E402
import surefoot.language.models.policy as policies  # noqa: E402
from surefoot.core.minibatches import groups_by_length  # noqa: E402
from surefoot.core.rollout import Shared, map_tensors  # noqa: E402
from surefoot.diagnostics.metrics import TIMING  # noqa: E402
from surefoot.language.data.batches import left_padded, right_padded  # noqa: E402
from surefoot.language.models import padding_free  # noqa: E402
from surefoot.language.models.padding_free import Reading, RowMask, end_to_end, prompts_once  # noqa: E402
from surefoot.language.models.pair_policy import PairPolicy  # noqa: E402
from surefoot.language.models.policy import LanguagePolicy, ReferencePolicy  # noqa: E402
from surefoot.language.models.policy.critic import Critic  # noqa: E402
from surefoot.language.models.policy.passes import in_micro_batches  # noqa: E402
from surefoot.language.models.reward_model import new_reward_model  # noqa: E402
from surefoot.language.supervised.preferences import DpoPolicy, side_tensors  # noqa: E402
from surefoot.recipes.reading import make_recipe  # noqa: E402
from surefoot.runs.factory import make_world  # noqa: E402
from surefoot.store.metrics import read_metrics  # noqa: E402

from . import tiny  # noqa: E402
from .test_policy import PAD, SHAPE, awake, gradients, make, near, text  # noqa: E402

OTHERS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4},
    "qwen3": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "head_dim": 8},
    "gemma3_text": {"sliding_window": 4, "head_dim": 8},
    "phi": {"num_key_value_heads": 4},
    "granite": {"logits_scaling": 3.0},
    "mixtral": {"num_local_experts": 4},
}
"""families with sliding windows, an output head beyond one linear layer, or experts"""
RECURRENT: dict[str, dict[str, Any]] = {
    "mamba": {"vocab_size": 102, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "qwen3_next": {
        **SHAPE,
        "head_dim": 8,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "num_experts": 0,
    },
}


def family(kind: str) -> Any:
    if kind in tiny.FAMILIES:
        return make(kind, scale=3.0)
    settings = RECURRENT[kind] if kind in RECURRENT else SHAPE | OTHERS[kind]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **settings)).eval()


def both(model: Any, critic: Any = None, **settings: Any) -> list[LanguagePolicy]:
    """The same policy with and without padding."""
    policies = [LanguagePolicy(model, critic, PAD, padding_free=free, **settings) for free in (False, True)]
    assert policies[1].padding_reason is None
    assert policies[1].padding_free
    for policy in policies if critic is not None else ():
        awake(policy)
    return policies


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
    of_wanted, of_actual = (outputs_and_gradients(policy, batch) for policy in (wanted, actual))
    for a, b in zip(of_actual[0], of_wanted[0], strict=True):
        near(a, b)
    for a, b in zip(of_actual[1], of_wanted[1], strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            near(a, b, 1e-4)


# ---- passes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*tiny.FAMILIES, *OTHERS])
def test_log_probs_entropy_values_and_gradients_match_the_padded_pass(kind: str) -> None:
    """Of rows with prompts of their own, and of rows that share some."""
    policies = both(family(kind), "head")
    for batch in (text(rows=9, prompt=6, response=9), batch_of(ROWS)):
        check_same(*policies, batch)


@pytest.mark.parametrize("critic", ["head", "own"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_critics_and_checkpointed_layers_match_the_padded_pass(critic: str, checkpointing: bool) -> None:
    model = make("llama")
    wanted, actual = both(model, "head" if critic == "head" else Critic.from_policy(model), checkpointing=checkpointing)
    for batch in (text(rows=7), batch_of(ROWS)):
        near(*(gradients(policy, policy(*batch)) for policy in (actual, wanted)), 1e-4)
        with torch.no_grad():
            near(actual.values_after(*batch), wanted.values_after(*batch))


def test_custom_critic_reads_padded_rows() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = make("gpt2", seed=5).base_model
            self.head = nn.Linear(tiny.WIDTH, 1)

        def forward(self, ids: Tensor) -> Tensor:
            assert ids.shape == (6, 12)
            values: Tensor = self.head(self.trunk(input_ids=ids).last_hidden_state).squeeze(-1)
            return values

    own, batch = Own(), text()
    wanted, actual = both(make("llama"), None)
    wanted.critic = actual.critic = own
    near(actual(*batch).values, wanted(*batch).values)


def test_router_losses_match_the_padded_pass() -> None:
    batch = text(rows=7)
    wanted, actual = both(family("mixtral"), None, balanced=True)
    parts = [map_tensors(lambda x, part=part: x[part], batch) for part in (slice(4), slice(4, 7))]
    for policy in (wanted, actual):
        policy.prepare(parts)
    for part in parts:
        near(*(policy(*part).router_loss for policy in (actual, wanted)))


def test_reference_uses_the_padding_mode_of_its_policy() -> None:
    batch = text()
    wanted, actual = (ReferencePolicy(policy) for policy in both(make("llama")))
    assert (actual.policy.padding_free, wanted.policy.padding_free) == (True, False)
    near(actual.log_probs(*batch), wanted.log_probs(*batch))


@pytest.mark.parametrize("kind", tiny.FAMILIES)
def test_reward_models_match_the_padded_pass_for_left_and_right_padding(kind: str) -> None:
    draw = torch.Generator().manual_seed(0)
    ids, mask = right_padded([torch.randint(2, 90, (n,), generator=draw).tolist() for n in (5, 1, 9, 3)], PAD)
    left = torch.stack([row.roll(int((~real.bool()).sum())) for row, real in zip(ids, mask, strict=True)])
    shifts = [(ids, mask), (left, mask.flip(-1))]
    model = new_reward_model(make(kind), 1)
    for tokens, real in shifts:
        model.padding_free = False
        scores, everywhere = model.raw(tokens, real), model.prefix_scores(tokens, real)
        model.padding_free = True
        near(model.raw(tokens, real), scores)
        near(model.prefix_scores(tokens, real)[real.bool()], everywhere[real.bool()])


def passes_of(model: Any) -> list[tuple[Any, Any]]:
    """Record the (rows, tokens) shape and the mask of every later pass through the first layer."""
    seen: list[tuple[Any, Any]] = []
    model.base_model.layers[0].register_forward_pre_hook(
        lambda _, args, named: seen.append((args[0].shape[:2], named["attention_mask"])), with_kwargs=True
    )
    return seen


def test_pass_has_no_padding_tokens_and_no_full_attention_mask() -> None:
    """Otherwise the results would be right but cost as much as with padding."""
    model, batch = make("llama"), text(rows=5)
    seen = passes_of(model)
    policy = both(model)[1]
    seen.clear()
    policy(*batch)
    (shape, mask), real = seen[0], int(batch[0]["prompt_mask"].sum() + batch[2].sum())
    assert shape == (1, real)
    assert isinstance(mask, RowMask)
    assert mask.causal is None
    assert sum(mask.layout.lengths) == real


def test_padded_pass_is_bitwise_unchanged_after_laid_out_exits() -> None:
    model, ids = make("qwen2"), torch.arange(20).view(2, 10)
    real = torch.ones_like(ids)
    real[1, :4] = 0
    before = model(input_ids=ids, attention_mask=real).logits
    read = end_to_end(ids, real.bool().flip(-1))
    with read.laid_out():
        model.base_model(input_ids=read.ids, use_cache=False, **read.options)
    assert torch.equal(model(input_ids=ids, attention_mask=real).logits, before)


# ---- models that need padding --------------------------------------------------------------------------------------------


def test_unsupported_models_fall_back_to_padding_with_a_reason() -> None:
    batch = text()
    assert padding_free.reason_for_padding(make("llama").base_model) is None
    for kind, reason in (("mamba", "takes no position_ids"), ("qwen3_next", "as recurrent layers do")):
        model = family(kind)
        policy, wanted = LanguagePolicy(model, None, PAD, padding_free=True), LanguagePolicy(model, None, PAD)
        assert not policy.padding_free
        assert reason in (policy.padding_reason or "")
        assert torch.equal(policy(*batch).log_probs, wanted(*batch).log_probs)
    eager = make("llama")
    eager.set_attn_implementation("eager")
    assert "is 'eager', not 'sdpa'" in (padding_free.reason_for_padding(eager.base_model) or "")


def test_critic_that_needs_padding_makes_the_policy_pad_too() -> None:
    eager = make("llama", seed=3)
    eager.set_attn_implementation("eager")
    policy = LanguagePolicy(make("llama"), Critic.from_policy(eager), PAD, padding_free=True)
    assert not policy.padding_free
    assert policy.padding_reason is not None
    pairs = PairPolicy(new_reward_model(eager, 1), padding_free=True)
    assert not pairs.model.padding_free
    assert pairs.padding_reason is not None


def test_at_maps_padded_positions_to_packed_tokens() -> None:
    ids = torch.arange(1, 13).view(3, 4)
    real = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1], [1, 0, 0, 0]]).bool()
    rows, columns = real.nonzero(as_tuple=True)
    read = end_to_end(ids, real)
    assert read.layout.lengths == (2, 3, 1)
    assert read.options["position_ids"].tolist() == [[0, 1, 0, 1, 2, 0]]
    assert torch.equal(read.ids[read.at(rows, columns)], ids[rows, columns])
    assert torch.equal(Reading(ids, real).ids[Reading(ids, real).at(rows, columns)], ids[rows, columns])


# ---- runs ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data files of every kind with rows of different lengths, and a reward function."""
    folder = tmp_path_factory.mktemp("padding-free")
    tiny.write_texts(folder, 16)
    return folder


def settings(kind: str, files: Path, start: Path, **changes: Any) -> dict[str, Any]:
    """Settings of a 32-step run (two iterations); ``kind`` is a key of ``RUNS``."""
    rows = {"reward": "pairs", "dpo": "pairs", "kto": "labels", "steps": "steps"}.get(kind, "rows")
    fields: dict[str, Any] = {"model": str(start), "steps": 32, "padding_free": True}
    fields |= {"data": {"train": str(files / f"{rows}.jsonl"), "max_length": 64}, "optimizer": {"learning_rate": 1e-4}}
    if kind in ("kto", "steps"):
        fields["preference"] = {"loss": kind}
    if kind in ("ppo", "grpo"):
        fields |= {"sampling": {"prompts": 8, "samples": 2, "max_tokens": 6}, "reference": {"beta": 0.1}}
        fields["reward"] = {"terms": [{"function": f"{files}/rewards.py:score"}], "missing_eos": "bootstrap"}
    if kind == "ppo":
        fields["objective"] = {"reuse": {"epochs": 2, "minibatches": 2}}
        fields["mixing"] = {"sft_coefficient": 0.1, "demonstrations": str(files / "rows.jsonl"), "batch": 4}
    if kind == "grpo":
        fields |= {"algorithm": "GRPO", "objective": {"reuse": {"epochs": 2, "minibatches": 1}}}
        fields["reward"]["missing_eos"] = None
    if kind not in ("ppo", "grpo"):
        fields["data"] |= {"batch": 16, "held_out": fields["data"]["train"]}
    return {**fields, **changes}


RUNS = {"sft": "sft", "reward": "reward", "steps": "reward", "dpo": "dpo", "kto": "dpo", "ppo": "language", "grpo": "language"}
"""recipe kind by run name"""
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in RUNS),
    ("ppo", {"critic": {"own_model": True}, "optimizer": {"learning_rate": 1e-4, "micro_batch_tokens": 40}}),
    ("ppo", {"adapter": {"rank": 4}, "critic": {"own_model": True}, "gradient_checkpointing": True}),
    ("grpo", {"optimizer": {"learning_rate": 1e-4, "micro_batch_tokens": 60}}),  # rows that share a prompt stay together
    ("reward", {"adapter": {"rank": 4}, "optimizer": {"learning_rate": 1e-4, "micro_batch": 3}}),
    ("dpo", {"adapter": {"rank": 4}, "gradient_checkpointing": True, "optimizer": {"learning_rate": 1e-3, "micro_batch": 5}}),
]


@pytest.mark.parametrize(
    ("name", "changes"),
    [pytest.param(*case, marks=pytest.mark.slow if number >= len(RUNS) else ()) for number, case in enumerate(CASES)],
)
def test_run_metrics_and_weights_match_the_padded_run(
    name: str, changes: dict[str, Any], files: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    weights, metrics = [], []
    for free in (False, True):
        fields = settings(name, files, folders["llama"], **{**changes, "padding_free": free})
        result = surefoot.train(RUNS[name], run_dir=tmp_path / str(free), **fields)
        weights.append({k: v for k, v in module_of(result).state_dict().items() if v.is_floating_point()})
        rows = read_metrics(tmp_path / str(free) / "metrics.jsonl")
        metrics.append([{k: v for k, v in row.items() if k not in TIMING} for row in rows])
    for padded_row, row in zip(*metrics, strict=True):
        for each in (padded_row, row):  # noise: margins are 0 up to rounding before the first update
            each.pop("held_out_accuracy", None)
        assert padded_row == pytest.approx(row, rel=2e-3, abs=2e-4)
    if name in ("ppo", "grpo"):
        assert [row["ratio_at_start"] for row in metrics[1]] == pytest.approx([1, 1], abs=1e-5)
    for key, weight in weights[0].items():
        torch.testing.assert_close(weights[1][key], weight, rtol=0, atol=1e-4, msg=lambda text, key=key: f"{key}: {text}")


def module_of(result: Any) -> Any:
    return result if isinstance(result, nn.Module) else result.model


def test_initial_ratio_is_exactly_one_with_one_minibatch(files: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    """The rows have the same order as in the pass that computed log π_old."""
    fields = settings("grpo", files, folders["llama"])
    surefoot.train("language", run_dir=tmp_path / "run", **fields)
    assert [row["ratio_at_start"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 1]


def test_startup_notes_report_the_padding_mode(files: Path, folders: dict[str, Path]) -> None:
    def lines(**changes: Any) -> list[str]:
        recipe = make_recipe({"kind": "sft", **settings("sft", files, folders["llama"], **changes)})
        return [line for line in make_world(recipe).arithmetic() if line.startswith("padding_free")]

    assert lines() == ["padding_free: rows are read end to end"]
    assert lines(padding_free=False) == []
    reason = "MambaModel takes no position_ids"
    assert padding_free.padding_notes(make_recipe({"kind": "sft", **settings("sft", files, folders["llama"])}), reason) == [
        f"padding_free: rows are padded, because {reason}"
    ]


# ---- prompts that rows share are read once ---------------------------------------------------------------------------


LLAMA: dict[str, Any] = {}
"""the two policies of the property test, built once for all examples"""


@hypothesis.settings(max_examples=25, deadline=None)
@given(rows=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 7), st.integers(0, 8)), min_size=1, max_size=9))
def test_sharing_prompts_does_not_change_outputs_or_gradients(rows: Rows) -> None:
    if not LLAMA:
        LLAMA["policies"] = both(make("llama"), "head")
        assert LLAMA["policies"][1].prompts_once
    batch = batch_of(rows)
    if batch[2].any():
        check_same(*LLAMA["policies"], batch)


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
    assert padding_free.reads_prompts_once(make("llama").base_model)
    assert not padding_free.reads_prompts_once(family("mamba").base_model)
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
    start, longest = read.layout.longest()
    assert read.ids[0, start : start + longest].tolist() == [1, 2, 3, 7, 8, 9]


# ---- micro-batches ------------------------------------------------------------------------------------------------------


@hypothesis.settings(max_examples=100, deadline=None)
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
    assert (shared.group.tolist(), shared.saved.tolist()) == ([0, 0], [35, 35])


def test_rows_that_share_a_prompt_stay_together_and_count_it_once() -> None:
    shared = Shared(torch.tensor([0, 1] * 4), torch.tensor([10, 10] * 4))
    parts = groups_by_length(torch.tensor([12, 13] * 4), 22, None, shared)
    assert [sorted(part.tolist()) for part in parts] == [[1, 3, 5, 7], [0, 2, 4, 6]]


def test_micro_batches_do_not_change_log_probs_or_values() -> None:
    wanted, actual = both(make("llama"), "head")
    batch = batch_of(ROWS)
    shared = actual.shared(batch[0], batch[2])
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
