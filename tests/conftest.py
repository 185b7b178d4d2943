"""What all tests share: folders in memory, one torch thread, the command line, and one headless Chromium."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from surefoot import sandbox
from surefoot.accel import programs as engine
from surefoot.cli import main as cli
from surefoot.errors import SurefootError

os.environ.setdefault("MUJOCO_GL", "disable")
LOCAL_STORES = tempfile.TemporaryDirectory()  # nothing reaches a server or a home folder; Trackio reads this on import
os.environ |= {"WANDB_MODE": "offline", "TRACKIO_DIR": LOCAL_STORES.name, "SUREFOOT_CACHE": f"{LOCAL_STORES.name}/cache"}
sys.path.insert(0, str(Path(__file__).parent / "runs"))
settings.register_profile("laws", max_examples=50, deadline=None, derandomize=True, database=None)
settings.load_profile("laws")  # the same examples every time, so that a red test is a changed function and not luck


def _folders_in_memory(memory: str = "/dev/shm", room: float = 4e9) -> None:
    """Put temporary folders into memory where there is enough: a run waits for the disk at each of its checkpoints."""
    if "PYTEST_DEBUG_TEMPROOT" in os.environ or not os.access(memory, os.W_OK | os.X_OK):
        return
    space = os.statvfs(memory)
    if space.f_bavail * space.f_frsize >= room and not space.f_flag & os.ST_NOEXEC:
        os.environ["PYTEST_DEBUG_TEMPROOT"] = memory


_folders_in_memory()


class Costs:
    """CPU seconds of each test, child processes included, and seconds by the clock, as JSON lines in one file."""

    def __init__(self, path: str) -> None:
        self.path, self.of_tests = path, 0.0

    def write(self, name: str, cpu: float, clock: float) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps([name, round(cpu, 3), round(clock, 3)]) + "\n")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        before = os.times()
        result = yield
        after = os.times()
        self.of_tests += sum(after[:2]) - sum(before[:2])
        self.write(item.nodeid, sum(after[:4]) - sum(before[:4]), after.elapsed - before.elapsed)
        return result

    def pytest_sessionfinish(self) -> None:
        self.write("", sum(os.times()[:2]) - self.of_tests, 0.0)  # imports, and collecting the tests


def pytest_configure(config: pytest.Config) -> None:
    if path := os.environ.get("SUREFOOT_COSTS"):
        config.pluginmanager.register(Costs(path))


@pytest.fixture(autouse=True)
def _one_thread():
    """The suite shares two cores, and results are exact for a given number of threads."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _errors_are_one_line(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every error for users that a test raises in this process is one line."""
    messages: list[str] = []

    def recorded(self: SurefootError, *arguments: object) -> None:
        ValueError.__init__(self, *arguments)
        messages.append(str(self))

    monkeypatch.setattr(SurefootError, "__init__", recorded)
    yield
    assert [message for message in messages if "\n" in message] == []


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run the command line in this process, in an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["surefoot", *words])
        with pytest.raises(SystemExit) as leaving:
            cli.main()
        captured = capsys.readouterr()
        return int(leaving.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture
def surefoot(command: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """What a command that must succeed writes to stdout."""

    def run(*words: str) -> str:
        code, out, err = command(*words)
        assert code == 0, err
        return out

    return run


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """A Hugging Face hub on this machine, with a token for it and an empty cache."""
    pytest.importorskip("huggingface_hub")
    from fake_hub import TOKEN, serving, use_hub

    with serving() as server:
        use_hub(monkeypatch, server.address, tmp_path / "cache")
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


TRACED: dict[str, torch.fx.GraphModule] = {}
"""what ``programs`` interprets, by the name of its library in a cache that the whole session shares"""


COMPILED = Path(__file__).parent.parent / ".pytest_cache"
"""compiled programs of all processes, which stay for the next session"""


@pytest.fixture(params=["interpreted", pytest.param("compiled", marks=pytest.mark.release)])
def programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> str:
    """For tests of ``engine = "compiled"``: ``make test`` interprets the traced programs, ``make release`` compiles them."""

    def trace(traced: torch.fx.GraphModule, arguments: Sequence[torch.Tensor], library: Path) -> None:
        library.parent.mkdir(parents=True, exist_ok=True)
        library.touch()
        TRACED[library.name] = traced

    def load(library: Path) -> engine.Program:
        def run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            arguments = tuple(tensors)
            tensors.clear()
            with torch.no_grad():
                return [x.clone() for x in TRACED[library.name](*arguments)]

        return run

    own = tmp_path_factory.getbasetemp() / "interpreted"
    monkeypatch.setenv("SUREFOOT_CACHE", str(COMPILED if request.param == "compiled" else own))
    if request.param == "interpreted":
        monkeypatch.setattr(engine, "_compile", trace)
        monkeypatch.setattr(engine, "_load", load)
    return str(request.param)


@pytest.fixture
def sandboxed() -> None:
    """For tests that run programs in a sandbox: skipped where a machine has no namespaces for it, and never where it has."""
    try:
        sandbox.check()
    except SurefootError as error:
        empty = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"]
        if shutil.which("bwrap") and subprocess.run(empty, capture_output=True, timeout=60).returncode == 0:
            pytest.fail(f"bubblewrap works here, and the sandbox does not: {error}")
        pytest.skip(str(error))


QUIET = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
QUIET += ("--disable-component-update", "--disable-sync")


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The system's browser; tests that need it are skipped where there is none, and fail under .ci/run."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        assert not os.environ.get("SUREFOOT_CI"), ".ci/run installs chromium, and there is none"
        pytest.skip("tests of pages need a browser: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=list(QUIET))
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Any, tmp_path: Path) -> Iterator[Any]:
    """A new page; whatever it complains of fails the test, and so does any request beyond this machine.

    It asks for ``tmp_path`` so that it is closed before that folder is deleted: an inspector's page asks for its runs again
    and again.
    """
    context = chromium.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    context.set_default_timeout(90_000)
    made = context.new_page()
    wrong: list[str] = []
    made.on("pageerror", lambda error: wrong.append(str(error)))
    made.on("console", lambda message: wrong.append(f"{message.text} {place(message)}") if message.type == "error" else None)
    made.on("request", lambda request: None if local(request.url) else wrong.append(request.url))
    yield made
    context.close()
    assert wrong == []


def place(message: Any) -> str:
    """Where a message of the console comes from: for a response of status 400 or more, the address that was requested."""
    return f"({message.location['url']}:{message.location['lineNumber']})"


def local(url: str) -> bool:
    return url.startswith(("file:", "data:", "blob:", "http://127.0.0.1:", "http://localhost:"))
