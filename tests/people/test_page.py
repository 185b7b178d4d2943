"""The page on which people compare answers: keys and buttons, kills between, and nothing that a model wrote is executed."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from language.tiny import write_folder

pytest.importorskip("starlette")

import itertools

from surefoot.inspector.labelling import Comparison
from surefoot.people.log import APART, LabelLog, Queue, labels_of_all

HOSTILE = "<img src=x onerror=document.title='taken'>"


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Twenty pairs of which "good" is the better answer, all of which would like to be markup."""
    rows = [{"prompt": f"{n} {HOSTILE}", "a": "good" if n % 2 else "bad", "b": "bad" if n % 2 else "good"} for n in range(20)]
    rows[3]["prompt"] = [{"role": "user", "content": HOSTILE}]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "pairs.jsonl"


@contextmanager
def served(*words: str | Path) -> Iterator[tuple[str, Any]]:
    """A command that serves a page; its address and its process."""
    command = [sys.executable, "-m", "surefoot", *map(str, words), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().strip(), process
        finally:
            process.kill()


def answer(page: Any, done: int, choose: Any) -> None:
    """Choose by ``choose(left text, right text)``, a key or the id of a button, and wait for the next pair."""
    page.wait_for_selector("#left, header")
    key = choose(*(page.inner_text(f"#{side} .said") for side in ("left", "right")))
    page.wait_for_timeout(170)  # keys are ignored for a moment
    page.click(f"#{key}") if len(key) > 2 and key.islower() else page.keyboard.press(key)
    page.wait_for_selector(f"#progress:has-text('{done} of 22')")


def label_all(chromium: Any, what: Path, who: str, kills: tuple[int, ...], choose: Any) -> None:
    """Label twenty pairs and two repeats, with ``choose(number, left text, right text)``; kill the server in between."""
    done = 0
    for until in (*kills, 22):
        with served("label", what, "--who", who) as (address, process):
            page = chromium.new_page()
            page.goto(address)
            page.wait_for_selector(f"#progress:has-text('{done} of 22')")
            for number in range(done, until):
                answer(page, number + 1, partial(choose, number))
            done = until
            if until < 22:
                process.send_signal(signal.SIGKILL)
            else:
                assert "these were all pairs" in page.inner_text("h1")
                assert "Every pair has a label" in page.inner_text("#after")
            assert page.title() == "Which is better?"
            page.close()


def test_two_people_label_the_same_pairs_with_kills_between_and_nothing_is_lost(pairs: Path, chromium: Any) -> None:
    keys = ["ArrowLeft", "ArrowRight"], ["1", "2"], ["left", "right"]
    label_all(chromium, pairs, "ann", (7, 15), lambda number, left, _: keys[number % 3][left != "good"])
    label_all(chromium, pairs, "lefty", (10,), lambda *_: "ArrowLeft")
    queue = Queue(pairs)
    labels = labels_of_all(queue, pairs.with_name("pairs-labels"))
    assert len(labels) == 44
    better = {label.key: label.preference for label in labels if label.who == "ann"}
    assert all(queue[key][side] == "good" for key, side in better.items())
    assert {label.choice for label in labels if label.who == "lefty"} == {"left"}
    words = [sys.executable, "-m", "surefoot", "label", str(pairs), "--report"]
    report = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert re.search(r"^warning: lefty chose the left answer in 22 of 22 pairs", report, re.MULTILINE)


def test_each_of_several_people_is_asked_a_pair_again_after_others_and_undo_shows_what_it_took_back(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"a": "x", "b": "y"}\n' * 100)
    for who in ("ann", "bo", "cy"):
        with closing(LabelLog(tmp_path / "labels" / f"{who}.jsonl", Queue(tmp_path / "pairs.jsonl"), who)) as log:
            page, asked = Comparison(log, "", ""), []
            while (state := page.state())["pair"]:
                asked.append(state["pair"]["key"])
                page.choose(asked[-1], "left", 10**7 * (len(asked) == 1) + 2000, state["row"])
            assert state["seconds"] == 2, "not those of a break"
            repeats = [key for key in asked if key.endswith("#2")]
            assert all(asked.index(key) - asked.index(key[:-2]) > APART for key in repeats)
            assert page.undo(state["row"])["pair"]["key"] == asked[-1]
            page.choose(asked[0], "equal", 1, len(log.rows))
            assert page.undo(len(log.rows))["pair"]["key"] == asked[0]


RECIPE = """
kind = "language"
model = "llama"
steps = 16
data = { train = "prompts.jsonl", held_out = "prompts.jsonl", max_length = 16 }
sampling = { prompts = 8, max_tokens = 12 }
evaluation = { rows = 8 }
reward = { terms = [{ model = "reward" }] }
optimizer = { learning_rate = 1e-3 }
"""


@pytest.mark.slow
def test_labels_of_two_people_with_kills_between_train_the_reward_model_and_ppo_follows(
    tmp_path: Path, chromium: Any, page: Any, command: Callable[..., tuple[int, str, str]]
) -> None:
    pytest.importorskip("transformers")
    write_folder(tmp_path / "llama", "llama")
    rows = {"prompts": [{"prompt": f"{n} says "} for n in range(20)], "first": []}
    rows["first"] = [{"prompt": f"{n} ", "chosen": "aeiou", "rejected": "bcdfg"} for n in range(6)]
    for name, of in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of))
    (tmp_path / "ppo.toml").write_text(RECIPE)
    words = ("train", "reward", "--run-dir", "reward", "--model", "llama", "--data.train", "first.jsonl", "--steps", "6")
    assert command(*words, "--data.max-length", "32", "--data.batch", "3")[0] == 0
    rounds = ("rounds", "ppo.toml", "--rounds", "1", "--pairs", "20", "--judge", "people", "--run-dir", "mine", "--quiet")
    code, out, err = command(*rounds)
    assert (code, "round-1: 0 of 20 pairs are labelled; label them with: surefoot label mine" in out) == (0, True), out + err

    def vowels(text: str) -> int:
        return sum(map(text.count, "aeiou"))

    def careful(_: int, left: str, right: str) -> str:
        return "ArrowDown" if vowels(left) == vowels(right) else "ArrowLeft" if vowels(left) > vowels(right) else "ArrowRight"

    label_all(chromium, tmp_path / "mine", "ann", (6, 13), careful)
    label_all(chromium, tmp_path / "mine", "lefty", (10,), lambda *_: "ArrowLeft")
    code, out, err = command(*rounds)
    assert code == 0, err
    assert "lefty chose the left answer in 22 of 22 pairs" in out
    assert "ann chose the left" not in out
    here = tmp_path / "mine" / "round-1"
    trained = [json.loads(line) for line in (here / "pairs.jsonl").read_text().splitlines()][2 * len(rows["first"]) :]
    assert len(trained) == 2 * 40, "two rows for each label of both people, none for repeats"
    assert all((here / run / "model").is_dir() for run in ("reward", "ppo"))
    assert json.loads((here / "round.json").read_text())["labels"] == 40
    with served("inspect", "mine/round-1/ppo") as (address, _):
        page.goto(address)
        page.click("nav a[data-view=labels]")
        page.wait_for_selector("[data-round=round-1]")
        assert page.inner_text(".finding.warning h3").endswith("lefty chose the left answer in 22 of 22 pairs")
        assert page.locator(".people tbody th").all_inner_texts() == ["ann", "lefty"]
        assert "lefty agree on" in page.inner_text("#labels")


