"""Multi-turn responses: rollout contents, truncation, rewards, failing environments, runs, and the guess task."""

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from chain import check_chain
from torch import Tensor

import surefoot
from surefoot import read_trace
from surefoot.core.credit import assign_credit
from surefoot.core.rollout import LearnerState, Rollout
from surefoot.core.seeding import deterministic
from surefoot.errors import SurefootError
from surefoot.functional import gae
from surefoot.language import tasks
from surefoot.language.analysis.evaluate import evaluate_run, index_of_token
from surefoot.language.data.rows import write_rows
from surefoot.language.data.tokens import Tokens
from surefoot.language.models.loading import load_model
from surefoot.language.online.turns import Conversation, Environments, add_turn_rewards
from surefoot.language.online.world import LanguageWorld
from surefoot.language.rewards.scores import Scores, scatter_scores
from surefoot.language.sampling import sampler
from surefoot.language.sampling.ends import Ends, cut_at_stop
from surefoot.language.sampling.engines import Request, Samples
from surefoot.language.tasks.guess import Guess
from surefoot.recipes.language import TurnSettings
from surefoot.store.metrics import read_metrics
from surefoot.store.reading import traces_in

from . import tiny

ENVIRONMENTS = '''
import time

class Talk:
    """Pays each turn by its letters, and is done after some turns of which the row says how many."""
    def __init__(self, after=3):
        self.after = after
    def reset(self, row):
        self.turns, self.left = 0, row.get("turns", self.after)
        return [{"role": "user", "content": row.get("prompt", "hi")}]
    def step(self, response):
        self.turns += 1
        told = [{"role": "user", "content": f"{len(response)}, and then? " * (self.turns % 2 + 1)}]
        return told, float(self.turns + len(set(response))), self.turns >= self.left

class Plain(Talk):
    def reset(self, row):
        return super().reset(row)[0]["content"]
    def step(self, response):
        told, reward, done = super().step(response)
        return told[0]["content"], reward, done

class Endless(Talk):
    def step(self, response):
        return *super().step(response)[:2], False

class Long(Endless):
    def step(self, response):
        return [{"role": "user", "content": "word " * 8}], 1.0, False

class Once(Talk):
    def reset(self, row):
        return row["prompt"]
    def step(self, response):
        return [], sum(c in "aeiou" for c in response) / max(1, len(response)), True

def broken(reset=lambda start: start, step=lambda *reply: reply):
    """Rows of two turns get something else."""
    class Broken(Talk):
        def reset(self, row):
            start = super().reset(row)
            return reset(start) if self.left == 2 else start
        def step(self, response):
            reply = super().step(response)
            return step(*reply) if self.left == 2 else reply
    return Broken

HALF = [{"role": "user", "content": "cut \\ud83d"}]
Cut, Mute = broken(lambda start: HALF), broken(lambda start: [])
Wordy = broken(lambda start: [{"role": "user", "content": "x" * 300}])
CutReply = broken(step=lambda told, reward, done: (HALF, reward, done))
NotANumber = broken(step=lambda told, reward, done: (told, float("nan"), done))
Pair = broken(step=lambda told, reward, done: (told, reward))
Silent = broken(step=lambda told, reward, done: (None, reward, done))
Unsure = broken(step=lambda told, reward, done: (told, reward, "maybe"))

class Raises(Talk):
    def step(self, response):
        if self.left == 2 and self.turns == 1:
            raise RuntimeError("no\\nnetwork")
        return super().step(response)

class Closes(Talk):
    """Notes who was opened and is closed; some fail meanwhile, and one of these in closing too."""
    opened, closed = [], []
    def reset(self, row):
        Closes.opened.append(self)
        return super().reset(row)
    def step(self, response):
        if self.left == 2:
            raise RuntimeError("lost")
        return super().step(response)
    def close(self):
        if self in Closes.opened:
            Closes.closed.append(self)
            if getattr(self, "left", 0) == 2:
                raise RuntimeError("lost, too")

class Unready(Talk):
    def reset(self, row):
        self.browser = open(__file__)
        return super().reset(row)
    def close(self):
        self.browser.close()

class Dead(Talk):
    def reset(self, row):
        raise RuntimeError("down")

def each(tokens):
    return [[0.5] * len(row) for row in tokens]

def whole(responses):
    return [1.0] * len(responses)

class Hangs(Talk):
    def step(self, response):
        time.sleep(3)

class Deals(Talk):
    """Plays with what it gets, and needs all of it."""
    def reset(self, row):
        assert row["deck"] == [1, 2, 3], row
        row["deck"].clear()
        return super().reset(row)

class Headless:
    def reset(self, row):
        return "hi"

class Unmade:
    def __init__(self):
        raise OSError("no such\\nbrowser")

thing = 3

def last(prompts, responses, turns):
    return [100.0 * len(prompt) for prompt in prompts]
'''
STOP = list("aeiou nrstl.,!?AEIOUNRSTL0123456789")
"""enough strings that most turns of a random model end before the token limit"""
BAD = ("CutReply", "Mute", "Raises")


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Rows for conversations of one to three turns, and a file of environments."""
    (tmp_path / "others.py").write_text(ENVIRONMENTS)
    write_rows(tmp_path / "rows.jsonl", ({"prompt": "say " + "x" * (i % 3), "turns": i % 3 + 1} for i in range(24)))
    return {"rows": str(tmp_path / "rows.jsonl"), "others": str(tmp_path / "others.py")}


def fields(files: dict[str, str], model: Path, name: str = "Talk", **changes: Any) -> dict[str, Any]:
    table: dict[str, Any] = {
        "steps": 24,
        "data": {"train": files["rows"], "max_length": 24},
        "sampling": {"prompts": 12, "max_tokens": 6, "stop": STOP},
        "turns": {"environment": f"{files['others']}:{name}", "max_turns": 3},
        "reward": {"missing_eos": "none"},
    }
    return tiny.fields_of(model, files["rows"], "", **{**table, **changes})


def world(files: dict[str, str], model: Path, name: str = "Talk", **changes: Any) -> LanguageWorld:
    """A world with frequent EOS, a non-zero critic, and a reference that differs from the policy."""
    made = tiny.world_of(fields(files, model, name, **changes))
    with torch.no_grad():
        made.policy.model.get_output_embeddings().weight[made.tokens.eos_id] *= 3
        if made.reference is not None:
            made.reference.policy.model.get_output_embeddings().weight.mul_(0.7)
        if made.policy.value_head is not None:
            made.policy.value_head.weight.normal_(generator=torch.Generator().manual_seed(1))
    return made


def collected(made: LanguageWorld) -> Rollout:
    return made.collector.collect(LearnerState.seeded(1, 64))


def turn_text(tokens: Tokens, ids: Tensor | list[int]) -> str:
    """A turn's text as environments get it: with special tokens, without the EOS or stop string that ended it."""
    ids = [int(i) for i in ids]
    ids = ids[:-1] if ids[-1:] == [tokens.eos_id] else ids
    characters = [tokens.decode([i]) for i in ids]  # "" for special tokens
    end = next((place for place, text in enumerate(characters) if text in STOP), None)
    return tokens.tokenizer.decode(ids[:end])


