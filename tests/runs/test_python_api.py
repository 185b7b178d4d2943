"""The Python API: completion, typed arguments, results, display, and evaluation."""

import importlib
import inspect
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jedi
import numpy as np
import pytest

import surefoot
from surefoot.errors import SurefootError
from surefoot.recipes.fields import KINDS
from surefoot.runs import display as displays

ROOT = Path(__file__).resolve().parent.parent.parent

PROGRAM = """
import gymnasium
import surefoot

def make() -> gymnasium.Env[int, int]:
    raise NotImplementedError

agent = surefoot.train("CartPole-v1", steps=10, rollout={"environments": 4}, objective={"reuse": None})
reveal_type(agent)
reveal_type(surefoot.train(make, steps=5))
model = surefoot.train("sft", data={"train": "x.jsonl"})
reveal_type(model)
reveal_type(surefoot.train("reviews_reward"))
reveal_type(surefoot.evaluate(agent))
reveal_type(surefoot.evaluate(model, rows=3))
surefoot.train("CartPole-v1", rollot={})
surefoot.train("CartPole-v1", rollout={"environment": 4})
"""


def completions(text: str) -> set[str]:
    return {completion.name for completion in jedi.Interpreter(text, [{"surefoot": surefoot}]).complete()}


def test_every_public_name_is_listed_and_completed() -> None:
    assert set(surefoot.__all__) <= set(dir(surefoot)), "also those that are imported later"
    assert not [name for name in dir(surefoot) if name not in surefoot.__all__ and not name.startswith("__")]
    assert {"train", "evaluate", "load", "resume"} <= completions("surefoot.")


def test_every_field_of_a_recipe_is_an_argument_of_train() -> None:
    arguments = set(inspect.signature(surefoot.train).parameters)
    fields = {name for recipe in KINDS.values() for name in recipe.model_fields} - {"kind"}
    assert fields <= arguments
    assert "fields" not in arguments
    assert {"rollout=", "run_dir="} <= completions('surefoot.train("CartPole-v1", r')


@pytest.mark.slow
def test_a_type_checker_knows_arguments_and_results(tmp_path: Path) -> None:
    """Takes longer than other tests where mypy has no cache of torch yet."""
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(tmp_path / "program.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    revealed = re.findall(r'Revealed type is "(?:[\w.]*\.)?([^"]*)"', done.stdout)
    assert revealed == ["Agent", "Agent", "LanguageModel", "RewardModel", "EvaluationResult", "dict[str, Any]"]
    wrong = PROGRAM.splitlines().index('surefoot.train("CartPole-v1", rollot={})') + 1
    errors = {int(line.split(":")[1]) for line in done.stdout.splitlines() if " error: " in line}
    assert errors == {wrong, wrong + 1}


# ---- display ----------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def small(**arguments: Any) -> Any:
    return surefoot.train("CartPole-v1", steps=64, rollout={"environments": 2, "steps": 32}, **arguments)


def test_progress_is_shown_in_a_terminal_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small()
    assert capsys.readouterr().out == ""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    small()
    assert "PPO_CLIP on CartPole-v1, seed 1" in terminal.getvalue()
    quiet = Terminal()
    monkeypatch.setattr(sys, "stdout", quiet)
    small(display=False)
    assert quiet.getvalue() == ""


def test_progress_is_shown_anywhere_if_display_is_true_or_a_listener(capsys: pytest.CaptureFixture[str]) -> None:
    small(display=True)
    assert "step 64/64" in capsys.readouterr().out
    small(display=displays.Lines("mine"))
    assert capsys.readouterr().out.startswith("mine\n")


def test_a_notebook_shows_one_table_that_is_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    import IPython
    from IPython import display

    shown: list[dict[str, str]] = []

    class Handle:
        def update(self, bundle: dict[str, str], raw: bool) -> None:
            shown.append(bundle)

    class ZMQInteractiveShell:
        pass

    def first(bundle: dict[str, str], raw: bool, display_id: bool) -> Handle:
        assert not shown, "later tables replace the first"
        shown.append(bundle)
        return Handle()

    monkeypatch.setattr(IPython, "get_ipython", ZMQInteractiveShell)
    monkeypatch.setattr(display, "display", first)
    small()
    assert "step 64 of 64" in shown[-1]["text/plain"]
    assert "PPO_CLIP on CartPole-v1" in shown[-1]["text/html"]


# ---- evaluate ---------------------------------------------------------------------------------------------------------


def test_a_run_an_agent_and_a_saved_agent_have_the_same_result(tmp_path: Path) -> None:
    agent = small(run_dir=tmp_path / "run", evaluation={"episodes": 0})
    of_agent = surefoot.evaluate(agent, episodes=3)
    assert surefoot.evaluate(tmp_path / "run", episodes=3) == of_agent
    assert surefoot.evaluate(str(tmp_path / "run"), episodes=np.int64(3), seed=np.int64(0)) == of_agent


def test_a_callback_that_is_no_function_is_rejected_before_training(tmp_path: Path) -> None:
    not_a_function: Any = 3
    with pytest.raises(SurefootError, match="callback=3: is not a function"):
        surefoot.train("CartPole-v1", steps=256, display=False, run_dir=tmp_path / "run", callback=not_a_function)
    assert not (tmp_path / "run").exists()


def test_an_agent_is_evaluated_with_its_environment_s_arguments_however_its_task_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lamps.py").write_text(
        "import gymnasium, numpy as np\n"
        "class Lamp(gymnasium.Env):\n"
        "    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)\n"
        "    action_space = gymnasium.spaces.Discrete(2)\n"
        "    def __init__(self, pay=1.0):\n"
        "        self.pay = pay\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        super().reset(seed=seed)\n"
        "        return np.zeros(1, np.float32), {}\n"
        "    def step(self, action):\n"
        "        return np.zeros(1, np.float32), self.pay, True, False, {}\n"
        "class Other(Lamp):\n"
        "    pass\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    lamps = importlib.import_module("lamps")
    small: dict[str, Any] = {"steps": 8, "rollout": {"environments": 2, "steps": 4}, "display": False}
    for task in ("lamps.py:Lamp", "lamps:Lamp", lamps.Lamp):
        agent = surefoot.train(task, algorithm="REINFORCE_BASELINE", environment={"pay": 5.0}, **small)
        for same in (None, "lamps.py:Lamp", "lamps:Lamp", lamps.Lamp):
            assert surefoot.evaluate(agent, same, episodes=1).mean_return == 5
        for other in ("lamps.py:Other", "lamps:Other", lamps.Other):
            assert surefoot.evaluate(agent, other, episodes=1).mean_return == 1
