"""The documentation: Python examples run, commands run, links work, and the reference is current.

README.md and every page under docs/ is parsed; README.md, and before a release all of them, run:

- a ``python`` block is run; the blocks of a page share their names, and a temporary folder to work in;
- a ``python`` or ``toml`` block whose first line is nothing but ``# a_file.py`` or ``# a_file.toml`` is saved under that name;
- in a ``console`` block the lines that begin with ``$ `` are run: ``surefoot`` commands by the command line's own entry point,
  in this process, which has loaded torch already; others by a shell that finds this environment's programs first;
- an ``sh`` block, which can be pasted as it stands, is run by a shell;
- a block after the line ``<!-- parse only -->`` is only parsed: Python by Python, ``surefoot`` commands with their flags and
  their recipe, other commands by their first word.
"""

import ast
import os
import pydoc
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest

import surefoot
from surefoot.cli.main import COMMANDS, cli, main
from surefoot.cli.options import changes_from
from surefoot.recipes.presets import find_recipe

ROOT = Path(__file__).resolve().parent.parent
RUN = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINKED = [*RUN, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "docs" / "notebooks" / "ladder.ipynb"]
PARSE_ONLY = "<!-- parse only -->"
KNOWN = {".", "cd", "git", "kill", "ls", "make", "pip", "python", "sleep", "surefoot", "tensorboard", "torchrun"}
KNOWN |= {"trackio", "wandb"}
TRAINING = ("train", "ladder", "compare-algorithms", "tune")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, the line its text begins on, and whether it is only parsed."""

    language: str
    text: str
    line: int
    parse_only: bool

    @property
    def file(self) -> str | None:
        """The name under which it is to be saved, if it says one."""
        name = re.match(r"# (\w+\.(?:py|toml))\n", self.text)
        return name[1] if name and self.language in ("python", "toml") else None

    @property
    def commands(self) -> list[str]:
        """The commands of a console block; a backslash at the end of a line joins it to the next."""
        joined = self.text.replace("\\\n", " ")
        return [line.removeprefix("$ ") for line in joined.splitlines() if line.startswith("$ ")]


def blocks(text: str) -> list[Block]:
    """Every fenced block of a page, in order."""
    result, lines = [], text.splitlines()
    start, language = None, ""
    for number, line in enumerate(lines):
        if start is None and (fence := re.match(r"\s*```(\w*)", line)):
            start, language = number, fence[1]
        elif start is not None and line.strip() == "```":
            before = [above.strip() for above in lines[:start] if above.strip()][-1:]
            body = "\n".join(lines[start + 1 : number]) + "\n"
            result.append(Block(language, body, start + 2, before == [PARSE_ONLY]))
            start = None
    assert start is None, f"a block begins on line {start} and never ends"
    return result


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def check_python(text: str) -> None:
    """Parse it, and raise when a name of the package does not exist."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "surefoot":
            for name in node.names:
                assert pydoc.locate(f"{node.module}.{name.name}") is not None, f"{node.module} has no {name.name}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "surefoot":
            assert hasattr(surefoot, node.attr), f"surefoot.{node.attr} does not exist"


def check_command(command: str) -> None:
    """Raise when a command that is not run has a word or a flag that does not exist."""
    words = shlex.split(command, comments=True)
    while words and (words[-1] == "&" or words[0].partition("=")[0].isupper()):
        words = words[:-1] if words[-1] == "&" else words[1:]
    assert words[0] in KNOWN, f"{words[0]!r} is not among the known commands {sorted(KNOWN)}"
    if words[0] == "surefoot":
        check_surefoot(words[1:])


def check_surefoot(words: list[str]) -> None:
    """Parse the arguments as the command line does; for ``train``, make the recipe as well."""
    name = next((word for word in words if not word.startswith("-")), None)
    assert name is None or name in COMMANDS, f"{name!r} is no command of surefoot"
    if name is None or "--help" in words:
        return
    _, command, rest = cli.resolve_command(click.Context(cli), words[words.index(name) :])
    assert command is not None
    with command.make_context(name, rest) as context:
        params = dict(context.params)
    if name == "train" and (not params["what"].endswith(".toml") or Path(params["what"]).exists()):
        own = {"what", "seeds", "run_dir", "name", "preset", "checkpoint_every", "dry_run", "quiet", "profile"}
        find_recipe(params["what"], changes_from({key: value for key, value in params.items() if key not in own}))


