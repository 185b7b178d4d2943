"""PPO on text with policy, critic, reference and reward: rollouts, learning, bad input, the reference and traces."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from chain import check_chain

import surefoot
from surefoot import read_trace
from surefoot.core.credit import assign_credit
from surefoot.core.rollout import LearnerState, Rollout
from surefoot.errors import SurefootError
from surefoot.language.data.tokens import Tokens
from surefoot.language.memory.check import workload_of
from surefoot.language.models.loading import load_model
from surefoot.language.models.reward_model import new_reward_model
from surefoot.language.online.world import LanguageWorld
from surefoot.recipes.reading import make_recipe, to_table
from surefoot.runs.factory import make_learner
from surefoot.store.folder import recipe_differences
from surefoot.store.metrics import read_metrics
from surefoot.store.reading import traces_in

from . import tiny
from .tiny import write_folder

VOWELS = """
def vowels(responses):
    return [sum(c in "aeiou" for c in text) / max(1, len(text)) for text in responses]

def by_column(responses, worth):
    return [float(w) for w in worth]

def half(responses):
    return [None if i % 2 else 1.0 for i in range(len(responses))]

def length(responses):
    return [float(len(text)) for text in responses]

def nothing(responses):
    return [None] * len(responses)

def empty(responses):
    return [2.0 if text == "" else 0.0 for text in responses]

def patient(responses):
    return length(responses)

patient.longest = lambda count, arguments, columns: 2.5 * count

def turns(prompts):
    return [float(len(prompt)) for prompt in prompts]
"""


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Prompts with an extra column, and reward functions."""
    (tmp_path / "rewards.py").write_text(VOWELS)
    rows = [{"prompt": f"{i % 7} says ", "worth": i % 3} for i in range(40)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"prompts": str(tmp_path / "prompts.jsonl"), "rewards": str(tmp_path / "rewards.py")}


def fields(files: dict[str, str], model: Path, function: str = "vowels", **changes: Any) -> dict[str, Any]:
    return tiny.fields_of(model, files["prompts"], f"{files['rewards']}:{function}", **changes)


def world(files: dict[str, str], model: Path, function: str = "vowels", **changes: Any) -> LanguageWorld:
    return tiny.world_of(fields(files, model, function, **changes))


def collected(made: LanguageWorld) -> Rollout:
    return made.collector.collect(LearnerState.seeded(1, 64))


