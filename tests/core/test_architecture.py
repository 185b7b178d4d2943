"""Directions between the parts, kept by reading the imports of every file; and what ``surefoot --help`` may load.

DESIGN: ``functional`` imports torch alone. ``control`` and ``language`` never import each other. ``run`` imports neither. What
learns knows rollouts and no worlds. Nothing imports ``cli``.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import surefoot
from surefoot.cli import COMMANDS

SOURCE = Path(surefoot.__file__).parent
WORLDS = ("surefoot.control", "surefoot.language")
CORE = ("algorithms", "rollout", "credit", "objective", "optimizer", "learner", "natural_step", "loop", "traces")
LIGHT = (
    "surefoot",
    "surefoot.cli",
    "surefoot.config",
    "surefoot.recipes",
    "surefoot.algorithms",
    "surefoot.errors",
    ", ".join(sorted({where.partition(":")[0] for where in COMMANDS.values()})),
)


def module_of(path: Path, source: Path = SOURCE) -> str:
    """``…/surefoot/run/folder.py`` -> ``surefoot.run.folder``"""
    parts = path.relative_to(source.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(text: str, module: str, package: bool = False) -> set[str]:
    """Every module that a file imports, anywhere in it, by its full name; ``from a import b`` counts as a and as a.b."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            here = module.split(".")
            above = here[: len(here) - node.level + package] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            found |= {origin, *(f"{origin}.{alias.name}" for alias in node.names)}
    return found


FILES = {module_of(path): path for path in sorted(SOURCE.rglob("*.py"))}
IMPORTS = {name: imports(path.read_text("utf-8"), name, path.name == "__init__.py") for name, path in FILES.items()}


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def offences(importers: str | tuple[str, ...], forbidden: str | tuple[str, ...]) -> list[str]:
    """Who among the importers imports something forbidden."""
    importers, forbidden = ((x,) if isinstance(x, str) else x for x in (importers, forbidden))
    return [
        f"{name} imports {found}"
        for name, all_found in IMPORTS.items()
        if any(inside(name, importer) for importer in importers)
        for found in sorted(all_found)
        if any(inside(found, package) for package in forbidden)
    ]


def test_every_file_is_read() -> None:
    """An empty list would keep every direction."""
    assert {"surefoot", "surefoot.__main__", "surefoot.functional.returns", "surefoot.control.collect"} <= set(FILES)
    assert "surefoot.functional" in IMPORTS["surefoot.credit"]
    assert "surefoot.rollout" in IMPORTS["surefoot.control.collect"]
    assert "surefoot.api" in IMPORTS["surefoot.cli_train"], "imports inside functions count"


@pytest.mark.parametrize(
    ("text", "module", "package", "expected"),
    [
        ("import a.b as c, d", "x.y", False, {"a.b", "d"}),
        ("from a import b", "x.y", False, {"a", "a.b"}),
        ("def f():\n    from a.b import c", "x.y", False, {"a.b", "a.b.c"}),
        ("from . import z", "x.y", False, {"x", "x.z"}),
        ("from .z import w", "x.y", False, {"x.z", "x.z.w"}),
        ("from ..z import w", "x.y.v", False, {"x.z", "x.z.w"}),
        ("from .z import w", "x.y", True, {"x.y.z", "x.y.z.w"}),
    ],
)
def test_imports_are_read_by_their_full_names(text: str, module: str, package: bool, expected: set[str]) -> None:
    assert imports(text, module, package) == expected


def test_functional_imports_torch_and_itself_only() -> None:
    allowed = {"torch", "collections", "dataclasses", "functools", "itertools", "math", "typing"}
    found = {name for module, names in IMPORTS.items() if inside(module, "surefoot.functional") for name in names}
    foreign = {name for name in found if name.split(".")[0] not in allowed and not inside(name, "surefoot.functional")}
    assert foreign == set()


def test_control_and_language_never_import_each_other() -> None:
    assert offences("surefoot.control", "surefoot.language") == []
    assert offences("surefoot.language", "surefoot.control") == []


def test_worlds_know_no_session() -> None:
    assert offences(WORLDS, ("surefoot.session", "surefoot.api", "surefoot.cli")) == []
    assert {"surefoot.control", "surefoot.language"} <= set(FILES)