def run_command(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a command in ``folder``, which is the current one."""
    if command.startswith("surefoot ") and not set("|&;<>$`*") & set(command):
        monkeypatch.setattr(sys, "argv", shlex.split(command, comments=True))
        with pytest.raises(SystemExit) as leaving:
            main()
        assert not leaving.value.code, f"$ {command}: exit code {leaving.value.code}"
        return
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    shell = ["bash", "-euo", "pipefail", "-c", command]
    done = subprocess.run(shell, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize(
    "path", [pytest.param(path, id=name_of(path), marks=() if path.stem == "README" else pytest.mark.release) for path in RUN]
)
def test_examples_of_a_page_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    names: dict[str, Any] = {"__name__": f"docs_{path.stem.replace('-', '_')}"}
    before = set(sys.modules)
    try:
        for block in blocks(path.read_text("utf-8")):
            if block.file is not None:
                Path(block.file).write_text(block.text, "utf-8")
            elif block.language == "python" and not block.parse_only:
                exec(compile("\n" * (block.line - 1) + block.text, str(path), "exec"), names)
            elif block.language == "sh":
                run_command(block.text, tmp_path, monkeypatch)
            elif block.language == "console":
                for command in block.commands:
                    check_command(command) if block.parse_only else run_command(command, tmp_path, monkeypatch)
    finally:
        for module in set(sys.modules) - before:
            if getattr(sys.modules[module], "__file__", None) and str(tmp_path) in str(sys.modules[module].__file__):
                del sys.modules[module]


def check_block(block: Block) -> None:
    """Parse it, and save it in the working folder if it has a file's name."""
    if block.language == "python":
        check_python(block.text)
    if block.language == "toml":
        tomllib.loads(block.text)
    if block.file is not None:
        Path(block.file).write_text(block.text, "utf-8")
    if block.language == "console":
        assert block.commands, "a console block without a line that begins with '$ '"
        for command in block.commands:
            check_command(command)


def test_examples_of_all_pages_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, path in enumerate(RUN):
        (folder := tmp_path / str(number)).mkdir()
        monkeypatch.chdir(folder)
        for block in blocks(path.read_text("utf-8")):
            try:
                check_block(block)
            except Exception as error:
                error.add_note(f"{name_of(path)}:{block.line}")
                raise


def test_every_printed_training_has_its_steps() -> None:
    """On the command line, or in a recipe file, so that nobody starts hours of training without knowing."""
    for path in RUN:
        for block in (block for block in blocks(path.read_text("utf-8")) if block.language == "console"):
            for command in block.commands:
                words = shlex.split(command, comments=True)
                if words[:1] != ["surefoot"] or len(words) < 3 or words[1] not in TRAINING:
                    continue
                known = {"--steps", "--dry-run", "--help", "-h", "--resume"} & set(words) or words[2].endswith(".toml")
                assert known, f"{name_of(path)}:{block.line}: {command}"


def test_the_reference_matches_the_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["docs/generate.py", "--check"])
    with pytest.raises(SystemExit) as leaving:
        runpy.run_path(str(ROOT / "docs" / "generate.py"), run_name="__main__")
    assert leaving.value.code == 0, capsys.readouterr().out


def commands_of(group: click.Group, words: str) -> Iterator[tuple[str, click.Command]]:
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        if isinstance(command, click.Group):
            yield from commands_of(command, f"{words} {name}")
        elif command is not None:
            yield f"{words} {name}", command


def test_the_reference_has_every_command_with_every_flag_also_those_within_others() -> None:
    sections = re.split(r"^## `(.*)`$", (ROOT / "docs/reference/cli.md").read_text("utf-8"), flags=re.M)
    documented = dict(zip(sections[1::2], sections[2::2], strict=True))
    commands = dict(commands_of(cli, "surefoot"))
    fields = (ROOT / "docs/reference/recipe.md").read_text("utf-8")
    assert "surefoot data make" in commands
    assert documented.keys() == commands.keys()
    for name, command in commands.items():
        for option in (parameter for parameter in command.params if isinstance(parameter, click.Option)):
            flag = option.opts[0]
            field = f"`{flag.removeprefix('--').replace('-', '_')}`"
            assert flag in documented[name] or ("(recipe.md)" in documented[name] and field in fields), (name, flag)


def anchors(path: Path) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    counts: dict[str, int] = {}
    result = set()
    text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.M | re.S)
    for heading in re.findall(r"^#+ +(.*?) *#*$", text, flags=re.M):
        words = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(" ", "-")
        result.add(words if words not in counts else f"{words}-{counts[words]}")
        counts[words] = counts.get(words, 0) + 1
    return result


def test_links_work() -> None:
    broken = []
    for path in LINKED:
        text = re.sub(r"^```.*?^```|`[^`\n]+`(?!\])", "", path.read_text("utf-8"), flags=re.M | re.S)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"[a-z]+:", link):
                continue
            file, _, anchor = link.partition("#")
            target = (path.parent / file).resolve() if file else path
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{name_of(path)}: {link}")
    assert broken == []


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    wanted = {re.split(r"[<>=!~;\[ ]", requirement)[0] for group in groups for requirement in group}
    page = (ROOT / "docs" / "dependencies.md").read_text("utf-8")
    assert {name for name in wanted if f"`{name}" not in page} == set()
    assert {name for name in project["optional-dependencies"] if f"`{name}`" not in page} == set()


def test_no_file_contains_a_path_of_the_machine_that_wrote_it() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    places = [f"/{name}".encode() for name in ("work/", "root/", "tmp/w")]  # not written out, or this file would be found
    files = [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    assert files
    assert {name_of(file) for file in files if any(place in file.read_bytes() for place in places)} == set()


# ---- the tests' own tools ---------------------------------------------------------------------------------------------

PAGE = f"""
```python
x = 1
```

{PARSE_ONLY}
```console
$ surefoot train CartPole-v1 \\
    --seed 2
output
```

```toml
# some.toml
a = 1
```
"""


def test_code_blocks_are_parsed() -> None:
    first, second, third = blocks(PAGE)
    assert (first.language, first.text, first.line, first.parse_only) == ("python", "x = 1\n", 3, False)
    assert (second.parse_only, second.commands) == (True, ["surefoot train CartPole-v1      --seed 2"])
    assert (third.file, first.file) == ("some.toml", None)


def test_wrong_commands_are_detected_and_right_ones_accepted() -> None:
    for command in (
        "surefoot train CartPole-v1 --objective.gea-lambda 0.9",
        "surefoot train CartPole-v1 --objective.gae-lambda 2",
        "surefoot train CartPole-v9",
        "surefoot evaluate",
        "surefoot fly runs/x",
        "rm -rf runs",
    ):
        with pytest.raises((click.UsageError, ValueError, AssertionError)):
            check_command(command)
    for command in ("surefoot train CartPole-v1 --seeds 3 &", "FOO=1 surefoot list", "surefoot evaluate runs/x --json  # look"):
        check_command(command)
