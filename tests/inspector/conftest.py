"""Small runs with traces for tests of pages to look at, and a server of them."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from language.tiny import write_folder

import surefoot
from surefoot.inspector.catalog import Catalog
from surefoot.inspector.folders import RunFolders
from surefoot.inspector.server import application


@pytest.fixture(scope="session")
def cart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of control, traced in every other iteration, with a profile."""
    folder = tmp_path_factory.mktemp("inspected") / "cart"
    settings = {"traces": {"every": 512, "rows": 3}, "profile": True}
    surefoot.train("CartPole-v1", steps=2_048, seed=1, run_dir=folder, display=None, **settings)
    return folder


HOSTILE = "<img src=x onerror=document.title='taken'>"
REWARD = """
def vowels(responses):
    return [sum(c in "aeiou" for c in text) / max(1, len(text)) for text in responses]
"""


@pytest.fixture(scope="session")
def text_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a tiny model, traced in every iteration, whose name and prompts would like to be markup."""
    folder = tmp_path_factory.mktemp("text")
    write_folder(folder / "llama", "llama")
    (folder / "rewards.py").write_text(REWARD)
    for name, count in (("prompts", 24), ("held_out", 8)):
        rows = [json.dumps({"prompt": f"{i}{HOSTILE} says\u202e "}) + "\n" for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(rows))
    run = folder / HOSTILE.replace("/", "")
    surefoot.train(
        "language",
        run_dir=run,
        model=str(folder / "llama"),
        steps=32,
        data={"train": str(folder / "prompts.jsonl"), "held_out": str(folder / "held_out.jsonl"), "max_length": 96},
        sampling={"prompts": 8, "samples": 2, "max_tokens": 10},
        reward={"terms": [{"function": f"{folder / 'rewards.py'}:vowels"}], "missing_eos": "none"},
        reference={"beta": 0.3},
        optimizer={"learning_rate": 1e-2, "micro_batch_tokens": 4096},
        evaluation={"every": 16},
        traces={"every": 1, "rows": 3},
    )
    return run


@pytest.fixture(scope="session")
def inspector() -> Iterator[Callable[..., str]]:
    """Begins to serve some runs, and says the address that the command would print."""
    servers: list[tuple[Any, threading.Thread]] = []

    def begin(runs: list[Path], table: bool = False) -> str:
        listening = socket.create_server(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        catalog, folders = (Catalog(runs), RunFolders([])) if table else (None, RunFolders(runs))
        app = application(folders, port, "once", catalog=catalog)
        config = uvicorn.Config(app, log_level="warning", lifespan="off", ws="none")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{port}/enter?token=once"

    yield begin
    for server, thread in servers:
        server.should_exit = True
        thread.join(20)
