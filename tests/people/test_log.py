"""Labels of people: none is lost or trained twice, and what a page shows depends on the queue and the person alone;
how well labels agree: shares, κ and exact tests against values that are computed by hand or known."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.errors import SurefootError
from surefoot.people.agreement import bias, findings, kappa, lines, of_people, share, with_model
from surefoot.people.log import (
    AGAIN,
    APART,
    CHOICES,
    LABELS,
    QUEUE,
    Label,
    LabelLog,
    Queue,
    Round,
    copies_of,
    labelled,
    labels_of_all,
    pair_rows,
    write_log,
)
from surefoot.store.manifest import write_listed


def text_of(count: int) -> str:
    pairs = ({"prompt": f"p{n}", "a": f"a{n}", "b": f"b{n}", "topic": n} for n in range(1, count + 1))
    return "".join(json.dumps(pair) + "\n" for pair in pairs)


def queue_of(count: int, folder: Path = Path("nowhere")) -> Queue:
    return Queue(folder / QUEUE, text_of(count).encode())


@pytest.fixture
def here(tmp_path: Path) -> Round:
    """A round of twelve pairs."""
    folder = tmp_path / "round-1"
    folder.mkdir()
    write_listed(folder / QUEUE, text_of(12))
    return Round(folder)


OPENED: list[LabelLog] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().close()


def log_of(here: Round, who: str) -> LabelLog:
    OPENED.append(LabelLog(here.folder / LABELS / f"{who}.jsonl", here.queue, who))
    return OPENED[-1]


def prefer(log: LabelLog, key: str, better: str) -> None:
    """Choose the side on which the page shows an answer."""
    log.choose(key, "left" if log.queue.b_is_left(key, log.who) == (better == "b") else "right", 900)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 200), st.sampled_from(["ann", "bo"]))
def test_everybody_is_asked_every_pair_once_and_a_tenth_again_later_with_the_sides_swapped(count: int, who: str) -> None:
    queue = queue_of(count)
    order = queue.order(who)
    assert order == queue_of(count).order(who), "a page that is loaded again asks the same"
    once, again = [key for key in order if AGAIN not in key], [key for key in order if AGAIN in key]
    assert sorted(map(int, once)) == list(range(1, count + 1))
    assert len(set(again)) == len(again) == min(max(1, count // 2), round(count / 10))
    for key in again:
        first = key.removesuffix(AGAIN)
        assert once.index(first) < max(1, count // 2), "from the first half"
        assert order.index(key) - order.index(first) > min(APART, len(order) - 1 - order.index(first) - 1)
        assert queue.b_is_left(key, who) != queue.b_is_left(first, who)


def test_sides_and_order_are_random_for_each_person_and_everybody_begins_with_the_same_pairs() -> None:
    queue = queue_of(200)
    sides = {who: [queue.b_is_left(str(n), who) for n in range(1, 201)] for who in ("ann", "bo")}
    assert all(70 < sum(of) < 130 for of in sides.values())
    assert 60 < sum(x != y for x, y in zip(*sides.values(), strict=True)) < 140
    first = {who: [key for key in queue.order(who) if AGAIN not in key][:40] for who in sides}
    assert first["ann"] != first["bo"]
    assert set(first["ann"]) == set(first["bo"]) == queue.common()


def test_a_label_means_the_answer_that_was_on_its_side(here: Round) -> None:
    log = log_of(here, "ann")
    for number in range(1, 13):
        prefer(log, str(number), "a" if number % 3 else "b")
    assert [label.preference for label in here.labels] == ["a" if n % 3 else "b" for n in range(1, 13)]
    rows = pair_rows(here.queue, here.labels, 1)
    assert rows[0] == {"prompt": "p1", "topic": 1, "chosen": "a1", "rejected": "b1"}
    assert rows[2] == {"prompt": "p3", "topic": 3, "chosen": "b3", "rejected": "a3"}


def test_equal_labels_have_the_weight_of_others_and_repeats_and_skipped_pairs_none(here: Round) -> None:
    log = log_of(here, "ann")
    prefer(log, "1", "a")
    log.choose("2", "equal", 5)
    log.choose("3", "skip", 5)
    prefer(log, "1" + AGAIN, "b")
    rows = pair_rows(here.queue, here.labels, copies_of(here.labels))
    assert [(row["chosen"], row["rejected"]) for row in rows] == [("a1", "b1"), ("a1", "b1"), ("a2", "b2"), ("b2", "a2")]
    assert labelled(here.labels) == {"1", "2", "3"}


def test_undo_takes_back_the_last_label_and_a_changed_one_replaces_the_first(here: Round) -> None:
    log = log_of(here, "ann")
    assert log.undo() is None
    prefer(log, "1", "a")
    prefer(log, "2", "a")
    prefer(log, "1", "b")
    assert {label.key: label.preference for label in here.labels} == {"2": "a", "1": "b"}
    assert log.undo() == "1"
    assert [label.key for label in here.labels] == ["2"]
    log.close()
    assert list(log_of(here, "ann").labels) == ["2"]


def test_answers_to_messages_are_messages_and_rows_that_were_written_are_pairs_again() -> None:
    pair = {"prompt": [{"role": "user", "content": "hi"}], "a": "one", "b": "two", "video_a": None}
    for _ in range(2):
        queue = Queue(Path(QUEUE), b"\xef\xbb\xbf" + json.dumps(pair).encode() + b"\r\n")
        [row] = pair_rows(queue, [Label("1", "x", "left", False, 900)], 1)
        assert [(len(row[side]), row[side][0]["content"]) for side in ("chosen", "rejected")] == [(1, "one"), (1, "two")]
        pair = row


# ---- closing ------------------------------------------------------------------------------------------------------------


def test_later_labels_belong_to_the_next_round(here: Round) -> None:
    log = log_of(here, "ann")
    prefer(log, "1", "a")
    here.close()
    assert [row["chosen"] for row in here.rows()[0]] == ["a1"]
    prefer(log, "2", "b")
    assert [row["chosen"] for row in here.rows()[0]] == ["a1"], "training depends on closed.json alone"
    following = Round(here.folder.with_name("round-2"))
    following.folder.mkdir()
    write_listed(following.folder / QUEUE, text_of(3))
    other = log_of(following, "bo")
    prefer(other, "3", "a")
    following.close([here])
    assert [row["chosen"] for row in following.rows()[0]] == ["a1", "b2", "a3"]
    assert [row["chosen"] for row in following.rows(only_own=True)[0]] == ["a3"]


def test_a_judge_fills_the_log_of_people(here: Round) -> None:
    write_log(here.folder / LABELS / "judge.jsonl", here.queue, ["a", "b", "equal", None])
    assert [label.preference for label in here.labels] == ["a", "b", "equal", None]
    assert list(log_of(here, "judge").labels) == ["1", "2", "3", "4"], "and reads it as one of theirs"


def test_what_is_wrong_with_labels_is_one_line(here: Round) -> None:
    with pytest.raises(SurefootError, match="has no labels to train on; label pairs first"):
        here.close()
    log = log_of(here, "ann")
    prefer(log, "1", "a")
    with pytest.raises(SurefootError, match=r"ann.jsonl: in use by another page"):
        log_of(here, "ann")
    for key, choice, what in (("1", "up", "choice='up'"), ("13", "left", "key='13': is no pair"), ("01", "left", "key='01'")):
        with pytest.raises(SurefootError, match=what):
            log.choose(key, choice, 1)
    log.close()
    here.close()
    file = here.folder / LABELS / "ann.jsonl"
    text = file.read_text()
    for damaged in (text.replace("900", "901"), ""):
        file.write_text(damaged)
        with pytest.raises(SurefootError, match="is not what the training of round-1 read"):
            here.rows()
    for damaged, what in (
        (text.replace("queue", "cue"), "has labels of another queue"),
        (text.replace('"ann"', '"bo"'), "has the labels of 'bo'"),
        (text + "{\n", r"ann.jsonl:3: is damaged"),
        (text.replace("900", '"soon"'), r"ann.jsonl:2: is damaged"),
        (text + json.dumps({"key": "99", "choice": "left", "b_left": True}) + "\n", "key='99'"),
    ):
        file.write_text(damaged)
        with pytest.raises(SurefootError, match=what):
            log_of(here, "ann")
    (here.folder / QUEUE).write_text(text_of(12).replace("a1", "a9"))
    with pytest.raises(SurefootError, match=r"queue.jsonl: does not match its SHA-256"):
        Round(here.folder).queue  # noqa: B018


def test_a_label_that_can_t_be_saved_is_an_error_and_leaves_no_part(here: Round, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    log = log_of(here, "ann")
    prefer(log, "1", "a")
    before, away = log.path.read_bytes(), log.path.with_suffix(".away")
    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        with pytest.raises(SurefootError, match=r"not saved \(No space left on device\); restore"):
            prefer(log, "2", "a")
    assert log.path.read_bytes() == before
    log.path.rename(away)
    with pytest.raises(SurefootError, match="the label is not saved"):
        prefer(log, "2", "a")
    away.rename(log.path)
    prefer(log, "3", "a")
    assert [label.key for label in here.labels] == ["1", "3"]


def test_bad_input_is_one_line_with_exit_code_2_and_changes_no_label(
    here: Round, command: Callable[..., tuple[int, str, str]]
) -> None:
    pairs, run = Path("pairs.jsonl"), str(here.folder.parent)
    pairs.write_text(text_of(4))
    for _ in range(2):  # a log without labels follows the queue
        LabelLog(Path("pairs-labels/bo.jsonl"), Queue(pairs), "bo").close()
        pairs.write_text(text_of(3))
    log_of(here, "ann").close()
    OPENED.append(LabelLog(Path("pairs-labels/bo.jsonl"), Queue(pairs), "bo"))
    prefer(OPENED[-1], "1", "a")
    before = Path("pairs-labels/bo.jsonl").read_bytes()

    def rejected(what: str, *words: str) -> None:
        code, _, err = command(*words)
        assert (code, err.count("\n"), what in err) == (2, 1, True), err

    for name in ("a/b", "..", ".ann", "a\nb", "", "ann ", "x" * 300):
        rejected("can't be the name of a file of labels", "label", run, "--who", name)
    rejected("in use by another page", "label", "pairs.jsonl", "--who", "bo", "--no-browser")
    rejected("has no labels to train on; label pairs first", "label", run, "--close")
    rejected("--close: is for a folder of rounds", "label", "pairs.jsonl", "--close")
    for file in ("pairs.jsonl", "pairs-labels/bo.jsonl"):
        rejected("has the pairs, or labels of them; choose another", "label", "pairs.jsonl", "--export", file)
    Path("clips.jsonl").write_text(text_of(1) + '{"video_a": "a.mp4", "video_b": "b.mp4"}')
    rejected("clips have no rows of text", "label", "clips.jsonl", "--export", "rows.jsonl")
    rejected("clips.jsonl: a.mp4: is no file; restore", "label", "clips.jsonl", "--no-browser")
    rejected("'--pairs': 0 is not in the range", "rounds", "ppo.toml", "--judge", "people", "--pairs", "0")
    pairs.write_text(text_of(3).replace("a2", "a9"))
    for flags in (["--report"], ["--export", "rows.jsonl"], ["--who", "bo", "--no-browser"]):
        OPENED[-1].close()
        rejected("has labels of another queue than pairs.jsonl, or it was edited; restore", "label", "pairs.jsonl", *flags)
    assert Path("pairs-labels/bo.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"prompt": "x", "a": "y"}',
        '{"prompt": "x", "video_a": "y", "video_b": 3}',
        '{"prompt": 1, "a": "", "b": "y"}',
        '{"prompt": "\\ud800", "a": "", "b": "y"}',
    ],
)
def test_a_line_that_is_no_pair_is_named(line: str) -> None:
    with pytest.raises(SurefootError, match=r"queue.jsonl:13: "):
        Queue(Path(QUEUE), (text_of(12) + line).encode())


# ---- kills --------------------------------------------------------------------------------------------------------------

LABELLER = """
import sys
from pathlib import Path
from surefoot.people.log import LabelLog, Queue

