"""Tuning: the best of a study is near a planted optimum; kills, several processes and bad trials lose and repeat nothing.

Runs are real and tiny. Only their evaluation is replaced, at the edge of the world, by a score of the recipe's own settings.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("optuna")

from surefoot import Interrupted, SurefootError
from surefoot.compare import statistics
from surefoot.compare import tune as module
from surefoot.compare.tune import Plan, Study, resume_study, tune
from surefoot.control.world import ControlWorld
from surefoot.core.rollout import EvaluationReport
from surefoot.runs import api
from surefoot.store.checkpoint import checkpoints_in

LR = "optimizer.learning_rate"
SPACE = {LR: {"low": 1e-6, "high": 1e-1, "log": True}, "objective.gamma": [0.9, 0.95, 0.98]}
TINY = {
    "steps": 64,
    "rollout": {"environments": 2, "steps": 16},
    "network": {"hidden": [4]},
    "objective": {"reuse": {"epochs": 1, "minibatches": 1}},
    "traces": {"rows": 0},
    "evaluation": {"every": 32},
    "checkpoint": {"every": 32},
}
PLANTED = """
import math
from surefoot.control.world import ControlWorld
from surefoot.core.rollout import EvaluationReport

def score_of(recipe):
    '''Best at a learning rate of 1e-3 and a discount of 0.95; seeds differ a little.'''
    return -(math.log10(recipe.optimizer.learning_rate) + 3) ** 2 - abs(recipe.objective.gamma - 0.95) + recipe.seed / 1000

def evaluate(self):
    return EvaluationReport(score_of(self.recipe), {"evaluation_return": score_of(self.recipe)})

