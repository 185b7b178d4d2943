"""Pairs that people compare, and the log of what each person chose.

``queue.jsonl`` has the pairs and is written once. Its SHA-256 seeds the order, the sides and the repeats of every person, so a
page that is loaded again shows what it showed before. ``labels/NAME.jsonl`` is only appended to: a line is on the disk before
the page draws the next pair. ``closed.json`` has size and SHA-256 of each log as training read it; later lines belong to the
next round.

This module imports no torch.
"""

import hashlib
import json
import os
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import filelock

from surefoot.errors import SurefootError
from surefoot.files import parsed, read_bytes, write_text
from surefoot.store.manifest import flush, read_listed, read_listed_table, write_listed

SIDES, CLIPS = ("a", "b"), ("video_a", "video_b")
QUEUE, LABELS, CLOSED = "queue.jsonl", "labels", "closed.json"
LEFT, RIGHT, EQUAL, SKIP = CHOICES = ("left", "right", "equal", "skip")
REPEATED = 0.1
"""share of the pairs that a person is asked twice, to compare the person with himself"""
APART = 10
"""other pairs at least between a pair and its repeat"""
COMMON = 0.2
"""share of the pairs that everybody is asked first, to compare people"""
AGAIN = "#2"
"""ends the key of a repeat"""

Preference = Literal["a", "b", "equal"]
Row = dict[str, Any]


# ---- the pairs ----------------------------------------------------------------------------------------------------------


