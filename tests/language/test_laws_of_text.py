"""Updates on sampled text do not depend on padding, row order, batches or tokenizer settings; scores, values and KL penalties
are in the right places.
"""

import copy
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot import Reuse
from surefoot.core.credit import assign_credit
from surefoot.core.learner import Learner, LearnerSettings
from surefoot.core.optimizer import AdamSettings
from surefoot.core.rollout import LearnerState, Rollout, map_tensors
from surefoot.functional import masked_mean
from surefoot.language.data.datasets import repeat_prompts
from surefoot.language.data.rows import write_rows
from surefoot.language.online.world import LanguageWorld
from surefoot.language.rewards.terms import FunctionReward
from surefoot.language.sampling.ends import cut_at_stop
from surefoot.language.supervised.world import SupervisedWorld
from surefoot.recipes.reading import make_recipe

from .tiny import VOCABULARY, fields_of, set_probabilities, world_of, write_folder

LETTERS = "def letters(responses):\n    return [len(set(text)) / 4 + text.count('a') for text in responses]\n"
PROMPTS = ("hi ", "what is it? ", "x", "say something: ", "go", "a longer one, of two parts: ", "no", "yes, ")


def make_world(model: Path, where: Path, **changes: Any) -> LanguageWorld:
    """A world with prompts of many lengths, a critic with nonzero values, and a reference that differs from the policy."""
    where.mkdir(exist_ok=True)
    (where / "letters.py").write_text(LETTERS)
    write_rows(where / "prompts.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    table: dict[str, Any] = {"sampling": {"prompts": 8, "max_tokens": 7, "stop": ["e", "o"]}, "reference": {"beta": 0.1}}
    fields = fields_of(model, where / "prompts.jsonl", f"{where}/letters.py:letters", **{**table, **changes})
    world = world_of(fields)
    head = world.policy.value_head if world.policy.critic is None else world.policy.critic.head
    with torch.no_grad():
        if world.reference is not None:
            world.reference.policy.model.get_output_embeddings().weight.mul_(0.7)
        if head is not None:
            head.weight.normal_(generator=torch.Generator().manual_seed(1))
    return world


def collect(world: LanguageWorld) -> Rollout:
    return world.collector.collect(LearnerState.seeded(1, 64))


def one_update(world: LanguageWorld, rollout: Rollout, **sizes: Any) -> tuple[Tensor, dict[str, Any]]:
    """Gradient and metrics of one update of a copy of the policy on the whole rollout."""
    objective = replace(world.recipe.objective, reuse=Reuse(1, 1), entropy_coefficient=0.01, reference_coefficient=0.05)
    learner = Learner(copy.deepcopy(world.policy), objective, LearnerSettings(AdamSettings(1e-3, max_grad_norm=None), **sizes))
    metrics = learner.update(rollout, assign_credit(rollout, objective), LearnerState.seeded(1, 64))
    return learner.optimizers["policy"].gradients, metrics


def expect_close_gradients(one: Tensor, other: Tensor) -> None:
    """Gradients are not zero, and equal up to rounding errors relative to the largest entry."""
    assert one.abs().max() > 1e-2
    torch.testing.assert_close(one, other, rtol=0, atol=2e-6 * float(one.abs().max()))


@pytest.fixture
def world(folders: dict[str, Path], tmp_path: Path) -> LanguageWorld:
    return make_world(folders["llama"], tmp_path)


# ---- what must not matter -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "left", "between", "right"), [("llama", 5, 0, 0), ("gpt2", 2, 3, 4), ("qwen2", 0, 4, 0), ("gemma", 2, 0, 6)]
)
def test_padding_of_any_amount_side_and_content_changes_no_gradient(
    kind: str, left: int, between: int, right: int, folders: dict[str, Path], tmp_path: Path
) -> None:
    world = make_world(folders[kind], tmp_path)
    r = collect(world)
    assert len(set(r.mask.sum(-1).tolist())) > 1, "responses differ in length"
    generator = torch.Generator().manual_seed(3)

    def garbage(x: Tensor, keep: Tensor) -> Tensor:
        return torch.where(keep, x, torch.randint(0, VOCABULARY, x.shape, generator=generator))

    def wider(x: Any) -> Any:
        if x.shape[1:] == r.mask.shape[1:]:
            x = nn.functional.pad(x, (0, right), value=9 if x.dtype == torch.int64 else False)
        return x

    padded: Rollout = map_tensors(wider, r)
    prompt_mask = nn.functional.pad(r.inputs["prompt_mask"], (left, between))
    prompt = garbage(nn.functional.pad(r.inputs["prompt"], (left, between)), prompt_mask)
    padded = replace(
        padded, inputs={"prompt": prompt, "prompt_mask": prompt_mask}, actions=garbage(padded.actions, padded.mask)
    )
    assert padded.mask.shape[1] == r.mask.shape[1] + right
    expect_close_gradients(one_update(world, padded)[0], one_update(world, r)[0])