def test_run_warns_if_hanging_responses_would_exceed_the_deadline(
    files: dict[str, str], folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out = {"train": files["prompts"], "held_out": files["prompts"], "max_length": 32}
    made = world(files, folders["llama"], "patient", data=held_out, evaluation={"rows": 30})
    notes = [note for note in made.warnings if "hang" in note]
    assert len(notes) == 1
    assert "patient': if all 30 responses hang, a call takes 75 s and the run ends at reward.deadline=60 s" in notes[0]
    reward = {"terms": [{"function": f"{files['rewards']}:patient"}], "deadline": 30.0}
    for ranks, hangs in ((1, ["all 16 responses"]), (2, [])):
        monkeypatch.setattr("surefoot.language.online.world.world_size", lambda ranks=ranks: ranks)
        notes = [note for note in world(files, folders["llama"], reward=reward).warnings if "hang" in note]
        assert len(notes) == len(hangs) == sum(what in note for what, note in zip(hangs, notes, strict=True)), "of one rank"


def test_resume_may_change_the_deadline_but_not_the_tolerance(files: dict[str, str], folders: dict[str, Path]) -> None:
    table = to_table(make_recipe({"kind": "language", **fields(files, folders["llama"])}))

    def changed(**settings: Any) -> list[str]:
        return recipe_differences(table, make_recipe({**table, "reward": {**table["reward"], **settings}}))

    assert changed(deadline=90.0) == []
    assert changed(tolerated=0.2) == ["reward.tolerated: 0.1 -> 0.2"]
    (line,) = changed(terms=[{"function": "other.py:score"}])
    assert "other.py:score" in line
    assert "None" not in line


# ---- rollouts -----------------------------------------------------------------------------------------------------------


def test_score_is_on_the_last_token_and_kl_on_every_token(files: dict[str, str], folders: dict[str, Path]) -> None:
    made = world(files, folders["gpt2"], reference={"beta": 0.3})
    with torch.no_grad():  # otherwise the reference equals the policy and the KL is 0
        made.reference.policy.model.get_output_embeddings().weight.mul_(0.5)
    r = collected(made)
    kl = r.old_log_probs - r.ref_log_probs
    assert kl[r.mask].abs().max() > 0.01
    without = r.rewards + 0.3 * kl
    last = r.terminated | r.truncated
    torch.testing.assert_close(without[r.mask & ~last], torch.zeros_like(without[r.mask & ~last]), atol=1e-6, rtol=0)
    torch.testing.assert_close(without[last], r.reward_parts["score"].sum(-1))
    assert (last.sum(-1) == 1).all()
    assert (last.int().argmax(-1) == r.mask.sum(-1) - 1).all()
    assert (r.rewards[~r.mask] == 0).all()


@pytest.mark.parametrize(("treatment", "wanted"), [("penalty", -2.0), ("subtract", 6.0), ("bootstrap", 8.0)])
def test_responses_without_eos_are_treated_as_configured(
    treatment: str, wanted: float, files: dict[str, str], folders: dict[str, Path]
) -> None:
    settings = {"terms": [{"function": f"{files['rewards']}:length"}], "missing_eos": treatment, "missing_eos_value": -2.0}
    made = world(files, folders["llama"], reward=settings, sampling={"prompts": 8, "max_tokens": 8})
    made.policy.value_head.bias.data.fill_(3.0)
    r = collected(made)
    cut = r.mask.all(-1) & (r.actions[:, -1] != made.tokens.eos_id)
    assert cut.any()
    scores = r.reward_parts["score"][cut].sum(-1)
    text = [made.tokens.decode(row) for row in r.actions[cut]]
    torch.testing.assert_close(
        scores, torch.tensor([wanted - 8.0 + len(t) if treatment != "penalty" else wanted for t in text])
    )
    assert r.truncated[cut].any(-1).all() == (treatment == "bootstrap")
    ahead = assign_credit(r, replace(made.recipe.objective, gae_lambda=0.0)).advantages[cut][:, -1]
    shift = 0.0 if treatment == "bootstrap" else -3.0  # V = 3 everywhere, but only "bootstrap" adds it after a cut
    torch.testing.assert_close(ahead, r.rewards[cut][:, -1] + shift, atol=1e-4, rtol=0)


def test_responses_without_a_score_are_masked_counted_and_neither_bootstrapped_nor_learned_from(
    files: dict[str, str], folders: dict[str, Path]
) -> None:
    settings = {"terms": [{"function": f"{files['rewards']}:half"}], "missing_eos": "bootstrap", "tolerated": 0.5}
    made = world(files, folders["llama"], reward=settings)
    r = collected(made)
    assert r.metrics["without_score"] == 0.5
    assert r.mask.any(-1).tolist() == [True, False] * 8
    assert r.truncated[::2].any()
    assert (r.truncated | r.terminated).sum(-1).tolist() == [1, 0] * 8
    credit = assign_credit(r, made.recipe.objective)
    assert not credit.advantages[1::2].any()
    assert not credit.returns[1::2].any()


def test_reward_functions_get_columns_and_groups_share_a_prompt(files: dict[str, str], folders: dict[str, Path]) -> None:
    rows = [{"prompt": f"{i} says ", "worth": i % 3} for i in range(40)]
    Path(files["prompts"]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = world(files, folders["llama"], "by_column", sampling={"prompts": 8, "samples": 2, "max_tokens": 4})
    r = collected(made)
    worth = {tuple(made.tokens.encode_prompt(str(row["prompt"]))): row["worth"] for row in rows}
    assert len(worth) == len(rows)
    scores = r.reward_parts["score"].sum(-1).tolist()
    prompts = [prompt[mask] for prompt, mask in zip(r.inputs["prompt"], r.inputs["prompt_mask"], strict=True)]
    assert scores == [worth[tuple(prompt.tolist())] for prompt in prompts]
    assert len({*scores}) == 3
    assert r.group.tolist() == [i // 2 for i in range(16)]
    assert (r.inputs["prompt"][::2] == r.inputs["prompt"][1::2]).all()


def test_reward_functions_get_the_whole_conversation(files: dict[str, str], tmp_path: Path) -> None:
    """All messages, not only the last one."""
    seen = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"prompt": seen}) + "\n")
    data = {"train": str(tmp_path / "chat.jsonl"), "max_length": 64}
    made = world(files, Path("pocket"), "turns", data=data, sampling={"prompts": 4, "max_tokens": 4})
    assert collected(made).reward_parts["score"].sum(-1).eq(2).all()