def pieces(row: Tensor) -> list[list[int]]:
    """Indices of each contiguous run of True.   [T]"""
    results: list[list[int]] = []
    for place, kept in enumerate(row.tolist()):
        if kept and results and results[-1][-1] == place - 1:
            results[-1].append(place)
        elif kept:
            results.append([place])
    return results


# ---- rollout contents ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma"])  # no qwen2: transformers loads its tiny tokenizer without spaces
def test_conversation_is_one_templated_row_masked_to_the_models_tokens(
    kind: str, files: dict[str, str], folders: dict[str, Path]
) -> None:
    made = world(files, folders[kind])
    r, tokens = collected(made), made.tokens
    turns = set()
    for row in range(len(r.mask)):
        prompt = r.inputs["prompt"][row][r.inputs["prompt_mask"][row]].tolist()
        own = pieces(r.mask[row])
        messages = [{"role": "user", "content": tokens.decode(prompt)}]
        for number, place in enumerate(own):
            sampled = r.actions[row][place].tolist()
            ids = sampled[:-1] if sampled[-1] in tokens.eos_ids else sampled
            messages.append({"role": "assistant", "content": tokens.tokenizer.decode(ids)})
            if number + 1 < len(own):
                received = r.actions[row, place[-1] + 1 : own[number + 1][0]].tolist()
                reply = tokens.decode(received)
                assert reply.startswith(f"{len(turn_text(tokens, ids))}, and then? ")
                messages.append({"role": "user", "content": reply})
        whole, kept = tokens.render(messages), r.actions[row, : own[-1][-1] + 1].tolist()
        closed = kept[-1] in tokens.eos_ids
        assert prompt + kept == (whole if closed else whole[:-1])
        turns.add(len(own))
    assert turns == {1, 2, 3}
    assert r.metrics["turns"] == pytest.approx(2.0, abs=0.7)


