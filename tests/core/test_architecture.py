"""Import directions between packages, checked in the source of every file; and the modules that ``surefoot --help`` loads.

``functional`` imports torch alone; ``LAYERS`` has what ``core`` and the layers beside it import. ``control`` and ``language``
never import each other. ``recipes`` needs no torch. Only ``__main__`` imports ``cli``.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import surefoot
from surefoot.cli.main import COMMANDS

SOURCE = Path(surefoot.__file__).parent
WORLDS = ("surefoot.control", "surefoot.language")
LIGHT = (
    "surefoot",
    "surefoot.cli.main",
    "surefoot.recipes.reading",
    "surefoot.recipes.presets",
    "surefoot.core.algorithms",
    "surefoot.errors",
    ", ".join(sorted({where.partition(":")[0] for where in COMMANDS.values()})),
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
    imported = {name for module, names in IMPORTS.items() if inside(module, "surefoot.functional") for name in names}
    foreign = {name for name in imported if name.split(".")[0] not in allowed and not inside(name, "surefoot.functional")}
    assert foreign == set()


def test_control_and_language_never_import_each_other() -> None:
    assert offences("surefoot.control", "surefoot.language") == []
    assert offences("surefoot.language", "surefoot.control") == []


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


def test_verifiers_and_the_sandbox_do_not_import_training() -> None:
    parts, light = ("surefoot.sandbox", "surefoot.verifiers"), ("surefoot.errors", "surefoot.files")
    ours = {
        imported
        for part in parts
        for name in FILES
        if inside(name, part)
        for imported in IMPORTS[name]
        if inside(imported, "surefoot")
    }
    assert {name for name in ours if not any(inside(name, allowed) for allowed in (*parts, *light))} <= {"surefoot"}
    assert offences(parts, ("torch", "numpy")) == []
    assert offences("surefoot.sandbox", "surefoot.verifiers") == []


LAYERS = {
    "core": ("functional", "ranks", "accel", "sharding"),
    "accel": ("core", "functional", "ranks"),
    "ranks": ("functional",),
    "sharding": ("core", "functional", "ranks"),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_the_core_and_the_layers_beside_it_import_what_is_below_them(layer: str) -> None:
    """Every module is read, so a new one is covered from its first day."""
    allowed = tuple(f"surefoot.{name}" for name in (layer, *LAYERS[layer], "errors", "files"))
    ours = {n for file in FILES if inside(file, f"surefoot.{layer}") for n in IMPORTS[file] if inside(n, "surefoot")}
    assert {name for name in ours - {"surefoot"} if not any(inside(name, part) for part in allowed)} == set()
    assert offences(f"surefoot.{layer}", ("gymnasium", "transformers", "rich", "click", "pydantic")) == []


def test_worlds_import_of_runs_only_readers_of_files() -> None:
    """A world saves and loads itself, also from the hub; it knows no session, display or tracker."""
    disk = tuple(f"surefoot.runs.{name}" for name in ("checkpoint", "folder", "hub", "reading", "traces"))
    used = {name for part in WORLDS for file in FILES if inside(file, part) for name in IMPORTS[file]}
    ours = {name for name in used if inside(name, "surefoot.runs")} - {"surefoot.runs"}
    assert {name for name in ours if not any(inside(name, module) for module in disk)} == set()


def test_the_store_imports_what_is_below_the_worlds() -> None:
    below = ("store", "errors", "files", "recipes", "functional", "core")
    ours = {n for file in FILES if inside(file, "surefoot.store") for n in IMPORTS[file] if inside(n, "surefoot")}
    assert {name for name in ours - {"surefoot"} if not any(inside(name, f"surefoot.{part}") for part in below)} == set()


def test_recipes_import_of_surefoot_only_the_core_and_errors() -> None:
    allowed = ("surefoot.recipes", "surefoot.core", "surefoot.errors", "surefoot.files")
    ours = {n for file in FILES if inside(file, "surefoot.recipes") for n in IMPORTS[file] if inside(n, "surefoot")} - {
        "surefoot"
    }
    assert {name for name in ours if not any(inside(name, part) for part in allowed)} == set()


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


def test_no_folder_holds_more_than_twelve_modules_and_the_top_twenty_one_entries() -> None:
    folders: dict[Path, int] = {}
    for path in FILES.values():
        if path.name not in ("__init__.py", "__main__.py"):
            folders[path.parent] = folders.get(path.parent, 0) + 1
    assert {str(folder.relative_to(SOURCE)): n for folder, n in folders.items() if n > 12} == {}
    hidden = {"__pycache__", "py.typed", "__init__.py", "__main__.py"}
    assert len([path for path in SOURCE.iterdir() if path.name not in hidden]) <= 21


def test_only_main_imports_the_command_line() -> None:
    everyone = offences("surefoot", "surefoot.cli.main")
    assert [line for line in everyone if not line.startswith("surefoot.__main__ ")] == []
    assert everyone


def test_only_the_command_line_imports_comparisons() -> None:
    everyone = offences("surefoot", "surefoot.compare")
    commands = tuple(f"surefoot.cli.{name} " for name in ("agents", "check", "compare"))
    assert [line for line in everyone if not line.startswith(("surefoot.compare", *commands))] == []
    assert everyone


def test_only_the_command_line_imports_the_inspector_which_imports_no_world() -> None:
    everyone = offences("surefoot", "surefoot.inspector")
    assert [line for line in everyone if not line.startswith(("surefoot.inspector", "surefoot.cli.inspect "))] == []
    assert everyone
    assert offences("surefoot.inspector", (*WORLDS, "surefoot.runs.session", "surefoot.runs.api")) == []
    assert {line.split()[0].rpartition(".")[0] for line in offences("surefoot", ("starlette", "uvicorn"))} <= {
        "surefoot.inspector"
    }


def test_matplotlib_is_imported_where_plots_are_drawn_and_nowhere_else(loaded: set[str]) -> None:
    assert {line.split()[0] for line in offences("surefoot", "matplotlib")} == {"surefoot.compare.plots"}
    assert "matplotlib" not in loaded, "without a plot to draw it need not be there"


@pytest.mark.parametrize("name", LIGHT)
def test_help_needs_no_torch(name: str) -> None:
    """In a new process, because torch is here already. numpy and gymnasium take seconds too."""
    command = f"import sys, {name}; print(sorted({{'torch', 'numpy', 'gymnasium', 'tensorboard'}} & set(sys.modules)))"
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
