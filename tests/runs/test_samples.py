"""Samples during training: a few on the display, all in the run's folder, with control characters escaped."""

import io
import json

import pytest
from killing import rows_of
from rich.console import Console

from surefoot.core.rollout import LearnerState
from surefoot.diagnostics.metrics import METRICS, SHOWN
from surefoot.recipes.presets import find_recipe
from surefoot.runs import api
from surefoot.runs.display import Dashboard, Lines, line_of, some
from surefoot.store.events import InitialSamples
from surefoot.store.manifest import write_listed
from surefoot.store.reading import read_samples
from surefoot.store.traces import SampleFolder
from surefoot.terminal import visible

HOSTILE = "[bold red]no[/] \x1b[31mred\x1b[0m \x9b2J\x07\r\b \u202eback\u2028 tab\t end\nnew \ud800 [link=http://x]y"
METRIC_ROWS = {name: 0.1 for name in SHOWN if name in METRICS}
FEW_METRICS = {"reward": 0.1, "kl_reference_response": 2.0}


def samples(count=9, response="it is fine.", **columns):
    return [{"prompt": f"red bike {n}: ", "response": response, "reward": n / 4, **columns} for n in range(count)]


def board(width, height, metrics, sample, times=1):
    """What is written to a terminal, and what the last frame shows."""
    console = Console(width=width, height=height, force_terminal=True, record=True, file=io.StringIO())
    display = Dashboard("PPO_CLIP on a model", console)
    for step in range(1, times + 1):
        display.samples(step * 64, sample)
        display.show(LearnerState(total_steps=1000, steps=step * 64), metrics)
    frame = console.render_lines(display.live.renderable, pad=False)
    display.close()
    return console.export_text(), ["".join(segment.text for segment in line) for line in frame]


def test_unprintable_characters_are_shown_as_escapes():
    shown = visible(HOSTILE)
    assert shown.isprintable()
    for mark in ("\\x1b[31m", "\\x9b", "\\x07", "\\r", "\\x08", "\\u202e", "\\u2028", "⇥", "⏎", "\\ud800", "[bold red]no[/]"):
        assert mark in shown
    assert visible("a\u00a0b\u3000c") == "a b c", "blanks are blanks"
    assert visible("naïve 日本語 🙂") == "naïve 日本語 🙂"


def test_samples_are_read_as_they_were_written_and_damaged_lines_are_left_out(tmp_path):
    written = samples(2, response="one\u2028two\x85three\r\nfour")
    SampleFolder(tmp_path, 0).write(64, written)
    file = tmp_path / "64.jsonl"
    write_listed(file, '[1]\n{"prompt": \n' + file.read_text("utf-8") + '{"reward": NaN}')
    assert read_samples(file) == [*written, {"reward": None}]


def test_hostile_text_moves_no_cursor_and_is_not_markup():
    for width, height in ((140, 50), (140, 24), (80, 24)):
        metrics = FEW_METRICS if height == 50 else METRIC_ROWS
        console = Console(width=width, height=height, force_terminal=True, color_system=None, file=io.StringIO())
        display = Dashboard("title", console)
        display.samples(64, [{"prompt": HOSTILE, "response": HOSTILE, "reward": None, "gold": 1.0}])
        display.show(LearnerState(total_steps=1000, steps=64), metrics)
        display.close()
        written = console.file.getvalue()
        assert "[bold red]no[/]" in written
        for harm in ("\x1b[31m", "\x9b", "\x07", "\b", "\u202e", "\u2028"):
            assert harm not in written


def test_samples_stand_below_the_metrics_where_the_terminal_is_high():
    _, frame = board(100, 50, METRIC_ROWS, samples(gold=0.5))
    heading = next(i for i, line in enumerate(frame) if "prompt → response, at step 64" in line)
    assert heading > next(i for i, line in enumerate(frame) if "entropy" in line)
    for number, line in zip((0, 3, 6), frame[heading + 1 : heading + 4], strict=True):
        assert line.split() == [f"{number / 4:+.2f}", "+0.50", "red", "bike", f"{number}:", "→", "it", "is", "fine."]
    assert len(frame) < 50