def test_rewards_get_turns_without_their_stop_strings(files: dict[str, str], folders: dict[str, Path]) -> None:
    made, tokens = world(files, folders["llama"]), Tokens(load_model(folders["llama"])[1])
    answers = made.collector.respond(made.collector.prompts, range(24))
    whole = cut = 0
    for talk, history, sample in zip(answers.conversations, answers.prompts.prompts, answers.texts, strict=True):
        last = [talk.ids[place] for place in talk.last]
        assert talk.answer == turn_text(tokens, last)
        assert sample == cut_at_stop(tokens.decode(last), STOP), "rewards get no special tokens"
        written = [message["content"] for message in history if message["role"] == "assistant"]
        assert written == [
            turn_text(tokens, [tokens.eos_id, *tokens.tokenizer(turn)["input_ids"]])[5:] for turn in talk.turns[:-1]
        ]
        assert talk.transcript.startswith((*written, talk.answer)[0])
        whole, cut = whole + len(written), cut + (written != talk.turns[:-1])
    assert whole > cut > 0
    plain = world(files, folders["llama"], "Plain")
    talks = plain.collector.respond(plain.collector.prompts, range(24)).conversations
    talk = next(talk for talk in talks if len(talk.turns) > 1 and talk.turns[0] != talk.answers[0])
    assert talk.history.startswith(talk.start + talk.turns[0]), "plain text is kept as the model read it"


def test_turn_reward_is_on_its_last_token_and_kl_on_the_models_tokens(files: dict[str, str], folders: dict[str, Path]) -> None:
    made = world(files, folders["llama"], reference={"beta": 0.3})
    r = collected(made)
    wanted = torch.zeros_like(r.rewards)
    for row in range(len(r.mask)):
        for number, place in enumerate(pieces(r.mask[row]), 1):
            wanted[row, place[-1]] = number + len(set(turn_text(made.tokens, r.actions[row][place])))
    kl = (r.old_log_probs - r.ref_log_probs) * r.mask
    assert kl.abs().max() > 0.01
    torch.testing.assert_close(r.rewards, wanted - 0.3 * kl, atol=1e-4, rtol=0)
    assert r.metrics["reward"] == pytest.approx(float(wanted.sum(-1).mean()), rel=1e-5)


@pytest.mark.parametrize("treatment", ["none", "bootstrap"])
def test_gae_skips_tokens_that_the_model_did_not_write(treatment: str, files: dict[str, str], folders: dict[str, Path]) -> None:
    made = world(files, folders["gpt2"], "Endless", reward={"missing_eos": treatment})
    r = collected(made)
    credit = assign_credit(r, replace(made.recipe.objective, gae_lambda=0.9))
    assert (~r.mask[:, :-1] & r.mask[:, 1:]).any(), "there are masked tokens between the turns"
    for row in range(len(r.mask)):
        keep = r.mask[row]
        rewards, values = r.rewards[row][keep], r.values[row][keep]
        behind = r.next_values[row][keep][-1:] if treatment == "bootstrap" else torch.zeros(1)
        ends = torch.zeros_like(keep[keep])
        ends[-1] = True
        alone = gae(
            rewards,
            values,
            torch.cat([values[1:], behind]),
            terminated=ends & (treatment == "none"),
            truncated=ends & (treatment == "bootstrap"),
            gamma=1.0,
            lam=0.9,
        )
        torch.testing.assert_close(credit.advantages[row][keep], alone, rtol=1e-5, atol=1e-5)
        assert not credit.advantages[row][~keep].any()


def test_sampler_and_trainer_log_probs_agree_across_turns(files: dict[str, str], folder: Path) -> None:
    r = collected(world(files, folder))
    assert r.metrics["turns"] > 1.5
    assert r.metrics["sampler_gap"] < 1e-4
    for x in (r.old_log_probs, r.values, r.rewards):
        assert not x[~r.mask].any()


def test_plain_text_replies_are_appended_without_a_template(files: dict[str, str], folders: dict[str, Path]) -> None:
    made = world(files, folders["llama"], "Plain")
    made.tokens.tokenizer.chat_template = None
    r = collected(made)
    assert r.metrics["turns"] > 1.5
    for row, sample in enumerate(made.collector.last_samples):
        length = pieces(r.mask[row])[-1][-1] + 1
        assert sample["response"].startswith(made.tokens.decode(r.actions[row, :length]))


