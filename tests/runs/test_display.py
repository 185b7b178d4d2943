"""The display: every number that a run needs, unhealthy ones with the reason, and plain lines in a pipe."""

import io
import json
import time

import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from rich.console import Console

from surefoot.cli.output import display_for
from surefoot.core.rollout import LearnerState
from surefoot.diagnostics.findings import out_of_range
from surefoot.diagnostics.metrics import METRICS, SHOWN
from surefoot.recipes.presets import find_recipe, resolve_recipe
from surefoot.runs import api
from surefoot.runs.display import Dashboard, Lines
from surefoot.store.events import Phase, RunStart
from surefoot.store.metrics import read_metrics

HEALTHY = {"episode_return": 20.0, "episode_length": 20.0, "steps_per_second": 1000.0, "policy_loss": -0.01, "value_loss": 1.0}
HEALTHY |= {"kl": 0.01, "ratio_outside": 0.1, "clip_active": 0.05, "explained_variance": 0.5, "entropy": 0.6}


def drawn(metrics):
    console = Console(width=150, force_terminal=True, record=True, file=io.StringIO())
    board = Dashboard("PPO_CLIP on CartPole-v1", console)
    board.show(LearnerState(total_steps=1000, steps=500), metrics)
    board.close()
    return console.export_text(styles=True)


def test_the_live_table_shows_the_main_metrics():
    text = drawn(HEALTHY)
    for word in (
        "return, last 100",
        "20.0",
        "steps/s",
        "1,000",
        "KL",
        "0.0100",
        "10.0%",
        "5.0%",
        "+0.50",
        "0.600",
        "500 of 1,000",
        "left",
    ):
        assert word in text
    assert "lower the learning rate" not in text


def test_the_title_keeps_its_lines_and_shows_control_characters(tmp_path):
    recipe, origin = find_recipe("cartpole"), resolve_recipe("cartpole", {}).origin
    title = display_for(recipe, tmp_path / "a\nb", origin=origin).title
    console = Console(width=200, force_terminal=True, record=True, file=io.StringIO())
    board = Dashboard(title, console)
    board.show(LearnerState(total_steps=1000, steps=500), HEALTHY)
    board.close()
    first, second = console.export_text().splitlines()[:2]
    assert first.strip().endswith("a⏎b")
    assert second.startswith("preset cartpole: ")


def test_an_unhealthy_value_is_coloured_and_explained():
    text = drawn({**HEALTHY, "kl": 3.0})
    assert "the policy moves far per batch" in text
    assert "\x1b[1;33m" in text.split("KL to")[1].split("\n")[0]


def test_the_table_has_only_rows_of_the_algorithm():
    assert "β of the penalty" not in drawn(HEALTHY)
    assert "0.25" in drawn({**HEALTHY, "beta": 0.25}).split("β of the penalty")[1].split("\n")[0]
    without = drawn({**HEALTHY, "explained_variance": None})
    assert "–" in without.split("explained variance")[1].split("\n")[0], "what is not defined now is shown as such"


def test_lines_are_plain_and_few(capsys):
    lines = Lines("title", every=1000)
    for steps in range(100, 1100, 100):
        lines.show(LearnerState(total_steps=1000, steps=steps), {**HEALTHY, "explained_variance": None})
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "title"
    assert [line[:10] for line in out if not line.startswith("    ")] == ["title", "step 100/1", "step 1,000"], "first and last"
    assert "\x1b" not in "".join(out)


def test_the_time_left_is_by_the_speed_since_this_process_began(monkeypatch, capsys):
    """Of a resumed run too: 100 steps took 10 s, and 500 are left."""
    now = iter([0.0, 0.0, 10.0, 10.0])
    monkeypatch.setattr("surefoot.runs.display.time.monotonic", lambda: next(now))
    lines = Lines("title", every=0)
    for steps in (400, 500):
        lines.show(LearnerState(total_steps=1000, steps=steps), {"reward": 0.5})
    assert capsys.readouterr().out.splitlines()[-1].endswith("left 0:00:50")


