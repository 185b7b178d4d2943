"""Retake the pictures of the docs from the runs of ``make demo``: SUREFOOT_SCREENSHOTS=1 pytest tests/inspector."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surefoot.control.video.traces import record_traces
from surefoot.store.reading import check_is_run, traces_in

from .test_clip_table import IMAGES
from .test_inspector import settled, until

pytestmark = pytest.mark.skipif(not os.environ.get("SUREFOOT_SCREENSHOTS"), reason="takes pictures, when asked to")
Begin = Callable[[list[Path]], str]
CONTROL, LANGUAGE = (IMAGES.parents[1] / "runs" / name for name in ("demo", "demo-language/ppo"))


def steps_of(page: Any, run: Path, begin: Begin, height: int) -> None:
    check_is_run(run)
    page.set_viewport_size({"width": 1280, "height": height})
    page.goto(begin([run]))
    page.click("nav a[data-view=steps]")
    settled(page)


def test_a_token(page: Any, inspector: Begin) -> None:
    steps_of(page, LANGUAGE, inspector, 1140)
    page.click("[data-find=clipped]")
    page.wait_for_selector("#hits li")
    page.click("#hits li:first-child button")
    until(page, "document.querySelector('#chain [data-term=clipped].taken') !== null")
    page.screenshot(path=IMAGES / "inspector-tokens.png")


def test_curves(page: Any, inspector: Begin) -> None:
    check_is_run(LANGUAGE)
    page.set_viewport_size({"width": 1280, "height": 900})
    page.goto(inspector([LANGUAGE]))
    page.wait_for_selector("#charts[data-iterations] .chart canvas")
    page.mouse.move(300, 500)
    page.screenshot(path=IMAGES / "inspector-curves.png")


def test_a_frame(page: Any, inspector: Begin) -> None:
    check_is_run(CONTROL)
    early = traces_in(CONTROL / "traces")[1].stem  # the pole does not stand still yet
    list(record_traces(CONTROL, early, size=(480, 320), caption=False))
    steps_of(page, CONTROL, inspector, 1010)
    page.locator("#iteration").fill("1")
    until(page, f"location.hash.startsWith('#steps/0/{early}/')")
    late = page.locator("#steps [data-t]").count() - 4
    page.click(f"#steps [data-t='{late}']")
    page.wait_for_selector(f"#frame[data-step='{late}']")
    page.screenshot(path=IMAGES / "inspector-frames.png")


def test_samples(page: Any, inspector: Begin) -> None:
    check_is_run(LANGUAGE)
    page.set_viewport_size({"width": 1280, "height": 560})
    page.goto(inspector([LANGUAGE]))
    page.click("nav a[data-view=samples]")
    page.wait_for_selector("#samples tbody tr")
    page.screenshot(path=IMAGES / "inspector-samples.png")