def test_row_order_changes_no_gradient(world: LanguageWorld) -> None:
    r = collect(world)
    order = torch.tensor([5, 2, 7, 0, 1, 6, 4, 3])
    expect_close_gradients(one_update(world, map_tensors(lambda x: x[order], r))[0], one_update(world, r)[0])


@pytest.mark.parametrize("sizes", [{"micro_batch": 3}, {"micro_batch_tokens": 40}])
def test_micro_batches_give_the_gradient_and_losses_of_one_batch(sizes: dict[str, int], world: LanguageWorld) -> None:
    r = collect(world)
    whole, parts = one_update(world, r), one_update(world, r, **sizes)
    expect_close_gradients(parts[0], whole[0])
    for name in ("policy_loss", "value_loss", "entropy"):
        assert parts[1][name] == pytest.approx(whole[1][name], abs=1e-5), name


def test_responses_rewards_and_values_do_not_depend_on_the_batch(folder: Path, tmp_path: Path) -> None:
    """With two prompts per iteration instead of eight, the batch and its padding differ."""
    eight = make_world(folder, tmp_path)
    two = make_world(
        folder, tmp_path, sampling={**eight.recipe.sampling.model_dump(), "prompts": 2}, objective={"reuse": {"minibatches": 1}}
    )
    whole, state = collect(eight), LearnerState.seeded(1, 64)
    for first in range(0, 8, 2):
        part = two.collector.collect(state)
        state.steps += 2
        width = part.mask.shape[1]
        for name in ("actions", "mask", "rewards", "values", "old_log_probs"):
            actual, wanted = getattr(part, name), getattr(whole, name)[first : first + 2]
            assert not wanted[:, width:][whole.mask[first : first + 2, width:]].any()
            torch.testing.assert_close(actual * part.mask, wanted[:, :width] * part.mask, rtol=0, atol=1e-4)


# ---- scores, values and penalties ---------------------------------------------------------------------------------------


def test_score_is_on_eos_or_else_on_the_last_token(folders: dict[str, Path], tmp_path: Path) -> None:
    plain = make_world(
        folders["gpt2"], tmp_path, sampling={"prompts": 8, "samples": 4, "max_tokens": 4}, reference={"beta": 0.0}
    )
    eos = plain.tokens.eos_id
    set_probabilities(plain.policy.model, [*plain.tokens.encode_completion("ab")], (0.5, 0.25, 0.25))
    r = collect(plain)
    ends = (r.actions == eos) & r.mask
    ended = ends.any(-1)
    assert ended.any()
    assert not ended.all()
    for row in range(len(r.mask)):
        place = int(ends[row].int().argmax()) if ended[row] else 3
        text = plain.tokens.decode(r.actions[row][r.mask[row]])
        wanted = torch.zeros(r.mask.shape[1])
        wanted[place] = len(set(text)) / 4 + text.count("a")
        torch.testing.assert_close(r.rewards[row], wanted)
        assert r.mask[row].tolist() == [t <= place for t in range(r.mask.shape[1])], "EOS is learned, and nothing after it"


