"""Golden cases for whole language components, not only for their formulas: sampler, policy, reference, critic, collector,
SFT and reward models. Each model is set to output the numbers of a case. All computations use float32.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot import PPO_CLIP, Objective
from surefoot.core.credit import assign_credit
from surefoot.core.learner import Learner, LearnerSettings
from surefoot.core.optimizer import AdamSettings
from surefoot.core.rollout import LearnerState, Rollout, map_tensors
from surefoot.language.data.datasets import Demonstrations
from surefoot.language.models.policy import LanguagePolicy, ReferencePolicy
from surefoot.language.models.policy.critic import Critic
from surefoot.language.models.reward_model import new_reward_model
from surefoot.language.sampling.engines import Request
from surefoot.language.sampling.sampler import sample
from surefoot.language.supervised.demonstrations import Rows, demonstration_tensors
from surefoot.language.supervised.world import RowCollector, SupervisedWorld
from surefoot.recipes.reading import make_recipe
from surefoot.runs.factory import make_learner

from . import tiny

CASES = {
    case["name"]: case
    for case in json.loads((Path(__file__).parents[1] / "golden" / "golden.json").read_text(encoding="utf-8"))
}
NEGLIGIBLE = -25.0
"""logit of all other tokens, whose probability is about e⁻²⁵"""


def expect(name: str, key: str, ours: Any) -> None:
    case = CASES[name]
    torch.testing.assert_close(
        torch.as_tensor(ours).detach().float(), torch.tensor(case["expected"][key]), rtol=0, atol=case["tolerance_fp32"]
    )


def hidden(model: Any, ids: list[int]) -> Tensor:
    """Last hidden state of the trunk after every prefix.   [L, width]"""
    with torch.no_grad():
        states: Tensor = model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    return states


# ---- a response of three tokens -----------------------------------------------------------------------------------------

RLHF = "rlhf_shaped_rewards_3_tokens"


@pytest.fixture
def golden_rollout(folders: dict[str, Path], tmp_path: Path) -> Rollout:
    """The rollout of the golden response "a", "b", EOS, taken from a batch that the collector sampled."""
    x = CASES[RLHF]["inputs"]
    (tmp_path / "score.py").write_text(f"def score(responses):\n    return [{x['score']}] * len(responses)\n")
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "x"}) + "\n")
    changes = {"sampling": {"prompts": 4, "samples": 32, "max_tokens": 6}, "reference": {"beta": x["kl_coef"]}}
    fields = tiny.fields_of(folders["llama"], tmp_path / "prompts.jsonl", f"{tmp_path}/score.py:score", **changes)
    world = tiny.world_of(fields)
    tokens, policy = world.tokens, world.policy
    prompt, ids = tokens.encode_prompt("x"), tokens.encode_completion("ab")
    other = tokens.encode_completion("c")[0]
    for model, log_probs in ((policy.model, x["logp"]), (world.reference.policy.model, x["ref_logp"])):
        logits = torch.full((3, len(tokens.tokenizer)), NEGLIGIBLE, dtype=torch.float64)
        for t, (token, log_prob) in enumerate(zip(ids, log_probs, strict=True)):
            logits[t, token] = log_prob
            logits[t, other] = torch.log1p(-torch.tensor(log_prob, dtype=torch.float64).exp())
        tiny.teach(model.get_output_embeddings(), hidden(model, [*prompt, *ids])[len(prompt) - 1 : -1], logits)
    before = hidden(policy.model, [*prompt, *ids])[len(prompt) - 1 : -1]
    tiny.teach(policy.value_head, before, torch.tensor(x["values"]).unsqueeze(-1))
    whole = world.collector.collect(LearnerState.seeded(1, 128))
    row = [tokens[kept].tolist() for tokens, kept in zip(whole.actions, whole.mask, strict=True)].index(ids)
    part: Rollout = map_tensors(lambda y: y[row : row + 1], whole)
    return part


def test_rewards_advantages_returns_and_kl_match_the_golden_case(golden_rollout: Rollout) -> None:
    x = CASES[RLHF]["inputs"]
    credit = assign_credit(golden_rollout, replace(PPO_CLIP, gamma=x["gamma"], gae_lambda=x["lam"]))
    kl, rewards = golden_rollout.reward_parts["kl"][0], golden_rollout.rewards[0]
    expect(RLHF, "k1", kl[:3])
    expect(RLHF, "rewards", rewards[:3])
    expect(RLHF, "advantages", credit.advantages[0, :3])
    expect(RLHF, "returns", credit.returns[0, :3])
    expect(RLHF, "seq_kl", kl.sum())
    expect(RLHF, "non_score_reward_sum", (golden_rollout.rewards - golden_rollout.reward_parts["score"]).sum())
    expect(RLHF, "rlhf_reward", rewards.sum())


def test_sampler_policy_and_reference_apply_temperature_as_in_the_golden_case() -> None:
    name = "logprob_temperature"
    x, expected = CASES[name]["inputs"], CASES[name]["expected"]
    model, prompt = tiny.model("llama"), [30, 31, 32]
    logits = torch.full((1, tiny.VOCABULARY), NEGLIGIBLE)
    logits[0, [50, 51, 52]] = torch.tensor(x["logits"])
    tiny.teach(model.get_output_embeddings(), hidden(model, prompt)[-1:], logits)
    inputs = {"prompt": torch.tensor([prompt]), "prompt_mask": torch.ones(1, 3, dtype=torch.bool)}
    actions = torch.tensor([[50 + x["token"]]])
    for temperature, key in ((x["temperature"], "correct"), (1.0, "untempered")):
        policy = LanguagePolicy(model, None, 0, temperature)
        expect(name, key, policy(inputs, actions).log_probs[0, 0])
        expect(name, key, ReferencePolicy(policy).log_probs(inputs, actions, torch.ones(1, 1, dtype=torch.bool))[0, 0])
        drawn = sample(model, Request([prompt], range(16), 1, [1], 0, samples=16, temperature=temperature))
        sampled = drawn.log_probs[drawn.actions == actions[0, 0]]
        assert len(sampled) > 1
        expect(name, key, sampled[0])
        assert abs(float(sampled[0]) - expected["wrong_divide_logprob"]) > 0.1


# ---- supervised ---------------------------------------------------------------------------------------------------------


def test_sft_loss_matches_the_golden_case_and_ignores_masked_tokens() -> None:
    name = "sft_masked_cross_entropy"
    x = CASES[name]["inputs"]
    model, classes = tiny.model("llama"), [50, 51, 52]
    labels = [40 if label == x["ignore_index"] else classes[label] for label in x["shifted_labels"]]
    ids, trained = [30, *labels], [False] + [label != x["ignore_index"] for label in x["shifted_labels"]]
    logits = torch.full((len(labels), tiny.VOCABULARY), NEGLIGIBLE)
    logits[:, classes] = torch.tensor(x["shifted_logits"])
    tiny.teach(model.get_output_embeddings(), hidden(model, ids)[:-1], logits)
    demonstrations = Demonstrations([ids], [trained])
    rows = Rows(lambda chosen: demonstration_tensors(demonstrations, chosen, 0), "", [len(ids)], [sum(trained)])
    rollout = RowCollector(rows, 1, 1).collect(LearnerState.seeded(1, 1))
    policy, objective = LanguagePolicy(model, None, 0), Objective(gamma=0.0)
    expect(name, "token_losses", -policy(rollout.inputs, rollout.actions, rollout.mask).log_probs[rollout.mask])
    metrics = Learner(policy, objective, LearnerSettings(AdamSettings(1e-3))).update(
        rollout, assign_credit(rollout, objective), LearnerState.seeded(1, 1)
    )
    expect(name, "loss", metrics["policy_loss"])


def test_reward_model_loss_and_accuracy_match_the_golden_case(folders: dict[str, Path], tmp_path: Path) -> None:
    """A tie does not count as correct."""
    name = "bradley_terry_rm_loss"
    x = CASES[name]["inputs"]
    pairs = [("a", "b"), ("c", "d"), ("e", "f")]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({"prompt": "x", "chosen": c, "rejected": r}) + "\n" for c, r in pairs))
    data = {"train": str(path), "held_out": str(path), "max_length": 8, "batch": 3}
    world = SupervisedWorld(make_recipe({"kind": "reward", "model": str(folders["llama"]), "data": data}))
    scores: dict[str, float] = {}
    for (chosen, rejected), r_chosen, r_rejected in zip(pairs, x["r_chosen"], x["r_rejected"], strict=True):
        scores |= {chosen: r_chosen, rejected: r_rejected}
    model = world.policy.model
    texts = [[*world.tokens.encode_prompt("x"), *world.tokens.encode_completion(text)] for text in scores]
    e, f = world.tokens.tokenizer.convert_tokens_to_ids(["e", "f"])
    with torch.no_grad():
        letters = model.backbone.get_input_embeddings().weight
        letters[f] = letters[e]  # a tie to the last bit
        ends = torch.stack([model.backbone(input_ids=torch.tensor([ids])).last_hidden_state[0, -1] for ids in texts])
    tiny.teach(model.head, ends, torch.tensor(list(scores.values())).unsqueeze(-1))
    evaluation = world.evaluate()
    expect(name, "loss_mean", evaluation.metrics["held_out_loss"])
    expect(name, "accuracy", evaluation.metrics["held_out_accuracy"])
    state = LearnerState.seeded(1, 3)
    rollout = world.collector.collect(state)
    actual = -world.policy(rollout.inputs, rollout.actions, rollout.mask).log_probs[:, 0]
    expect(name, "loss_per_pair", actual[actual.argsort()[torch.tensor([0, 2, 1])]])  # rows are shuffled
    metrics = make_learner(world.recipe, world.policy).update(rollout, assign_credit(rollout, world.recipe.objective), state)
    expect(name, "loss_mean", metrics["policy_loss"])


def test_standardised_rewards_and_critic_values_match_the_golden_gain_and_bias() -> None:
    """Surefoot always standardises to mean 0 and std 1; it has no variant that only subtracts the mean."""
    name = "rm_gain_bias_normalisation"
    x = CASES[name]["inputs"]
    assert (x["new_mean"], x["new_std"]) == (0.0, 1.0)
    scores = new_reward_model(tiny.model("llama"), 1)
    scores.standardise(torch.tensor([x["old_mean"] - x["old_std"], x["old_mean"] + x["old_std"]]))
    ids, mask = torch.tensor([[30, 31, 32]]), torch.ones(1, 3, dtype=torch.bool)
    rewards, values = [], []
    with torch.no_grad():
        scores.head.weight.zero_()
        for raw in [*x["raw"], 0.0, 1.0]:
            scores.head.bias.fill_(raw)
            rewards.append(float(scores(ids, mask)))
            critic = Critic.from_reward_model(scores.backbone, scores.head, float(scores.mean), float(scores.std))
            policy = LanguagePolicy(tiny.model("llama"), critic, 0)
            inputs = {"prompt": ids[:, :1], "prompt_mask": mask[:, :1]}
            values.append(float(policy.values_after(inputs, ids[:, 1:], mask[:, 1:])))
    for actual in (rewards, values):
        expect(name, "normalised", actual[:3])
        expect(name, "bias", actual[3])
        expect(name, "gain", actual[4] - actual[3])
