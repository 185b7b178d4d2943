"""The demo of labels: it waits for a person, goes on after any stop with the same result, and says when labels are too few."""

import json
import re
import shlex
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from surefoot import demos
from surefoot.demos import language, people, run_demo
from surefoot.errors import SurefootError
from surefoot.language.tasks import reviews
from surefoot.people.log import LabelLog, Round
from surefoot.recipes.presets import find_recipe
from surefoot.runs.display import Display
from surefoot.store.events import RolloutEnd

TINY = {
    "reviews_sft": {"steps": 96},
    "reviews_people": {"steps": 32},
    "reviews": {"steps": 32, "sampling": {"prompts": 16, "max_tokens": 12}, "evaluation": {"rows": 8}},
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages of a few updates on a few rows."""
    rows = reviews.demonstrations
    monkeypatch.setattr(reviews, "demonstrations", lambda count, seed: rows(min(count, 64), seed))
    for name, count in (("OTHERS", 8), ("PAIRS", 4)):
        monkeypatch.setattr(people, name, count)
    monkeypatch.setattr(language, "HELD_OUT_PAIRS", 8)
    for module in (demos, people):
        monkeypatch.setattr(module, "find_recipe", lambda name, changes: find_recipe(name, {**changes, **TINY[name]}))


class Stop(Exception):
    """What a kill stands for here."""


@pytest.mark.slow
def test_a_demo_that_is_stopped_in_every_stage_ends_with_the_same_result(tmp_path: Path) -> None:
    whole = run_demo(people.demo("gold"), tmp_path / "whole", 3, lambda recipe, run: Display())
    stopped: set[Path] = set()

    def display_for(recipe: Any, run: Path) -> Any:
        def listen(event: Any) -> None:
            if isinstance(event, RolloutEnd) and run not in stopped:
                stopped.add(run)
                raise Stop

        return listen

    for _ in range(8):
        try:
            report = run_demo(people.demo("gold"), tmp_path / "cut", 3, display_for)
            break
        except Stop:
            continue
    assert len(stopped) == 6, "SFT, the first reward model, and both runs of two rounds"
    assert {**report, "seconds": 0} == {**whole, "seconds": 0}
    done = tmp_path / "cut" / "demo-people-gold"
    assert report["preferred"]["of"] == len(Round(done / "compared").queue.pairs)
    (done / "demo.json").unlink()
    with pytest.raises(SurefootError, match=r"^seed=4: .*demo-people-gold was begun with 3; repeat that"):
        run_demo(people.demo("gold"), tmp_path / "cut", 4, display_for)


@pytest.mark.slow
def test_the_demo_waits_for_a_person_and_tells_chance_from_knowledge(tmp_path: Path, command: Any) -> None:
    for where, place in (("rounds", "rounds/round-1"), ("rounds", "rounds/round-2"), ("compared", "compared")):
        code, out, err = command("demo", "people")
        assert (code, f"label them with: surefoot label runs/demo-people/{where}, then repeat" in out) == (0, True), err
        at = Round(Path("runs/demo-people") / place)
        with closing(LabelLog(at.folder / "labels" / "ann.jsonl", at.queue, "ann")) as log:
            for key in at.queue.order("ann"):
                log.choose(key, "left" if at.queue.b_is_left(key, "ann") else "right", 900)
    code, out, err = command("demo", "people")
    assert code == 0, err
    assert "You prefer the trained model's answers, by more than chance." in out
    report = json.loads(Path("runs/demo-people/demo.json").read_text())
    assert report["preferred"]["share"] == 1, "b is from after training, whatever its side"
    assert not (tmp_path / "runs" / "demo-people-2").exists()
    proposed = re.findall(r"^  surefoot (.*?)(?: +#.*)?$", out.partition("Try next:")[2], re.MULTILINE)
    more, its_report, _ = map(shlex.split, proposed)
    for words, printed in ((more, "round-3: 0 of 4 pairs are labelled"), (its_report, "")):
        code, out, err = command(*words)
        assert (code, printed in out) == (0, True), err
    code, _, err = command("demo", "verifier", "--judge", "gold")
    assert (code, err) == (2, "surefoot: --judge gold: is for the people demo; run: surefoot demo people --judge gold\n")
