"""Cells: finished ones are skipped, interrupted ones resume to the same numbers, and failures lose no results."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import gymnasium
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from surefoot import Interrupted, SurefootError
from surefoot.compare.algorithms import compare_algorithms, recipes_for
from surefoot.compare.cells import REQUEST, locked_folder, summary
from surefoot.compare.ladder import run_ladder
from surefoot.compare.processes import OverallProgress, end
from surefoot.processes import Child, let_in
from surefoot.runs import api
from surefoot.store.folder import folder_lock
from surefoot.store.manifest import write_listed

from .conftest import TINY

CHANGES = {
    "steps": 256,
    "rollout": {"environments": 2, "steps": 32},
    "network": {"hidden": [8]},
    "evaluation": {"episodes": 0},
    "checkpoint": {"every": 64},
}
TIMES = ("seconds",)


@pytest.fixture(autouse=True, scope="module")
def _no_plots():
    """Drawing takes longer than these runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("surefoot.compare.report.matplotlib_installed", lambda: False)
        yield


@pytest.mark.parametrize(("field", "count"), [("seeds", 0), ("episodes", -1), ("jobs", True), ("batches", 1_000_001)])
def test_counts_in_python_have_the_bounds_of_the_command_line(field, count, tmp_path):
    counts = {"seeds": 1, "episodes": 2, "jobs": 1, field: count}
    least = {"episodes": 0, "batches": 2}.get(field, 1)
    calls = [lambda: run_ladder("CartPole-v1", CHANGES, folder=tmp_path / "run", **counts)]
    if field != "batches":
        calls.append(lambda: compare_algorithms("CartPole-v1", ["A2C"], CHANGES, folder=tmp_path / "run", **counts))
    for call in calls:
        with pytest.raises(SurefootError, match=rf"^{field}={count!r}: must lie between {least} and 1,000,000$"):
            call()
    assert not (tmp_path / "run").exists()


def compared(folder, algorithms=("A2C", "PPO_CLIP"), **more):
    return compare_algorithms("CartPole-v1", list(algorithms), {**CHANGES, **more}, 1, folder, episodes=2)


def numbers(report):
    return {
        name: [{k: v for k, v in cell.items() if k not in TIMES} for cell in cells]
        for name, cells in report.results["results"].items()
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return numbers(compared(tmp_path_factory.mktemp("whole") / "run"))


def test_a_stopped_comparison_resumes_where_it_was(whole, tmp_path, monkeypatch):
    steps = OverallProgress.step

    def stop(self, name, reached):
        steps(self, name, reached)
        if name == "PPO_CLIP-seed1" and reached == 128:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(OverallProgress, "step", stop)
        with pytest.raises(Interrupted, match="1 of 2 runs finished; repeat the command to continue"):
            compared(tmp_path / "run")
    used = []
    for verb in ("start", "resume"):
        real = getattr(api, verb)
        monkeypatch.setattr(api, verb, lambda *a, real=real, verb=verb, **k: used.append(verb) or real(*a, **k))
    assert numbers(compared(tmp_path / "run")) == whole
    assert used == ["resume"]


def test_a_cell_that_was_killed_between_training_and_evaluation_is_only_evaluated(whole, tmp_path, monkeypatch):
    compared(tmp_path / "run")
    (tmp_path / "run" / "A2C-seed1" / "result.json").unlink()
    monkeypatch.setattr(api, "start", None)
    monkeypatch.setattr(api, "resume", None)
    assert numbers(compared(tmp_path / "run")) == whole


def test_a_run_killed_before_it_started_is_started_again(whole, tmp_path):
    (tmp_path / "run" / "A2C-seed1").mkdir(parents=True)
    (tmp_path / "run" / "A2C-seed1" / ".config.toml.tmp").write_text("half")
    with pytest.raises(SurefootError, match="contains a run or other files"):
        compared(tmp_path / "run")
    (tmp_path / "run" / "request.json").write_text(_request())
    assert numbers(compared(tmp_path / "run")) == whole


def _request():
    from surefoot.compare.cells import recipe_tables

    recipes = recipes_for("CartPole-v1", ["A2C", "PPO_CLIP"], CHANGES)
    return json.dumps({"command": "compare-algorithms", "seeds": 1, "episodes": 2, "recipes": recipe_tables(recipes)})


def test_a_run_that_would_stop_before_its_budget_is_rejected(tmp_path):
    with pytest.raises(SurefootError, match=r"A2C: evaluation\.patience=2: would end a run before the budget"):
        compared(tmp_path / "run", evaluation={"episodes": 2, "every": 64, "patience": 2})
    assert list(tmp_path.iterdir()) == []


def pair() -> SyncVectorEnv:
    return SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2, autoreset_mode=AutoresetMode.SAME_STEP)


def test_agents_that_could_not_be_evaluated_are_rejected_before_training(tmp_path):
    task, changes = f"{__name__}:pair", {**CHANGES, "steps": 64}
    with pytest.raises(SurefootError, match="episodes=2: final agents are evaluated in single environments"):
        compare_algorithms(task, ["A2C", "PPO_CLIP"], changes, 1, tmp_path / "run", episodes=2)
    assert list(tmp_path.iterdir()) == []
    assert compare_algorithms(task, ["A2C"], changes, 1, tmp_path / "run", episodes=0).results["results"]["A2C"]