def test_unscored_responses_change_no_weight_and_give_no_held_out_reward(
    files: dict[str, str], folders: dict[str, Path]
) -> None:
    settings = {"terms": [{"function": f"{files['rewards']}:nothing"}], "tolerated": 1.0}
    data = {"train": files["prompts"], "held_out": files["prompts"], "max_length": 32}
    made = world(files, folders["llama"], reward=settings, data=data)
    before = {name: weights.clone() for name, weights in made.policy.state_dict().items()}
    state = LearnerState.seeded(1, 64)
    r = made.collector.collect(state)
    assert not r.mask.any()
    make_learner(made.recipe, made.policy).update(r, assign_credit(r, made.recipe.objective), state)
    for name, weights in made.policy.state_dict().items():
        assert torch.equal(weights, before[name]), name
    evaluation = made.evaluate()
    assert evaluation.metrics["held_out_reward"] is None
    assert all(row["reward"] is None for row in evaluation.samples)


def test_responses_of_eos_alone_terminate_and_score_as_empty_text(files: dict[str, str], folders: dict[str, Path]) -> None:
    made = world(files, folders["gpt2"], "empty", reference={"beta": 0.0})
    bias = torch.zeros(made.policy.readout.vocabulary)
    bias[made.tokens.eos_id] = 1e3  # for every prompt
    made.policy.model.get_output_embeddings().bias = torch.nn.Parameter(bias)
    r = collected(made)
    assert r.actions.tolist() == [[made.tokens.eos_id]] * 16
    assert r.terminated.all()
    assert r.rewards.tolist() == [[2.0]] * 16
    assert r.metrics["eos_rate"] == 1


def test_each_held_out_prompt_gets_one_response(files: dict[str, str], folders: dict[str, Path]) -> None:
    """The number of samples per prompt in training does not matter."""
    changes = {"data": {"train": files["prompts"], "held_out": files["prompts"], "max_length": 32}, "evaluation": {"rows": 7}}
    several = {"sampling": {"prompts": 4, "samples": 4, "max_tokens": 8}}
    one, many = (world(files, folders["llama"], **changes, **more).evaluate() for more in ({}, several))
    assert len(many.samples) == 7
    for ours, theirs in zip(many.samples, one.samples, strict=True):
        assert (ours["prompt"], ours["response"]) == (theirs["prompt"], theirs["response"])
        vowels = sum(letter in "aeiou" for letter in ours["response"])
        assert ours["reward"] == theirs["reward"] == pytest.approx(vowels / max(1, len(ours["response"])))


@pytest.mark.parametrize("own", [False, True])
def test_reference_uses_the_sampling_temperature(own: bool, files: dict[str, str], folders: dict[str, Path]) -> None:
    """Before training the KL is 0, whether the reference is the initial policy or a folder with the same weights."""
    reference = {"model": str(folders["llama"])} if own else {}
    sampling = {"prompts": 16, "max_tokens": 8, "temperature": 0.6}
    r = collected(world(files, folders["llama"], reference=reference, sampling=sampling))
    assert float(r.reward_parts["kl"].abs().max()) < 1e-5


