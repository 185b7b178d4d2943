"""A server with the part of the Hugging Face hub's interface that ``datasets`` uses, for one data set of two commits."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

OLD, NEW = "a" * 40, "b" * 40
CARD = b"""---
configs:
- config_name: default
  data_files:
  - {split: train, path: data/train.jsonl}
  - {split: test, path: data/test.jsonl}
- config_name: other
  data_files:
  - {split: train, path: data/other.jsonl}
---
"""


def lines(*completions: str) -> bytes:
    return "".join(json.dumps({"prompt": "ab", "completion": text}) + "\n" for text in completions).encode()


COMMITS = {
    OLD: {
        "README.md": CARD,
        "data/train.jsonl": lines("c", "d"),
        "data/test.jsonl": lines("e"),
        "data/other.jsonl": lines("f"),
    },
    NEW: {"README.md": CARD, "data/train.jsonl": lines("x"), "data/test.jsonl": lines("y"), "data/other.jsonl": lines("z")},
}


class Hub(ThreadingHTTPServer):
    """``head`` is the commit of the branch main."""

    head = OLD
    requests = 0


class Handler(BaseHTTPRequestHandler):
    """Answers for the data set ``org/name``."""

    server: Hub

    def log_message(self, *_: Any) -> None:
        """Nothing is logged."""

    def reply(self, content: bytes | Any, status: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        self.server.requests += 1
        path = self.path.partition("?")[0]
        api, files = "/api/datasets/org/name", "/datasets/org/name/resolve/"
        if path == api or path.startswith(f"{api}/revision/"):
            self._info(path.removeprefix(api).removeprefix("/revision/") or "main")
        elif path.startswith(f"{api}/tree/"):
            self._tree(*path.removeprefix(f"{api}/tree/").partition("/")[::2])
        elif path.startswith(files):
            revision, _, name = path.removeprefix(files).partition("/")
            commit = self._commit(revision) or OLD
            content = COMMITS[commit].get(name)
            if content is None:
                self.reply(b"", 404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
            else:
                self.reply(content, ETag=f'"{commit[:8]}{name.replace("/", "-")}"', X_Repo_Commit=commit)
        else:
            self.reply({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"])).decode()
        revision = self.path.rpartition("/")[2]
        files = COMMITS[self._commit(revision) or OLD]
        names = json.loads(content)["paths"] if content.startswith("{") else parse_qs(content)["paths"]
        self.reply([_entry(name, files[name]) for name in names if name in files])

    def _commit(self, revision: str) -> str | None:
        return self.server.head if revision == "main" else revision if revision in COMMITS else None

    def _info(self, revision: str) -> None:
        commit = self._commit(revision)
        if commit is None:
            self.reply({"error": "Invalid rev id"}, 404, X_Error_Code="RevisionNotFound")
            return
        siblings = [{"rfilename": name} for name in COMMITS[commit]]
        self.reply({"id": "org/name", "sha": commit, "private": False, "tags": [], "siblings": siblings})

    def _tree(self, revision: str, folder: str) -> None:
        files = COMMITS[self._commit(revision) or OLD]
        self.reply([_entry(name, content) for name, content in files.items() if name.startswith(folder)])


def _entry(name: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": len(content), "oid": "c" * 40}


@contextmanager
def serving() -> Iterator[Hub]:
    """The server, on a free port of this machine."""
    hub = Hub(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