def test_samples_stand_beside_the_metrics_where_the_terminal_is_low_and_wide():
    _, frame = board(150, 24, METRIC_ROWS, samples())
    row = next(line for line in frame if "red bike 3" in line)
    assert any(label in row for label, _ in SHOWN.values()) or "step" in row


def test_samples_stay_above_the_metrics_where_the_terminal_is_small_and_are_there_once_each():
    text, frame = board(80, 24, METRIC_ROWS, samples(), times=3)
    assert not any("red bike" in line for line in frame)
    for step in (64, 128, 192):
        assert text.count(f"at step {step}") == 1


@pytest.mark.parametrize("response", ["", "word " * 4000, "x" * 20_000, "日本" * 5000], ids=["none", "words", "long", "wide"])
def test_no_length_of_text_makes_the_display_higher_than_the_terminal(response):
    long = [{"prompt": "p" * 9000, "response": response, "reward": -1.25, "gold": None}] * 2
    for width, height in ((200, 60), (150, 24), (80, 24), (20, 10)):
        _, frame = board(width, height, FEW_METRICS, long)
        assert len(frame) < max(height, 12)
        assert all(len(line) <= width for line in frame)


def test_plain_lines_carry_a_few_samples_in_one_line_each_and_only_new_ones(capsys):
    lines = Lines("title", every=0)
    for step in (64, 128):
        if step == 64:
            lines.samples(step, samples(response=HOSTILE, gold=None))
        lines.show(LearnerState(total_steps=1000, steps=step), {"reward": 0.5})
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 1 + 2 + 3
    message = [line for line in out if "red bike" in line]
    assert [line.split()[:6] for line in message] == [["step", "64", "reward", f"{n / 4:+.2f}", "gold", "–"] for n in (0, 3, 6)]
    assert all(line.isprintable() for line in message)
    assert len(line_of(64, samples(response="x" * 10_000)[0])) < 200


def test_characters_that_the_terminal_cannot_encode_do_not_end_a_run(monkeypatch):
    end = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", end)
    lines = Lines("title")
    lines.samples(64, samples(response="日本"))
    lines.show(LearnerState(total_steps=1000, steps=64), {"reward": 0.5})
    end.seek(0)
    assert "\\u65e5\\u672c" in end.read()


def test_displayed_samples_are_spread_and_the_same_each_time():
    assert [s["prompt"] for s in some(samples(128))] == ["red bike 0: ", "red bike 42: ", "red bike 85: "]
    assert len(some(samples(2))) == 2
    assert some([]) == []


def test_the_folder_is_cut_back_to_the_checkpoint(tmp_path):
    folder = SampleFolder(tmp_path / "samples", 0)
    assert not (tmp_path / "samples").exists()
    for steps in (64, 128, 1024):
        folder.write(steps, samples(2))
    for name in ("mine.jsonl", ".128.jsonl.1-2.tmp"):
        (tmp_path / "samples" / name).write_text("{}")
    SampleFolder(tmp_path / "samples", 128)
    assert {path.name for path in (tmp_path / "samples").iterdir()} == {"64.jsonl", "128.jsonl", "mine.jsonl", "manifest.json"}
    rows = [json.loads(line) for line in (tmp_path / "samples" / "64.jsonl").read_text("utf-8").splitlines()]
    assert rows == samples(2)


