"""The notebooks: they equal their sources and run without an error."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SAVED = ROOT / "docs" / "notebooks" / "ladder.ipynb"
TEXT = SAVED.with_suffix(".py")
NAMES = ("REINFORCE", "REINFORCE_BASELINE", "ACTOR_CRITIC", "A2C", "PPO_UNCLIPPED", "PPO_CLIP")
LARGEST = 300_000  # bytes: it is shown on web pages and kept in git


@pytest.fixture(scope="module")
def tool() -> dict[str, Any]:
    """docs/notebook.py."""
    return runpy.run_path(str(ROOT / "docs" / "notebook.py"))


@pytest.fixture(scope="module")
def saved() -> Any:
    import nbformat

    return nbformat.read(SAVED, as_version=4)


def code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def pictures(notebook: Any) -> int:
    outputs = [output for cell in code(notebook) for output in cell.outputs]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def test_saved_notebooks_match_their_sources_and_ran_without_an_error(tool: dict[str, Any], saved: Any) -> None:
    import nbformat

    assert pictures(saved) == 4
    for path in SAVED.parent.glob("*.ipynb"):
        saved = nbformat.read(path, as_version=4)
        text = path.with_suffix(".py").read_text("utf-8")
        assert tool["cells_of"](saved) == tool["cells_of"](tool["from_text"](text)), f"python docs/notebook.py {path.stem}"
        assert [cell.execution_count for cell in code(saved)] == list(range(1, len(code(saved)) + 1))
        outputs = [output for cell in code(saved) for output in cell.outputs]
        assert [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"] == []
        assert len(path.read_bytes()) < LARGEST


def test_the_saved_notebook_was_run_on_its_whole_budget(saved: Any) -> None:
    """What it says of learning is checked on 20,000 steps alone; a notebook of a smaller run would claim it unchecked."""
    printed = "".join(output.get("text", "") for cell in code(saved) for output in cell.outputs)
    for updates in (79, 1_580):  # 79 batches of 256 steps, used once and twenty times
        assert f": {updates:,} updates;" in printed
    (seeds,) = re.findall(r"PPO_UNCLIPPED: .*: (\d+) (\d+) (\d+)\n", printed)
    assert int(seeds[2]) < min(map(int, seeds[:2])) / 4, "which of its seeds was lost is said in the text"


def test_every_rung_is_shown_trained_and_checked() -> None:
    parts = TEXT.read_text("utf-8").split("\n# ## Rung ")[1:]
    assert [part[0] for part in parts] == list("012345")
    for name, part in zip(NAMES, parts, strict=True):
        assert f'\nclimb("{name}")\n' in part
        assert "\nassert " in part


@pytest.mark.release
def test_the_notebook_runs(tool: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a kernel of its own, as for a reader, on a small budget: all that is not about learning is checked."""
    monkeypatch.setenv("SUREFOOT_NOTEBOOK_STEPS", "512")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    done = tool["executed"](tool["from_text"](TEXT.read_text("utf-8")))
    assert pictures(done) == 4
    assert [output for cell in code(done) for output in cell.outputs if output.get("name") == "stderr"] == []


@pytest.mark.release
def test_the_notebook_of_comparisons_runs(tool: dict[str, Any]) -> None:
    assert pictures(tool["executed"](tool["from_text"]((SAVED.parent / "comparisons.py").read_text("utf-8")))) == 2


@pytest.mark.release
def test_a_false_claim_stops_the_notebook(tool: dict[str, Any]) -> None:
    from nbclient.exceptions import CellExecutionError

    with pytest.raises(CellExecutionError, match="AssertionError"):
        tool["executed"](tool["from_text"]("# %%\nassert 1 + 1 == 3\n"))


@pytest.mark.release
def test_its_statements_about_learning_hold(tool: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUREFOOT_NOTEBOOK_STEPS", raising=False)
    done = tool["executed"](tool["from_text"](TEXT.read_text("utf-8")))  # raises at an assertion that fails
    checks = [cell for cell in code(done) if "if ENOUGH:\n" in cell.source and "assert " in cell.source]
    assert len(checks) >= 4
    assert all(cell.execution_count for cell in checks)
