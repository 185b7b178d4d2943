"""Import directions between folders, checked in the source of every file; and the modules that ``surefoot --help`` loads."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import surefoot
from surefoot.cli.main import COMMANDS

SOURCE = Path(surefoot.__file__).parent
FOREIGN_TO_CORE = ("gymnasium", "transformers", "rich", "click", "pydantic")
LIGHT = (
    "surefoot",
    "surefoot.cli.main",
    "surefoot.recipes.reading",
    "surefoot.recipes.presets",
    "surefoot.core.algorithms",
    "surefoot.errors",
    *sorted({where.partition(":")[0] for where in COMMANDS.values()}),
)


def module_of(path: Path, source: Path = SOURCE) -> str:
    """``…/surefoot/store/folder.py`` -> ``surefoot.store.folder``"""
    parts = path.relative_to(source.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(text: str, module: str, package: bool = False) -> set[str]:
    """Every module that a file imports, anywhere in it, by its full name; ``from a import b`` counts as a and as a.b."""
    imported: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            here = module.split(".")
            above = here[: len(here) - node.level + package] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            imported |= {origin, *(f"{origin}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__"):
            imported |= {argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)}
    return imported


FILES = {module_of(path): path for path in sorted(SOURCE.rglob("*.py"))}
IMPORTS = {name: imports(path.read_text("utf-8"), name, path.name == "__init__.py") for name, path in FILES.items()}


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def offences(importers: str | tuple[str, ...], forbidden: str | tuple[str, ...]) -> list[str]:
    """Who among the importers imports something forbidden."""
    importers, forbidden = ((x,) if isinstance(x, str) else x for x in (importers, forbidden))
    return [
        f"{name} imports {imported}"
        for name, names in IMPORTS.items()
        if any(inside(name, importer) for importer in importers)
        for imported in sorted(names)
        if any(inside(imported, package) for package in forbidden)
    ]


def test_every_file_is_read() -> None:
    """An empty list would keep every direction."""
    assert {"surefoot", "surefoot.__main__", "surefoot.functional.returns", "surefoot.control.collect"} <= set(FILES)
    assert "surefoot.functional" in IMPORTS["surefoot.core.credit"]
    assert "surefoot.core.rollout" in IMPORTS["surefoot.control.collect"]
    assert "surefoot.runs.api" in IMPORTS["surefoot.cli.train"], "imports inside functions count"


@pytest.mark.parametrize(
    ("text", "module", "package", "expected"),
    [
        ("import a.b as c, d", "x.y", False, {"a.b", "d"}),
        ("def f():\n    from a.b import c", "x.y", False, {"a.b", "a.b.c"}),
        ("from . import z", "x.y", False, {"x", "x.z"}),
        ("from ..z import w", "x.y.v", False, {"x.z", "x.z.w"}),
        ("from .z import w", "x.y", True, {"x.y.z", "x.y.z.w"}),
        ("if TYPE_CHECKING:\n    from a.b import c", "x.y", False, {"a.b", "a.b.c"}),
        ("importlib.import_module('a.b')", "x.y", False, {"a.b"}),
    ],
)
def test_imports_are_read_by_their_full_names(text: str, module: str, package: bool, expected: set[str]) -> None:
    assert imports(text, module, package) == expected


def test_functional_imports_torch_and_itself_only() -> None:
    allowed = {"torch", "collections", "dataclasses", "functools", "itertools", "math", "typing"}
    imported = {name for module, names in IMPORTS.items() if inside(module, "surefoot.functional") for name in names}
    foreign = {name for name in imported if name.split(".")[0] not in allowed and not inside(name, "surefoot.functional")}
    assert foreign == set()


BASE = {"errors", "files", "terminal", "signals", "calls", "processes"}
LAYERS = {
    "errors": set[str](),
    "files": {"errors"},
    "terminal": set[str](),
    "signals": {"errors"},
    "calls": {"errors"},
    "processes": {"signals"},
    "functional": set[str](),
    "ranks": {*BASE, "functional"},
    "core": {*BASE, "functional", "ranks"},
    "accel": {*BASE, "core", "functional", "ranks"},
    "sharding": {*BASE, "core", "functional", "ranks"},
    "recipes": {"errors", "files", "core"},
    "store": {*BASE, "core", "sharding", "recipes"},
    "people": {"errors", "files", "store"},
    "sandbox": {"errors", "files"},
    "verifiers": {"errors", "files", "signals", "calls", "processes", "sandbox"},
    "control": {*(world := {*BASE, "functional", "ranks", "core", "accel", "sharding", "recipes", "store"}), "people"},
    "language": {*world, "verifiers"},
    "diagnostics": {*world, "control", "language"},
    "runs": (everything := {*world, "control", "language", "diagnostics", "people"}),
    "inspector": {*BASE, "core", "recipes", "store", "people", "diagnostics"},
    "compare": {*everything, "runs"},
    "demos": {*everything, "runs"},
    "cli": {*everything, "runs", "inspector", "compare", "demos"},
    "__main__": {"cli"},
}
"""what the modules of each folder may import besides their own folder; the package itself exports from any"""


def test_folders_import_what_is_below_them() -> None:
    """Every form of import, also inside functions, for types and by name."""
    used = {(name.split(".")[1], other.split(".")[1]) for name, other in module_imports() if name != "surefoot"}
    assert {inner for inner, _ in used} <= set(LAYERS)
    assert {(inner, other) for inner, other in used if inner != other and other not in LAYERS[inner]} == set()


def module_imports() -> set[tuple[str, str]]:
    """Pairs of modules of which the first imports the second."""
    pairs = {(name, other) for name, names in IMPORTS.items() for other in names if other in FILES}
    return {(a, b) for a, b in pairs if a != b != "surefoot"}


def test_no_two_folders_import_each_other() -> None:
    """Nor over a third one. A module beside a folder counts as one; two modules may know each other for types."""
    for package in (name for name, path in FILES.items() if path.name == "__init__.py"):
        depth = package.count(".") + 1
        children: dict[str, set[str]] = {}
        for name, other in module_imports():
            if name.startswith(f"{package}.") and other.startswith(f"{package}."):
                of, to = name.split(".")[depth], other.split(".")[depth]
                children.setdefault(of, set()).update({to} - {of})
                children.setdefault(to, set())
        folders = {name for name in children if FILES[f"{package}.{name}"].name == "__init__.py"}
        assert [circle for circle in circles(children) if circle & folders] == [], package


@pytest.fixture(scope="module")
def loaded() -> set[str]:
    """What is loaded in a new process by all of language and by the ladder: one process, since torch takes seconds."""
    modules = ", ".join(name for name in FILES if inside(name, "surefoot.language"))
    command = f"import sys, surefoot.compare.ladder, {modules}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=120, check=True)
    loaded = set(done.stdout.split())
    assert {"torch", "surefoot.compare.ladder", "surefoot.language.models.loading"} <= loaded
    return loaded


def test_transformers_and_its_kind_are_imported_in_language_alone_and_only_when_used(loaded: set[str]) -> None:
    packages = ("transformers", "tokenizers", "pyarrow", "datasets", "huggingface_hub")
    hub = offences("surefoot.store.hub", "huggingface_hub")
    assert hub, "agents are on the hub too"
    assert [
        line
        for line in offences("surefoot", packages)
        if line not in hub and not line.startswith(("surefoot.language ", "surefoot.language."))
    ] == []
    assert loaded & set(packages) == set(), "control runs, and messages come, without the extra"


def test_heavy_packages_are_imported_where_they_are_needed_alone() -> None:
    assert offences(("surefoot.sandbox", "surefoot.verifiers"), ("torch", "numpy")) == []
    assert offences(tuple(f"surefoot.{name}" for name in ("core", "accel", "ranks", "sharding")), FOREIGN_TO_CORE) == []
    assert {line.split()[0].rpartition(".")[0] for line in offences("surefoot", ("starlette", "uvicorn"))} <= {
        "surefoot.inspector"
    }


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Groups of modules that import each other, directly or through others."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for name in graph[waiting.pop()] - seen:
                seen.add(name)
                waiting.append(name)
        return seen

    reach = {name: reached(name) for name in graph}
    return [{a, b} for a in graph for b in reach[a] if a < b and a in reach[b]]


def test_no_two_modules_import_each_other_anywhere() -> None:
    """Imports inside functions count: a circle that is only postponed is still a circle."""
    typed = {name: set(IMPORTS[name]) - only_for_types(path) for name, path in FILES.items()}
    assert (
        circles(
            {
                name: {imported for imported in all_imported if imported in FILES and imported != name}
                for name, all_imported in typed.items()
            }
        )
        == []
    )


def only_for_types(path: Path) -> set[str]:
    """What a file imports under ``if TYPE_CHECKING`` alone."""
    tree = ast.parse(path.read_text("utf-8"))
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    text = "\n".join(ast.unparse(node) for block in blocks for node in block.body)
    return imports(text, module_of(path), path.name == "__init__.py")


def test_the_check_detects_an_import_cycle() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [{"b", "c"}]


def test_no_folder_holds_more_than_twelve_modules_and_the_top_twenty_four_entries() -> None:
    folders: dict[Path, int] = {}
    for path in FILES.values():
        if path.name not in ("__init__.py", "__main__.py"):
            folders[path.parent] = folders.get(path.parent, 0) + 1
    assert {str(folder.relative_to(SOURCE)): n for folder, n in folders.items() if n > 12} == {}
    hidden = {"__pycache__", "py.typed", "__init__.py", "__main__.py"}
    assert len([path for path in SOURCE.iterdir() if path.name not in hidden]) <= 24


def test_matplotlib_is_imported_where_plots_are_drawn_and_nowhere_else(loaded: set[str]) -> None:
    assert {line.split()[0] for line in offences("surefoot", "matplotlib")} == {"surefoot.compare.plots"}
    assert "matplotlib" not in loaded, "without a plot to draw it need not be there"


def test_help_needs_no_torch() -> None:
    """In a new process, because torch is here already. numpy and gymnasium take seconds too."""
    command = (
        f"import sys, {', '.join(LIGHT)}; print(sorted({{'torch', 'numpy', 'gymnasium', 'tensorboard'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_a_function_of_more_than_60_lines_has_a_reason() -> None:
    """In a comment inside it, ``# long because …``."""
    for path in sorted(SOURCE.rglob("*.py")):
        lines = path.read_text().splitlines()
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                body = lines[node.lineno - 1 : node.end_lineno]
                assert len(body) <= 60 or any(line.strip().startswith("# long because ") for line in body), (path, node.name)