def test_single_turn_equals_a_response_without_an_environment(files: dict[str, str], folders: dict[str, Path]) -> None:
    (Path(files["rows"]).parent / "vowels.py").write_text(
        "def vowels(responses):\n    return [sum(c in 'aeiou' for c in t) / max(1, len(t)) for t in responses]\n"
    )
    terms = [{"function": f"{Path(files['rows']).parent}/vowels.py:vowels"}]
    write_rows(Path(files["rows"]), ({"prompt": [{"role": "user", "content": "hi"}]} for _ in range(24)))
    reward = {"terms": terms, "missing_eos": "penalty", "special_tokens": True}
    one = collected(world(files, folders["llama"], turns={}, reward=reward))
    other = collected(world(files, folders["llama"], "Once", reward={"missing_eos": "penalty"}))
    for name in ("actions", "mask", "rewards", "values", "next_values", "old_log_probs", "terminated"):
        actual, wanted = getattr(other, name), getattr(one, name)
        width = min(actual.shape[1], wanted.shape[1])  # a reply after truncation stays at the end
        torch.testing.assert_close(actual[:, :width] * one.mask[:, :width], wanted[:, :width] * one.mask[:, :width])
    assert other.mask.sum() == one.mask.sum()


# ---- truncated conversations --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("treatment", "last"), [("penalty", -2.0), ("subtract", -2.0)])
def test_unfinished_conversation_is_truncated_and_keeps_earlier_rewards(
    treatment: str, last: float, files: dict[str, str], folders: dict[str, Path]
) -> None:
    reward = {"missing_eos": treatment, "missing_eos_value": -2.0}
    made = world(files, folders["llama"], "Endless", reward=reward, reference={"beta": 0.0})
    r = collected(made)
    assert r.metrics["eos_rate"] == 0
    for row in range(len(r.mask)):
        for number, place in enumerate(own := pieces(r.mask[row]), 1):
            earned = number + len(set(turn_text(made.tokens, r.actions[row][place])))
            wanted = earned if number < len(own) else last + (earned if treatment != "penalty" else 0)
            assert float(r.rewards[row, place[-1]]) == pytest.approx(wanted, abs=1e-4)


def test_truncated_conversation_bootstraps_from_all_text_and_the_last_reply(
    files: dict[str, str], folders: dict[str, Path]
) -> None:
    made = world(files, folders["llama"], "Endless", reward={"missing_eos": "bootstrap"})
    r, widths = collected(made), set()
    for row in range(len(r.mask)):
        own = pieces(r.mask[row])
        place, text = own[-1][-1], made.collector.last_samples[row]["response"]
        ended = bool(made.tokens.decode(r.actions[row][own[-1]]).endswith(tuple(STOP))) or r.actions[row, place] == 1
        prompt = r.inputs["prompt"][row][r.inputs["prompt_mask"][row]].tolist()
        ids = prompt + r.actions[row, : place + 1].tolist()
        if ended:
            reply = [{"role": "user", "content": text.split("user: ")[-1]}]
            ids += made.tokens.encode_reply(reply, ids[-1:])
        with torch.no_grad():
            state = made.policy.model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
            wanted = made.policy.value_head(state)
        assert r.truncated[row, place]
        torch.testing.assert_close(r.next_values[row, place], wanted, atol=1e-4, rtol=1e-4)
        widths.add(place)
    assert len(widths) > 1, "rows are truncated at different lengths"


def test_turn_begins_only_if_all_of_it_fits(files: dict[str, str], folders: dict[str, Path]) -> None:
    turns = {"environment": f"{files['others']}:Long", "max_turns": 20, "max_length": 120}
    r = collected(world(files, folders["gpt2"], turns=turns))
    lengths = r.inputs["prompt_mask"].sum(-1) + (r.mask.flip(-1).cumsum(-1).flip(-1) > 0).sum(-1)
    assert lengths.max() <= 120
    assert r.metrics["turns"] < 4


# ---- rewards ------------------------------------------------------------------------------------------------------------


def test_final_reward_scores_the_last_turn_given_the_whole_history(files: dict[str, str], folders: dict[str, Path]) -> None:
    reward = {"missing_eos": "none", "terms": [{"function": f"{files['others']}:last"}]}
    made = world(files, folders["llama"], reward=reward, reference={"beta": 0.0})
    r = collected(made)
    for row in range(len(r.mask)):
        own = pieces(r.mask[row])
        for number, place in enumerate(own, 1):
            earned = number + len(set(turn_text(made.tokens, r.actions[row][place])))
            final = 100.0 * (2 * len(own) - 1) if number == len(own) else 0.0  # messages before the last turn
            assert float(r.rewards[row, place[-1]]) == pytest.approx(earned + final, rel=1e-5)
    assert {"reward_environment", "reward_last"} <= set(r.metrics)