def test_micro_batch_limits_rows_per_pass_in_collection_and_updates(files: dict[str, str], folders: dict[str, Path]) -> None:
    """So do the passes of an update."""
    made = world(files, folders["llama"], optimizer={"micro_batch": 3}, sampling={"prompts": 8, "max_tokens": 6})
    whole = collected(world(files, folders["llama"], sampling={"prompts": 8, "max_tokens": 6}))
    sizes: list[int] = []
    for model in (made.policy, made.reference.policy):
        model.register_forward_hook(lambda _, arguments, __: sizes.append(len(arguments[1])))
    r = collected(made)
    assert sizes
    assert max(sizes) <= 3
    torch.testing.assert_close(r.rewards, whole.rewards, atol=1e-5, rtol=0)
    sizes.clear()
    make_learner(made.recipe, made.policy).update(r, assign_credit(r, made.recipe.objective), LearnerState.seeded(1, 64))
    assert sum(sizes) == 8 * made.recipe.objective.reuse.epochs
    assert max(sizes) <= 3


# ---- learning -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["PPO_PENALTY_ADAPTIVE", "A2C", "REINFORCE"])
def test_control_algorithms_train_on_text(algorithm: str, files: dict[str, str], folders: dict[str, Path]) -> None:
    rows: list[Any] = []
    surefoot.train(
        "language", algorithm, **fields(files, folders["llama"]), callback=lambda metrics: bool(rows.append(metrics))
    )
    assert len(rows) == 4
    assert all(row["ratio_at_start"] == pytest.approx(1, abs=1e-4) for row in rows)
    updates = 16 if algorithm == "PPO_PENALTY_ADAPTIVE" else 1
    assert rows[-1]["updates"] == 4 * updates, "one optimizer step per epoch and minibatch"


def test_ppo_raises_the_reward(files: dict[str, str], folders: dict[str, Path]) -> None:
    rows: list[Any] = []
    surefoot.train(
        "language",
        **fields(files, folders["llama"], steps=64 * 24, sampling={"prompts": 64, "max_tokens": 8}),
        reference={"beta": 0.01},
        callback=lambda metrics: bool(rows.append(metrics)),
    )
    first, last = (sum(row["reward"] for row in part) / 3 for part in (rows[:3], rows[-3:]))
    assert first < 0.2
    assert last > 0.6


# ---- bad input ----------------------------------------------------------------------------------------------------------


def test_reward_function_without_its_column_is_rejected_before_the_run_begins(
    files: dict[str, str], folders: dict[str, Path], tmp_path: Path
) -> None:
    Path(files["rewards"]).write_text("def asks(responses, answer):\n    return [0.0] * len(responses)\n")
    with pytest.raises(SurefootError, match="requires 'answer'; available: prompts, responses, worth"):
        surefoot.train("language", run_dir=tmp_path / "run", **fields(files, folders["llama"], "asks"))
    assert not (tmp_path / "run").exists()


def test_errors_begin_with_their_field(files: dict[str, str], folders: dict[str, Path]) -> None:
    missing = "mps" if torch.cuda.is_available() else "cuda"
    for changes, field in (
        ({"device": missing}, f"device='{missing}': can't be used here"),
        ({"sampling": {"prompts": 8, "max_tokens": 128}}, r"sampling\.max_tokens=128: leaves no room"),
        ({"reward": {"terms": [{"model": str(folders["llama"])}]}}, "reward.terms"),
        ({"reference": {"model": "./nowhere"}}, "reference.model"),
        ({"reward": {"terms": [{"function": f"{files['rewards']}:length"}], "gold": "nowhere:gold"}}, "reward.gold"),
        ({"critic": {"own_model": True, "start": "./nowhere"}}, "critic.start"),
    ):
        with pytest.raises(SurefootError, match=f"^{field}"):
            world(files, folders["llama"], **changes)


