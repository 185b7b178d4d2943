"""The clip table in a real browser: cells equal surefoot.functional, and every way to navigate works."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot import read_trace
from surefoot.functional import clip_active, clipped_surrogate, importance_ratio, ratio_outside, unclipped_surrogate
from surefoot.inspector.clip_table import clip_table_page
from surefoot.inspector.traces import PassSamples, on_a_page
from surefoot.store.reading import traces_in

IMAGES = Path(__file__).parents[2] / "docs" / "images"
CELLS = """() => [...document.querySelectorAll("#cells td")].map((cell) => {
    const {ratio, advantage, value, unclipped, branch, flows} = cell.dataset;
    return {ratio: +ratio, advantage: +advantage, value: +value, unclipped: +unclipped, branch, flows: flows === "true",
        kind: cell.className, shown: cell.querySelector("b").textContent};
})"""
RULES = [(0.2, 0.2, None), (0.2, 0.28, None), (0.1, 0.3, 3.0), (0.0, 0.0, 1.5), (1.0, 0.5, None)]


@pytest.fixture
def table(page: Any, tmp_path: Path) -> Any:
    """The page as `surefoot inspect --clip-table` writes it, opened from its file."""
    (tmp_path / "clip.html").write_text(clip_table_page(), "utf-8")
    page.goto((tmp_path / "clip.html").as_uri())
    return page


def set_rule(page: Any, low: float, high: float, dual: float | None) -> None:
    page.fill("#low", str(low))
    page.fill("#high", str(high))
    page.set_checked("#dual-on", dual is not None)
    if dual is not None:
        page.fill("#dual", str(dual))


def number(text: str) -> float:
    return float(text.replace("−", "-").replace(",", ""))


def test_every_cell_equals_what_functional_computes(table: Any) -> None:
    branches = set()
    for low, high, dual in RULES:
        set_rule(table, low, high, dual)
        cells = table.evaluate(CELLS)
        assert len(cells) == 99
        log_ratio = torch.tensor([cell["ratio"] for cell in cells], dtype=torch.float64).log().requires_grad_()
        advantages = torch.tensor([cell["advantage"] for cell in cells], dtype=torch.float64)
        exact = torch.tensor([cell["ratio"] for cell in cells], dtype=torch.float64)
        wanted = clipped_surrogate(exact, advantages, low, high, dual)
        active = clip_active(exact, advantages, low, high, dual)
        assert torch.tensor([cell["value"] for cell in cells], dtype=torch.float64).equal(wanted)
        assert torch.tensor([cell["unclipped"] for cell in cells], dtype=torch.float64).equal(
            unclipped_surrogate(exact, advantages)
        )
        assert [cell["branch"] == "unclipped" for cell in cells] == (~active).tolist()
        assert [cell["flows"] for cell in cells] == (~active & (advantages != 0)).tolist()
        assert all(abs(number(cell["shown"]) - cell["value"]) <= 0.005 + 1e-9 for cell in cells)
        ratio = importance_ratio(log_ratio, torch.zeros_like(log_ratio))
        (push,) = torch.autograd.grad(clipped_surrogate(ratio, advantages, low, high, dual).sum(), log_ratio)
        edges = {1 - low, 1 + high, dual}  # there rounding decides which side a ratio is on
        for cell, pushed in zip(cells, push.tolist(), strict=True):
            if not any(edge is not None and abs(cell["ratio"] - edge) < 1e-9 for edge in edges):
                assert cell["kind"] == {1: "raise", 0: "still", -1: "lower"}[(pushed > 0) - (pushed < 0)], cell
        branches |= {cell["branch"] for cell in cells}
    assert branches == {"unclipped", "clipped", "dual_clip"}


def test_a_cell_that_is_clicked_writes_its_arithmetic_out(table: Any) -> None:
    table.click('#cells td[data-ratio="1.5"][data-advantage="-0.8"]')
    text = table.inner_text("#chain")
    for part in (
        "1.5 · (−0.8) = −1.20",
        "1.2 · (−0.8) = −0.96",
        "min(−1.20, −0.96) = −1.20",
        "flows: lowers π(a|s)",
        "full penalty",
    ):
        assert part in text
    assert table.locator("#cells td[aria-selected=true]").count() == 1
    assert table.inner_text('[data-term="unclipped"] .mark') == "taken"


def test_the_keyboard_moves_through_the_grid_and_the_curve(table: Any) -> None:
    cell = table.locator('#cells td[data-ratio="1.5"][data-advantage="1.5"]')
    assert cell.get_attribute("tabindex") == "0", "the grid is one stop of the Tab key"
    assert table.locator('#cells td[tabindex="0"]').count() == 1
    cell.focus()
    table.keyboard.press("ArrowRight")
    table.keyboard.press("ArrowUp")
    assert (table.input_value("#ratio"), table.input_value("#advantage")) == ("2", "2")
    assert "ratio 2, advantage +2: clipped, objective 2.40, gradient zero" in table.evaluate("document.activeElement.ariaLabel")
    table.keyboard.press("Control+Home")
    assert (table.input_value("#ratio"), table.input_value("#advantage")) == ("0.5", "2")
    table.keyboard.press("ArrowLeft")
    assert table.input_value("#ratio") == "0.5", "the edge holds"
    table.focus("#point")
    table.keyboard.press("ArrowRight")
    table.keyboard.press("Shift+ArrowRight")
    assert table.input_value("#ratio") == "0.61"
    assert table.get_attribute("#point", "aria-valuetext") == "ratio 0.61, advantage +2: objective 1.22"


def test_the_point_is_dragged_along_the_curve(table: Any) -> None:
    table.click('#cells td[data-ratio="1"][data-advantage="1"]')
    box = table.locator("#point").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    table.mouse.move(x, y)
    table.mouse.down()
    table.mouse.move(x + 40, y)
    table.mouse.move(x + 90, y)
    table.mouse.up()
    ratio = float(table.input_value("#ratio"))
    assert 1.3 < ratio < 1.7
    assert "= 1.20" in table.inner_text('[data-term="clipped"]')
    assert "zero" in table.inner_text('[data-term="gradient"]')
    table.mouse.move(x, y)
    assert float(table.input_value("#ratio")) == ratio, "let go is let go"


def test_an_invalid_number_is_marked_and_changes_nothing(table: Any) -> None:
    before = table.inner_text("#chain")
    table.fill("#low", "7")
    assert table.get_attribute("#low", "aria-invalid") == "true"
    assert table.inner_text("#chain") == before


def test_light_and_dark(table: Any) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    light = table.evaluate(paper)
    table.click("#theme")
    assert table.evaluate(paper) != light
    table.click("#theme")
    assert table.evaluate(paper) == light
    table.emulate_media(color_scheme="dark")
    assert table.evaluate(paper) == light, "who chose keeps it"
    if os.environ.get("SUREFOOT_SCREENSHOTS"):
        table.set_viewport_size({"width": 1280, "height": 680})
        table.screenshot(path=IMAGES / "clip-table.png")


def test_with_a_run_the_counters_are_those_of_its_samples(page: Any, cart: Path, tmp_path: Path) -> None:
    (tmp_path / "clip.html").write_text(clip_table_page(on_a_page([cart])), "utf-8")
    page.goto((tmp_path / "clip.html").as_uri())
    files = traces_in(cart / "traces")
    assert len(files) == 4
    for index in (0, 3):
        trace = read_trace(files[index])
        page.locator("#trace").fill(str(index))
        for visit in (0, 19, None):
            page.locator("#pass").fill(str(0 if visit is None else visit + 1))
            passes = range(20) if visit is None else [visit]
            ratios = torch.cat([row.visits.ratio[k] for k in passes for row in trace.rows]).double()
            advantages = torch.cat([row.visits.advantages[k] for k in passes for row in trace.rows]).double()
            outside = ratio_outside(ratios, trace.clip, trace.clip_high)
            where = {"inside": ~outside, "above": outside & (ratios > 1), "below": outside & (ratios < 1)}
            for name, sign in (("good", advantages > 0), ("bad", advantages < 0)):
                for place, there in where.items():
                    shown = page.inner_text(f'[data-counter="{name}-{place}"] b')
                    assert number(shown) == int((sign & there).sum()), (index, visit, name, place)
            silenced = 100 * float(clip_active(ratios, advantages, trace.clip, trace.clip_high).double().mean())
            assert f"removes the gradient of {silenced:.1f} %" in page.inner_text("#verdict")
    assert number(page.input_value("#low")) == pytest.approx(trace.clip), "ε is the run's"
    drawn = page.evaluate("""() => { const c = document.querySelector("canvas");
        return c.getContext("2d").getImageData(0, 0, c.width, c.height).data.some((x) => x > 0) }""")
    assert drawn
    if os.environ.get("SUREFOOT_SCREENSHOTS"):
        page.locator(".density").screenshot(path=IMAGES / "clip-table-run.png")


def test_a_name_of_a_run_is_text(page: Any, cart: Path, tmp_path: Path) -> None:
    name = '</script><img src=x onerror="document.title=1">\u2028'
    (tmp_path / "clip.html").write_text(clip_table_page([{**on_a_page([cart])[0], "name": name}]), "utf-8")
    page.goto((tmp_path / "clip.html").as_uri())
    assert page.locator("img").count() == 0
    assert "</script><img" in page.inner_text("#run")


def test_a_long_run_is_thinned_evenly() -> None:
    x = torch.arange(1000.0)
    few = PassSamples(x, -x).thinned(10)
    assert few.ratios.tolist() == [100.0 * i for i in range(10)]
    assert few.advantages.equal(-few.ratios)


def test_the_command_writes_a_page_that_loads_nothing_else(command: Any, cart: Path, tmp_path: Path) -> None:
    code, output, _ = command("inspect", "--clip-table")
    assert code == 0
    assert output.startswith("clip-table.html: the clip table; ")
    text = (tmp_path / "clip-table.html").read_text("utf-8")
    assert "http://www.w3.org/2000/svg" in text
    assert text.replace("http://www.w3.org/2000/svg", "").count("http") == 1, "the one in http-equiv"
    code, _, _ = command("inspect", str(cart), "--clip-table", "--out", "mine.html")
    assert code == 0
    held = (tmp_path / "mine.html").read_text("utf-8").split('id="samples">')[1].split("</script>")[0]
    assert [run["name"] for run in json.loads(held)] == ["cart"]


def test_a_folder_without_a_run_or_samples_is_a_one_line_error(command: Any, cart: Path, tmp_path: Path) -> None:
    code, _, output = command("inspect", "--clip-table", "nowhere")
    assert code == 2
    assert output.startswith("surefoot: nowhere: no such run folder")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.toml").write_text((cart / "config.toml").read_text())
    code, _, output = command("inspect", "--clip-table", str(bare))
    assert code == 2
    assert "has no traces of a loss with ratios" in output
    code, _, output = command("inspect", "--clip-table", "--out", str(tmp_path / "no" / "where.html"))
    assert code == 2
    assert "can't be written" in output
