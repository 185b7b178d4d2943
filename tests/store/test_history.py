"""metrics.jsonl: all readers return the same rows; damaged lines are skipped, kept and reported."""

import hashlib
import json
import shutil
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.inspector.curves import Columns
from surefoot.recipes.presets import find_recipe
from surefoot.runs import api
from surefoot.store.manifest import MANIFEST
from surefoot.store.metrics import cut_back, fingerprint_file, read_fingerprints, read_metrics
from surefoot.store.reading import History, rising

NONSENSE = {
    "a list for a count": b'{"iteration": 3, "steps": []}',
    "a long count": b'{"iteration": 3, "steps": 1%s}' % (b"0" * 400),
    "a long number": b'{"iteration": 3, "steps": 192, "kl": 1%s}' % (b"0" * 400),
    "a longer number": b'{"iteration": 3, "steps": 192, "kl": 1%s}' % (b"0" * 5000),
    "brackets": b"[" * 100_000,
    "nested": b'{"iteration":' * 100_000,
    "a word": b'{"iteration": 3, "steps": 192, "kl": "low"}',
    "a table": b'{"iteration": 3, "steps": 192, "kl": {}}',
    "a truth for a count": b'{"iteration": true, "steps": 192}',
    "a count below zero": b'{"iteration": 3, "steps": -192}',
    "a count that jumps": b'{"iteration": 3, "steps": 99999999}',
    "a count that falls": b'{"iteration": 1, "steps": 192}',
    "no table": b"3",
    "no count": b'{"kl": 0.5}',
    "no text": b"\xff\xfe\x00",
    "nothing": b"",
}


def line(n, **more):
    return json.dumps({"iteration": n, "steps": 64 * n, "kl": 1 / n, "score": None, **more}).encode()


def text_of(*lines):
    return b"".join(each + b"\n" for each in lines)


def iterations(rows):
    return [row["iteration"] for row in rows]


# ---- reading


def test_an_invalid_line_loses_only_its_own_row(tmp_path):
    for nonsense in NONSENSE.values():
        text = text_of(line(1), line(2), nonsense, line(4), line(5))
        history = History(text)
        assert iterations(history.rows) == [1, 2, 4, 5]
        assert history.damaged == [3]
        assert history.fault == "has 5 lines, of which line 3 can't be read"
        (tmp_path / "metrics.jsonl").write_bytes(text)
        assert read_metrics(tmp_path / "metrics.jsonl") == history.rows
        columns = Columns(tmp_path / "metrics.jsonl")
        assert columns.read_on() == 4
        assert columns.columns["iteration"].tolist() == [1, 2, 4, 5]


def test_every_number_that_a_run_may_write_is_read_back():
    for value in ("NaN", "Infinity", "-Infinity", "null", "1e300", "0", "12345678901234567890"):
        assert len(History(text_of(line(1), b'{"iteration": 2, "steps": 128, "kl": %s}' % value.encode())).rows) == 2


def test_a_byte_order_mark_is_ignored(tmp_path):
    text = text_of(line(1), line(2))
    assert History(b"\xef\xbb\xbf" + text).text == text
    (tmp_path / "metrics.jsonl").write_bytes(b"\xef\xbb\xbf" + text)
    assert Columns(tmp_path / "metrics.jsonl").read_on() == 2


def test_an_unfinished_last_line_is_not_an_error():
    history = History(text_of(line(1)) + line(2)[:9])
    assert (history.rows, history.fault) == ([json.loads(line(1))], None)


def test_a_missing_file_has_no_rows(tmp_path):
    assert read_metrics(tmp_path / "metrics.jsonl") == []


@given(st.lists(st.integers(0, 12), max_size=9))
def test_the_longest_rising_series_is_kept(values):
    actual = [values[index] for index in rising(values)]
    longest = [0]  # by trying all
    for mask in range(1, 2 ** len(values)):
        chosen = [value for index, value in enumerate(values) if mask >> index & 1]
        if all(a < b for a, b in pairwise(chosen)):
            longest.append(len(chosen))
    assert all(a < b for a, b in pairwise(actual))
    assert len(actual) == max(longest)


# ---- cutting back


