"""Run the notebooks of docs/notebooks, which are plain text (.py), and save them with outputs and plots as .ipynb.

    python docs/notebook.py [NAME ...]    run them (the ladder takes a minute and a half) and write the notebooks
    python docs/notebook.py --check       run nothing; exit 1 if a notebook's cells differ from its text

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

FOLDER = Path(__file__).resolve().parent / "notebooks"


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
    parser.add_argument("names", nargs="*", default=sorted(path.stem for path in FOLDER.glob("*.py")), help="all by default")
    parser.add_argument("--check", action="store_true", help="run nothing; exit 1 if a notebook differs from its text")
    options, stale = parser.parse_args(), 0
    for name in options.names:
        notebook, fresh = FOLDER / f"{name}.ipynb", from_text((FOLDER / f"{name}.py").read_text("utf-8"))
        if not options.check:
            notebook.write_text(nbformat.writes(executed(fresh)) + "\n", "utf-8", newline="\n")
            print(f"{name}.ipynb: written")
        elif not notebook.is_file() or cells_of(nbformat.read(notebook, as_version=4)) != cells_of(fresh):
            print(f"{name}.ipynb: stale; run: python docs/notebook.py {name}")
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