@pytest.fixture(scope="module")
def loaded() -> set[str]:
    """What is loaded in a new process by all of language and by the ladder: one process, since torch takes seconds."""
    modules = ", ".join(name for name in FILES if inside(name, "surefoot.language"))
    command = f"import sys, surefoot.compare.ladder, {modules}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=120, check=True)
    found = set(done.stdout.split())
    assert {"torch", "surefoot.compare.ladder", "surefoot.language.models"} <= found
    return found


def test_transformers_and_its_kind_are_imported_in_language_alone_and_only_when_used(loaded: set[str]) -> None:
    packages = ("transformers", "tokenizers", "pyarrow", "datasets", "huggingface_hub")
    assert [line for line in offences("surefoot", packages) if not line.startswith("surefoot.language.")] == []
    assert loaded & set(packages) == set(), "control runs, and messages come, without the extra"


def test_verifiers_and_the_sandbox_know_nothing_of_training() -> None:
    parts, errors = ("surefoot.sandbox", "surefoot.verifiers"), "surefoot.errors"
    ours = {
        found for part in parts for name in FILES if inside(name, part) for found in IMPORTS[name] if inside(found, "surefoot")
    }
    assert {name for name in ours if not any(inside(name, known) for known in (*parts, errors))} <= {"surefoot"}
    assert offences(parts, ("torch", "numpy")) == []
    assert offences("surefoot.sandbox", "surefoot.verifiers") == []


def test_run_imports_no_world() -> None:
    assert offences("surefoot.run", WORLDS) == []


def test_what_learns_knows_no_world() -> None:
    core = tuple(f"surefoot.{name}" for name in CORE)
    outside = (*WORLDS, "gymnasium", "numpy", "surefoot.session", "surefoot.api", "surefoot.cli", "surefoot.config")
    assert offences(core, outside) == []
    assert len(set(core) & set(FILES)) >= 7


def test_the_core_reads_of_run_only_what_sums_over_ranks() -> None:
    core = tuple(f"surefoot.{name}" for name in CORE)
    used = {found for name in core if name in IMPORTS for found in IMPORTS[name] if inside(found, "surefoot.run")}
    assert {name for name in used if not inside(name, "surefoot.run.distributed")} <= {"surefoot.run"}


def test_only_main_imports_the_command_line() -> None:
    everyone = offences("surefoot", "surefoot.cli")
    assert [line for line in everyone if not line.startswith("surefoot.__main__ ")] == []
    assert everyone


def test_only_the_command_line_knows_comparisons() -> None:
    everyone = offences("surefoot", "surefoot.compare")
    assert [
        line
        for line in everyone
        if not line.startswith(("surefoot.compare", "surefoot.cli_check ", "surefoot.cli_compare ", "surefoot.cli_report "))
    ] == []
    assert everyone


def test_only_the_command_line_knows_the_inspector_and_it_knows_no_world() -> None:
    everyone = offences("surefoot", "surefoot.inspector")
    assert [line for line in everyone if not line.startswith(("surefoot.inspector", "surefoot.cli_inspect "))] == []
    assert everyone
    assert offences("surefoot.inspector", (*WORLDS, "surefoot.session", "surefoot.api")) == []
    assert {line.split()[0].rpartition(".")[0] for line in offences("surefoot", ("starlette", "uvicorn"))} <= {
        "surefoot.inspector"
    }


def test_matplotlib_is_imported_where_plots_are_drawn_and_nowhere_else(loaded: set[str]) -> None:
    assert {line.split()[0] for line in offences("surefoot", "matplotlib")} == {
        "surefoot.compare.plots",
        "surefoot.compare.run_plots",
    }
    assert "matplotlib" not in loaded, "without a plot to draw it need not be there"


@pytest.mark.parametrize("name", LIGHT)
def test_help_needs_no_torch(name: str) -> None:
    """In a new process, because torch is here already. numpy and gymnasium take seconds too."""
    command = f"import sys, {name}; print(sorted({{'torch', 'numpy', 'gymnasium', 'tensorboard'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
