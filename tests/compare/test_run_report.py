"""Reports of runs: reading, grouping and comparing; the HTML page loads nothing and escapes text."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import surefoot
from surefoot.compare.plots import binned, smoothed
from surefoot.compare.report import page
from surefoot.compare.runs import distinguishing_fields, group_runs, read_run
from surefoot.compare.statistics import mean_interval
from surefoot.recipes.reading import make_recipe, to_table
from surefoot.store.manifest import write_listed
from surefoot.store.traces import SampleFolder

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two seeds of one recipe, and one run with another λ, one of them under a hostile name with hostile samples."""
    root = tmp_path_factory.mktemp("runs")
    folders = [root / "a", root / "b", root / "<b onload=x>$\\frac"]
    for seed, folder in enumerate(folders, 1):
        objective = {"reuse": {"epochs": 2, "minibatches": 2}, **({"gae_lambda": 0.5} if seed == 3 else {})}
        sizes = {"rollout": {"environments": 2, "steps": 32}, "evaluation": {"episodes": 1}, "steps": 512}
        surefoot.train("CartPole-v1", seed=seed, run_dir=folder, objective=objective, **sizes)
    (folders[2] / "samples").mkdir()
    rows = [{"prompt": HOSTILE, "response": f"</td>{HOSTILE}\x1b[31m\ud800", "reward": 1.0}, {"prompt": 1}, {"response": "ok"}]
    write_listed(folders[2] / "samples" / "512.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return folders


class Page(HTMLParser):
    """Every tag with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_a_page_is_self_contained_and_has_no_scripts(runs: list[Path]) -> None:
    text = page([read_run(run) for run in runs])
    tags = Page(text).tags
    assert not {tag for tag, _ in tags} & {"script", "iframe", "object", "link", "b onload=x", "form"}
    assert not {name for _, attributes in tags for name in attributes if name.startswith("on")}
    places = [value for _, attributes in tags for name, value in attributes.items() if name in ("src", "href", "srcset")]
    assert len(places) >= 6
    assert all(value is not None and value.startswith("data:image/svg+xml;base64,") for value in places)
    assert "default-src 'none'" in text
    assert "url(" not in text
    assert HOSTILE not in text
    assert "&lt;script&gt;" in text, "it is shown as text"
    assert "\\x1b[31m\\ud800" in text, "what has no shape is shown as what it is"


def test_a_page_contains_scores_settings_curves_and_the_command(runs: list[Path], command: Any) -> None:
    code, out, _ = command("report", str(runs[0]), "--figures", "png")
    assert code == 0
    text = (runs[0] / "report.html").read_text("utf-8")
    for words in (
        "PPO_CLIP on CartPole-v1",
        "return, greedy",
        "Too short to judge: 8 iterations",
        "Explained variance",
        "gae_lambda",
        "torch",
    ):
        assert words in text
    assert f"surefoot train {runs[0]}/config.toml" in text
    assert "working_folder" not in text
    pictures = sorted((runs[0] / "report-figures").iterdir())
    assert {picture.name for picture in pictures} >= {"return.png", "kl.png", "clip.png", "entropy.png", "critic.png"}
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
    assert f"{len(pictures)} figures" in out
    for words in (("report", str(runs[0])), ("inspect", "--clip-table", "--no-browser")):
        code, _, error = command(*words, "--out", str(runs[0] / "config.toml"))
        assert (code, error) == (2, f"surefoot: --out {runs[0]}/config.toml: name a file that ends in .html\n")
    assert read_run(runs[0]).recipe.steps == 512


def test_the_command_on_a_page_can_be_repeated(runs: list[Path], command: Any, tmp_path: Path) -> None:
    assert command("train", str(runs[0] / "config.toml"), "--name", "again", "--quiet")[0] == 0
    before, after = read_run(runs[0]), read_run(tmp_path / "runs" / "again")
    assert to_table(before.recipe) == to_table(after.recipe)
    assert before.last("policy_loss") == after.last("policy_loss")


def test_runs_that_differ_in_their_seed_alone_are_one_group(runs: list[Path]) -> None:
    groups = group_runs([read_run(run) for run in runs])
    assert [[run.recipe.seed for run in group] for group in groups] == [[1, 2], [3]]
    assert "seed" not in distinguishing_fields(groups[0][0].recipe)


def test_evaluation_settings_distinguish_runs_only_if_patience_may_end_them(runs: list[Path]) -> None:
    table = to_table(read_run(runs[0]).recipe)

    def fields(every: int, patience: int | str) -> dict[str, Any]:
        return distinguishing_fields(
            make_recipe({**table, "evaluation": {**table["evaluation"], "every": every, "patience": patience}})
        )

    assert fields(64, "none") == fields(128, "none")
    assert fields(64, 2) != fields(128, 2)


def test_settings_that_change_no_number_distinguish_no_runs() -> None:
    def fields(deadline: float, memory: bool) -> dict[str, Any]:
        reward = {"terms": [{"function": "rewards.py:score"}], "deadline": deadline}
        table = {"kind": "language", "model": "pocket", "steps": 64, "data": {"train": "prompts.jsonl"}, "reward": reward}
        return distinguishing_fields(make_recipe({**table, "check_memory": memory}))

    assert fields(60, True) == fields(90, False)


def test_compare_prints_differences_results_and_intervals(runs: list[Path], command: Any) -> None:
    code, out, _ = command("compare", *map(str, runs))
    assert code == 0
    assert re.search(r"\| objective.gae_lambda *\| *0\.8 *\| *0\.5 *\|", out)
    assert "A gae_lambda=0.8" in out
    table = json.loads(command("compare", *map(str, runs), "--json")[1])
    assert table["differences"] == {"objective.gae_lambda": [0.8, 0.5]}
    returns = [read_run(run).last("episode_return") for run in runs]
    first, second = (group["scores"]["episode_return"] for group in table["groups"])
    assert first["each"] == returns[:2]
    assert first["mean"] == pytest.approx(np.mean(returns[:2]))
    assert first["interval"] == pytest.approx(mean_interval(returns[:2]))
    assert second["each"] == returns[2:]
    actual = table["against_first"]["episode_return"]["B gae_lambda=0.5"]
    assert actual["difference"] == pytest.approx(returns[2] - np.mean(returns[:2]))
    assert actual["interval"] == [None, None]  # one seed


def test_compare_needs_two_different_runs(runs: list[Path], command: Any) -> None:
    for words in ([str(runs[0])], [str(runs[0])] * 2, [str(runs[0]), "runs/none"]):
        code, _, err = command("compare", *words)
        assert code == 2
        assert err.count("\n") == 1


def test_smoothing_keeps_lines_and_bins_keep_means() -> None:
    line = np.arange(1000.0)
    assert smoothed(line)[100:900] == pytest.approx(line[100:900])
    assert smoothed(np.full(50, 3.0)) == pytest.approx(3.0)
    steps, values = binned(line, line**2, 100)
    assert len(values) == 100
    assert steps.mean() == pytest.approx(line.mean())
    assert values.mean() == pytest.approx((line**2).mean())


def test_a_sample_with_another_kind_of_line_end_is_one_sample(runs: list[Path], tmp_path: Path) -> None:
    message = "one\u2028two\x85three"
    shutil.copytree(runs[0], tmp_path / "run")
    SampleFolder(tmp_path / "run" / "samples", 0).write(512, [{"prompt": "p", "response": message, "reward": 1.0}])
    assert read_run(tmp_path / "run").samples() == (512, [{"prompt": "p", "response": message, "reward": 1.0}])
