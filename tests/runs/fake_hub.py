"""A server with the part of the Hugging Face hub's interface that downloads and uploads use; repositories are in memory.

It starts with one data set, ``org/name``, of two commits. Large files go through LFS, as on the hub; private repositories need
the token. Xet, which the hub also offers, is not there: set HF_HUB_DISABLE_XET.
"""

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

import pytest
import yaml

OLD, NEW = "a" * 40, "b" * 40
TOKEN = "token-of-the-tests"
LARGE = (".safetensors", ".png", ".mp4")
HEADER = re.compile(r"---\n(.*?)\n---\n", re.S)
DATA_CARD = b"""---
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


def data_files(train: bytes, test: bytes, other: bytes = b"") -> dict[str, bytes]:
    return {"README.md": DATA_CARD, "data/train.jsonl": train, "data/test.jsonl": test, "data/other.jsonl": other}


@dataclass
class Repository:
    """Commits by name, oldest first; ``head`` is that of the branch main."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    head: str = ""
    private: bool = False

    def commit(self, revision: str) -> str | None:
        revision = self.head if revision == "main" else revision
        return revision if revision in self.commits else None

    def add(self, files: dict[str, bytes]) -> str:
        """A new commit on main."""
        content = "".join(f"{name} {hashlib.sha1(data).hexdigest()}" for name, data in sorted(files.items()))
        self.head = hashlib.sha1(f"{len(self.commits)} {content}".encode()).hexdigest()
        self.commits[self.head] = files
        return self.head

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[self.head]