def test_no_plain_line_is_longer_than_120_columns(capsys):
    lines = Lines(f"title of {'many words ' * 30}\nand a second line")
    lines.message("  ! kl: " + "the policy moves far per batch " * 9)
    lines.samples(64, [{"prompt": "p" * 300, "response": "r" * 300, "reward": 1.0, "gold": -1.0}])
    lines.show(LearnerState(total_steps=1000, steps=1000), {**HEALTHY, "clip_active": 0.9})
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 120
    assert " ".join(out.split()).count("moves far per batch") == 9, "lines are wrapped, not cut"
    assert all(label in out for label, _ in (SHOWN[name] for name in HEALTHY if name in SHOWN))


def names(metrics):
    return {finding.name for finding in out_of_range(metrics)}


def test_undefined_values_are_not_out_of_range():
    assert names({"explained_variance": None, "kl": 0.01, "steps": 5}) == set()
    assert names({"explained_variance": -3.0, "clip_active": 0.9}) == {"explained_variance", "clip_active"}


def test_the_finding_about_a_critic_explains_when_to_ignore_it():
    """A solved task pays the same in every episode: the critic is fine, the number is not."""
    (finding,) = out_of_range({"explained_variance": -30.0})
    assert "meaningless where returns are nearly constant" in finding.what
    assert "meaningless" in drawn({**HEALTHY, "explained_variance": -30.0}).split("explained variance")[1]


def keys_of_language(folder):
    """The keys of one iteration of each kind of language run, on the smallest of data."""
    pytest.importorskip("transformers")
    rows = folder / "rows.jsonl"
    texts = ("i love it.", "it is fine.", "the chain is weak.", "good")
    expected = ({"prompt": "new bike: ", "completion": text, "chosen": text, "rejected": "no"} for text in texts)
    rows.write_text("".join(json.dumps(row) + "\n" for row in expected))
    gold = "surefoot.language.tasks.reviews:gold"
    shared = {"model": "pocket", "steps": 4, "data": {"train": str(rows), "held_out": str(rows), "max_length": 64}}
    few = {"data": {**shared["data"], "batch": 4}}
    terms = [{"function": gold}, {"function": "surefoot.language.tasks.reviews:gold", "weight": 0.5}]
    online = {"sampling": {"prompts": 4, "max_tokens": 4}, "reward": {"terms": terms, "gold": gold}}
    online["evaluation"] = {"demonstrations": str(rows)}
    online["mixing"] = {"sft_coefficient": 0.1, "demonstrations": str(rows)}
    written = set()
    for kind, changes in (("sft", few), ("reward", few), ("dpo", few), ("language", online)):
        api.start(find_recipe(kind, {**shared, **changes}), folder / kind)
        written |= {key for row in read_metrics(folder / kind / "metrics.jsonl") for key in row}
    labelled = folder / "labelled.jsonl"
    answers = ({"prompt": f"new {text[:4]}: ", "completion": text, "label": len(text) > 8} for text in texts)
    labelled.write_text("".join(json.dumps(row) + "\n" for row in answers))
    kto = {**few["data"], "train": str(labelled), "held_out": str(labelled)}
    api.start(find_recipe("dpo", {**shared, "data": kto, "preference": {"loss": "kto"}}), folder / "kto")
    written |= {key for row in read_metrics(folder / "kto" / "metrics.jsonl") for key in row}
    groups = {**shared, "steps": 16, "sampling": {"prompts": 2, "samples": 2, "max_tokens": 4}, "reward": {"terms": terms}}
    for algorithm, switches in (("DAPO", {}), ("CISPO", {"drop_above_kl": 0.1}), ("ONLINE_DPO", {"reuse": None})):
        objective = {"reuse": {"minibatches": 1}, **switches}
        api.start(find_recipe("language", {**groups, "algorithm": algorithm, "objective": objective}), folder / algorithm)
        written |= {key for row in read_metrics(folder / algorithm / "metrics.jsonl") for key in row}
    games = folder / "games.jsonl"
    games.write_text('{"secret": 2, "highest": 3}\n' * 4)
    turns = {**shared, "data": {"train": str(games), "held_out": str(games)}, "sampling": {"prompts": 4, "max_tokens": 2}}
    api.start(find_recipe("guess", {**turns, "objective": {"reuse": {"minibatches": 1}}}), folder / "turns")
    written |= {key for row in read_metrics(folder / "turns" / "metrics.jsonl") for key in row}
    return {key for key in written if not key.startswith("reward_")}  # the parts of a reward have their own names


class Successful(CartPoleEnv):
    """CartPole, whose infos have both names of a success."""

    def step(self, action):
        *rest, _ = super().step(action)
        return *rest, {"is_success": True, "success": 0.5}


