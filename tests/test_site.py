"""The documentation site: every page, working links, no server and no network."""

import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def tool() -> dict[str, Any]:
    """docs/site/build.py."""
    return runpy.run_path(str(ROOT / "docs" / "site" / "build.py"))


def leaves(tree: Any) -> list[str]:
    """The pages of a navigation, in order."""
    if isinstance(tree, str):
        return [tree]
    return [page for branch in (tree.values() if isinstance(tree, dict) else tree) for page in leaves(branch)]


def test_the_navigation_has_every_page_once(tool: dict[str, Any]) -> None:
    config = tomllib.loads((ROOT / "docs" / "site" / "zensical.toml").read_text("utf-8"))
    docs = ROOT / "docs"
    written = [*docs.rglob("*.md"), *docs.rglob("*.ipynb"), *docs.rglob("*.html"), *tool["ALONGSIDE"]]
    assert sorted(leaves(config["project"]["nav"])) == sorted(tool["place"](path) for path in written)


def test_links_to_files_beside_the_pages_lead_to_pages_made_of_them(tool: dict[str, Any]) -> None:
    page = ROOT / "docs" / "how-to" / "resume.md"
    text = (
        "[a](../../examples/memory.py) [b](../math.md#pairs) [c](#here) `[d](../x.md)` [e](https://x.y/z.md) [`f`](../index.md)"
    )
    made, linked = tool["on_the_site"](text, page)
    assert made == text.replace("../../examples/memory.py", "../source/examples/memory.py.md")
    assert {path.name for path in linked} == {"memory.py", "math.md", "index.md"}
    with pytest.raises(SystemExit, match=r"docs/how-to/resume.md: the link nowhere.md leads nowhere"):
        tool["on_the_site"]("[g](nowhere.md)", page)


def test_text_escaped_differently_by_github_and_the_site_reads_the_same(tool: dict[str, Any]) -> None:
    made, _ = tool["on_the_site"](r"| `int \| None` | `a<b` |", ROOT / "docs" / "index.md")
    assert made == "| <code>int &#124; None</code> | `a<b` |"
    made, _ = tool["on_the_site"]("k\\<n `k\\<n`\n```\nk\\<n | `a\\|b`\n```\n", ROOT / "docs" / "index.md")
    assert made == "k&lt;n `k\\<n`\n```\nk\\<n | `a\\|b`\n```\n"


LINKS = {
    '<a href="b.html#there"> <a href="#here" id="here"> <a href="https://elsewhere.org/">': None,
    '<img src="data:image/png;base64,x">': None,
    '<a href="c.html">': "c.html leads nowhere",
    '<a href="b.html#gone">': "b.html#gone leads nowhere",
    '<img src="gone.png">': "gone.png leads nowhere",
    '<script src="https://elsewhere.org/x.js">': "fetches https://elsewhere.org/x.js",
    '<link rel="stylesheet" href="//elsewhere.org/x.css">': "fetches //elsewhere.org/x.css",
}


def test_a_broken_site_is_detected(tool: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "b.html").write_text('<h2 id="there">')
    for body, wrong in LINKS.items():
        (tmp_path / "a.html").write_text(body)
        assert list(tool["broken"](tmp_path)) == ([] if wrong is None else [f"a.html: {wrong}"])


@pytest.mark.slow
def test_the_site_is_complete_and_works_from_a_folder(tool: dict[str, Any], tmp_path: Path, page: Any) -> None:
    """``page`` fails on any request beyond this machine, and on any formula that KaTeX does not understand."""
    assert tool["build"](tmp_path) == []
    site = tmp_path / "site"
    with_formulas = [file for file in site.rglob("*.html") if 'class="arithmatex"' in file.read_text("utf-8")]
    assert {"math.html", "ladder.html"} <= {file.name for file in with_formulas}
    for file in with_formulas:
        page.goto(file.as_uri())
        page.wait_for_selector(".katex")
        assert page.evaluate("document.querySelectorAll('.arithmatex:not(:has(.katex))').length") == 0, file.name
    page.goto((site / "index.html").as_uri())
    page.locator(".md-search__button").click()
    page.get_by_role("combobox", name="Search").fill("leave_one_out")
    page.locator("a[href*='functional.html'][href$='#leave_one_out_advantages']:visible").first.click()
    page.wait_for_url("**/reference/functional.html*")
    page.goto((site / "index.html").as_uri())
    page.locator(".md-search__button").click()
    page.get_by_role("combobox", name="Search").fill("custom environment")
    assert "your-own-environment" in page.locator("a[href*='how-to']:has(mark):visible").first.get_attribute("href")
    assert "Surefoot 0." in page.locator("footer").inner_text(), "the version is on every page"
    page.set_viewport_size({"width": 390, "height": 844})
    for name in ("index", "coming-from", "math", "notebooks/ladder", "reference/recipe", "benchmarks/control"):
        page.goto((site / f"{name}.html").as_uri())
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{name} is wider than a phone"
