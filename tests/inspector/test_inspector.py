"""The inspector in a real browser: live curves, the calculation of a step and of a token, findings, and hostile text."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import surefoot
from surefoot import read_trace
from surefoot.functional import n_step_advantages
from surefoot.store.manifest import write_listed
from surefoot.store.metrics import read_metrics
from surefoot.store.reading import traces_in

from .conftest import HOSTILE
from .test_server import spoiled

Begin = Callable[[list[Path]], str]


def number(text: str) -> float:
    return float(text.replace("−", "-").replace(",", ""))


def bold(page: Any, term: str) -> float:
    return number(page.inner_text(f'#chain [data-term="{term}"] b'))


def settled(page: Any) -> None:
    page.wait_for_selector("#audit[data-count]")


def go_to(page: Any, trace: Path, index: int = 0) -> None:
    """Go to a row of a trace, at its first step."""
    place = f"#steps/0/{trace.stem}/{index}/0/0"
    page.evaluate(f"location.hash = '{place}'")
    row = f"document.querySelector('#rows button:nth-child({index + 1})')?.ariaSelected"
    until(
        page,
        f"location.hash === '{place}' && {row} === 'true' && document.querySelector('#steps [data-t]').ariaSelected === 'true'",
    )


def until(page: Any, condition: str) -> None:
    """Wait for a condition; the page's policy lets nobody evaluate a string in it repeatedly, so it is asked from here."""
    for _ in range(100):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never became true: {condition}")


def test_curves_are_the_runs_own_and_share_a_cursor(page: Any, cart: Path, text_run: Path, inspector: Begin) -> None:
    page.goto(inspector([cart]))
    page.wait_for_selector("#charts[data-iterations='8'] .chart canvas")
    assert "token" not in page.url, "the address in the bar is one that can be kept"
    shown = {chart.get_attribute("data-metric"): chart for chart in page.query_selector_all(".chart")}
    assert {"episode_return", "kl", "entropy", "clip_active", "ratio_outside", "explained_variance", "steps_per_second"} <= set(
        shown
    )
    rows = read_metrics(cart / "metrics.jsonl")
    for name in ("kl", "entropy", "explained_variance"):
        assert number(shown[name].query_selector(".readout span").inner_text()) == pytest.approx(rows[-1][name], rel=5e-3)
    box = shown["kl"].query_selector(".u-over").bounding_box()
    page.mouse.move(box["x"] + 1, box["y"] + 40)
    for name in ("kl", "entropy"):
        assert shown[name].query_selector(".readout i").inner_text() == "step 256"
        assert number(shown[name].query_selector(".readout span").inner_text()) == pytest.approx(rows[0][name], rel=5e-3)
    page.check("#log")
    page.select_option("#more", "ratio_max")
    page.wait_for_selector('.chart[data-metric="ratio_max"] canvas')