@pytest.mark.parametrize("treatment", ["none", "penalty"])
def test_token_rewards_of_the_last_turn_add_to_turn_rewards(
    treatment: str, files: dict[str, str], folders: dict[str, Path], tmp_path: Path
) -> None:
    code = "def each(tokens):\n    return [[float(1 + i) for i in range(len(row))] for row in tokens]\neach.per = 'token'\n"
    (tmp_path / "each.py").write_text(code)
    reward = {
        "missing_eos": treatment,
        **({} if treatment == "none" else {"missing_eos_value": -2.0}),
        "terms": [{"function": f"{tmp_path / 'each.py'}:each"}],
    }
    made = world(files, folders["llama"], "Endless", reward=reward, reference={"beta": 0.0})
    r = collected(made)
    for row in range(len(r.mask)):
        own = pieces(r.mask[row])
        for number, place in enumerate(own, 1):
            wanted = torch.zeros(len(place))
            wanted[-1] = number + len(set(turn_text(made.tokens, r.actions[row][place])))
            if number == len(own):
                wanted = wanted + torch.arange(1, len(place) + 1) if treatment == "none" else 0 * wanted
                wanted[-1] -= 2.0 * (treatment == "penalty")
            torch.testing.assert_close(r.rewards[row, place], wanted, atol=1e-4, rtol=1e-4)


def test_group_advantages_use_the_total_reward_of_all_turns(files: dict[str, str], folders: dict[str, Path]) -> None:
    sampling = {"prompts": 3, "samples": 4, "max_tokens": 6, "stop": STOP}
    made = world(files, folders["llama"], algorithm="GRPO", sampling=sampling, objective={"reuse": {"minibatches": 1}})
    r = collected(made)
    credit = assign_credit(r, made.recipe.objective)
    totals = r.rewards.sum(-1).view(3, 4)
    wanted = ((totals - totals.mean(-1, keepdim=True)) / (totals.std(-1, keepdim=True) + 1e-4)).flatten()
    torch.testing.assert_close(credit.advantages, wanted.unsqueeze(-1) * r.mask, atol=1e-4, rtol=1e-4)
    drawn = {"rounds": 3, **sampling}
    more = collected(world(files, folders["llama"], algorithm="DAPO", sampling=drawn, objective={"reuse": {"minibatches": 1}}))
    assert more.mask.any(-1).all()


# ---- calls at once -----------------------------------------------------------------------------------------------------


def test_environments_run_at_once_and_converse_as_one_at_a_time() -> None:
    model = tiny.model("llama")

    def conversations(parties: int, at_once: int) -> list[Any]:
        """Of environments each of which goes on when as many have been entered."""
        entered = {name: threading.Barrier(parties, timeout=60) for name in ("reset", "step")}

        class Waits:
            def reset(self, row: dict[str, Any]) -> str:
                entered["reset"].wait()
                self.seed = row["seed"]
                return "hi "

            def step(self, response: str) -> tuple[str, float, bool]:
                entered["step"].wait()
                return "", float(self.seed % 97 + len(response)), True

        settings = TurnSettings(environment="surefoot.language.tasks.guess:Guess", at_once=at_once)
        made = Environments(settings, (64, 100), deadline=60, tolerated=0.0)
        made.make = Waits
        draw = partial(drawn_by, model)
        talks = made.converse([{} for _ in range(24)], range(24), draw, Ends(Tokens(tiny.tokenizer())))
        return [(talk.failure, talk.rewards, talk.ids, talk.turns) for talk in talks]

    together = conversations(24, 24)
    assert {failure for failure, *_ in together} == {None}
    assert together == conversations(1, 1) == conversations(1, 5)


def drawn_by(model: Any, prompts: Any, seeds: Any) -> Samples:
    return sampler.sample(model, Request(prompts, seeds, 4, (1,), 0))


# ---- failures -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BAD)
def test_failed_conversations_are_masked_and_the_rest_continue(
    name: str, files: dict[str, str], folders: dict[str, Path]
) -> None:
    made = world(files, folders["llama"], name, reward={"tolerated": 0.4, "missing_eos": "bootstrap"})
    r = collected(made)
    failed = ~r.mask.any(-1)
    assert r.metrics["without_score"] == pytest.approx(float(failed.float().mean()))
    assert 0 < failed.sum() <= 4, "only two-turn rows fail, unless truncated in the first turn"
    assert torch.isfinite(r.rewards).all()
    assert torch.isfinite(r.next_values).all()
    assert [sample["reward"] is None for sample in made.collector.last_samples] == failed.tolist()


