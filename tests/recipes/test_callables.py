"""Functions and classes of the user by name, from modules and files."""

import dataclasses
import math

import pytest

from surefoot.errors import SurefootError
from surefoot.recipes.callables import import_object, is_importable, object_path, take_functions, with_task


def test_a_module_is_imported_as_python_does():
    assert import_object("field", "math:tau") is math.tau
    assert import_object("field", "os.path:join") is __import__("os").path.join


def test_a_file_is_loaded_from_any_folder(tmp_path, monkeypatch):
    folder = tmp_path / "with space"
    folder.mkdir()
    (folder / "my-rewards.py").write_text("def twice(x):\n    return 2 * x\n")
    assert import_object("field", f"{folder / 'my-rewards.py'}:twice")(4) == 8
    monkeypatch.chdir(folder)
    assert import_object("field", "my-rewards.py:twice")(5) == 10


def test_a_changed_file_is_read_again(tmp_path):
    file = tmp_path / "edited.py"
    file.write_text("answer = 'before'\n")
    assert import_object("field", f"{file}:answer") == "before"
    file.write_text("answer = 'after, and longer'\n")
    assert import_object("field", f"{file}:answer") == "after, and longer"


def test_a_file_may_have_dataclasses(tmp_path):
    """They look for their module among Python's; one that is not there makes some of them fail."""
    (tmp_path / "kept.py").write_text(
        "from __future__ import annotations\nimport dataclasses\n"
        "@dataclasses.dataclass\nclass Kept:\n    x: int = 1\n    y: dataclasses.InitVar[int] = 2\n"
    )
    kept = import_object("field", f"{tmp_path / 'kept.py'}:Kept")
    assert [field.name for field in dataclasses.fields(kept)] == ["x"]


def test_errors_are_one_line_with_the_field(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "raises.py").write_text("raise ValueError('not\\ntoday')\n")
    (tmp_path / "exits.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "needs.py").write_text("import no_such_package\n")
    (tmp_path / "fine.py").write_text("f = 1\n")
    monkeypatch.chdir(tmp_path)
    for name, what in (
        ("nothing_here.py:f", "there is no file"),
        ("broken.py:f", "SyntaxError: invalid syntax (broken.py, line 1)); fix the file"),
        ("raises.py:f", "ValueError: not today in raises.py:1); fix the file"),
        ("exits.py:f", "SystemExit: 3 in exits.py:1)"),
        ("needs.py:f", "in needs.py:1); install it, or run in its folder and name needs:f (a file imports only"),
        ("fine.py:g", "fine.py has no 'g'"),
        ("fine.py", "must name module:function or file.py:function"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        (":f", "two names with a colon between them"),
    ):
        with pytest.raises(SurefootError) as raised:
            import_object("reward.function", name)
        assert str(raised.value).startswith(f"reward.function={name!r}: can't be imported (")
        assert what in str(raised.value)


def test_a_name_stands_for_an_object_only_if_importing_it_returns_that_object():
    class Local:
        pass

    for thing, importable in (
        (math.sqrt, True),
        (dataclasses.Field, True),
        (lambda: 1, False),
        (Local, False),
        (type("Shown", (), {"__module__": __name__}), False),  # another one of that name
        (Shown(), False),
        (Shown, True),
    ):
        assert is_importable(object_path(thing)) is importable, thing


class Shown:
    """A class of this module, whose instances have no name."""


def test_an_invalid_reward_is_one_line_that_lists_the_valid_forms():
    with pytest.raises(SurefootError, match=r"^reward=3: is not a function, a list of terms or a table; set"):
        take_functions(3)


def test_a_passed_task_is_among_the_passed_objects() -> None:
    assert with_task({"reward.gold": max}, min) == {"reward.gold": max, "task": min}
    assert with_task(None, None) == {}
