"""The page on which a person compares two answers, or two clips: what it shows next, and where its labels go.

It has the inspector's guards. Nothing on it tells a score, a model or a step before the end.
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from surefoot.errors import SurefootError
from surefoot.inspector.access import Guard, LoginTokens
from surefoot.inspector.server import front_end, json_route, starlette, static_route, video_route, write_route
from surefoot.people.log import AGAIN, APART, CLIPS, Label, LabelLog, labelled, labels_of_all

EDITABLE = 10
"""the labels given last, which can be changed"""
PAGE = {"": "label.html", "label.js": "label.js", "label.css": "label.css"} | {
    name: name for name in ("style.css", "dom.js", "api.js", "icon.svg")
}
"""the files of the page"""
SIDES = ("left", "right")


class Comparison:
    """One person's comparison of the pairs of a queue.

    log        of this person; the logs beside it are those of others
    question   asked above each pair
    after      printed when every pair has a label
    """

    def __init__(self, log: LabelLog, question: str, after: str) -> None:
        self.log, self.question, self.after = log, question, after
        self.order, self.common = log.queue.order(log.who), log.queue.common()
        for file in (pair[name] for pair in log.queue.pairs for name in CLIPS if name in pair):
            if not (log.queue.path.parent / file).is_file():
                raise SurefootError(f"{log.queue.path}: {file}: is no file; restore it, or correct the row")

    def state(self, key: str | None = None) -> dict[str, Any]:
        """What the page shows: the next pair, or that of ``key``; the labels given last; how many there are.

        ``row`` counts the rows of the log: a label is taken only from a page that shows this state.
        """
        labels = self.log.labels
        for_all = labelled(labels_of_all(self.log.queue, self.log.path.parent))
        left = self._left(labels, for_all)
        key = key or (left[0] if left else None)
        return {
            "question": self.question,
            "noun": "clip" if CLIPS[0] in self.log.queue.pairs[0] else "answer",
            "row": len(self.log.rows),
            "done": len(labels),
            "total": len(self.order),
            "complete": len(for_all) == len(self.log.queue.pairs),
            "after": self.after,
            "seconds": median(label.milliseconds for label in labels.values()) / 1000 if labels else 0,
            "last": [self._summary(label.key, label.choice) for label in list(labels.values())[: -EDITABLE - 1 : -1]],
            "pair": None if key is None else self._pair(key, labels[key].choice if key in labels else None),
            "next": [url for each in left[1:3] for url in self._videos(each)],
        }

    def _left(self, labels: Mapping[str, Label], for_all: Collection[str]) -> list[str]:
        """What this person is asked yet: first what nobody has judged, last the repeats of pairs that were asked just now."""
        far = list(labels)[:-APART]

        def late(key: str) -> int:
            first = key.removesuffix(AGAIN)
            return 2 * (first not in far) if key != first else first in for_all and first not in self.common

        return sorted((key for key in self.order if key not in labels), key=late)

    def choose(self, key: str, choice: str, milliseconds: Any, row: Any) -> dict[str, Any]:
        """Append a label, and return what comes next; a request that was sent twice, or from an older page, adds nothing."""
        if type(milliseconds) is not int or milliseconds < 0:
            raise SurefootError(f"ms={milliseconds!r}: must be a whole number of at least 0")
        if row == len(self.log.rows):
            self.log.choose(key, choice, milliseconds)
        return self.state()

    def undo(self, row: Any) -> dict[str, Any]:
        """Take back the last label, and return its pair."""
        return self.state(self.log.undo() if row == len(self.log.rows) else None)

    def video(self, key: str, side: str) -> Path:
        """The file of a clip."""
        pair = self.log.queue[key]
        if side not in SIDES or "video_a" not in pair:
            raise FileNotFoundError(side)
        return self.log.queue.path.parent / str(pair[f"video_{self._shown(key)[side]}"])

    def _shown(self, key: str) -> dict[str, str]:
        """Which answer is on each side."""
        b_left = self.log.queue.b_is_left(key, self.log.who)
        return {"left": "b" if b_left else "a", "right": "a" if b_left else "b"}

    def _videos(self, key: str) -> list[str]:
        number = key.replace(AGAIN, "~2")  # a "#" would end the address
        return [f"api/clips/{number}/{side}" for side in SIDES] if "video_a" in self.log.queue[key] else []

    def _pair(self, key: str, chosen: str | None) -> dict[str, Any]:
        pair, shown, videos = self.log.queue[key], self._shown(key), self._videos(key)
        sides = [{"video": url} for url in videos] or [{"text": pair[shown[side]]} for side in SIDES]
        return {"key": key, "prompt": as_text(pair.get("prompt")), "left": sides[0], "right": sides[1], "chosen": chosen}

    def _summary(self, key: str, choice: str) -> dict[str, str]:
        pair = self.log.queue[key]
        text = as_text(pair.get("prompt")) or f"pair {key}"
        return {"key": key, "choice": choice, "about": text if len(text) < 60 else f"{text[:59]}…"}


def as_text(prompt: Any) -> str:
    """A prompt as plain text; of messages, each with its role."""
    if isinstance(prompt, list):
        return "\n\n".join(f"{one.get('role', '')}: {one.get('content') or ''}" for one in prompt if isinstance(one, dict))
    return "" if prompt is None else str(prompt)


def application(comparison: Comparison, port: int, token: str, entered: Callable[[], None]) -> ASGIApp:
    """The ASGI application of the page."""

    def clip(request: Request) -> Path:
        return comparison.video(request.path_params["key"].replace("~2", AGAIN), request.path_params["side"])

    def choose(request: Request, sent: dict[str, Any]) -> Any:
        return comparison.choose(str(sent.get("key")), str(sent.get("choice")), sent.get("ms"), sent.get("row"))

    files = front_end()
    routes = [
        Route("/api/pair", json_route(lambda request: comparison.state(request.query_params.get("key")))),
        Route("/api/clips/{key}/{side}", video_route(clip)),
        Route("/api/label", write_route(choose), methods=["POST"]),
        Route("/api/undo", write_route(lambda _, sent: comparison.undo(sent.get("row"))), methods=["POST"]),
        *(Route(f"/{address}", static_route(files[name])) for address, name in PAGE.items()),
    ]
    return Guard(starlette(routes), port, LoginTokens(token), entered, {"/api/label", "/api/undo"})