def test_a_run_that_someone_else_stops_interrupts_the_comparison(tmp_path, monkeypatch):
    """Anyone may stop the process of one run; then the command has no result of it and reports the interruption."""
    monkeypatch.setattr("surefoot.compare.cells.run_works", lambda *arguments: None)
    with pytest.raises(Interrupted, match="stopped with 0 of 2 runs finished; repeat the command to continue"):
        compare_algorithms("CartPole-v1", ["A2C", "PPO_CLIP"], CHANGES, 1, tmp_path / "run", episodes=2, jobs=2)


def test_other_settings_in_the_same_folder_are_rejected_and_the_error_lists_them(tmp_path):
    with locked_folder(tmp_path / "x", {"seeds": 3, "recipes": {"A2C": {"steps": 10}}}):
        pass
    with (
        pytest.raises(SurefootError, match=r"other settings \(recipes.A2C.steps: 10 -> 20; seeds: 3 -> 5\); repeat those"),
        locked_folder(tmp_path / "x", {"seeds": 5, "recipes": {"A2C": {"steps": 20}}}),
    ):
        pass


def test_a_folder_is_for_one_command_at_a_time_and_not_for_other_files(tmp_path):
    with (
        locked_folder(tmp_path / "x", {"a": 1}),
        pytest.raises(SurefootError, match="in use"),
        locked_folder(tmp_path / "x", {"a": 1}),
    ):
        pass
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "letter.txt").write_text("dear")
    with pytest.raises(SurefootError, match="other files"), locked_folder(tmp_path / "y", {"a": 1}):
        pass
    assert [p.name for p in (tmp_path / "y").iterdir()] == ["letter.txt"]


def test_what_a_killed_write_leaves_does_not_make_a_folder_someone_elses(tmp_path):
    (tmp_path / ".request.json.123-4.tmp").write_text("{")
    with locked_folder(tmp_path, {"a": 1}):
        assert json.loads((tmp_path / "request.json").read_text()) == {"a": 1}
    assert {path.name for path in tmp_path.iterdir()} <= {"request.json", ".lock"}


def test_a_cell_without_its_recipe_is_kept(whole, tmp_path):
    compared(tmp_path / "run")
    cell = tmp_path / "run" / "A2C-seed1"
    (cell / "result.json").unlink()
    (cell / "config.toml").unlink()
    shutil.rmtree(cell / "checkpoints" / "256")
    before = sorted(path for path in cell.rglob("*") if path.name != ".lock")
    with pytest.raises(SurefootError, match=r"A2C-seed1: .*no config\.toml of a run; restore that"):
        compared(tmp_path / "run")
    assert sorted(path for path in cell.rglob("*") if path.name != ".lock") == before


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        ("{", "can't be read"),
        ({"last_100_mean": "x"}, "has no last_100_mean"),
        ({"seed": True}, "has no seed"),
        ({"curves": {"steps": [1], "rollouts": [1], "return": [None], "ratio_max": []}}, "has no curves"),
    ],
)
def test_a_damaged_result_is_one_line_and_the_run_is_kept(damage, part, whole, tmp_path):
    compared(tmp_path / "run")
    file = tmp_path / "run" / "A2C-seed1" / "result.json"
    table = json.loads(file.read_text())
    write_listed(file, damage if isinstance(damage, str) else json.dumps({**table, **damage}))
    remedy = "; remove this file and repeat the command; the run is kept"
    with pytest.raises(SurefootError, match=rf"result\.json: .*{part}.*{remedy}$"):
        compared(tmp_path / "run")
    file.unlink()
    assert numbers(compared(tmp_path / "run")) == whole


def test_a_result_of_damaged_metrics_is_reported(tmp_path, capsys):
    compared(tmp_path / "run")
    cell = tmp_path / "run" / "A2C-seed1"
    (cell / "result.json").unlink()
    lines = (cell / "metrics.jsonl").read_text().splitlines(keepends=True)
    (cell / "metrics.jsonl").write_text("".join([lines[0], "{\n", *lines[2:]]))
    compared(tmp_path / "run")
    assert "A2C-seed1: metrics.jsonl " in capsys.readouterr().out


def test_seeds_above_the_largest_are_rejected_before_training(tmp_path):
    with pytest.raises(SurefootError, match=r"^seeds=2: the last seed would be above 9007199254740992"):
        compare_algorithms("CartPole-v1", ["A2C"], {**CHANGES, "seed": 2**53}, 2, tmp_path / "run", episodes=0)
    assert not (tmp_path / "run").exists()