class Queue:
    """The pairs of a file, each with ``prompt``, ``a`` and ``b``, or with two videos ``video_a`` and ``video_b``.

    Answers may be messages. Raises SurefootError, with file and line, for anything else.
    """

    def __init__(self, path: Path, content: bytes | None = None) -> None:
        self.path = path
        content = read_bytes(path) if content is None else content
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.pairs = [_pair(path, number, line) for number, line in enumerate(content.splitlines(), 1) if line.strip()]
        if not self.pairs:
            raise SurefootError(f"{path}: has no pairs; each line needs prompt, a and b")

    def __getitem__(self, key: str) -> Row:
        """The pair of a presentation. Raises SurefootError for a key of another queue."""
        number = key.removesuffix(AGAIN)
        if not number.isdecimal() or number != str(int(number)) or not 1 <= int(number) <= len(self.pairs):
            raise SurefootError(f"key={key!r}: is no pair of {self.path}")
        return self.pairs[int(number) - 1]

    def order(self, who: str) -> list[str]:
        """The keys of all pairs in the order in which a person is asked, repeats included.

        First the pairs that everybody is asked first, then the others; both shuffled for each person. A tenth of the pairs,
        all from the first half, is asked again later.
        """
        draw, parts = self.draw("order", who), self._parts()
        for part in parts:
            draw.shuffle(part)
        keys = [*parts[0], *parts[1]]
        early = keys[: max(1, len(keys) // 2)]
        for key in draw.sample(early, min(len(early), round(REPEATED * len(keys)))):
            after = keys.index(key) + APART + 1
            keys.insert(draw.randint(min(after, len(keys)), len(keys)), key + AGAIN)
        return keys

    def common(self) -> set[str]:
        """The keys of the pairs that everybody is asked first."""
        return set(self._parts()[0])

    def _parts(self) -> tuple[list[str], list[str]]:
        keys = [str(number) for number in range(1, len(self.pairs) + 1)]
        self.draw("common").shuffle(keys)
        first = round(COMMON * len(keys))
        return keys[:first], keys[first:]

    def b_is_left(self, key: str, who: str) -> bool:
        """Which side a person sees b on; a repeat has the sides swapped."""
        swapped = self.draw("side", key.removesuffix(AGAIN), who).random() < 0.5
        return swapped != key.endswith(AGAIN)

    def draw(self, *about: str) -> random.Random:
        """Random numbers for one use of this queue."""
        return random.Random("\n".join((self.sha256, *about)))


def _pair(path: Path, number: int, line: bytes) -> Row:
    try:
        row = parsed(line.decode("utf-8-sig"))
        json.dumps(row, ensure_ascii=False).encode()  # half of a character can't be shown
    except ValueError as error:
        raise SurefootError(f"{path}:{number}: can't be read ({error}); write a line of JSON for each pair") from None
    if not isinstance(row, dict):
        raise SurefootError(f"{path}:{number}: is no table; write a line of JSON with prompt, a and b")
    if "chosen" in row and "rejected" in row:  # pairs for a reward model; the page shows sides at random
        row = {"a": row.pop("chosen"), "b": row.pop("rejected"), **row}
    row = {name: value for name, value in row.items() if value is not None or name not in ("prompt", *CLIPS)}
    for name in CLIPS if CLIPS[0] in row else SIDES:
        if isinstance(of := row.get(name), list) and len(of) == 1 and isinstance(of[0], dict):  # a message, as pair_rows writes
            row[name] = of[0].get("content")
        if not isinstance(row.get(name), str):
            raise SurefootError(f"{path}:{number}: {name}={row.get(name)!r}: must be text; each line needs prompt, a and b")
    if not isinstance(row.get("prompt", ""), str | list):
        raise SurefootError(f"{path}:{number}: prompt={row['prompt']!r}: must be text, or a list of messages")
    return row


# ---- the log of one person ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Label:
    """What a person chose of one pair, the last time."""

    key: str
    who: str
    choice: str
    b_left: bool
    milliseconds: int

    @property
    def repeat(self) -> bool:
        """Whether the pair was asked a second time, which is never trained on."""
        return self.key.endswith(AGAIN)

    @property
    def preference(self) -> Preference | None:
        """The better answer; None for a pair that the person skipped."""
        if self.choice in (EQUAL, SKIP):
            return "equal" if self.choice == EQUAL else None
        return "b" if (self.choice == LEFT) == self.b_left else "a"


class LabelLog:
    """The log of one person, open to be appended to.

    Raises SurefootError if another process has it open, if it belongs to another queue, or if a line is damaged. A last line
    that a kill cut off is removed: its label was not acknowledged.
    """

    def __init__(self, path: Path, queue: Queue, who: str) -> None:
        check_person(who)
        self.path, self.queue, self.who = path, queue, who
        path.parent.mkdir(parents=True, exist_ok=True)
        self.lock = filelock.FileLock(path.with_name(f".{path.stem}.lock"))
        try:
            self.lock.acquire(timeout=0)
        except filelock.Timeout:
            raise SurefootError(
                f"{path}: in use by another page; continue there, stop it, or take another name: --who NAME"
            ) from None
        try:
            content = read_bytes(path) if path.exists() else b""
            whole = content[: content.rfind(b"\n") + 1]
            self.rows = rows_of(path, whole, queue, who)
            if not self.rows and queue.sha256.encode() not in whole:  # opened before the queue was edited
                whole = b""
            self.file = path.open("ab", buffering=0)
        except BaseException:
            self.lock.release()
            raise
        if len(whole) < len(content):
            self.file.truncate(len(whole))
        if not whole:
            self._append({"queue": queue.sha256, "who": who})
            flush(path.parent)

    def close(self) -> None:
        """Close the file and let others open it."""
        self.file.close()
        self.lock.release()

    @property
    def labels(self) -> dict[str, Label]:
        """The labels that stand, by key; the one that was given last comes last."""
        return standing(self.rows, self.who)

    def choose(self, key: str, choice: str, milliseconds: int) -> None:
        """Append a label, on the disk when this returns. A later label of the same key replaces an earlier one."""
        if choice not in CHOICES:
            raise SurefootError(f"choice={choice!r}: must be one of {', '.join(CHOICES)}")
        self.queue[key]
        left = self.queue.b_is_left(key, self.who)
        row = {"key": key, "choice": choice, "b_left": left, "ms": milliseconds, "at": round(time.time(), 3)}
        self._append(row)
        self.rows.append(row)

    def undo(self) -> str | None:
        """Take back the label that was given last, if there is one, and return its key."""
        if key := next(reversed(self.labels), None):
            row = {"key": key, "undo": True, "at": round(time.time(), 3)}
            self._append(row)
            self.rows.append(row)
        return key

    def _append(self, row: Row) -> None:
        line, state = json.dumps(row).encode() + b"\n", os.fstat(self.file.fileno())
        try:
            if not os.path.samestat(os.stat(self.path), state):
                raise OSError(0, "another file has its place")
            if self.file.write(line) < len(line):
                raise OSError(0, "no space left")
            os.fsync(self.file.fileno())
        except OSError as error:
            with suppress(OSError):
                self.file.truncate(state.st_size)
            raise SurefootError(
                f"{self.path}: the label is not saved ({error.strerror}); restore the file, or free space, and choose again"
            ) from None


def check_person(name: str) -> None:
    """Raise SurefootError for a name that can't be that of a file."""
    plain = name.isprintable() and name == name.strip().lstrip(".") and {"/", "\\"}.isdisjoint(name)
    if not plain or not 0 < len(name.encode()) < 100:
        raise SurefootError(f"who={name!r:.60}: can't be the name of a file of labels; use letters, digits, - and _")


def rows_of(path: Path, content: bytes, queue: Queue, who: str) -> list[Row]:
    """The rows of a log after its first line. Raises SurefootError for a damaged line, or a log of another queue."""
    rows = []
    for number, line in enumerate(content.splitlines(), 1):
        try:
            row = parsed(line.decode("utf-8"))
            chosen = number > 1 and row.get("undo") is not True
            if chosen and not (row["choice"] in CHOICES and {type(row["b_left"]), type(row.get("ms", 0))} == {bool, int}):
                raise ValueError("no label")
            rows.append(row)
        except (ValueError, KeyError, AttributeError):
            raise SurefootError(
                f"{path}:{number}: is damaged; restore the file from a copy, or move it away to label again"
            ) from None
    if rows[1:] and rows[0].get("queue") != queue.sha256:
        raise SurefootError(
            f"{path}: has labels of another queue than {queue.path}, or it was edited; restore it, or move the labels away"
        )
    if rows and rows[0].get("who") != who:
        raise SurefootError(f"{path}: has the labels of {rows[0].get('who')!r}; restore its name")
    for row in rows[1:]:
        queue[str(row.get("key"))]
    return rows[1:]


def standing(rows: Iterable[Mapping[str, Any]], who: str) -> dict[str, Label]:
    """The labels that are neither replaced nor taken back, in the order in which they were given."""
    labels: dict[str, Label] = {}
    for row in rows:
        key = str(row["key"])
        labels.pop(key, None)
        if not row.get("undo"):
            labels[key] = Label(key, who, str(row["choice"]), bool(row["b_left"]), int(row.get("ms", 0)))
    return labels


def write_log(path: Path, queue: Queue, preferences: Sequence[Preference | None]) -> None:
    """The log of a judge that is no person: what it prefers in each pair, None for a pair that it skips."""
    who, rows = path.stem, [json.dumps({"queue": queue.sha256, "who": path.stem})]
    for number, better in enumerate(preferences, 1):
        left = queue.b_is_left(str(number), who)
        choice = SKIP if better is None else EQUAL if better == "equal" else LEFT if (better == "b") == left else RIGHT
        rows.append(json.dumps({"key": str(number), "choice": choice, "b_left": left, "ms": 0}))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(f"{row}\n" for row in rows))


# ---- all people ---------------------------------------------------------------------------------------------------------


def labels_of_all(queue: Queue, folder: Path, sizes: Mapping[str, int] | None = None) -> list[Label]:
    """The labels that stand in all logs of a folder.

    sizes   bytes to read of each log; without it, all whole lines of every log
    """
    labels: list[Label] = []
    for path in sorted(folder.glob("*.jsonl")):
        if sizes is None or path.name in sizes:
            content = read_bytes(path)[: None if sizes is None else sizes[path.name]]
            rows = rows_of(path, content[: content.rfind(b"\n") + 1], queue, path.stem)
            labels += standing(rows, path.stem).values()
    return labels


def labelled(labels: Iterable[Label]) -> set[str]:
    """The keys of the pairs that somebody has judged or skipped."""
    return {label.key for label in labels if not label.repeat}


def copies_of(labels: Iterable[Label]) -> int:
    """How often ``pair_rows`` has each decided label: twice if there is an equal one, whose two orders have half its weight."""
    return 2 if any(label.preference == "equal" and not label.repeat for label in labels) else 1


def pair_rows(queue: Queue, labels: Sequence[Label], copies: int) -> list[Row]:
    """Rows for reward models and DPO: (prompt, chosen, rejected).

    A decided label is ``copies`` rows, an equal one is both orders once. Skipped pairs and repeats are left out.
    """
    judged = [(queue[label.key], label.preference) for label in labels if not label.repeat and label.preference is not None]
    rows = []
    for pair, better in judged:
        same, messages = {name: x for name, x in pair.items() if name not in SIDES}, isinstance(pair.get("prompt"), list)
        a, b = ([{"role": "assistant", "content": pair[side]}] if messages else pair[side] for side in SIDES)
        for chosen, rejected in ((a, b), (b, a)) if better == "equal" else ((a, b) if better == "a" else (b, a),) * copies:
            rows.append({**same, "chosen": chosen, "rejected": rejected})
    return rows


def _fingerprint(content: bytes) -> dict[str, Any]:
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


@dataclass(frozen=True)
class Round:
    """The folder of a round: its queue, its logs, and what training read of the logs of this round and of earlier ones."""

    folder: Path

    @cached_property
    def queue(self) -> Queue:
        """The pairs. Raises SurefootError if the file is not what was written."""
        path = self.folder / QUEUE
        return Queue(path, read_listed(path, "restore it from a copy; its labels belong to what was written"))

    @property
    def labels(self) -> list[Label]:
        """All labels that stand now."""
        return labels_of_all(self.queue, self.folder / LABELS)

    @property
    def closed(self) -> bool:
        """Whether training has read the labels."""
        return (self.folder / CLOSED).is_file()

    def close(self, earlier: Sequence["Round"] = ()) -> None:
        """Write what training reads: the logs as they are now, those of earlier rounds included.

        Raises SurefootError if this round has no label to train on.
        """
        if not any(label.preference and not label.repeat for label in self.labels):
            raise SurefootError(
                f"{self.folder}: has no labels to train on; label pairs first: surefoot label {self.folder.parent}"
            )
        logs = {}
        for each in (*earlier, self):
            for path in sorted((each.folder / LABELS).glob("*.jsonl")):
                content = read_bytes(path)
                logs[f"{each.folder.name}/{LABELS}/{path.name}"] = _fingerprint(content[: content.rfind(b"\n") + 1])
        write_listed(self.folder / CLOSED, json.dumps({"logs": logs}, indent=1))

    def rows(self, only_own: bool = False) -> tuple[list[Row], int]:
        """The rows that training uses, and how often each decided label is among them; ``only_own`` as in ``read``."""
        found = self.read(only_own)
        copies = copies_of(label for _, labels in found for label in labels)
        return [row for queue, labels in found for row in pair_rows(queue, labels, copies)], copies

    def read(self, only_own: bool = False) -> list[tuple[Queue, list[Label]]]:
        """The labels that training uses, from the logs in closed.json, by round.

        only_own   those of this round alone

        Raises SurefootError if a log has lost or changed a line.
        """
        logs: Mapping[str, Mapping[str, Any]] = read_listed_table(self.folder / CLOSED)["logs"]
        found: list[tuple[Queue, list[Label]]] = []
        for folder in [self.folder.name] if only_own else dict.fromkeys(name.split("/")[0] for name in logs):
            each = Round(self.folder.parent / folder)
            sizes = {}
            for name, expected in logs.items():
                if name.startswith(f"{folder}/"):
                    path = self.folder.parent / name
                    if not path.is_file() or _fingerprint(read_bytes(path)[: expected["size"]]) != expected:
                        raise SurefootError(
                            f"{path}: is not what the training of {self.folder.name} read; restore it, or to train again "
                            f"without it remove {self.folder / CLOSED} and all that follows it"
                        )
                    sizes[path.name] = int(expected["size"])
            found.append((each.queue, labels_of_all(each.queue, each.folder / LABELS, sizes)))
        return found


def waits_for(run: Path) -> str:
    """What people must do before a run that asks about clips goes on, or why its labels can't be read; empty for other runs."""
    at = next((at for at in rounds_of(run)[-1:] if not at.closed), None)
    if at is None:
        return ""
    try:
        done, total = len(labelled(at.labels)), len(at.queue.pairs)
    except SurefootError as error:
        return str(error)
    label = f"label them with: surefoot label {run}, then " if done < total else ""
    return f"{at.folder.name}: {done} of {total} pairs of clips are labelled; {label}go on with: surefoot resume {run}"


def rounds_of(folder: Path) -> list[Round]:
    """The rounds of a folder that have a queue, in order."""
    if (folder / QUEUE).is_file():
        return [Round(folder)]
    found = [path.parent for path in folder.glob(f"round-*/{QUEUE}") if path.parent.name.removeprefix("round-").isdecimal()]
    return [Round(path) for path in sorted(found, key=lambda path: int(path.name.removeprefix("round-")))]
