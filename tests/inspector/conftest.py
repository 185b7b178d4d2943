"""One headless Chromium for all tests of pages, and a small run with traces for them to look at."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import surefoot

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
def page(chromium: Any) -> Iterator[Any]:
    """A new page; whatever it complains of fails the test, and so does any request beyond this machine."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    made = context.new_page()
    wrong: list[str] = []
    made.on("pageerror", lambda error: wrong.append(str(error)))
    made.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    made.on("request", lambda request: None if local(request.url) else wrong.append(request.url))
    yield made
    context.close()
    assert wrong == []


def local(url: str) -> bool:
    return url.startswith(("file:", "data:", "blob:", "http://127.0.0.1:", "http://localhost:"))


@pytest.fixture(scope="session")
def cart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of control, traced in every other iteration."""
    folder = tmp_path_factory.mktemp("inspected") / "cart"
    surefoot.train("CartPole-v1", steps=2_048, seed=1, run_dir=folder, traces={"every": 512, "rows": 3}, display=None)
    return folder