def cut(tmp_path, text, iteration, written=None):
    """The text afterwards, and what was told."""
    notes = []
    (tmp_path / "metrics.jsonl").write_bytes(text)
    if written is not None:
        manifest = tmp_path / "checkpoints" / "1" / MANIFEST
        manifest.parent.mkdir(parents=True, exist_ok=True)
        manifest.write_text(json.dumps({"metrics": {"size": len(written), "sha256": sha256(written)}}))
    kept = cut_back(tmp_path, iteration, notes.append)
    assert kept == (tmp_path / "metrics.jsonl").read_bytes()
    return kept, notes


def sha256(content):
    return hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("has_checksum", [True, False], ids=["with a checksum", "without"])
def test_later_iterations_and_an_unfinished_line_are_dropped_without_a_message(has_checksum, tmp_path):
    before = text_of(line(1), line(2), line(3))
    text = before + text_of(line(4)) + line(5)[:7]
    assert cut(tmp_path, text, 3, before if has_checksum else None) == (before, [])
    assert not (tmp_path / "metrics.damaged.jsonl").exists()


@pytest.mark.parametrize("has_checksum", [True, False], ids=["with a checksum", "without"])
def test_a_damaged_line_is_set_aside_and_reported_and_no_other_is_lost(has_checksum, tmp_path):
    before = text_of(line(1), line(2), line(3), line(4))
    for nonsense in NONSENSE.values():
        (tmp_path / "metrics.damaged.jsonl").unlink(missing_ok=True)
        text = text_of(line(1), line(2), nonsense, line(4), line(5))
        kept, notes = cut(tmp_path, text, 4, before if has_checksum else None)
        assert kept == text_of(line(1), line(2), line(4))
        assert (tmp_path / "metrics.damaged.jsonl").read_bytes() == nonsense + b"\n"
        assert len(notes) == 1
        assert "line 3" in notes[0]
        assert "kept in metrics.damaged.jsonl" in notes[0]


def test_missing_rows_are_reported_without_a_checksum(tmp_path):
    for lines, fault in (
        ([], "lacks 3 iterations, the first of them 1"),
        ([line(1), line(2)], "lacks iteration 3"),
        ([line(3)], "lacks 2 iterations, the first of them 1"),
        ([line(1), line(3)], "lacks iteration 2"),
    ):
        kept, notes = cut(tmp_path, text_of(*lines), 3)
        assert kept == text_of(*lines)
        assert len(notes) == 1
        assert notes[0].endswith(fault)
        assert History(text_of(*lines, line(4))).fault == fault, "and so they are when the run has gone on"


def test_lines_set_aside_twice_after_a_kill_are_kept_once(tmp_path):
    text = text_of(line(1), b"nonsense", b"more", line(4))
    cut(tmp_path, text, 4)
    cut(tmp_path, text, 4)
    assert (tmp_path / "metrics.damaged.jsonl").read_bytes() == b"nonsense\nmore\n"


def test_a_changed_number_is_detected_and_kept(tmp_path):
    before = text_of(line(1), line(2), line(3))
    changed = text_of(line(1), line(2, kl=0.75), line(3))
    kept, notes = cut(tmp_path, changed, 3, before)
    assert kept == changed
    assert len(notes) == 1
    assert "any of its numbers may be wrong" in notes[0]


def test_a_missing_end_is_detected(tmp_path):
    for left in (0, 1, 40, 100):
        before = text_of(line(1), line(2), line(3))
        _, notes = cut(tmp_path, before[:left], 3, before)
        assert len(notes) == 1
        assert f"has {left} of the {len(before)} bytes that the run wrote" in notes[0]