def test_environment_that_modifies_its_row_does_not_affect_others(files: dict[str, str], folders: dict[str, Path]) -> None:
    """Other samples, later iterations and evaluations get the same rows."""
    write_rows(files["rows"], ({"prompt": f"say {i}", "turns": 2, "deck": [1, 2, 3]} for i in range(6)))
    data = {"train": files["rows"], "held_out": files["rows"], "max_length": 24}
    sampling = {"prompts": 6, "samples": 2, "max_tokens": 6, "stop": STOP}
    made = world(
        files, folders["llama"], "Deals", data=data, sampling=sampling, reward={"tolerated": 0.0, "missing_eos": "none"}
    )
    for _ in range(2):
        collected(made)
        assert made.evaluate() is not None
    assert made.prompts.columns["deck"] == [[1, 2, 3]] * 6


def test_seed_column_is_rejected_unless_renamed(files: dict[str, str], folders: dict[str, Path]) -> None:
    write_rows(files["rows"], ({"prompt": "say", "turns": 1, "seed": 7} for _ in range(12)))
    with pytest.raises(SurefootError, match=r"the rows have a column 'seed', .*data.columns = \{ seed = \"row_seed\" \}"):
        world(files, folders["llama"])
    world(files, folders["llama"], data={"train": files["rows"], "columns": {"seed": "row_seed"}})


def test_gold_and_rewards_skip_failed_conversations(files: dict[str, str], folders: dict[str, Path], tmp_path: Path) -> None:
    """The function is not even called with an empty answer for a conversation that never began."""
    (tmp_path / "golden.py").write_text(
        "seen = []\n"
        "def gold(responses):\n    seen.append(len(responses))\n    return [float(len(text)) for text in responses]\n"
    )
    function = f"{tmp_path}/golden.py:gold"
    reward = {"tolerated": 0.4, "missing_eos": "none", "gold": function, "terms": [{"function": function}]}
    made = world(files, folders["llama"], "Wordy", reward=reward)
    r = collected(made)
    failed = ~r.mask.any(-1)
    assert 0 < failed.sum() < 6
    assert [sample["gold"] is None for sample in made.collector.last_samples] == failed.tolist()
    scored = [sample["gold"] for sample in made.collector.last_samples if sample["gold"] is not None]
    assert r.metrics["gold"] == pytest.approx(sum(scored) / len(scored))
    assert set(made.gold.function.__globals__["seen"]) == {12 - int(failed.sum())}, "failed conversations are not passed to it"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Raises", "RuntimeError: no network"),
        ("NotANumber", "a reward that is no finite number (nan)"),
        ("Pair", "step returned a tuple instead of reply, reward and done"),
        ("Silent", "returned nothing instead of text or a list of messages"),
        ("Unsure", "step returned a str for done"),
        ("Cut", "reset returned half of a character ('\\ud83d')"),
        ("CutReply", "step returned half of a character ('\\ud83d')"),
        ("Wordy", "has 302 tokens; data.max_length, or the context, allows 24"),
        ("Hangs", "took longer than reward.deadline=0.3 s"),
        ("Headless", "has no method step"),
        ("Unmade", "can't be made: OSError: no such browser"),
        ("Unready", "close before any reset raised AttributeError"),
        ("thing", "is a int; name a class"),
        ("Tlak", "can't be imported"),
    ],
)
def test_broken_environment_raises_a_one_line_error(
    name: str, message: str, files: dict[str, str], folders: dict[str, Path]
) -> None:
    deadline = 0.3 if name == "Hangs" else 30.0  # a busy machine may take longer than 0.3 s for any other case
    with pytest.raises(SurefootError) as error:
        collected(world(files, folders["llama"], name, reward={"tolerated": 0.0, "deadline": deadline}))
    assert str(error.value).startswith(f"turns.environment='{files['others']}:{name}': ")
    assert message in str(error.value)


def test_failed_conversation_may_be_longer_than_all_scored_ones() -> None:
    fine = Conversation({}, 1, ids=[7, 8], own=[True] * 2, ends=[1], rewards=[0.25])
    failed = Conversation({}, 2, ids=[7] * 5, own=[True] * 5, ends=[4], failure="raised")
    one = torch.ones(1)
    scores = Scores(one, {"steps": one}, one.bool(), torch.tensor([[0.5, 0.5]]))
    actual = add_turn_rewards(scatter_scores(scores, [0], 2), [fine, failed], (2, 6))
    assert actual.total.tolist() == [1.25, 0.0]
    assert actual.valid.tolist() == [True, False]
    assert actual.dense.tolist() == [[0.5, 0.75, 0, 0, 0, 0], [0] * 6]