@pytest.mark.slow
def test_every_key_that_a_run_writes_has_its_meaning_and_every_meaning_its_key(tmp_path):
    written = set()
    for algorithm in ("PPO_CLIP", "PPO_PENALTY_ADAPTIVE", "TRPO"):
        changes = {"steps": 512, "evaluation": {"episodes": 1}, "optimizer": {"critic_learning_rate": 1e-3}}
        changes["normalise"] = {"observations": True, "rewards": True}
        changes["objective"] = {"target_kl": "none" if algorithm == "TRPO" else 0.5, "kl_estimator": "exact"}
        api.start(find_recipe("CartPole-v1", {**changes, "algorithm": algorithm}), tmp_path / algorithm)
        rows = read_metrics(tmp_path / algorithm / "metrics.jsonl")
        assert [row["iteration"] for row in rows] == [1, 2]
        written |= {key for row in rows for key in row}
    boxed = {"steps": 256, "rollout": {"environments": 2, "steps": 128}, "evaluation": {"episodes": 0}}
    boxed["objective"] = {"reuse": {"epochs": 2, "minibatches": 4}}
    api.start(find_recipe("Pendulum-v1", boxed), tmp_path / "box")
    written |= {key for row in read_metrics(tmp_path / "box" / "metrics.jsonl") for key in row}
    successful = find_recipe("CartPole-v1", {"steps": 256, "evaluation": {"episodes": 1}})
    api.start(successful, tmp_path / "success", Successful)
    written |= {key for row in read_metrics(tmp_path / "success" / "metrics.jsonl") for key in row}
    written |= keys_of_language(tmp_path)
    assert written - set(METRICS) == set()
    elsewhere = {"reference_loss", "router_loss", "gpu_memory_gb", "gpu_percent", "truncations_estimated"}
    elsewhere |= {  # of samplers that are not exact, and of servers
        "sampler_kl",
        "importance_weight",
        "importance_capped",
        "responses_missing",
        "sampler_lag",
    }
    elsewhere |= {"tool_calls", "tool_calls_failed", "tool_calls_malformed"}  # of conversations with tools
    elsewhere |= {"labels_trained", "label_accuracy"}  # of rewards that are learned from clips
    assert set(METRICS) - written <= elsewhere


def test_the_time_left_counts_the_evaluations_ahead(monkeypatch, capsys):
    """1 s for 100 steps, 7 s for an evaluation: 500 steps with evaluations at 800 and at the end take 19 s."""
    now = [0.0]
    monkeypatch.setattr("surefoot.runs.display.time.monotonic", lambda: now[0])
    lines, state = Lines("title", every=0), LearnerState(total_steps=1000)
    lines(RunStart(state, None, evaluate_every=400, becomes=1024))
    for state.steps in range(100, 600, 100):
        now[0] += 1
        if state.steps == 400:
            lines(Phase("evaluating at step 400"))
            now[0] += 7
            lines(Phase("learning"))
        lines.show(state, {"reward": 0.5})
    out = capsys.readouterr().out.splitlines()
    assert out[2].endswith("left 0:00:08 and 3 evaluations")
    assert out[-1].endswith("left 0:00:19")
    assert out[-1].startswith("step 500/1,024"), "what the budget becomes"


def test_a_long_phase_is_named_in_lines_and_on_the_dashboard(monkeypatch, capsys):
    monkeypatch.setattr("surefoot.runs.display.PATIENCE", 0.01)
    lines = Lines("title")
    for text, seconds in (("evaluating at step 64", 0.1), ("saving", 0.0), ("", 0.1)):
        lines(Phase(text))
        time.sleep(seconds)
    assert capsys.readouterr().out == "evaluating at step 64 …\n", "short ones are not"
    console = Console(width=150, force_terminal=True, file=io.StringIO())
    board = Dashboard("title", console)
    board(Phase("evaluating at step 64"))
    board.doing.since -= 9
    board.live.refresh()
    board.close()
    assert "evaluating at step 64 … 9 s" in console.file.getvalue()


def test_the_loss_of_supervised_runs_is_no_policy_loss():
    assert "policy loss" in drawn(HEALTHY)
    assert "policy loss" not in drawn({"policy_loss": 0.5, "held_out_loss": 0.4})