def test_reference_and_critic_need_the_policys_vocabulary_and_context(
    files: dict[str, str], folders: dict[str, Path], tmp_path: Path
) -> None:
    """The tokenizers' vocabularies are compared, not the sizes of embeddings."""
    other = write_folder(tmp_path / "other", "llama")
    tokenizer_json = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer_json["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer_json))
    short = write_folder(tmp_path / "short", "gpt2", n_positions=12)
    for folder, message in ((other, "its vocabulary differs"), (short, "have up to 15 tokens and its context is 12")):
        model, tokenizer = load_model(folder)
        new_reward_model(model, 1, tokenizer).save(tmp_path / f"{folder.name}-scores")
        changes: dict[str, Any] = {"own_model": True, "start": str(tmp_path / f"{folder.name}-scores")}
        with pytest.raises(SurefootError, match=f"critic.start=.*{message}"):
            world(files, folders["llama"], critic=changes)
        with pytest.raises(SurefootError, match=f"reference.model=.*{message}"):
            world(files, folders["llama"], reference={"model": str(folder)})


# ---- the reference ---------------------------------------------------------------------------------------------------


GROUPS: dict[str, Any] = {"sampling": {"prompts": 4, "samples": 4, "max_tokens": 8}}
KL_METRICS = {"kl_reference", "kl_reference_response", "held_out_kl"}


@pytest.mark.parametrize(
    ("changes", "exists"),
    [
        ({}, True),
        ({"reference": {"beta": 0.0}}, False),
        ({"reference": {"beta": 0.0, "measure": True}}, True),
        ({"algorithm": "GRPO", **GROUPS}, True),
        ({"algorithm": "DR_GRPO", **GROUPS}, False),
        ({"algorithm": "DAPO", **GROUPS}, False),
        ({"algorithm": "CISPO", **GROUPS}, False),
        ({"algorithm": "DAPO", "reference": {"beta": 0.1}, **GROUPS}, True),
        ({"algorithm": "DAPO", "objective": {"reference_coefficient": 0.1}, **GROUPS}, True),
    ],
)
def test_reference_exists_and_is_planned_only_if_something_uses_it(
    changes: Any, exists: bool, files: dict[str, str], folders: dict[str, Path]
) -> None:
    made = world(files, folders["llama"], **changes)
    assert (made.reference is not None) == exists
    assert (workload_of(made.recipe, prompt=8, response=8).reference is not None) == exists
    assert any("no reference" in line for line in made.arithmetic()) != exists
    rollout = collected(made)
    assert (
        (rollout.ref_log_probs is not None) == exists == ("kl" in rollout.reward_parts) == ("kl_reference" in rollout.metrics)
    )


def test_explicit_reference_model_is_kept_without_a_penalty(files: dict[str, str], folders: dict[str, Path]) -> None:
    recipe = world(files, folders["llama"], reference={"beta": 0.0, "model": str(folders["llama"])}).recipe
    assert recipe.has_reference
    assert workload_of(recipe, prompt=8, response=8).reference is not None


@pytest.mark.parametrize(("algorithm", "adapter"), [("PPO_CLIP", True), ("DAPO", False)])
def test_measuring_the_reference_changes_no_weight_and_no_other_metric(
    algorithm: str, adapter: bool, files: dict[str, str], folders: dict[str, Path], tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"algorithm": algorithm, "steps": 48, **(GROUPS if algorithm == "DAPO" else {})}
    changes["data"] = {"train": files["prompts"], "held_out": files["prompts"], "max_length": 32}
    changes["evaluation"] = {"rows": 4, "every": 16}
    if adapter:
        changes["adapter"] = {"rank": 2, "merge": False}
    runs = {}
    for measure in (False, True):
        settings = fields(files, folders["llama"], **changes, reference={"beta": 0.0, "measure": measure})
        trained = surefoot.train("language", run_dir=tmp_path / str(measure), check_memory=False, **settings)
        runs[measure] = trained.model.state_dict(), read_metrics(tmp_path / str(measure) / "metrics.jsonl")
    for name, weight in runs[False][0].items():
        assert torch.equal(weight, runs[True][0][name]), name
    for without, measured in zip(runs[False][1], runs[True][1], strict=True):
        assert not KL_METRICS & without.keys()
        assert {"kl_reference", "kl_reference_response"} <= measured.keys()
        for name in ("reward", "policy_loss", "gradient_norm_policy", "held_out_reward", "updates"):
            assert without.get(name) == measured.get(name), name


# ---- traces ----------------------------------------------------------------------------------------------------------


TRACED: dict[str, Any] = {
    "sampling": {"prompts": 8, "samples": 2, "max_tokens": 8},
    "reference": {"beta": 0.3},
    "optimizer": {"learning_rate": 1e-2, "micro_batch_tokens": 64},
    "traces": {"every": 1, "rows": 3},
}


def test_traced_tokens_rewards_and_kl_are_consistent(files: dict[str, str], folders: dict[str, Path], tmp_path: Path) -> None:
    surefoot.train("language", run_dir=tmp_path / "run", **fields(files, folders["llama"], **TRACED))
    model, tokenizer = load_model(folders["llama"])
    tokens = Tokens(tokenizer, model)
    files = traces_in(tmp_path / "run" / "traces")
    assert [file.stem for file in files] == ["16", "32", "48", "64"]
    met, spent = set(), 0.0
    for file in files:
        trace = read_trace(file)
        assert (trace.gamma, trace.gae_lambda, trace.clip, trace.clip_high) == (1.0, 0.95, 0.2, 0.2)
        met |= check_chain(trace, "batch")
        assert len({row.row for row in trace.rows}) == 3
        for row in trace.rows:
            assert row.start == 0
            assert row.mask.all()
            assert (row.terminated | row.truncated)[-1]
            assert row.about["prompt"].endswith(" says ")
            assert len(row.about["tokens"]) == len(row.mask)
            assert row.about["tokens"] == [tokenizer.decode([i]) for i in row.actions.tolist()]
            plain = [i not in tokenizer.all_special_ids for i in row.actions.tolist()]
            text = "".join(token for token, keep in zip(row.about["tokens"], plain, strict=True) if keep)
            assert text == tokens.decode(row.actions)
            assert row.reward_parts["score"].sum() == pytest.approx(
                sum(c in "aeiou" for c in text) / max(1, len(text)), abs=1e-6
            )
            for t in range(len(row.mask)):
                kl = float(row.old_log_probs[t] - row.ref_log_probs[t])
                assert row.reward_parts["kl"][t] == pytest.approx(kl, abs=1e-6)
                score = float(row.reward_parts["score"][t])
                assert row.rewards[t] == pytest.approx(score - row.about["reference_beta"] * kl, abs=1e-5)
                spent += abs(kl)
    assert met == {"unclipped", "clipped"}
    assert spent > 0.1


def test_traces_change_no_weight(files: dict[str, str], folders: dict[str, Path], tmp_path: Path) -> None:
    traced = surefoot.train("language", run_dir=tmp_path / "run", **fields(files, folders["llama"], **TRACED))
    alone = surefoot.train("language", **fields(files, folders["llama"], **TRACED))
    assert traces_in(tmp_path / "run" / "traces")
    for name, weights in traced.model.state_dict().items():
        assert weights.equal(alone.model.state_dict()[name]), name


def test_responses_without_a_score_are_not_traced(files: dict[str, str], folders: dict[str, Path], tmp_path: Path) -> None:
    reward = {"terms": [{"function": f"{files['rewards']}:half"}], "tolerated": 0.5}
    surefoot.train("language", run_dir=tmp_path / "run", **fields(files, folders["llama"], **TRACED, steps=16, reward=reward))
    (file,) = traces_in(tmp_path / "run" / "traces")
    trace = read_trace(file)
    assert len(trace.rows) == 3
    assert all(row.row % 2 == 0 for row in trace.rows)


def test_demonstrations_are_traced_only_if_enabled(tmp_path: Path, folders: dict[str, Path]) -> None:
    rows = [{"prompt": f"{i} ", "completion": "yes" * (1 + i % 3)} for i in range(16)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table: dict[str, Any] = {
        "model": str(folders["llama"]),
        "steps": 16,
        "data": {"train": str(tmp_path / "rows.jsonl"), "batch": 8},
    }
    surefoot.train("sft", run_dir=tmp_path / "plain", **table)
    assert not (tmp_path / "plain" / "traces").exists()
    surefoot.train("sft", run_dir=tmp_path / "run", **table, traces={"rows": 2})
    files = traces_in(tmp_path / "run" / "traces")
    assert len(files) == 2
    for file in files:
        trace = read_trace(file)
        assert check_chain(trace, None, ratios=False) == {"log_prob"}
        for row in trace.rows:
            assert "".join(row.about["tokens"]).startswith("yes")
            assert (row.visits.log_probs < 0).all()
            assert row.rewards.tolist() == [1.0] * len(row.mask)