def test_every_environment_is_closed_even_after_a_failure(files: dict[str, str], folders: dict[str, Path]) -> None:
    made = world(files, folders["llama"], "Closes", reward={"tolerated": 0.6, "missing_eos": "none"})
    assert collected(made).metrics["without_score"] > 0
    assert len(made.environments.make.opened) == 12
    assert made.environments.make.closed
    assert set(made.environments.make.closed) == set(made.environments.make.opened)


def test_rollout_is_fully_masked_if_no_conversation_starts(files: dict[str, str], folders: dict[str, Path]) -> None:
    terms = [{"function": f"{files['others']}:each", "per": "token"}, {"function": f"{files['others']}:whole"}]
    reward = {"tolerated": 1.0, "missing_eos": "none", "terms": terms}
    r = collected(world(files, folders["llama"], "Dead", reward=reward))
    assert r.metrics["without_score"] == 1
    assert not r.mask.any()


def test_messages_need_a_template(files: dict[str, str], folders: dict[str, Path]) -> None:
    made = world(files, folders["llama"])
    made.tokens.tokenizer.chat_template = None
    with pytest.raises(SurefootError, match=r"turns\.environment=.*need a chat template.*set tokenizer\.chat_template"):
        collected(made)


# ---- runs ---------------------------------------------------------------------------------------------------------------