def test_a_cell_that_fails_is_named_and_the_others_are_kept(whole, tmp_path, monkeypatch, capsys):
    real = api.start

    def start(recipe, *arguments, **named):
        if recipe.algorithm == "A2C":
            raise SurefootError("a wheel came off")
        return real(recipe, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(api, "start", start)
        with pytest.raises(SurefootError, match=r"A2C-seed1: a wheel came off; the other runs are kept, repeat the command"):
            compared(tmp_path / "run")
    assert "A2C-seed1 failed: a wheel came off" in capsys.readouterr().out
    assert (tmp_path / "run" / "PPO_CLIP-seed1" / "result.json").exists()
    assert numbers(compared(tmp_path / "run")) == whole


ROW = {"episode_return": None, "ratio_outside": 0.1, "ratio_max": 1.0, "seconds_collecting": 1.0, "seconds_learning": 2.0}


def test_a_summary_is_made_of_the_metrics():
    rows = [{**ROW, "iteration": n, "steps": 10 * n, "updates": 2 * n, "episodes": float(n)} for n in range(1, 1001)]
    rows[300]["ratio_max"] = 7.0
    for n in range(500, 1000):
        rows[n]["episode_return"] = float(n)
        rows[n]["explained_variance"] = n / 1000
    result = summary(rows)
    assert (result["steps"], result["rollouts"], result["updates"], result["seconds"]) == (10_000, 1000, 2000, 3000)
    assert result["ratio_max"] == 7.0
    assert result["average_return"] == pytest.approx(sum(range(500, 1000)) / 500)
    assert result["explained_variance"] == 0.875
    curves = result["curves"]
    assert len(curves["steps"]) == len(curves["return"]) == len(curves["ratio_max"]) == 400
    assert curves["steps"][0] > 10
    assert (curves["steps"][-1], curves["return"][0], curves["return"][-1]) == (10_000, None, 999.0)
    assert max(curves["ratio_max"]) == 7.0, "a spike between two points is not lost"


def test_a_summary_of_rows_that_were_edited_is_rejected_in_one_line_or_does_without():
    result = summary([{"iteration": 1, "steps": 5, "updates": 1, "episodes": 0}])
    assert result["seconds"] == 0
    unknown = ("last_100_mean", "average_return", "explained_variance", "ratio_max", "ratio_outside")
    assert [result[name] for name in unknown] == [None] * 5
    for rows, part in (([], "has no row"), ([{"iteration": 1, "steps": 5}], "has no updates and no episodes")):
        with pytest.raises(SurefootError, match=part):
            summary(rows)


LONGER = [*TINY, "--steps", "2560"]


def words(*more):
    program = [sys.executable, "-m", "surefoot", "compare-algorithms", "CartPole-v1", "--algorithms", "A2C,PPO_CLIP"]
    return [*program, *LONGER, "--json", *more]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    done = subprocess.run(words(), cwd=tmp_path_factory.mktemp("undisturbed"), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["results"]


KILLED = [("1", signal.SIGKILL), ("2", signal.SIGINT)]


@pytest.mark.parametrize(
    ("jobs", "number"),
    [pytest.param("2", signal.SIGKILL, marks=pytest.mark.slow), *(pytest.param(*x, marks=pytest.mark.release) for x in KILLED)],
)
def test_a_killed_command_continues_when_it_is_repeated(undisturbed, tmp_path, jobs, number):
    child = subprocess.Popen(words("--jobs", jobs), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob("runs/*/*/checkpoints/*/manifest.json")):
        assert child.poll() is None
        time.sleep(0.05)
    child.send_signal(number)
    _, error = child.communicate()
    assert child.returncode == (-9 if number == signal.SIGKILL else 130), error
    if number != signal.SIGKILL:
        assert "of 2 runs finished; repeat the command to continue" in error.splitlines()[-1]
        assert "Traceback" not in error
    again = subprocess.run(words("--jobs", jobs), cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    results = json.loads(again.stdout)["results"]
    for name in undisturbed:
        assert [{**cell, "seconds": 0} for cell in results[name]] == [{**cell, "seconds": 0} for cell in undisturbed[name]]


def test_a_second_process_waits_until_the_request_is_written(tmp_path):
    def second():
        with folder_lock(tmp_path / "s", REQUEST, timeout=60):
            return (tmp_path / "s" / REQUEST).read_text()

    with ThreadPoolExecutor(1) as pool, folder_lock(tmp_path / "s", REQUEST):
        unfinished = tmp_path / "s" / ".request.json.half"
        unfinished.write_text("{}")
        waiting = pool.submit(second)
        time.sleep(0.2)
        unfinished.rename(tmp_path / "s" / REQUEST)
    assert waiting.result() == "{}"


def save_together(connection, folder):
    def save(number, frame):
        (folder / str(os.getpid())).touch()
        until = time.monotonic() + 100
        while len(list(folder.iterdir())) < 3 and time.monotonic() < until:
            time.sleep(0.01)  # until the others are told to save too
        os._exit(0 if time.monotonic() < until else 1)

    let_in()
    signal.signal(signal.SIGTERM, save)
    connection.send("ready")
    time.sleep(60)


def test_stopped_processes_save_concurrently_and_all_end(tmp_path):
    """One after another would take long, and a second Ctrl-C would leave the rest running."""
    children = [Child(f"{__name__}:save_together", tmp_path) for _ in range(3)]
    assert [child.receive(60) for child in children] == ["ready"] * 3
    end(children)
    assert [child.process.returncode for child in children] == [0, 0, 0]
