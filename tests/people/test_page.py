"""The page on which people compare answers: keys and buttons, kills between, and nothing that a model wrote is executed."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from surefoot.people.log import Queue, labels_of_all

HOSTILE = "<img src=x onerror=document.title='taken'>"


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Twenty pairs of which "good" is the better answer, all of which would like to be markup."""
    rows = [{"prompt": f"{n} {HOSTILE}", "a": "good" if n % 2 else "bad", "b": "bad" if n % 2 else "good"} for n in range(20)]
    rows[3]["prompt"] = [{"role": "user", "content": HOSTILE}]  # type: ignore[assignment]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "pairs.jsonl"


@contextmanager
def served(pairs: Path, who: str) -> Iterator[tuple[str, Any]]:
    """The command that serves the page; its address and its process."""
    words = [sys.executable, "-m", "surefoot", "label", str(pairs), "--who", who, "--no-browser"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), process
        finally:
            process.kill()


def answer(page: Any, done: int, choose: Any) -> None:
    """Choose by ``choose(left text)``, a key or the id of a button, and wait for the next pair."""
    page.wait_for_selector("#left, header")
    key = choose(page.inner_text("#left .said"))
    page.wait_for_timeout(170)  # keys are ignored for a moment
    page.click(f"#{key}") if len(key) > 2 and key.islower() else page.keyboard.press(key)
    page.wait_for_selector(f"#progress:has-text('{done} of 22')")


def test_two_people_label_the_same_pairs_with_kills_between_and_nothing_is_lost(pairs: Path, chromium: Any) -> None:
    careful = ["ArrowLeft", "ArrowRight"], ["1", "2"], ["left", "right"]
    for who, kills in (("ann", (7, 15)), ("lefty", (10,))):
        done = 0
        for until in (*kills, 22):
            with served(pairs, who) as (address, process):
                page = chromium.new_page()
                page.goto(address)
                page.wait_for_selector(f"#progress:has-text('{done} of 22')")
                while done < until:
                    keys = careful[done % 3] if who == "ann" else ["ArrowLeft"] * 2
                    answer(page, done + 1, lambda text, keys=keys: keys[text != "good"])
                    done += 1
                if until < 22:
                    process.send_signal(signal.SIGKILL)
                else:
                    assert "these were all pairs" in page.inner_text("h1")
                    assert "Every pair has a label" in page.inner_text("#after")
                assert page.title() == "Which is better?"
                page.close()
    queue = Queue(pairs)
    labels = labels_of_all(queue, pairs.with_name("pairs-labels"))
    assert len(labels) == 44
    better = {label.key: label.preference for label in labels if label.who == "ann"}
    assert all(queue[key][side] == "good" for key, side in better.items())
    assert {label.choice for label in labels if label.who == "lefty"} == {"left"}
    words = [sys.executable, "-m", "surefoot", "label", str(pairs), "--report"]
    report = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert re.search(r"^warning: lefty chose the left answer in 22 of 22 pairs", report, re.MULTILINE)


def test_undo_equal_skip_pause_and_the_last_labels_can_be_changed(pairs: Path, chromium: Any) -> None:
    with served(pairs, "ann") as (address, _):
        page = chromium.new_page(viewport={"width": 390, "height": 800})
        page.goto(address)
        page.wait_for_selector("#left")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        answer(page, 1, lambda _: "ArrowDown")
        answer(page, 2, lambda _: "s")
        answer(page, 3, lambda _: "equal")
        page.keyboard.press("Backspace")
        page.wait_for_selector("#progress:has-text('2 of 22')")
        page.click("#pause")
        assert page.query_selector("#left") is None
        page.keyboard.press("ArrowLeft")  # while paused nothing is chosen
        page.keyboard.press("p")
        page.click("summary")
        page.click(".last li:first-child button")
        answer(page, 2, lambda _: "ArrowRight")
        page.close()
    rows = (pairs.with_name("pairs-labels") / "ann.jsonl").read_text().splitlines()[1:]
    assert [json.loads(row).get("choice", "undo") for row in rows] == ["equal", "skip", "equal", "undo", "right"]