def test_traces_evaluation_and_samples_contain_whole_conversations(
    files: dict[str, str], folders: dict[str, Path], tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    data = {"train": files["rows"], "held_out": files["rows"], "max_length": 24}
    table = fields(files, folders["llama"], data=data, traces={"every": 1, "rows": 4}, reward={"missing_eos": "penalty"})
    surefoot.train("language", run_dir=tmp_path / "run", **table)
    trace = read_trace(traces_in(tmp_path / "run" / "traces")[-1])
    check_chain(trace, "batch")
    several = [row for row in trace.rows if not row.mask.all()]
    assert several, "the trace includes masked environment messages"
    for row in several:
        received = "".join(t for t, own in zip(row.about["tokens"], row.mask.tolist(), strict=True) if not own)
        assert "and then?" in received
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert 1 <= metrics["turns"] <= 3
    assert metrics["held_out_turns"] is not None
    report = evaluate_run(tmp_path / "run")
    (best,) = (int(path.name) for path in (tmp_path / "run" / "best").iterdir())
    then = next(row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["steps"] == best)
    assert report["trained"]["reward"] == pytest.approx(then["held_out_reward"])
    long = next(row for row in report["samples"] if "assistant: " in row["response"])
    assert long["prompt"].startswith("say ")
    assert ", and then? \nassistant: " in long["response"].replace("? , ", "? ")
    assert command("evaluate", str(tmp_path / "run"), "--samples", "2", "--threshold", "3")[0] == 0
    assert command("generate", str(tmp_path / "run"), "--prompt", "say x", "--max-tokens", "4")[0] == 0
    failed = command("data", "accuracy", files["rows"], "--model", str(tmp_path / "run"))
    assert failed[0] == 2
    assert failed[2].count("\n") == 1


def test_index_of_token_counts_only_the_models_tokens() -> None:
    mask = torch.tensor([[1, 1, 0, 0, 1, 1, 0], [0, 1, 1, 1, 0, 0, 0]]).bool()
    assert index_of_token(mask, torch.tensor([0, 0])).tolist() == [0, 1]
    assert index_of_token(mask, torch.tensor([2, 1])).tolist() == [4, 2]


# ---- guess a number -----------------------------------------------------------------------------------------------------


def test_bisection_finds_every_number_within_difficulty_turns() -> None:
    for difficulty in (2, 4, 6):
        highest = 2**difficulty - 1
        for secret in range(1, highest + 1):
            game, low, high, done, turns = Guess(), 1, highest, False, 0
            assert game.reset({"secret": secret, "highest": highest})[0]["content"] == f"1 to {highest}"
            while not done:
                text, turns = (low + high) // 2, turns + 1
                messages, reward, done = game.step(f" {text}\n")
                low, high = (text + 1, high) if messages and messages[0]["content"] == "higher" else (low, text - 1)
            assert reward == 1
            assert turns <= difficulty


def test_invalid_guess_ends_the_game_without_reward() -> None:
    for message in ("", "x", "0", "16", "-1", "1 2", "99999", "3.5", "３"):
        game = Guess()
        game.reset({"secret": 3, "highest": 15})
        assert game.step(message) == ([], 0.0, True)


@pytest.mark.parametrize("sloppy", [0.0, 1.0])
def test_demonstrations_have_correct_replies_and_possible_guesses(sloppy: float) -> None:
    for row in tasks.demonstrations("guess", 50, 1, 4, sloppy=sloppy):
        messages, low, high = row["messages"], 1, 15
        for message, expected in zip(messages[1::2], [*messages[2::2], None], strict=True):
            number = int(message["content"])
            assert low <= number <= high
            if sloppy == 0:
                assert number == (low + high) // 2
            if expected is not None:
                low, high = (number + 1, high) if expected["content"] == "higher" else (low, number - 1)
    assert len({row["secret"] for row in tasks.rows("guess", 200, 1, 4)}) == 15


def test_data_make_writes_guess_rows_and_training_requires_their_columns(
    command: Callable[..., tuple[int, str, str]], folders: dict[str, Path], tmp_path: Path
) -> None:
    for flags, file in ((("--difficulty", "2"), "train.jsonl"), (("--demonstrations",), "teacher.jsonl")):
        assert command("data", "make", "guess", "--rows", "8", *flags, "--out", str(tmp_path / file))[0] == 0
    assert json.loads((tmp_path / "train.jsonl").read_text().splitlines()[0])["highest"] == 3
    assert command("data", "make", "guess", "--difficulty", "9", "--out", str(tmp_path / "no.jsonl"))[0] == 2
    (tmp_path / "other.jsonl").write_text('{"prompt": "x"}\n')
    flags = ("--data.train", str(tmp_path / "other.jsonl"), "--run-dir", str(tmp_path / "runs"))
    code, _, err = command("train", "guess", "--model", str(folders["llama"]), *flags)
    assert code == 2
    assert "its rows need a column 'secret'" in err


@pytest.mark.release
def test_pocket_model_improves_on_random_guesses(tmp_path: Path) -> None:
    """It starts from demonstrations that guess at random within the remaining range."""
    write_rows(tmp_path / "teacher.jsonl", tasks.demonstrations("guess", 4_800, 1, sloppy=1.0))
    write_rows(tmp_path / "train.jsonl", tasks.rows("guess", 1_000, 1))
    write_rows(tmp_path / "test.jsonl", tasks.rows("guess", 512, 1, test=True))
    surefoot.train("guess_sft", run_dir=tmp_path / "sft", data={"train": str(tmp_path / "teacher.jsonl")}, steps=3_840)
    data = {"train": str(tmp_path / "train.jsonl"), "held_out": str(tmp_path / "test.jsonl")}
    surefoot.train("guess", run_dir=tmp_path / "ppo", model=str(tmp_path / "sft"), data=data, steps=2_304)
    report = evaluate_run(tmp_path / "ppo", rows=512)
    assert report["start"]["reward"] < 0.7
    assert report["trained"]["reward"] > 0.75


def test_text_environments_and_rewards_may_use_operations_without_a_deterministic_algorithm(
    files: dict[str, str], folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure of either would be tolerated, without a word, where few responses have one. ``longest`` is asked before."""
    monkeypatch.setattr("surefoot.runs.session.arithmetic", lambda recipe: deterministic(True))
    operation = "torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))"
    (tmp_path / "chance.py").write_text(
        "import torch\n"
        "class Chance:\n"
        f"    def reset(self, row):\n        {operation}\n        return row['prompt']\n"
        f"    def step(self, response):\n        {operation}\n        return [], 1.0, True\n"
        f"def score(responses):\n    {operation}\n    return [1.0] * len(responses)\n"
    )
    for name, changes in {
        "environment": {"turns": {"environment": f"{tmp_path / 'chance.py'}:Chance", "max_turns": 2}},
        "reward": {"turns": {}, "reward": {"terms": [{"function": f"{tmp_path / 'chance.py'}:score"}], "missing_eos": "none"}},
    }.items():
        table = fields(files, folders["llama"], **changes)
        surefoot.train("language", run_dir=tmp_path / name, display=False, **table)
        rows = read_metrics(tmp_path / name / "metrics.jsonl")
        assert [row["without_score"] for row in rows] == [0.0] * len(rows)
        assert not torch.are_deterministic_algorithms_enabled()
