"""No program gets the address with the token as an argument: the browser opens a file that only its owner can read."""

import errno
import os
import re
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest
import uvicorn

from surefoot.cli import inspect as cli_inspect
from surefoot.inspector.access import LoginFile

from .test_server import remembering


def file_of(uri: str) -> Path:
    return Path(url2pathname(urlsplit(uri).path))


def test_a_browser_gets_in_by_the_file_once_and_the_cookie_stays_strict(
    chromium: Any, page: Any, cart: Path, tmp_path: Path, inspector: Callable[[list[Path]], str]
) -> None:
    address = inspector([cart])
    uri = LoginFile(tmp_path).write(address)
    assert uri is not None
    assert uri.startswith("file:")
    assert "once" not in uri
    assert stat.S_IMODE(file_of(uri).stat().st_mode) == 0o600
    page.goto(uri)
    page.wait_for_selector(".chart canvas")
    assert page.url.split("#")[0] == address.split("enter")[0]
    (cookie,) = page.context.cookies()
    assert (cookie["sameSite"], cookie["httpOnly"]) == ("Strict", True)
    other = chromium.new_context().new_page()
    other.goto(uri)
    other.wait_for_url("http:**")
    assert "was already used" in other.inner_text("body")
    other.context.close()


@pytest.fixture
def opened(cart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Callable[[], None]]]:
    """What a browser was told by the command, and how to end the inspector."""
    servers: list[uvicorn.Server] = []
    addresses: list[str] = []
    ready = threading.Event()
    monkeypatch.setattr(uvicorn.Server, "__init__", remembering(uvicorn.Server.__init__, servers))
    monkeypatch.setattr(cli_inspect, "has_desktop", lambda: True)
    monkeypatch.setattr(cli_inspect.webbrowser, "open", lambda uri: (addresses.append(uri), ready.set()))
    monkeypatch.setenv("HOME", str(tmp_path))
    thread = threading.Thread(target=cli_inspect.show_runs, args=([cart], 0, False))
    thread.start()
    assert ready.wait(100)

    def end() -> None:
        servers[0].should_exit = True
        thread.join(100)
        assert not thread.is_alive()

    yield addresses[0], end
    end()


def test_the_login_file_is_deleted_after_the_first_login(opened: tuple[str, Callable[[], None]], tmp_path: Path) -> None:
    file = file_of(opened[0])
    assert file.parent == tmp_path, "a home folder, which browsers in a sandbox can read"
    match = re.search(r"url=http://127\.0\.0\.1:(\d+)(/enter\?token=[\w-]{32})\"", file.read_text())
    assert match is not None
    assert match[2].split("=")[1] not in opened[0]
    connection = HTTPConnection("127.0.0.1", int(match[1]), timeout=60)
    connection.request("GET", "/enter?token=wrong")
    answer = connection.getresponse()
    answer.read()
    assert answer.status == 403
    assert file.exists(), "nobody is inside yet"
    connection.request("GET", match[2])
    answer = connection.getresponse()
    answer.read()
    assert answer.status == 303
    assert not file.exists()
    connection.close()


def test_the_login_file_is_deleted_with_an_unvisited_inspector(opened: tuple[str, Callable[[], None]]) -> None:
    file = file_of(opened[0])
    assert file.exists()
    opened[1]()
    assert not file.exists()


def test_the_login_file_is_deleted_when_the_inspector_is_terminated(cart: Path, tmp_path: Path) -> None:
    program = f"""
import signal
from pathlib import Path
from surefoot.cli import inspect as cli_inspect
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever these tests were started with: nohup leaves it ignored, and it stays so
cli_inspect.has_desktop = lambda: True
cli_inspect.webbrowser.open = lambda uri: print("opened", flush=True)
cli_inspect.show_runs([Path({str(cart)!r})], 0, False)
"""
    environment = {**os.environ, "HOME": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert any(line == "opened\n" for line in process.stdout)
        assert len(list(tmp_path.glob("surefoot-*.html"))) == 1
        process.send_signal(signal.SIGHUP)
        try:
            assert process.wait(100) == -signal.SIGHUP
        finally:
            process.kill()
    assert not list(tmp_path.glob("surefoot-*.html"))


def test_a_full_disk_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int, *mode: str, **encoding: str) -> Any:
        os.close(handle)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("surefoot.inspector.access.os.fdopen", full)
    assert LoginFile(tmp_path).write("http://127.0.0.1:1/enter?token=x") is None
    assert not list(tmp_path.iterdir())