class Hub(ThreadingHTTPServer):
    """``requests`` lists method and path of each request."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        old, new = data_files(lines("c", "d"), lines("e"), lines("f")), data_files(lines("x"), lines("y"), lines("z"))
        self.repositories = {"datasets/org/name": Repository({OLD: old, NEW: new}, OLD)}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def model(self, name: str) -> Repository:
        return self.repositories[f"models/{name}"]


class Handler(BaseHTTPRequestHandler):
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

    @property
    def allowed(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def missing(self, what: str, **headers: str) -> None:
        self.reply({"error": f"{what} not found"}, 404, X_Error_Code=f"{what}NotFound", **headers)

    def repository(self, key: str) -> Repository | None:
        """A repository that the request may read; otherwise the reply is sent."""
        found = self.server.repositories.get(key)
        if found is None or (found.private and not self.allowed):
            self.reply({"error": "Repository not found"}, 404 if self.allowed else 401, X_Error_Code="RepoNotFound")
            return None
        return found

    # ---- reading -------------------------------------------------------------------------------------------------------

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        self.server.requests.append(f"{self.command} {path}")
        if path == "/api/whoami-v2":
            self.reply(
                {"name": "org", "type": "user", "orgs": []} if self.allowed else {"error": "x"}, 200 if self.allowed else 401
            )
        elif match := re.fullmatch(r"/api/((?:models|datasets)/[^/]+/[^/]+)(?:/revision/(.+))?", path):
            self._info(match[1], match[2] or "main")
        elif match := re.fullmatch(r"/api/((?:models|datasets)/[^/]+/[^/]+)/tree/([^/]+)/?(.*)", path):
            self._tree(match[1], match[2], match[3])
        elif match := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(f"{match[1] or 'models/'}{match[2]}", match[3], match[4])
        else:
            self.missing("Repo")

    def _info(self, key: str, revision: str) -> None:
        if (found := self.repository(key)) is None:
            return
        if (commit := found.commit(revision)) is None:
            self.missing("Revision")
            return
        siblings = [{"rfilename": name} for name in found.commits[commit]]
        name = key.partition("/")[2]
        self.reply({"id": name, "sha": commit, "private": found.private, "tags": [], "siblings": siblings})

    def _tree(self, key: str, revision: str, folder: str) -> None:
        if (found := self.repository(key)) is None:
            return
        if (commit := found.commit(revision)) is None:
            self.missing("Revision")
            return
        inside = {name: data for name, data in found.commits[commit].items() if name.startswith(folder)}
        if folder and not inside:
            self.missing("Entry")
        else:
            self.reply([_entry(name, data) for name, data in inside.items()])

    def _resolve(self, key: str, revision: str, name: str) -> None:
        if (found := self.repository(key)) is None:
            return
        if (commit := found.commit(revision)) is None:
            self.missing("Revision")
        elif (content := found.commits[commit].get(name)) is None:
            self.missing("Entry", X_Repo_Commit=commit)
        else:
            self.reply(content, ETag=f'"{_entry(name, content)["oid"]}"', X_Repo_Commit=commit)

    # ---- writing -------------------------------------------------------------------------------------------------------

    def do_POST(self) -> None:
        content = self._body()
        path = unquote(self.path.partition("?")[0])
        self.server.requests.append(f"POST {path}")
        if match := re.fullmatch(r"/api/((?:models|datasets)/[^/]+/[^/]+)/paths-info/([^/]+)", path):
            self._paths(match[1], match[2], content.decode())
        elif not self.allowed:
            self.reply({"error": "Invalid username or password."}, 401)
        elif path == "/api/validate-yaml":
            self._validate(json.loads(content)["content"])
        elif path == "/api/repos/create":
            self._create(json.loads(content))
        elif match := re.fullmatch(r"/api/(models/[^/]+/[^/]+)/preupload/main", path):
            files = [
                {"path": f["path"], "uploadMode": "lfs" if f["path"].endswith(LARGE) else "regular", "shouldIgnore": False}
                for f in json.loads(content)["files"]
            ]
            self.reply({"files": files})
        elif path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                {**wanted, "actions": {"upload": {"href": f"{self.server.address}/upload/{wanted['oid']}"}}}
                for wanted in json.loads(content)["objects"]
            ]
            self.reply({"transfer": "basic", "objects": objects})
        elif match := re.fullmatch(r"/api/(models/[^/]+/[^/]+)/commit/main", path):
            self._commit(match[1], [json.loads(line) for line in content.splitlines()])
        else:
            self.missing("Repo")

    def do_PUT(self) -> None:
        content = self._body()
        name = self.path.rpartition("/")[2]
        assert hashlib.sha256(content).hexdigest() == name
        self.server.objects[name] = content
        self.reply({})

    def _body(self) -> bytes:
        """The content of the request, in one piece or in chunks."""
        if (length := self.headers["Content-Length"]) is not None:
            return self.rfile.read(int(length))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _paths(self, key: str, revision: str, content: str) -> None:
        if (found := self.repository(key)) is None:
            return
        files = found.commits[found.commit(revision) or OLD]
        names = json.loads(content)["paths"] if content.startswith("{") else parse_qs(content)["paths"]
        self.reply([_entry(name, files[name]) for name in names if name in files])

    def _validate(self, card: str) -> None:
        header = HEADER.match(card)
        table = yaml.safe_load(header[1]) if header else None
        errors = [] if isinstance(table, dict) and table.get("library_name") else [{"message": "no metadata"}]
        self.reply({"errors": errors, "warnings": []}, 400 if errors else 200)

    def _create(self, wanted: dict[str, Any]) -> None:
        name = f"{wanted.get('organization') or 'org'}/{wanted['name']}"
        if name.startswith("others/"):
            self.reply({"error": "You don't have the rights to create a model under this namespace"}, 403)
            return
        made = self.server.repositories[f"models/{name}"] = Repository(private=wanted.get("visibility") == "private")
        made.add({".gitattributes": b"*.safetensors filter=lfs\n"})
        self.reply({"url": f"{self.server.address}/{name}"})

    def _commit(self, key: str, operations: list[dict[str, Any]]) -> None:
        found = self.server.repositories[key]
        files = dict(found.files)
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "header":
                if value.get("parentCommit") not in (None, found.head):
                    self.reply({"error": "A commit has happened since."}, 412)
                    return
            elif operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
            elif operation["key"] == "deletedFile":
                del files[value["path"]]
        commit = found.add(files)
        self.reply({"commitUrl": f"{self.server.address}/{key}/commit/{commit}", "commitOid": commit})


def _entry(name: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
    if name.endswith(LARGE):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return entry


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


def use_hub(monkeypatch: pytest.MonkeyPatch, address: str, cache: Path) -> None:
    """Make ``huggingface_hub`` use an address in this process; it reads the settings when it is imported."""
    from huggingface_hub import constants

    values = {
        "ENDPOINT": address,
        "HUGGINGFACE_CO_URL_TEMPLATE": address + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(cache),
        "HF_TOKEN_PATH": str(cache / "token"),
        "HF_HUB_DISABLE_XET": True,
    }
    for name, value in values.items():
        monkeypatch.setattr(constants, name, value)


def closed_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