folder = Path(sys.argv[1])
log = LabelLog(folder / "labels" / "ann.jsonl", Queue(folder / "queue.jsonl"), "ann")
while True:
    for key in log.queue.order("ann"):
        log.choose(key, "left", len(log.rows))
        print(len(log.rows), flush=True)
"""


def test_no_acknowledged_label_is_lost_by_kills(here: Round) -> None:
    said, draw = 0, random.Random(1)
    for _ in range(5):
        words = [sys.executable, "-c", LABELLER, str(here.folder)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            assert int(process.stdout.readline()) > said
            time.sleep(draw.random() / 20)
            os.kill(process.pid, signal.SIGKILL)
            rest = process.stdout.read().splitlines(keepends=True)
        said = max([said + 1, *(int(line) for line in rest if line.endswith("\n"))])
        file = here.folder / LABELS / "ann.jsonl"
        file.write_bytes(file.read_bytes() + b'{"key": "1", "cho')  # a line that was being written
        log = log_of(here, "ann")
        assert [row["ms"] for row in log.rows] == list(range(len(log.rows)))
        assert len(log.rows) >= said
        said = len(log.rows)
        log.close()
    assert {label.choice for label in labels_of_all(here.queue, here.folder / LABELS)} <= set(CHOICES)


def uneven(count: int) -> Queue:
    return Queue(Path("queue.jsonl"), text_of(count).replace('"a": "a', '"a": "longer a').encode())


def label(queue: Queue, key: str, who: str, better: str) -> Label:
    left = queue.b_is_left(key, who)
    choice = better if better in ("equal", "skip") else "left" if (better == "b") == left else "right"
    return Label(key, who, choice, left, 1500)


def test_a_share_has_wilsons_interval_and_a_bias_the_exact_binomial_p() -> None:
    assert [round(share(8, 10)[name], 3) for name in ("low", "high")] == [0.490, 0.943]
    assert bias(2, 10)["p"] == pytest.approx(0.109375)
    assert bias(10, 10)["p"] == pytest.approx(2 / 1024)
    assert bias(5, 10)["p"] == 1
    assert share(0, 0)["share"] is None


def test_kappa_is_that_of_cohens_table() -> None:
    """20 yes/yes, 5 yes/no, 10 no/yes, 15 no/no: κ = 0.4, with the standard error of Fleiss, Cohen and Everitt."""
    both = 20 * [("a", "a")] + 5 * [("a", "b")] + 10 * [("b", "a")] + 15 * [("b", "b")]
    table = kappa(both)
    assert (table["pairs"], table["agreed"]) == (50, 35)
    assert table["kappa"] == pytest.approx(0.4)
    assert [table["low"], table["high"]] == pytest.approx([0.4 - 1.96 * 0.12709, 0.4 + 1.96 * 0.12709], abs=1e-3)
    assert kappa([("a", "a")] * 50)["kappa"] is None, "chance would agree as well"
    assert kappa([("a", "a"), ("b", "a"), ("b", "b")])["kappa"] is None, "too few pairs for an interval"
    draw = random.Random(1)
    assert abs(kappa([(draw.choice("ab"), draw.choice("ab")) for _ in range(4000)])["kappa"]) < 0.05


def test_who_always_picks_a_side_gets_a_finding_and_who_is_careful_gets_none() -> None:
    queue = uneven(20)
    keys = queue.order("lefty")
    labels = [Label(key, "lefty", "left", queue.b_is_left(key, "lefty"), 300) for key in keys]
    labels += [label(queue, key, "ann", "a" if int(key.removesuffix(AGAIN)) % 2 else "b") for key in queue.order("ann")]
    report = of_people(queue, labels)
    assert report["people"]["lefty"]["left"]["count"] == 22
    assert [(each.name, "lefty" in each.what) for each in findings(report)] == [("labels_biased_left", True)]
    assert report["between"]["ann and lefty"]["pairs"] == 20
    assert report["people"]["ann"]["same_again"] is None, "shown from 20 repeats on"
    assert any(line.startswith("ann: 20 labels, 0 equal, 0 skipped, 1.5 s each") for line in lines(report))


def test_the_agreement_with_oneself_and_length_are_counted_over_what_was_decided() -> None:
    queue = uneven(220)
    labels = [label(queue, key, "ann", "equal" if key in ("1", "1" + AGAIN) else "a") for key in queue.order("ann")]
    again = [each for each in labels if each.repeat]
    flipped = label(queue, again[0].key, "ann", "b")
    person = of_people(queue, [flipped if each is again[0] else each for each in labels])["people"]["ann"]
    assert (person["repeats"], person["same_again"]["count"]) == (22, 21)
    longer = person["longer"]
    assert (longer["count"], longer["of"]) == (219, 219), "each pair once"
    assert longer["p"] < 1e-9


def test_a_reward_model_is_compared_with_the_labels_that_decide() -> None:
    queue = uneven(6)
    better = ["a", "b", "a", "equal", "skip", "b"]
    labels = [label(queue, str(n), "ann", each) for n, each in enumerate(better, 1)] + [label(queue, "1" + AGAIN, "ann", "b")]
    margins = {"1": 2.0, "2": 1.0, "3": 0.0, "4": 5.0, "5": -5.0, "6": -3.0}
    model = with_model(labels, margins)
    assert (model["count"], model["of"]) == (2.5, 4)
    assert [each["key"] for each in model["differ"]] == ["2"]
    two = [Label(each.key, who, each.choice, each.b_left, 1) for each in labels for who in ("ann", "bob")]
    assert with_model(two, margins)["of"] == 4, "a second opinion on a pair is no second pair"
    report = {"people": {}, "between": {}, "model": model}
    assert [(each.name, each.severity) for each in findings(report)] == [("reward_model_at_chance", "serious")]
    assert findings({**report, "model": share(90, 100)}) == []