@pytest.mark.slow
def test_a_resumed_run_has_the_samples_of_an_uninterrupted_one(tmp_path):
    """Also where nothing is held out: then they are what was sampled in that iteration."""
    pytest.importorskip("transformers")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"red bike {n}: "}) + "\n" for n in range(12)))
    gold = "surefoot.language.tasks.reviews:gold"
    for held_out in ({}, {"held_out": str(prompts)}):
        root = tmp_path / f"runs{len(held_out)}"
        changes = {"model": "pocket", "steps": 16, "data": {"train": str(prompts), **held_out}, "reward": {"gold": gold}}
        changes["reward"]["terms"] = [{"function": gold}]
        changes |= {"sampling": {"prompts": 4, "max_tokens": 4}, "evaluation": {"every": 4}, "checkpoint": {"every": 8}}
        changes["objective"] = {"reuse": {"epochs": 1, "minibatches": 2}}
        recipe = find_recipe("language", changes)
        api.start(recipe, root / "whole")

        def killed(metrics):
            if metrics["steps"] == 12:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            api.start(recipe, root / "cut", callback=killed)
        assert (root / "cut" / "samples" / "12.jsonl").exists(), "beyond the checkpoint at 8"
        (root / "cut" / "samples" / "14.jsonl").write_text("of another course")
        api.resume(root / "cut")
        whole, cut = ({p.name: p.read_bytes() for p in (root / run / "samples").iterdir()} for run in ("whole", "cut"))
        assert sorted(whole) == ["0.jsonl", "12.jsonl", "16.jsonl", "4.jsonl", "8.jsonl", "manifest.json"]
        assert whole == cut
        rows = [json.loads(line) for line in whole["16.jsonl"].decode().splitlines()]
        assert len(rows) == (12 if held_out else 4)
        assert set(rows[0]) == {"prompt", "response", "reward", "kl", "gold"}
        first = [json.loads(line) for line in whole["0.jsonl"].decode().splitlines()]
        assert set(first[0]) == set(rows[0])
        assert [row["kl"] for row in first] == pytest.approx([0.0] * len(rows), abs=1e-5), "the policy is still the reference"
        if held_out:
            assert [row["prompt"] for row in first] == [row["prompt"] for row in rows], "the same prompts before and after"


def test_samples_before_training_change_no_number_of_the_run(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    from surefoot.language.online.world import LanguageWorld

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"red bike {n}: "}) + "\n" for n in range(12)))
    changes = {"model": "pocket", "steps": 8, "data": {"train": str(prompts), "held_out": str(prompts)}}
    changes |= {"sampling": {"prompts": 4, "max_tokens": 4}, "evaluation": {"every": 4}}
    changes |= {"reward": {"terms": [{"function": "surefoot.language.tasks.reviews:gold"}]}}
    recipe = find_recipe("language", changes)
    api.start(recipe, tmp_path / "with")
    monkeypatch.setattr(LanguageWorld, "samples", lambda world: [])
    api.start(recipe, tmp_path / "without")
    assert (tmp_path / "with" / "samples" / "0.jsonl").exists()
    assert not (tmp_path / "without" / "samples" / "0.jsonl").exists()
    assert rows_of(tmp_path / "with") == rows_of(tmp_path / "without")
    weights = [(tmp_path / name / "checkpoints" / "8" / "agent.safetensors").read_bytes() for name in ("with", "without")]
    assert weights[0] == weights[1]


def test_displays_show_the_samples_before_training(capsys):
    lines = Lines("title")
    lines(InitialSamples(LearnerState(total_steps=1000), samples()))
    lines.show(LearnerState(total_steps=1000, steps=64), {"reward": 0.5})
    shown = [line for line in capsys.readouterr().out.splitlines() if "red bike" in line]
    assert [line.split()[:2] for line in shown] == [["step", "0"]] * 3


def test_without_evaluation_there_are_no_samples(tmp_path):
    pytest.importorskip("transformers")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "red bike: "}\n')
    changes = {"model": "pocket", "steps": 4, "data": {"train": str(prompts)}, "sampling": {"prompts": 4, "max_tokens": 4}}
    changes |= {"reward": {"terms": [{"function": "surefoot.language.tasks.reviews:gold"}]}, "evaluation": {"rows": 0}}
    api.start(find_recipe("language", changes), tmp_path / "run")
    assert not (tmp_path / "run" / "samples").exists()