@given(st.data())
def test_every_change_of_written_rows_is_detected(data):
    before = text_of(*(line(n) for n in range(1, 9)))
    at = data.draw(st.integers(0, 8 * len(before) - 1))
    flipped = bytearray(before)
    flipped[at // 8] ^= 1 << at % 8
    written = {"size": len(before), "sha256": sha256(before)}
    assert History(before, written).fault is None
    assert History(bytes(flipped), written).fault is not None
    assert History(before[: at // 8], written).fault is not None


# ---- commands


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of eight rows."""
    path = tmp_path_factory.mktemp("runs") / "run"
    fields = {
        "steps": 512,
        "rollout": {"environments": 4, "steps": 16},
        "checkpoint": {"every": 64},
        "evaluation": {"episodes": 1},
    }
    api.start(find_recipe("CartPole-v1", fields), path)
    assert len(read_metrics(path / "metrics.jsonl")) == 8
    return path


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture
def surefoot(command):
    """Run a command: its exit code, and all that it prints. A traceback is an exception here."""

    def go(*words):
        code, out, errors = command(*map(str, words))
        return code, out + errors

    return go


def test_a_run_whose_metrics_are_as_it_wrote_them_has_no_such_finding(surefoot, run):
    assert "metrics.jsonl" not in surefoot("check", run)[1]
    _, output = surefoot("resume", run, "--steps", 576)
    assert "metrics.jsonl" not in output
    assert "metrics.jsonl" not in surefoot("check", run)[1]


def flat(text: str) -> str:
    """Wrapped lines as one."""
    return " ".join(text.split())


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", "has no metrics yet; wait for its first iteration, or continue it if it was stopped: surefoot resume "),
        (b"x\n", "metrics.jsonl: has 1 line, of which line 1 can't be read; no row is left"),
    ],
)
def test_a_run_without_rows_has_one_error_for_every_command(surefoot, finished, run, content, error):
    shutil.rmtree(run / "checkpoints")
    (run / "metrics.jsonl").write_bytes(content)
    for words in (("check", run), ("report", run), ("compare", finished, run)):
        code, output = surefoot(*words)
        assert (code, output.count("\n")) == (2, 1)
        assert error in output


def test_one_bad_byte_costs_one_row_which_is_kept_and_every_command_reports_it(surefoot, run, tmp_path):
    file = run / "metrics.jsonl"
    lines = file.read_bytes().split(b"\n")
    lines[1] = lines[1].replace(b"{", b"\xfb", 1)
    file.write_bytes(b"\n".join(lines))
    fault = "metrics.jsonl has 8 lines, of which line 2 can't be read"
    assert fault in flat(surefoot("check", run)[1])
    assert "metrics_damaged" in surefoot("check", run, "--json")[1]
    assert fault in flat(surefoot("compare", run, shutil.copytree(run, tmp_path / "other"))[1])
    assert surefoot("report", run)[0] == 0
    assert "of which line 2" in (run / "report.html").read_text()
    code, output = surefoot("resume", run, "--steps", 576)
    assert code == 0
    assert "of which line 2 can't be read; what can't be read is kept in metrics.damaged.jsonl" in flat(output)
    assert iterations(read_metrics(file)) == [1, 3, 4, 5, 6, 7, 8, 9]
    assert (run / "metrics.damaged.jsonl").read_bytes() == lines[1] + b"\n"


def test_missing_metrics_are_reported(surefoot, run):
    (run / "metrics.jsonl").unlink()
    code, output = surefoot("check", run)
    assert code == 2
    assert "metrics.jsonl: has 0 of the" in output
    code, output = surefoot("resume", run, "--steps", 576)
    assert code == 0
    assert "metrics.jsonl: has 0 of the" in output


def test_no_command_shows_a_traceback_for_invalid_metrics(surefoot, run, tmp_path):
    lines = (run / "metrics.jsonl").read_bytes().split(b"\n")
    (run / "metrics.jsonl").write_bytes(b"\n".join([*lines[:2], NONSENSE["a long number"], NONSENSE["brackets"], *lines[4:]]))
    other = shutil.copytree(run, tmp_path / "other")
    for words in (["check", run], ["report", run], ["compare", run, other], ["evaluate", run, "--episodes", 1]):
        assert surefoot(*words)[0] == 0
    assert surefoot("resume", run, "--steps", 576)[0] == 0


def test_a_row_is_in_its_file_at_once_and_a_run_goes_on_after_the_rows_up_to_its_iteration(tmp_path):
    for iteration, machine, written, there in [(0, "a", 3, [1, 1, 2, 3]), (2, "a", 0, [1, 1, 2]), (2, "b", 1, [1, 1, 2, 3, 3])]:
        file = fingerprint_file(tmp_path, iteration, {"processor": machine})
        for later in range(written):
            file.write({"iteration": iteration + 1 + later})
        assert [at for at, _ in read_fingerprints(tmp_path).lines] == there
        file.file.close()
