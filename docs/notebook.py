"""Run docs/notebooks/ladder.py, a notebook as plain text, and save it with its outputs and plots as ladder.ipynb.

    python docs/notebook.py            run it (a minute and a half) and write the notebook
    python docs/notebook.py --check    run nothing; exit 1 if the notebook's cells differ from the text

Change the text, never the notebook: ``# %%`` begins a code cell, ``# %% [markdown]`` a text cell.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

SOURCE = Path(__file__).resolve().parent / "notebooks" / "ladder.py"
NOTEBOOK = SOURCE.with_suffix(".ipynb")


def from_text(text: str) -> NotebookNode:
    """The notebook without outputs. Cells are numbered, so the same text gives the same file."""
    notebook = jupytext.reads(text, fmt="py:percent")
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def executed(notebook: NotebookNode) -> NotebookNode:
    """The notebook with its outputs, run by a kernel of this Python in an empty folder.

    Raises nbclient's CellExecutionError for the first cell that raises, including a failed assertion.
    """
    plain = notebook.metadata.copy()
    with tempfile.TemporaryDirectory() as folder:
        where = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=600, kernel_name="python3", record_timing=False, resources=where).execute()
    notebook.metadata = plain  # the kernel adds its version, which readers don't need
    return notebook


def cells_of(notebook: NotebookNode) -> list[tuple[str, str]]:
    """The kind and the text of each cell."""
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="run nothing; exit 1 if the notebook differs from the text")
    check = parser.parse_args().check
    fresh = from_text(SOURCE.read_text("utf-8"))
    if check:
        same = NOTEBOOK.is_file() and cells_of(nbformat.read(NOTEBOOK, as_version=4)) == cells_of(fresh)
        print("" if same else f"{NOTEBOOK.name}: stale; run: python docs/notebook.py", end="" if same else "\n")
        return 0 if same else 1
    NOTEBOOK.write_text(nbformat.writes(executed(fresh)) + "\n", "utf-8", newline="\n")
    print(f"{NOTEBOOK.name}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
