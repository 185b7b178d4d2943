"""The inspector's pages in a real browser: start page, table of runs, findings, recipes, small screens, invitations."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import surefoot
from surefoot import read_trace
from surefoot.diagnostics.findings import check_run
from surefoot.errors import SurefootError
from surefoot.inspector import traces as inspected
from surefoot.inspector.clip_table import clip_table_page
from surefoot.inspector.folders import RunFolders
from surefoot.inspector.traces import Traces
from surefoot.store.manifest import write_listed
from surefoot.store.metrics import read_metrics
from surefoot.store.reading import traces_in
from surefoot.store.traces import clipped_samples

from .test_inspector import settled, until

Begin = Callable[..., str]
VIEWS = ("curves", "steps", "clip", "samples", "findings", "recipe", "profile")
IDLE = {"kl": 1e-9, "clip_active": 0.0, "ratio_outside": 0.0, "episode_return": 20.0}


# ---- the most clipped trace -------------------------------------------------------------------------------------------


def stopped(file: Path) -> list[tuple[int, int]]:
    """Clipped samples and samples of each row, from the whole trace."""
    rows = [row.visits for row in read_trace(file).rows]
    return [(int(((v.updates >= 0) & ~v.gradient_flows).sum()), int((v.updates >= 0).sum())) for v in rows]


def test_clipped_samples_are_counted_without_reading_the_whole_trace(cart: Path, text_run: Path, tmp_path: Path) -> None:
    for run in (cart, text_run):
        for file in traces_in(run / "traces"):
            assert clipped_samples(file) == stopped(file)
    (tmp_path / "5.safetensors").write_bytes(b"nothing")
    with pytest.raises(SurefootError, match="can't be read"):
        clipped_samples(tmp_path / "5.safetensors")


def test_the_most_clipped_trace_has_the_most_of_all_and_its_step_is_clipped(cart: Path, text_run: Path) -> None:
    for run in (cart, text_run):
        counts = {int(file.stem): stopped(file) for file in traces_in(run / "traces")}
        found = Traces(RunFolders([run])).most_clipped(0)
        assert found["clipped"] == max(sum(row[0] for row in rows) for rows in counts.values()) > 0
        rows = counts[found["steps"]]
        assert (found["clipped"], found["samples"]) == tuple(map(sum, zip(*rows, strict=True)))
        assert rows[found["index"]][0] == max(row[0] for row in rows)
        row = read_trace(run / "traces" / f"{found['steps']}.safetensors").rows[found["index"]]
        assert row.visits.updates[found["visit"], found["t"]] >= 0
        assert not row.visits.gradient_flows[found["visit"], found["t"]]
        assert (found["counted"], found["traces"]) == (len(counts), len(counts))


def test_of_many_traces_those_with_the_highest_clip_active_are_counted(cart: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    active = {row["steps"]: row["clip_active"] for row in read_metrics(cart / "metrics.jsonl")}
    traced = [int(file.stem) for file in traces_in(cart / "traces")]
    highest = max(traced, key=lambda steps: active[steps])
    folders, counted = RunFolders([cart]), []
    folders.columns[0].read_on()
    monkeypatch.setattr(inspected, "MOST_COUNTED", 1)
    monkeypatch.setattr(inspected, "clipped_samples", lambda file: counted.append(int(file.stem)) or clipped_samples(file))
    found = Traces(folders).most_clipped(0)
    assert counted == [highest] == [found["steps"]]
    assert (found["counted"], found["traces"]) == (1, len(traced))


def test_a_run_without_clipped_samples_opens_on_its_last_trace(page: Any, tmp_path: Path, inspector: Begin) -> None:
    run = tmp_path / "slow"
    slow = {"steps": 512, "optimizer": {"learning_rate": 1e-9}, "rollout": {"steps": 32}, "traces": {"every": 256}}
    surefoot.train("CartPole-v1", run_dir=run, **slow)
    page.goto(inspector([run]))
    page.click("nav a[data-view=steps]")
    settled(page)
    assert page.inner_text("#most-clipped") == "No sample is clipped in 2 traces."
    assert "#steps/0/512/" in page.url


def test_steps_open_on_the_most_clipped_trace_and_clip_too(page: Any, cart: Path, inspector: Begin) -> None:
    found = Traces(RunFolders([cart])).most_clipped(0)
    page.goto(inspector([cart]))
    page.click("nav a[data-view=steps]")
    settled(page)
    place = "/".join(str(found[name]) for name in ("steps", "index", "t", "visit"))
    assert page.url.endswith(f"#steps/0/{place}")
    assert page.locator('#chain [data-term="clipped"].taken').count() == 1
    said = page.inner_text("#most-clipped")
    assert said.startswith(
        f"Most clipped trace: step {found['steps']:,}, with {found['clipped']:,} of {found['samples']:,} samples"
    )
    page.locator("#iteration").fill("0")
    until(page, f"!location.hash.endsWith({place!r})")
    page.click("#to-clipped")
    until(page, f"location.hash.endsWith({place!r})")
    page.click("nav a[data-view=clip]")
    page.wait_for_selector("#plane")
    until(page, f"document.querySelector('output[for=trace]').textContent.includes('step {found['steps']:,}')")


# ---- one numbering ----------------------------------------------------------------------------------------------------


def test_a_step_is_always_one_of_the_metrics_and_times_are_those_of_the_episode(
    page: Any, cart: Path, inspector: Begin
) -> None:
    known = {0, *(row["steps"] for row in read_metrics(cart / "metrics.jsonl"))}
    page.goto(inspector([cart]))
    words: list[str] = []
    for view in ("curves", "steps", "clip"):
        page.click(f"nav a[data-view={view}]")
        page.wait_for_selector({"curves": ".chart canvas", "steps": "#audit[data-count]", "clip": "#plane"}[view])
        if view == "steps":
            page.click("[data-find=worst]")
            page.wait_for_selector("#jump b")
        words += re.findall(r"\bstep ([\d,]+)", page.inner_text("#page"))
    assert len(words) > 20
    assert {int(word.replace(",", "")) for word in words} <= known
    page.click("nav a[data-view=steps]")
    settled(page)
    steps, index, t = (int(x) for x in page.url.partition("#steps/0/")[2].split("/")[:3])
    row = read_trace(cart / "traces" / f"{steps}.safetensors").rows[index]
    name = f"t = {row.about['step'] + t} of episode {row.about['episode']}, environment {row.row}"
    assert page.inner_text("#chain h3").startswith(name)


def test_tokens_are_counted_from_0(page: Any, text_run: Path, inspector: Begin) -> None:
    page.goto(inspector([text_run]))
    page.click("nav a[data-view=steps]")
    settled(page)
    page.click("#steps [data-t='0']")
    assert page.inner_text("#chain h3").endswith("at t = 0")


# ---- curves -----------------------------------------------------------------------------------------------------------


def test_a_log_scale_shows_how_many_values_it_leaves_out(page: Any, cart: Path, tmp_path: Path, inspector: Begin) -> None:
    copy = tmp_path / "cart"
    shutil.copytree(cart, copy)
    rows = read_metrics(copy / "metrics.jsonl")
    for i, row in enumerate(rows):
        row |= {"kl": [0.0, -1.0, 2.0][i] if i < 3 else row["kl"], "explained_variance": None, "value_loss": -1.0}
    (copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page.goto(inspector([copy]))
    page.wait_for_selector(".chart[data-metric=kl] canvas")
    assert page.locator(".unshown:visible").count() == 0
    page.check("#log")
    page.wait_for_selector(".chart[data-metric=kl] .unshown:visible")
    shown = {
        chart.get_attribute("data-metric"): chart.query_selector(".unshown").inner_text()
        for chart in page.query_selector_all(".chart")
    }
    assert shown["kl"] == "2 values are 0 or less, which a log scale can’t show"
    assert shown["value_loss"] == f"{len(rows)} values are 0 or less, which a log scale can’t show"
    assert shown["entropy"] == shown["steps_per_second"] == ""
    page.uncheck("#log")
    page.wait_for_selector(".chart[data-metric=kl] canvas")
    assert page.locator(".unshown:visible").count() == 0


def test_the_use_of_the_machine_is_a_group_of_its_own(page: Any, cart: Path, inspector: Begin) -> None:
    page.goto(inspector([cart]))
    page.wait_for_selector("#machine")
    after = "[...document.querySelectorAll('#machine ~ .charts .chart')].map((x) => x.dataset.metric)"
    assert page.evaluate(after) == ["steps_per_second", "cpu_cores", "memory_gb"]
    page.wait_for_selector(".chart[data-metric=memory_gb] canvas")
    page.select_option("#more", "seconds_learning")
    page.wait_for_selector("#machine ~ .charts .chart[data-metric=seconds_learning] canvas")


# ---- findings and recipe ----------------------------------------------------------------------------------------------


def test_findings_are_those_of_check_and_their_evidence_leads_to_the_curve(
    page: Any, cart: Path, tmp_path: Path, inspector: Begin
) -> None:
    copy = tmp_path / "idle"
    shutil.copytree(cart, copy)
    row = {**read_metrics(copy / "metrics.jsonl")[-1], **IDLE}
    rows = [{**row, "iteration": i, "steps": 64 * i} for i in range(1, 41)]
    (copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    check = check_run(copy)
    page.goto(inspector([copy, cart]))
    page.click("nav a[data-view=findings]")
    page.wait_for_selector(".finding")
    (idle, short) = page.locator("#findings section").all()
    assert [one.get_attribute("data-finding") for one in idle.locator(".finding").all()] == [
        finding.name for finding in check.findings
    ]
    text = idle.inner_text()
    for finding in check.findings:
        assert all(part in text for part in (finding.what, finding.cause, *finding.advice))
        assert sum(f"{each.metric} " in text for each in finding.evidence) == len(finding.evidence)
    verdict = check_run(cart).verdict
    assert short.inner_text().endswith(f"{verdict[0].upper()}{verdict[1:]}.")
    metric = next(finding for finding in check.findings if finding.evidence).evidence[0].metric
    idle.locator(".finding button.link").first.click()
    page.wait_for_selector(f".chart[data-metric={metric}] canvas")
    page.wait_for_selector("#whole:not([hidden])")


def test_the_recipe_marks_what_is_not_a_default(page: Any, cart: Path, text_run: Path, inspector: Begin) -> None:
    page.goto(inspector([cart]))
    page.click("nav a[data-view=recipe]")
    page.wait_for_selector("#recipe tbody tr")
    fields = {row.get_attribute("data-field"): row.inner_text() for row in page.query_selector_all("#recipe tbody tr")}
    assert "preset cartpole" in fields["objective.gae_lambda"]
    assert "0.8" in fields["objective.gae_lambda"]
    assert "default 0.95" in fields["objective.gae_lambda"]
    assert "set" in fields["traces.rows"]
    assert "default 2" in fields["traces.rows"]
    assert "optimizer.epsilon" not in fields
    page.select_option("#fields", "all")
    assert page.locator("#recipe tbody tr").count() > 60
    page.fill("#field-filter", "epsilon")
    assert page.locator("#recipe tbody tr[data-field='optimizer.epsilon'] [data-source=default]").count() == 1
    page.goto(inspector([cart, text_run]))
    page.click("nav a[data-view=recipe]")
    page.wait_for_selector("#recipe tbody tr")
    assert page.locator("#recipe tbody tr[data-field=kind] td").all_inner_texts()[:2] == ["control", "language"]
    assert page.locator("#recipe tbody tr[data-field='checkpoint.keep']").count() == 0, "equal in both"


def test_samples_begin_before_training(page: Any, text_run: Path, inspector: Begin) -> None:
    page.goto(inspector([text_run]))
    page.click("nav a[data-view=samples]")
    page.wait_for_selector("#samples tbody tr")
    assert page.locator("#before option").all_inner_texts()[0] == "step 0, before training"
    assert page.input_value("#before") == "0"
    first = json.loads((text_run / "samples" / "0.jsonl").read_text().splitlines()[0])
    assert first["response"].replace("\n", "⏎").strip()[:10] in page.locator("#samples tbody tr").first.inner_text()


# ---- widths -----------------------------------------------------------------------------------------------------------


def overflow(page: Any) -> list[str]:
    """The elements that make the page wider than the screen."""
    return page.evaluate("""() => document.documentElement.scrollWidth <= innerWidth ? [] :
        ["page", ...[...document.querySelectorAll('body *')].filter((x) => x.getBoundingClientRect().right > innerWidth + 1)
            .map((x) => x.outerHTML.slice(0, 120))]""")


def test_no_page_is_wider_than_a_phone(chromium: Any, cart: Path, text_run: Path, tmp_path: Path, inspector: Begin) -> None:
    root = tmp_path / "runs"
    shutil.copytree(cart, root / "comparison-of-several-learning-rates" / f"cartpole-with-a-very-long-name-{'x' * 60}")
    shutil.copytree(text_run, root / text_run.name)
    context = chromium.new_context(viewport={"width": 390, "height": 844})
    page = context.new_page()
    address = inspector([root], table=True)
    page.goto(address)
    page.wait_for_selector("#table tbody tr")
    page.set_viewport_size({"width": 1200, "height": 844})
    assert page.evaluate("(({ scrollWidth, clientWidth }) => scrollWidth <= clientWidth)(document.querySelector('.scroll'))")
    page.set_viewport_size({"width": 390, "height": 844})
    page.check("#table tbody tr:nth-child(1) input")
    page.check("#table tbody tr:nth-child(2) input")
    assert overflow(page) == []
    page.click("#invite")
    page.wait_for_selector("dialog[open]")
    assert overflow(page) == []
    page.keyboard.press("Escape")
    page.click("#compare")
    waits = {
        "curves": ".chart canvas",
        "steps": "#audit[data-count]",
        "clip": "#plane",
        "samples": "#samples tbody tr",
        "findings": ".verdict, .finding",
        "recipe": "#recipe tbody tr",
        "profile": ".profile tbody tr",
    }
    for view in VIEWS:
        page.click(f"nav a[data-view={view}]")
        page.wait_for_selector(waits[view])
        if view == "steps":
            page.click("[data-find=ratio]")
            page.wait_for_selector("#jump b")
        if view == "recipe":
            page.select_option("#fields", "all")
        assert overflow(page) == [], view
    context.close()


def test_the_clip_table_is_not_wider_than_a_phone(chromium: Any, tmp_path: Path) -> None:
    (tmp_path / "clip.html").write_text(clip_table_page())
    context = chromium.new_context(viewport={"width": 390, "height": 844})
    page = context.new_page()
    page.goto((tmp_path / "clip.html").as_uri())
    page.wait_for_selector("#cells td")
    assert overflow(page) == []
    context.close()


# ---- a run that waits for labels ---------------------------------------------------------------------------------------


def test_a_run_that_waits_for_labels_shows_the_command_and_its_actions_are_those_that_the_policy_sampled(
    page: Any, tmp_path: Path, inspector: Begin, command: Any
) -> None:
    run = tmp_path / "clips"
    small = {"rollout": {"environments": 1, "steps": 64}, "objective": {"reuse": {"minibatches": 2}}}
    surefoot.train("Pendulum-v1", steps=64, run_dir=run, display=None, traces={"every": 64, "rows": 1}, **small)
    (run / "round-1").mkdir()
    write_listed(run / "round-1" / "queue.jsonl", '{"video_a": "a.mp4", "video_b": "b.mp4"}\n')
    line = "round-1: 0 of 1 pairs of clips are labelled; label them with: surefoot label "
    line += f"{run}, then go on with: surefoot resume {run}"
    assert line in " ".join(command("check", str(run))[1].split())
    page.goto(inspector([run]))
    page.click("nav a[data-view=labels]")
    assert page.inner_text("#view") == page.inner_text("#runs .hint") == line
    page.click("nav a[data-view=steps]")
    settled(page)
    assert page.inner_text("#chain h3 >> nth=0").endswith(", as sampled: before any rescaling and clipping to the bounds")


# ---- the profile ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_profile_has_the_sections_of_the_file_with_bars_as_long_as_their_shares(
    page: Any, cart: Path, inspector: Begin
) -> None:
    summary = json.loads((cart / "profile" / "summary.json").read_text())
    page.goto(inspector([cart]))
    page.click("nav a[data-view=profile]")
    page.wait_for_selector(".profile tbody tr")
    rows = page.query_selector_all(".profile tbody tr")
    assert [row.get_attribute("data-section") for row in rows] == ["/".join(row["path"]) for row in summary["sections"]]
    for row, known in zip(rows, summary["sections"], strict=True):
        name, share, seconds, calls, _ = (cell.inner_text() for cell in row.query_selector_all("th, td"))
        wanted = 100 * known["seconds"] / summary["seconds"]
        assert (name, seconds) == (known["path"][-1], f"{known['seconds']:.4f}")
        assert float(share.removesuffix(" %")) == pytest.approx(wanted, abs=0.06)
        assert (calls == "") == (known["calls"] is None)
        fill, whole = (row.query_selector(part).bounding_box()["width"] for part in (".fill", ".bar"))
        assert 100 * fill / whole == pytest.approx(wanted, abs=1.5)
    assert str(cart / "profile" / "learning.json.gz") in page.inner_text("#profile")


def test_a_damaged_or_missing_profile_is_an_error_of_one_line(cart: Path, tmp_path: Path) -> None:
    copy = tmp_path / "cart"
    shutil.copytree(cart, copy)
    file = copy / "profile" / "summary.json"
    folders = RunFolders([copy])
    for damage in ('{"sections": [{"path": ["a"]}]}', '{"sections": 1}', "[]", "{"):
        file.write_text(damage)
        with pytest.raises(SurefootError, match=re.escape(str(file))):
            folders.profile(0)
    file.unlink()
    with pytest.raises(SurefootError, match="has no profile; train with --profile"):
        folders.profile(0)


# ---- another browser, and the table -----------------------------------------------------------------------------------


@pytest.fixture
def table(page: Any, cart: Path, tmp_path: Path, inspector: Begin) -> Any:
    """The table of three runs; their steps and seeds differ."""
    for seed, name in enumerate(("beta", "alpha", "group/gamma"), 1):
        shutil.copytree(cart, tmp_path / "runs" / name)
        config = tmp_path / "runs" / name / "config.toml"
        config.write_text(config.read_text().replace("seed = 1\n", f"seed = {seed}\n", 1))
        lines = (cart / "metrics.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / "runs" / name / "metrics.jsonl").write_text("".join(lines[: 9 - 2 * seed]))
    page.goto(inspector([tmp_path / "runs"], table=True))
    page.wait_for_selector("#table tbody tr")
    return page


def names(page: Any) -> list[str]:
    return [row.get_attribute("data-run") for row in page.query_selector_all("#table tbody tr")]


def test_the_table_filters_and_sorts_and_keeps_both_in_the_address(table: Any) -> None:
    table.click("th[data-column=name] button")
    assert names(table) == ["alpha", "beta", "group/gamma"]
    table.click("th[data-column=steps] button")
    assert names(table) == ["beta", "alpha", "group/gamma"], "counts begin with the largest"
    assert table.get_attribute("th[data-column=steps]", "aria-sort") == "descending"
    table.click("th[data-column=steps] button")
    assert names(table) == ["group/gamma", "alpha", "beta"]
    table.fill("#filter", "cartpole seed 2")
    assert names(table) == ["alpha"]
    assert table.inner_text("#count") == "1 of 3 runs"
    table.reload()
    table.wait_for_selector("#table tbody tr")
    assert names(table) == ["alpha"]
    table.fill("#filter", "")
    assert names(table) == ["group/gamma", "alpha", "beta"]


def test_runs_of_the_table_open_alone_or_together(table: Any) -> None:
    table.check("input[aria-label='select alpha']")
    assert table.inner_text("#compare") == "Open"
    table.check("input[aria-label='select group/gamma']")
    table.click("#compare")
    table.wait_for_selector("#charts[data-iterations='5,3'] .chart canvas")
    assert table.locator("#runs b").all_inner_texts() == ["alpha", "group/gamma"]
    table.click("nav a[data-view=recipe]")
    table.wait_for_selector("#recipe tbody tr")
    assert table.locator("#recipe tbody tr").all_inner_texts()[0].startswith("seed")
    table.click("a.back")
    table.wait_for_selector("#table tbody tr")
    table.click("td.c-name a:has-text('beta')")
    table.wait_for_selector("#charts[data-iterations='7'] .chart canvas")
    assert table.locator("#runs b").all_inner_texts() == ["beta"]


def test_tags_are_typed_into_the_table_and_filter_it(table: Any, tmp_path: Path) -> None:
    table.click("tr[data-run=alpha] button.tags")
    table.fill("td.c-tags input", "paper, <b>best</b>")
    table.keyboard.press("Enter")
    table.wait_for_selector("tr[data-run=alpha] .tag")
    assert table.locator("tr[data-run=alpha] .tag").all_inner_texts() == ["paper", "<b>best</b>"]
    assert json.loads((tmp_path / "runs" / "alpha" / "tags.json").read_text()) == {"tags": ["paper", "<b>best</b>"]}
    table.fill("#filter", "paper")
    assert names(table) == ["alpha"]
    table.click("tr[data-run=alpha] button.tags")
    table.fill("td.c-tags input", "lost")
    table.keyboard.press("Escape")
    assert table.locator("tr[data-run=alpha] .tag").all_inner_texts() == ["paper", "<b>best</b>"]


@pytest.mark.slow
def test_deleted_runs_are_taken_back_by_undo_and_from_the_trash(table: Any, tmp_path: Path) -> None:
    table.check("input[aria-label='select alpha']")
    table.check("input[aria-label='select beta']")
    table.click("#delete")
    table.wait_for_selector("#undo")
    assert names(table) == ["group/gamma"]
    assert not (tmp_path / "runs" / "alpha").exists()
    table.click("#undo")
    until(table, "document.querySelectorAll('#table tbody tr').length === 3")
    assert (tmp_path / "runs" / "alpha" / "config.toml").exists()
    table.check("input[aria-label='select group/gamma']")
    table.click("#delete")
    table.wait_for_selector("#undo")
    table.reload()
    table.click("#trash summary")
    table.click("#trash button")
    until(table, "document.querySelectorAll('#table tbody tr').length === 3")
    assert table.locator("#trash").is_hidden()