def test_damaged_lines_are_shown_under_the_name_of_the_run(page: Any, cart: Path, tmp_path: Path, inspector: Begin) -> None:
    copy = tmp_path / "cart"
    shutil.copytree(cart, copy)
    lines = (copy / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_bytes(b"".join([*lines[:2], b'{"iteration": 3, "st\n', *lines[3:]]))
    page.goto(inspector([copy, cart]))
    page.wait_for_selector("#charts[data-iterations='7,8'] .chart canvas")
    (shown,) = page.locator("#runs .damage").all_inner_texts()
    assert shown == "metrics.jsonl has 8 lines, of which line 3 can't be read"


def test_a_chart_says_in_words_what_it_shows_and_the_page_does_not_jump(page: Any, cart: Path, inspector: Begin) -> None:
    page.goto(inspector([cart]))
    page.wait_for_selector("#charts[data-iterations='8'] .chart canvas")
    rows = read_metrics(cart / "metrics.jsonl")
    words = page.get_attribute(".chart[data-metric=kl] .plot", "aria-label")
    assert words.startswith("KL to π_old")
    assert "over environment steps" in words
    assert f"from {rows[0]['kl']:.3g}"[:10] in words
    assert "Healthy below 0.1" in words
    page.click("nav a[data-view=clip]")
    page.click("nav a[data-view=curves]")
    page.wait_for_selector("#charts .chart canvas")
    assert page.evaluate("scrollY") == 0
    assert page.locator("h1").count() == 1


def test_a_running_run_is_updated_live(page: Any, cart: Path, tmp_path: Path, inspector: Begin) -> None:
    copy = tmp_path / "going"
    shutil.copytree(cart, copy)
    lines = (cart / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(lines[:5]))
    page.goto(inspector([copy]))
    page.wait_for_selector("#charts[data-iterations='5']")
    with (copy / "metrics.jsonl").open("a") as file:
        file.write("".join(lines[5:7]))
    page.wait_for_selector("#charts[data-iterations='7']")
    last = json.loads(lines[6])
    assert number(page.inner_text(".chart[data-metric=kl] .readout span")) == pytest.approx(last["kl"], rel=5e-3)
    assert f"{last['steps']:,} of 2,048 steps" in page.inner_text("#runs")


def test_the_chain_of_a_token_adds_up_and_is_what_the_trace_has(page: Any, text_run: Path, inspector: Begin) -> None:
    page.goto(inspector([text_run]))
    page.click("nav a[data-view=steps]")
    settled(page)
    files = traces_in(text_run / "traces")
    trace = read_trace(files[-1])
    lengths = [len(row.rewards) for row in trace.rows]
    index = lengths.index(max(lengths))
    go_to(page, files[-1], index)
    row, t = trace.rows[index], lengths[index] // 2
    tokens = [cell.text_content() for cell in page.query_selector_all("#steps [data-t]")]
    assert tokens == [token.replace("\n", "⏎") for token in row.about["tokens"]]
    page.click(f"#steps [data-t='{t}']")
    for visit in range(len(row.visits.updates)):
        page.locator("#visit").fill(str(visit))
        for term, value in {
            "reward": row.rewards[t],
            "TD residual": row.td_residuals[t],
            "advantage": row.advantages[t],
            "critic’s target": row.returns[t],
            "ratio": row.visits.ratio[visit, t],
            "advantage, as used": row.visits.advantages[visit, t],
            "objective": row.visits.surrogate[visit, t],
        }.items():
            assert bold(page, term) == pytest.approx(float(value), rel=1e-3, abs=1e-3), term
            assert page.inner_text(f'#chain [data-term="{term}"] .mark') == "✓"
    for step in range(len(files)):
        page.locator("#iteration").fill(str(step))
        until(page, f"location.hash.startsWith('#steps/0/{files[step].stem}/')")
        assert page.get_attribute("#audit", "data-wrong") == "0"
        assert int(page.get_attribute("#audit", "data-count")) > 20


def test_the_mean_of_the_n_step_advantages_of_a_step_is_its_advantage(page: Any, cart: Path, inspector: Begin) -> None:
    """The level between TD residuals and GAE, against ``n_step_advantages``."""
    page.goto(inspector([cart]))
    page.click("nav a[data-view=steps]")
    settled(page)
    file = traces_in(cart / "traces")[-1]
    trace = read_trace(file)
    index = max(range(len(trace.rows)), key=lambda i: len(trace.rows[i].rewards))
    row = trace.rows[index]
    go_to(page, file, index)
    page.click("#n-step summary")
    for t in (0, len(row.rewards) - 2, len(row.rewards) - 1):
        page.click(f"#steps [data-t='{t}']")
        assert page.inner_text('#chain [data-term="mean"] .mark') == "✓"
        assert bold(page, "mean") == pytest.approx(float(row.advantages[t]), rel=1e-3, abs=1e-3)
        lines = [line.split("\t") for line in page.inner_text("#n-step tbody").splitlines()]
        assert sum(number(line[3]) for line in lines if line[3]) == pytest.approx(1, abs=2e-3)
        for n, value, same, weight, _ in lines:
            if "to" in n:
                continue
            ends = {"terminated": row.terminated, "truncated": row.truncated, "mask": row.mask}
            right = n_step_advantages(row.rewards, row.values, row.next_values, **ends, gamma=trace.gamma, n=int(n))
            assert number(value) == pytest.approx(float(right[t]), rel=2e-3, abs=1e-3)
            assert same == "✓"
            if line_is_last := int(n) == len(row.rewards) - t:
                assert number(weight) == pytest.approx(trace.gae_lambda ** (int(n) - 1), rel=2e-3)
            else:
                assert number(weight) == pytest.approx((1 - trace.gae_lambda) * trace.gae_lambda ** (int(n) - 1), rel=2e-3)
        assert line_is_last


def test_tokens_are_coloured_and_reached_by_search_and_keys(page: Any, text_run: Path, inspector: Begin) -> None:
    page.goto(inspector([text_run]))
    page.click("nav a[data-view=steps]")
    settled(page)
    names = [button.inner_text() for button in page.query_selector_all("[data-colour]")]
    assert names == ["reward", "KL", "value", "TD residual", "advantage", "ratio", "branch"]
    colours = {}
    for name in ("reward", "advantage", "branch"):
        page.click(f"[data-colour={name}]")
        colours[name] = page.evaluate("[...document.querySelectorAll('#steps [data-t]')].map((x) => x.style.background)")
    assert len({tuple(each) for each in colours.values()}) == 3
    page.click("[data-find=ratio]")
    page.wait_for_selector("#hits li")
    shown = "Number(document.querySelector('#chain [data-term=ratio] b').textContent)"
    highest = max(float(row.visits.ratio.max()) for file in traces_in(text_run / "traces") for row in read_trace(file).rows)
    until(page, f"Math.abs({shown} - {highest}) < 1e-3")  # without another click
    assert page.inner_text("#jump b").startswith("largest ratio: 1 of ")
    first = page.url
    page.click("#next-hit")
    page.wait_for_selector("#jump b:has-text(': 2 of')")
    until(page, f"location.href !== {first!r}")
    assert page.locator("#hits button[aria-current=true]").count() == 1
    assert page.get_attribute("#hits li:nth-child(2) button", "aria-current") == "true"
    second = page.url
    page.click("#previous-hit")
    until(page, f"location.href === {first!r}")
    assert page.is_disabled("#previous-hit")
    page.click("#hits li:nth-child(2) button")
    until(page, f"location.href === {second!r}")
    page.click("#steps [data-t='0']")
    page.keyboard.press("End")
    assert page.evaluate("document.activeElement.dataset.t") == page.get_attribute("#steps [data-t]:last-child", "data-t")
    kept = page.url
    page.reload()
    settled(page)
    assert page.url == kept, "the address leads back to the same token"


@pytest.mark.slow
def test_numbers_that_are_not_finite_are_shown_and_nothing_is_learned_from_them(
    page: Any, cart: Path, tmp_path: Path, inspector: Begin
) -> None:
    copy = tmp_path / "cart"
    shutil.copytree(cart, copy)
    steps = spoiled(copy, 8)
    page.goto(inspector([copy]))
    page.wait_for_selector(".chart canvas")
    page.evaluate(f"location.hash = 'steps/0/{steps}/0/0/0'")
    settled(page)
    for t, shown in ((0, "NaN"), (1, "∞"), (2, "−∞")):
        page.click(f"#steps [data-t='{t}']")
        assert page.get_attribute(f"#steps [data-t='{t}']", "aria-label").endswith(f"advantage {shown}")
        assert shown in page.inner_text("#chain")
        assert "not finite: nothing can be learned" in page.inner_text("#chain")
    assert int(page.get_attribute("#audit", "data-wrong")) > 0, "they follow from nothing below them"
    page.click("[data-find=best]")
    page.wait_for_selector("#hits li")
    assert "A NaN" in "".join(page.locator("#hits li").all_inner_texts()[:2])


@pytest.mark.parametrize("algorithm", ["REINFORCE_BASELINE", "PPO_PENALTY"])
def test_every_algorithms_chain_adds_up(page: Any, tmp_path: Path, inspector: Begin, algorithm: str) -> None:
    whole = {"rollout": {"episodes": 1}} if algorithm.startswith("REINFORCE") else {}
    surefoot.train("CartPole-v1", algorithm=algorithm, steps=512, run_dir=tmp_path / "run", traces={"every": 256}, **whole)
    page.goto(inspector([tmp_path / "run"]))
    page.click("nav a[data-view=steps]")
    settled(page)
    assert page.get_attribute("#audit", "data-wrong") == "0", page.inner_text("#audit")
    assert int(page.get_attribute("#audit", "data-count")) > 30


def test_samples_before_and_after_are_shown_with_all_text_escaped(
    page: Any, text_run: Path, tmp_path: Path, inspector: Begin
) -> None:
    copy = tmp_path / text_run.name
    shutil.copytree(text_run, copy)
    steps = sorted(int(file.stem) for file in (copy / "samples").glob("*.jsonl"))
    files = [copy / "samples" / f"{at}.jsonl" for at in (steps[0], steps[-1])]
    first, last = ([json.loads(line) for line in file.read_text().splitlines()] for file in files)
    last[0]["response"] = f"\u202e\x1b\u2028{HOSTILE}"
    write_listed(files[1], "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in last))
    page.goto(inspector([copy]))
    page.wait_for_selector(".chart canvas")
    assert text_run.name in page.inner_text("#runs")
    page.click("nav a[data-view=steps]")
    settled(page)
    assert HOSTILE in page.inner_text("#prompt")
    page.click("nav a[data-view=clip]")
    page.wait_for_selector("[data-counter=good-inside] b")
    assert page.text_content("#run option") == text_run.name
    page.click("nav a[data-view=samples]")
    page.wait_for_selector("#samples tbody tr")
    rows = page.locator("#samples tbody tr")
    assert rows.count() == len(last)
    turned = rows.nth(0).inner_text()
    assert f"\\u202e\\u001b\\u2028{HOSTILE}" in turned, "what would turn the writing round is shown as its number"
    for i, (before, after) in list(enumerate(zip(first, last, strict=True)))[1:]:
        text = rows.nth(i).inner_text()
        assert before["prompt"] == after["prompt"]
        for sample in (before, after):
            assert sample["response"].replace("\n", "⏎").strip()[:20] in text
    assert page.locator("img").count() == 0
    assert "taken" not in page.title().split("·")[1]