@pytest.mark.parametrize(("own_model", "kind"), [(False, "llama"), (True, "gpt2"), (False, "gemma"), (True, "qwen2")])
def test_values_are_from_before_each_token_and_next_values_from_after(
    own_model: bool, kind: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """A truncated response is bootstrapped with the value of its last state, a terminated one with 0."""
    settings = {"terms": [{"function": f"{tmp_path}/letters.py:letters"}], "missing_eos": "bootstrap"}
    world = make_world(folders[kind], tmp_path, critic={"own_model": own_model}, reward=settings)
    r, policy = collect(world), world.policy
    trunk, head = (
        (policy.model.base_model, policy.value_head) if policy.critic is None else (policy.critic.trunk, policy.critic.head)
    )
    assert r.truncated.any()
    assert r.terminated.any()
    for row in range(len(r.mask)):
        prompt, response = r.inputs["prompt"][row][r.inputs["prompt_mask"][row]], r.actions[row][r.mask[row]]
        with torch.no_grad():
            states = trunk(input_ids=torch.cat([prompt, response]).unsqueeze(0)).last_hidden_state[0]
            v = (states @ head.weight[0] + head.bias)[len(prompt) - 1 :]
        count = len(response)
        torch.testing.assert_close(r.values[row, :count], v[:-1], rtol=1e-4, atol=1e-4)
        last = count if r.truncated[row].any() else count - 1
        torch.testing.assert_close(r.next_values[row, :last], v[1 : last + 1], rtol=1e-4, atol=1e-4)
        credit = assign_credit(
            map_tensors(lambda x, row=row: x[row : row + 1], r), replace(world.recipe.objective, gae_lambda=0.0)
        )
        behind = float(v[-1]) if r.truncated[row].any() else 0.0
        wanted = float(r.rewards[row, count - 1]) + behind - float(v[-2])
        assert float(credit.advantages[0, count - 1]) == pytest.approx(wanted, abs=2e-4)


def test_adapted_beta_moves_towards_the_target_kl_in_clipped_steps(folders: dict[str, Path], tmp_path: Path) -> None:
    """It rises if the KL is above the target and falls if it is below; the next rollout uses the new β."""
    measured = make_world(folders["llama"], tmp_path, reference={"beta": 0.5}).collector.collect(LearnerState.seeded(1, 64))
    spent = float(measured.reward_parts["kl"].sum(-1).mean())
    assert spent > 1e-3
    for excess in (1e3, 0.1, -0.05, -0.999):
        target = spent / (1 + excess)
        shift = min(max(excess, -0.2), 0.2)
        world = make_world(folders["llama"], tmp_path, reference={"beta": 0.5, "target": target, "horizon": 40})
        state = LearnerState.seeded(1, 64)
        first = world.collector.collect(state)
        assert first.metrics["kl_reference_response"] == pytest.approx(spent, rel=1e-5)
        second = world.collector.collect(state)
        beta = 0.5 * (1 + shift * 8 / 40)
        assert second.metrics["reference_beta"] == pytest.approx(beta, rel=1e-5)
        paid = second.reward_parts["score"] - beta * second.reward_parts["kl"]
        torch.testing.assert_close(second.rewards[second.mask], paid[second.mask])


def test_fixed_beta_ignores_and_clears_an_earlier_adapted_value(world: LanguageWorld) -> None:
    state = LearnerState.seeded(1, 64)
    state.coefficients["reference_beta"] = 7.0
    assert world.collector.collect(state).metrics["reference_beta"] == 0.1
    assert "reference_beta" not in state.coefficients


@pytest.mark.parametrize(("times", "within"), [(1.6, False), (1.4, True)])
def test_with_adapted_beta_policies_far_beyond_the_target_are_never_best(
    times: float, within: bool, folders: dict[str, Path], tmp_path: Path
) -> None:
    """With a tiny initial β, a policy far beyond the target would otherwise be the best."""
    data = {"train": str(tmp_path / "prompts.jsonl"), "held_out": str(tmp_path / "prompts.jsonl"), "max_length": 64}
    spent = make_world(folders["llama"], tmp_path, data=data).evaluate().metrics["held_out_kl"]
    assert spent > 1e-3
    target = spent / times
    evaluation = make_world(folders["llama"], tmp_path, data=data, reference={"beta": 1e-6, "target": target}).evaluate()
    assert evaluation.score == (evaluation.metrics["held_out_reward"] if within else -math.inf)


def test_stop_strings_are_cut_from_scored_texts(world: LanguageWorld) -> None:
    """As in best-of-n, chat and generate, so that a reward scores the same text everywhere."""
    world.collector.collect(LearnerState.seeded(1, 64))
    responses = [row["response"] for row in world.collector.last_samples]
    assert not any(stop in text for text in responses for stop in "eo")
    prompts = repeat_prompts(world.collector.prompts, range(8))
    answers = world.collector.respond(prompts, list(range(8)))
    whole = [world.tokens.decode(ids) for ids in answers.samples.responses()]
    assert any(stop in text for text in whole for stop in "eo"), "the tokens include a stop string"
    assert answers.texts == [cut_at_stop(text, "eo") for text in whole]


def test_samples_from_several_rounds_are_shown_without_stop_strings(folders: dict[str, Path], tmp_path: Path) -> None:
    sampling = {"prompts": 2, "samples": 4, "rounds": 3, "max_tokens": 7, "stop": ["e", "o"]}
    world = make_world(folders["llama"], tmp_path, algorithm="DAPO", sampling=sampling, objective={"reuse": {"minibatches": 1}})
    world.reward = world.collector.reward = FunctionReward(lambda responses: [1.0] * len(responses))  # no group has a signal
    rollout = collect(world)
    assert rollout.metrics["sampling_rounds"] > 1
    message = [row["response"] for row in world.collector.last_samples]
    assert len(message) > 8, "samples from both rounds"
    assert not any(stop in text for text in message for stop in "eo")


def test_reinforce_without_a_baseline_does_not_normalise_advantages() -> None:
    """Subtracting the batch mean would turn it into REINFORCE_BASELINE."""
    table = {"kind": "language", "model": "m", "data": {"train": "p.jsonl"}, "reward": {"terms": [{"function": "here:f"}]}}
    objectives = [make_recipe(table | {"algorithm": name}).objective for name in ("REINFORCE", "REINFORCE_BASELINE", "A2C")]
    assert [objective.normalise_advantages for objective in objectives] == [None, "batch", "batch"]


@pytest.mark.parametrize("own_model", [False, True])
def test_configured_dropout_is_off_in_sampling_scoring_and_learning(own_model: bool, tmp_path: Path) -> None:
    dropout = {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5}
    world = make_world(write_folder(tmp_path / "model", "gpt2", **dropout), tmp_path, critic={"own_model": own_model})
    r = collect(world)
    assert r.metrics["sampler_gap"] < 1e-4
    assert one_update(world, r)[1]["ratio_at_start"] == pytest.approx(1, abs=1e-5)
    world.policy.train()
    torch.testing.assert_close(world.policy(r.inputs, r.actions, r.mask).values, r.values, rtol=0, atol=1e-4)


# ---- tokenizer settings -------------------------------------------------------------------------------------------------

HABITS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "no pad": lambda settings: settings | {"pad_token": None},
    "pad = eos": lambda settings: settings | {"pad_token": settings["eos_token"]},
    "pad = eos on the left": lambda settings: settings | {"pad_token": settings["eos_token"], "padding_side": "left"},
}