def test_undo_equal_skip_pause_and_the_last_labels_can_be_changed(pairs: Path, chromium: Any) -> None:
    with served("label", pairs, "--who", "ann") as (address, process):
        page = chromium.new_page(viewport={"width": 390, "height": 800})
        page.goto(address)
        other = chromium.new_page()
        other.goto(address)
        assert other.inner_text("body").strip().endswith("start the command again"), "this page has no button Invite"
        answer(page, 1, lambda *_: "ArrowDown")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        answer(page, 2, lambda *_: "s")
        answer(page, 3, lambda *_: "equal")
        page.keyboard.press("Backspace")
        page.wait_for_selector("#progress:has-text('2 of 22')")
        page.click("#pause")
        assert page.query_selector("#left") is None
        page.keyboard.press("ArrowLeft")  # while paused nothing is chosen
        page.keyboard.press("p")
        page.click("summary")
        page.click(".last li:first-child button")
        with page.expect_response("**/api/label"):
            answer(page, 2, lambda *_: "ArrowRight")
        process.kill()
        page.wait_for_timeout(170)  # clicks are ignored for a moment
        page.click("#skip")
        page.wait_for_selector("#error:has-text('the command in the terminal has ended. Start it again')")
        page.close()
    rows = (pairs.with_name("pairs-labels") / "ann.jsonl").read_text().splitlines()[1:]
    assert [json.loads(row).get("choice", "undo") for row in rows] == ["equal", "skip", "equal", "undo", "right"]


def test_clips_start_together_loop_at_real_speed_and_the_next_two_pairs_are_loaded_before_they_are_shown(
    tmp_path: Path, chromium: Any
) -> None:
    np, encoder = pytest.importorskip("numpy"), pytest.importorskip("surefoot.control.video.encoder")
    pytest.importorskip("imageio_ffmpeg")
    rows = [{"video_a": f"{n}-a.mp4", "video_b": f"{n}-b.mp4"} for n in range(4)]
    (tmp_path / "clips.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in (name for row in rows for name in row.values()):
        with encoder.Encoder(tmp_path / name, 64, 64, 20) as made:
            for frame in range(10):
                made.add(np.full((64, 64, 3), 20 * frame, np.uint8))
    with served("label", tmp_path / "clips.jsonl", "--who", "ann") as (address, _):
        page = chromium.new_page()
        loads: list[str] = []
        page.on("request", lambda request: loads.append(request.url) if "/clips/" in request.url else None)
        page.goto(address)
        times = "() => [...document.querySelectorAll('video')].map((video) => [video.currentTime, video.playbackRate])"
        page.wait_for_selector("video")
        assert {"Clip 1 (← or 1)", "Clip 2 (→ or 2)"} <= set(page.locator("button").all_inner_texts())
        assert "Choose the better clip" in page.inner_text("#how")
        page.wait_for_timeout(1500)
        seen = [page.evaluate(times) for _ in range(12) if page.wait_for_timeout(60) is None]
        assert all(rates == [1, 1] for rates in ([rate for _, rate in pair] for pair in seen))
        assert all(abs(left[0] - right[0]) < 0.1 for left, right in seen), "also after loops of half a second"
        left = [pair[0][0] for pair in seen]
        assert any(later < earlier for earlier, later in itertools.pairwise(left)), "it loops"
        assert len(set(loads)) == 6, "those of this pair and of the next two"
        page.keyboard.press("ArrowLeft")
        page.wait_for_selector("#progress:has-text('1 of 4')")
        shown = set(page.eval_on_selector_all("video", "videos => videos.map((video) => video.src)"))
        assert shown <= set(loads[:6]), "loaded before it was shown"
        assert all(loads.count(source) == 1 for source in shown), "and not again"
        page.close()