ControlWorld.evaluate = evaluate
"""
"""replaces evaluations, here and in other processes"""


@pytest.fixture
def planted(monkeypatch):
    """The function that scores recipes."""
    monkeypatch.setattr(ControlWorld, "evaluate", ControlWorld.evaluate)
    names: dict = {}
    exec(PLANTED, names)
    return names["score_of"]


def studied(folder: Path, space=SPACE, changes=TINY, **options):
    return tune("CartPole-v1", space, changes, folder=folder, **{"seeds": 1, "trials": 4, "prune": False, **options})


def outcome(folder: Path):
    """What must not depend on kills: state, values and scores of every trial."""
    study = Study(folder, Plan.read(folder))
    return [
        (t.number, t.state.name, t.value, t.params, t.user_attrs.get("scores"), t.intermediate_values) for t in study.trials
    ]


@pytest.mark.release
def test_the_best_trial_is_near_a_planted_optimum(planted, tmp_path):
    result = studied(tmp_path / "s", trials=30, seeds=2)
    best = result.results["trials"][result.results["best"]]
    assert abs(math.log10(best["values"][LR]) + 3) < 0.25, "of a range of 5 decades"
    assert best["values"]["objective.gamma"] == 0.95
    assert best["value"] == pytest.approx(sum(best["scores"]) / 2)
    assert result.results["importance"][LR] > 0.8, "the discount hardly matters"
    recipe = tomllib.loads((tmp_path / "s" / "best.toml").read_text())
    assert recipe["optimizer"]["learning_rate"] == best["values"][LR]
    runs = sorted(path.name for path in (tmp_path / "s" / "trials").iterdir() if path.is_dir())
    assert runs == sorted(f"{trial}-seed{seed}" for trial in range(30) for seed in (1, 2)), "ordinary runs, one per seed"
    assert max(map(len, result.text.splitlines())) <= 120


def test_a_value_of_zero_is_better_than_a_negative_one(tmp_path, monkeypatch):
    values = {trial: float(trial == 2) - 1 for trial in range(4)}

    def evaluate(self):
        score = values[round(self.recipe.optimizer.learning_rate * 1e4) - 1]
        return EvaluationReport(score, {"evaluation_return": score})

    monkeypatch.setattr(ControlWorld, "evaluate", evaluate)
    space = {LR: [1e-4, 2e-4, 3e-4, 4e-4]}
    result = studied(tmp_path / "s", space, trials=12)
    best = result.results["trials"][result.results["best"]]
    assert {trial["value"] for trial in result.results["trials"]} == {0.0, -1.0}
    assert best["value"] == 0
    assert best["values"] == {LR: 3e-4}


def test_the_first_trial_is_the_recipe_itself(planted, tmp_path):
    result = studied(tmp_path / "s", trials=3)
    assert result.results["trials"][0]["values"] == {LR: 1e-3, "objective.gamma": 0.98}
    assert "initial recipe: trial 0" in result.text or result.results["best"] == 0


def test_a_repeated_command_trains_nothing_again_and_more_trials_go_on(planted, tmp_path, monkeypatch):
    whole = studied(tmp_path / "whole", trials=6)
    studied(tmp_path / "s", trials=3)
    resume_study(tmp_path / "s", trials=6)
    assert outcome(tmp_path / "s") == outcome(tmp_path / "whole")
    monkeypatch.setattr(api, "start", None)
    assert studied(tmp_path / "s", trials=6).results == whole.results
    assert resume_study(tmp_path / "s").results == whole.results, "as many trials as before"


def test_a_study_of_other_settings_is_rejected(planted, tmp_path):
    studied(tmp_path / "s", trials=1)
    other = {**SPACE, LR: {"low": 1e-6, "high": 1.0, "log": True}}
    for change in ({"space": other}, {"seeds": 2}, {"changes": {**TINY, "seed": 7}}):
        with pytest.raises(SurefootError, match=r"s: was started with other settings \(.*\); repeat those, or choose another"):
            studied(tmp_path / "s", **change)
    api.start(Plan.read(tmp_path / "s").recipe, tmp_path / "run")
    with pytest.raises(SurefootError, match="run: contains a run or other files; choose another --run-dir"):
        studied(tmp_path / "run")
    with pytest.raises(SurefootError, match="run: has no study to resume; begin one with: surefoot tune WHAT"):
        resume_study(tmp_path / "run")


def test_a_study_whose_database_is_damaged_is_one_line_and_nothing_is_lost(planted, tmp_path):
    folder = tmp_path / "a %?#s"
    studied(folder, trials=2)
    assert (folder / "study.db").is_file()
    sound = (folder / "study.db").read_bytes()
    (folder / "study.db").write_bytes(b"not a database" * 1_000)
    for command in (lambda: studied(folder, trials=3), lambda: resume_study(folder)):
        with pytest.raises(SurefootError, match=r"study\.db: can't be used \(DatabaseError: file is not a database\); restore"):
            command()
    (folder / "study.db").write_bytes(sound)
    assert len(studied(folder, trials=3).results["trials"]) == 3


@pytest.mark.slow
def test_trials_below_the_median_are_pruned(planted, tmp_path, monkeypatch):
    """Five trials end as the pruner needs; then a hopeless one is stopped at its first evaluation after the warm-up."""
    rates = []

    def evaluate(self):
        rates.append(self.recipe.optimizer.learning_rate)
        return EvaluationReport(planted(self.recipe), {})

    monkeypatch.setattr(ControlWorld, "evaluate", evaluate)
    long = {**TINY, "steps": 320}
    result = studied(tmp_path / "s", changes=long, trials=14, prune=True, seeds=2)
    pruned = [trial for trial in result.results["trials"] if trial["state"] == "pruned"]
    complete = [trial for trial in result.results["trials"] if trial["state"] == "complete"]
    assert pruned
    assert len(complete) >= 5
    worst = sorted(trial["value"] for trial in complete)[len(complete) // 2]
    for trial in pruned:
        evaluations = rates.count(trial["values"][LR])
        assert 4 <= evaluations < 20, "after a third of the first run, before the end of the second"
        run = tmp_path / "s" / "trials" / f"{trial['number']}-seed1"
        assert checkpoints_in(run / "checkpoints"), "a pruned run is an ordinary run, and can be resumed"
        assert -((math.log10(trial["values"][LR]) + 3) ** 2) < worst + 0.1
    assert len({trial["number"] for trial in result.results["trials"]}) == 14
    assert "pruned" in result.text


def test_values_that_do_not_fit_each_other_are_rejected_and_the_study_goes_on(planted, tmp_path, capsys):
    space = {"objective.reuse.minibatches": [1, 3], LR: SPACE[LR]}
    result = studied(tmp_path / "s", space, {**TINY, "steps": 33}, trials=8)
    states = {trial["values"]["objective.reuse.minibatches"]: trial["state"] for trial in result.results["trials"]}
    assert states == {1: "complete", 3: "rejected"}
    out = capsys.readouterr().out
    assert out.startswith("steps=33: becomes 64, since only whole iterations train (2 iterations of 32 steps)\n")
    assert "rejected: objective.reuse.minibatches=3: does not divide the batch of 32 steps" in out


def test_a_study_stops_if_its_first_trials_fail(tmp_path, monkeypatch):
    def evaluate(self):
        raise SurefootError("the simulator is out of licences; buy one")

    monkeypatch.setattr(ControlWorld, "evaluate", evaluate)
    with pytest.raises(SurefootError, match="3 trials have failed and none was completed; the first: the simulator is out of"):
        studied(tmp_path / "s", trials=9)
    assert [state for _, state, *_ in outcome(tmp_path / "s")] == ["FAIL"] * 3


def test_one_failure_among_others_stops_nothing(planted, tmp_path, monkeypatch):
    count = iter(range(1_000))

    def evaluate(self):
        if next(count) == 3:
            raise SurefootError("a wheel came off")
        return EvaluationReport(planted(self.recipe), {})

    monkeypatch.setattr(ControlWorld, "evaluate", evaluate)
    states = [trial["state"] for trial in studied(tmp_path / "s", trials=4).results["trials"]]
    assert states == ["complete", "failed", "complete", "complete"]


def test_a_recipe_whose_evaluations_have_no_score_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(ControlWorld, "evaluate", lambda self: EvaluationReport(math.nan, {}))
    with pytest.raises(SurefootError, match="no evaluation has a finite score; see: surefoot check"):
        studied(tmp_path / "s", trials=3)


def test_recipes_that_cannot_be_tuned_are_rejected_before_anything_is_written(tmp_path):
    for changes, message in (
        ({"evaluation": {"episodes": 0}}, r"evaluation\.episodes=0: trials are ranked by their evaluations"),
        ({"network": {"custom": "no.such:Net"}}, "no.such"),
    ):
        with pytest.raises(SurefootError, match=message):
            studied(tmp_path / "s", changes={**TINY, **changes})
    with pytest.raises(SurefootError, match=r"evaluation\.episodes: is part of how runs are scored, so its trials could not"):
        studied(tmp_path / "s", {"evaluation.episodes": [1, 2]})
    with pytest.raises(SurefootError, match=r"^trials=0: must lie between 1 and 1,000,000$"):
        studied(tmp_path / "s", trials=0)
    assert list(tmp_path.iterdir()) == []


def test_the_confirmation_trains_the_best_and_the_initial_recipe_on_new_seeds_and_episodes(planted, tmp_path):
    result = studied(tmp_path / "s", trials=8, seeds=2, confirm=3)
    best, initial = result.results["confirmed"].items()
    assert len(best[1]) == len(initial[1]) == 3
    assert (best[0], initial[0]) == (f"trial {result.results['best']}", "initial recipe")
    runs = sorted((tmp_path / "s" / "confirm").iterdir())
    recipes = [tomllib.loads((run / "config.toml").read_text()) for run in runs]
    assert sorted(recipe["seed"] for recipe in recipes) == [3, 3, 4, 4, 5, 5], "the trials had 1 and 2"
    assert {recipe["evaluation"]["seed"] for recipe in recipes} == {1_000_001}
    assert "on new seeds (3 to 5):" in result.text
    apart = (sum(best[1]) - sum(initial[1])) / 3
    (line,) = [line.strip() for line in result.text.splitlines() if "difference: " in line]
    assert line.startswith(f"difference: {statistics.number(apart)} (")
    assert line.endswith(": better" if apart > 0.003 else ": these seeds don't separate them"), "seeds differ by thousandths"
    assert "The best of several noisy scores is too high" not in result.text
    assert result.text == studied(tmp_path / "s", trials=8, seeds=2, confirm=3).text


def test_the_best_recipe_trains(planted, tmp_path):
    studied(tmp_path / "s", trials=3)
    result = api.train(str(tmp_path / "s" / "best.toml"), display=False)
    assert result.recipe.steps == 64


# ---- kills, and several processes -------------------------------------------------------------------------------------


def program(folder: Path, *words: str) -> list[str]:
    """The command line with the planted score, as a program that can be killed."""
    script = folder / "planted.py"
    main = 'if __name__ == "__main__":\n    from surefoot.cli.main import main\n    main()\n'
    script.write_text(PLANTED + main)
    space = folder / "space.toml"
    space.write_text(f"'{LR}' = {{ low = 1e-6, high = 1e-1, log = true }}\n'objective.gamma' = [0.9, 0.95, 0.98]\n")
    fields = ["--rollout.environments", "2", "--rollout.steps", "16", "--network.hidden", "[4]", "--traces.rows", "0"]
    fields += ["--objective.reuse.epochs", "1", "--evaluation.every", "64", "--checkpoint.every", "64"]
    return [sys.executable, str(script), "tune", "CartPole-v1", "--steps", "640", "--space", str(space), *fields, *words]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    subprocess.run(program(folder, "--trials", "6", "--name", "s"), cwd=folder, check=True, capture_output=True)
    return outcome(folder / "runs" / "s")


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), pytest.param(signal.SIGINT, marks=pytest.mark.release)]
)
def test_a_study_killed_at_a_trial_ends_with_the_same_trials_and_numbers(undisturbed, tmp_path, number):
    """Wherever it is killed, no trial is lost, none is counted twice, and a trial continues with its runs."""
    command, study = program(tmp_path, "--trials", "6", "--name", "s"), tmp_path / "runs" / "s"
    for trial in (1, 4):
        child = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while not list(study.glob(f"trials/{trial}-seed2/checkpoints/*/manifest.json")):
            assert child.poll() is None
            time.sleep(0.02)
        child.send_signal(number)
        _, error = child.communicate()
        assert child.returncode == (-9 if number == signal.SIGKILL else 130)
        if number == signal.SIGINT:
            assert f"stopped with {trial} of 6 trials ended; repeat the command to continue" in error
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "4 of 6 trials had already ended" in again.stdout
    assert outcome(study) == undisturbed


@pytest.mark.slow
def test_two_processes_on_one_study_share_its_trials(tmp_path):
    command, study = program(tmp_path, "--trials", "8", "--seeds", "1", "--no-pruning", "--name", "s"), tmp_path / "runs" / "s"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    both = [subprocess.Popen(command, cwd=tmp_path, text=True, **pipes) for _ in range(2)]
    lines, errors = zip(*(child.communicate() for child in both), strict=True)
    assert [child.returncode for child in both] == [0, 0], errors
    trials = outcome(study)
    assert [(number, state) for number, state, *_ in trials] == [(number, "COMPLETE") for number in range(8)]
    for number in range(8):
        by = [f"trial {number}: " in "\n".join(line for line in text.splitlines() if line.startswith("[")) for text in lines]
        assert by.count(True) == 1, f"one process trained trial {number}"
    assert all(number_of_rows(study / "trials" / f"{number}-seed1") == 20 for number in range(8)), "640 steps, 32 at a time"


def number_of_rows(run: Path) -> int:
    return len((run / "metrics.jsonl").read_text().splitlines())


def test_a_trial_that_ends_while_another_process_looks_for_killed_ones_is_left_alone(planted, tmp_path, monkeypatch):
    studied(tmp_path / "s", trials=1)
    study = Study(tmp_path / "s", Plan.read(tmp_path / "s"))
    running, lock = study.optuna.ask(), Study._lock

    def ends_first(self, trial):
        if trial == running.number:
            self.optuna.tell(running, 1.0)
        return lock(self, trial)

    monkeypatch.setattr(Study, "_lock", ends_first)
    with study.claim(wanted=2) as trial:
        assert trial is None
    assert lock(study, running.number) is not None, "its lock is free again"


def test_a_trial_fails_after_its_process_died_several_times(planted, tmp_path, monkeypatch):
    """Memory that does not suffice kills the process at the same step every time; other trials go on."""
    real = module.run_trial

    def dies(study, trial, parent):
        if trial.number == 1:
            os._exit(9)
        return real(study, trial, parent)

    monkeypatch.setattr(module, "run_trial", dies)
    for _ in range(3):
        child = os.fork()
        if not child:
            studied(tmp_path / "s", trials=3)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    states = [trial["state"] for trial in studied(tmp_path / "s", trials=3).results["trials"]]
    assert states == ["complete", "failed", "complete"]


def test_a_stopped_trial_is_not_a_crash(planted, tmp_path, monkeypatch):
    real, stops = module.run_trial, iter([True] * 5)

    def stop(study, trial, parent):
        if trial.number == 1 and next(stops, False):
            raise Interrupted("stopped")
        return real(study, trial, parent)

    monkeypatch.setattr(module, "run_trial", stop)
    for _ in range(5):
        with pytest.raises(Interrupted, match="stopped with 1 of 2 trials ended; repeat the command to continue"):
            studied(tmp_path / "s", trials=2)
    assert [trial["state"] for trial in studied(tmp_path / "s", trials=2).results["trials"]] == ["complete"] * 2


# ---- the command line -------------------------------------------------------------------------------------------------


def test_a_bad_space_is_one_line(command, tmp_path):
    (tmp_path / "space.toml").write_text("[optimizer]\nlearning_rate = { low = 1e-2, high = 1e-4 }\n")
    code, _, err = command("tune", "CartPole-v1", "--steps", "64", "--space", "space.toml")
    assert code == 2
    assert err == "surefoot: space.toml: optimizer.learning_rate: low=0.01 must be below high=0.0001; swap them\n"
    code, _, err = command("tune", "CartPole-v1", "--steps", "64", "--space", "none.toml")
    assert (code, err.count("\n")) == (2, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["space.toml"]


def test_resuming_a_study_by_its_name_rejects_what_it_would_ignore(planted, command, tmp_path):
    studied(tmp_path / "runs" / "s", trials=1)
    for words in (("--steps", "128"), ("--seeds", "3"), ("--space", "x.toml")):
        code, _, err = command("tune", "s", "--resume", *words)
        assert (code, err) == (2, f"surefoot: {words[0]}: a study keeps its settings; leave it out\n")
    code, out, err = command("tune", "s", "--resume", "--trials", "2")
    assert (code, err) == (0, "")
    assert "[2/2] trial 1: " in out
    assert "surefoot train runs/s/best.toml" in out


@pytest.mark.slow
def test_a_language_model_is_tuned_by_its_held_out_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{n} ", "completion": f"{n + 1}"} for n in range(24)]
    for name in ("train", "held"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": "train.jsonl", "batch": 8, "max_length": 32}
    changes = {"model": "pocket", "steps": 48, "data": data, "evaluation": {"every": 24}}
    with pytest.raises(SurefootError, match=r"data\.held_out=none: trials are ranked by held-out rows; set it to a file"):
        tune("sft", None, changes, trials=2, seeds=1, folder=tmp_path / "s")
    data["held_out"] = "held.jsonl"
    result = tune("sft", None, changes, trials=3, seeds=1, folder=tmp_path / "s")
    values = [trial["value"] for trial in result.results["trials"]]
    assert all(value < 0 for value in values), "log-likelihoods of held-out rows"
    assert max(values) == values[result.results["best"]]
    assert (tmp_path / "s" / "trials" / "0-seed1" / "model").is_dir()


GOOD, BAD = ("i love it.", "it is fine.", "great."), ("i hate it.", "it is weak.", "no.")
OTHER_KINDS = {
    "reward": ([{"prompt": "bike: ", "chosen": GOOD[i % 3], "rejected": BAD[i % 3]} for i in range(12)], "batch = 4"),
    "dpo": ([{"prompt": "bike: ", "chosen": GOOD[i % 3], "rejected": BAD[i % 3]} for i in range(12)], "batch = 4"),
    "language": (
        [{"prompt": f"{i} bike: "} for i in range(8)],
        '[sampling]\nprompts = 8\nmax_tokens = 4\n[reward]\nterms = ["rewards.py:short"]',
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_every_other_kind_on_text_is_tuned_by_its_shipped_space(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows, settings = OTHER_KINDS[kind]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("rewards.py").write_text("def short(responses):\n    return [1 - len(text) / 40 for text in responses]\n")
    data = f'[data]\ntrain = "rows.jsonl"\nheld_out = "rows.jsonl"\n{settings}\n'
    Path("recipe.toml").write_text(f'kind = "{kind}"\nmodel = "pocket"\nsteps = 16\n{data}')
    results = tune("recipe.toml", None, {}, trials=2, seeds=1, folder=tmp_path / "study").results
    assert all(math.isfinite(trial["value"]) for trial in results["trials"])
    assert len(results["trials"]) == 2
    assert tomllib.loads(Path("study/best.toml").read_text())["kind"] == kind