def with_habit(habit: str, folder: Path, tmp_path: Path) -> Path:
    """A copy of a model folder with other padding settings in its tokenizer."""
    copied = Path(shutil.copytree(folder, tmp_path / "habitual"))
    path = copied / "tokenizer_config.json"
    path.write_text(json.dumps(HABITS[habit](json.loads(path.read_text()))))
    return copied


@pytest.mark.parametrize(
    ("kind", "habit"), [("gpt2", "pad = eos on the left"), ("gpt2", "no pad"), ("llama", "pad = eos"), ("llama", "no pad")]
)
def test_tokenizer_padding_settings_change_no_sample_reward_or_gradient(
    habit: str, kind: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """This includes learned positions, which must follow the mask for sampler and trainer to agree on log-probabilities."""
    usual, other = (make_world(folder, tmp_path) for folder in (folders[kind], with_habit(habit, folders[kind], tmp_path)))
    tokenizer = other.tokens.tokenizer
    assert ("pad =" in habit) == (tokenizer.pad_token_id == other.tokens.eos_id)
    assert ("no pad" in habit) == (tokenizer.pad_token_id is None)
    assert other.tokens.pad_id not in other.tokens.eos_ids
    with torch.no_grad():  # make EOS likely
        for one in (usual, other):
            one.policy.model.get_output_embeddings().weight[one.tokens.eos_id] *= 3
    ours, theirs = collect(usual), collect(other)
    assert len(set(ours.inputs["prompt_mask"].sum(-1).tolist())) > 3, "prompts of several lengths"
    assert torch.equal(ours.mask, theirs.mask)
    assert torch.equal(ours.actions[ours.mask], theirs.actions[theirs.mask])
    torch.testing.assert_close(ours.rewards, theirs.rewards, rtol=0, atol=1e-5)
    assert theirs.metrics["sampler_gap"] < 1e-4
    assert theirs.metrics["eos_rate"] == ours.metrics["eos_rate"] > 0
    expect_close_gradients(one_update(other, theirs)[0], one_update(usual, ours)[0])


@pytest.mark.parametrize("habit", ["no pad", "pad = eos on the left"])
def test_sft_learns_eos_with_any_tokenizer_padding(habit: str, folders: dict[str, Path], tmp_path: Path) -> None:
    rows = [{"prompt": prompt, "completion": "ab"[: 1 + i % 2] * (1 + i % 3)} for i, prompt in enumerate(PROMPTS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": str(tmp_path / "rows.jsonl"), "max_length": 64, "batch": 8}
    losses = []
    for folder in (folders["gpt2"], with_habit(habit, folders["gpt2"], tmp_path)):
        world = SupervisedWorld(make_recipe({"kind": "sft", "model": str(folder), "data": data}))
        r = world.collector.collect(LearnerState.seeded(1, 8))
        last = r.mask.sum(-1) - 1
        assert (r.actions[torch.arange(8), last] == world.tokens.eos_id).all()
        losses.append(float(masked_mean(-world.policy(r.inputs, r.actions, r.mask).log_probs, r.mask).detach()))
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
