"""``verify`` executes iterations again: what it proves, what it finds, and that it leaves the run alone."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from killing import fingerprints
from ranked import on_ranks

import surefoot
from surefoot import SurefootError
from surefoot.cli.main import cli
from surefoot.compare.card import Options, write_repository
from surefoot.control.policy import DiagonalGaussian
from surefoot.core.steps.eager import EagerPasses
from surefoot.runs.verify import plan_of, verify
from surefoot.store.metrics import read_fingerprints
from surefoot.store.reading import FINGERPRINTS

FIELDS: dict[str, Any] = {
    "preset": "none",
    "steps": 384,
    "engine": "eager",
    "display": False,
    "rollout": {"environments": 4, "steps": 16},
    "objective": {"reuse": {"epochs": 2, "minibatches": 2}},
    "normalise": {"observations": True, "rewards": True},
    "optimizer": {"schedule": "linear"},
    "network": {"hidden": [8]},
    "evaluation": {"every": 128, "episodes": 1},
    "checkpoint": {"every": 128},
}


assert fingerprints.SHARE > 1, "of every iteration"


def files_of(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verified") / "run"
    surefoot.train("CartPole-v1", run_dir=path, **FIELDS)
    return path


@pytest.mark.parametrize(
    ("iteration", "every", "compared"), [(None, False, [5, 6]), (4, False, [1, 2, 3, 4]), (None, True, [1, 2, 3, 4, 5, 6])]
)
def test_a_run_repeats_from_the_nearest_earlier_checkpoint_and_is_left_as_it_was(
    run: Path, iteration: int | None, every: bool, compared: list[int]
) -> None:
    before = files_of(run)
    verified = verify(plan_of(run, iteration, every))
    assert verified.compared == compared
    assert verified.first is None
    assert verified.line.endswith("repeat to the last bit")
    assert files_of(run) == before


def test_a_run_that_was_extended_repeats_the_iterations_of_both_budgets(run: Path, tmp_path: Path) -> None:
    """Its schedule ended with the first budget, and goes on with the second."""
    longer = tmp_path / "longer"
    shutil.copytree(run, longer)
    surefoot.resume(longer, steps=512, display=False)
    for iteration, every in ((6, False), (8, False), (None, True)):
        assert verify(plan_of(longer, iteration, every)).first is None


def test_other_arithmetic_fails_at_its_stage_with_exit_code_1(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = EagerPasses.add

    def add(self: EagerPasses, *arguments: Any) -> Any:
        sums = original(self, *arguments)
        for parameter in self.policy.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1 + 1e-6)
        return sums

    monkeypatch.setattr(EagerPasses, "add", add)
    result = CliRunner().invoke(cli, ["verify", str(run), "--json"])
    assert result.exit_code == 1, result.output
    told = json.loads(result.stdout)
    assert (told["result"], told["first"]["iteration"], told["first"]["stage"]) == ("different", 5, "gradient")
    assert "no cause is recorded; look at the loss" in told["line"]


@pytest.mark.parametrize("iteration", [3, 6])
def test_an_edited_recipe_is_named_also_from_the_start(run: Path, tmp_path: Path, iteration: int) -> None:
    shutil.copytree(run, tmp_path / "copy")
    config = tmp_path / "copy" / "config.toml"
    config.write_text(config.read_text().replace("gamma = 0.99", "gamma = 0.9"))
    assert verify(plan_of(tmp_path / "copy", iteration)).line.endswith("; changed since: objective.gamma: 0.99 -> 0.9")
    config.write_text(config.read_text().replace("gamma", "gamna"))
    with pytest.raises(SurefootError, match=r"copy/config.toml: objective.gamna=0.9: unknown key"):
        plan_of(tmp_path / "copy")


def pulled(run: Path, folder: Path, factor: float) -> Path:
    """A run as another machine gets it: no checkpoints; there another processor computed numbers that far from ours."""
    folder.mkdir()
    for name in ("config.toml", "environment.json", "manifest.json"):
        shutil.copy(run / name, folder / name)
    lines = [json.loads(line) for line in (run / FINGERPRINTS).read_text().splitlines()]
    lines[0]["machine"]["processor"] = "Another, AVX2"
    for row in lines[1:]:
        _, norm, signed = row["gradient"]
        row["gradient"] = ["0" * 16, norm * factor, signed]
    (folder / FINGERPRINTS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_on_another_machine_close_numbers_pass_but_are_never_the_same(run: Path, tmp_path: Path) -> None:
    close = verify(plan_of(pulled(run, tmp_path / "close", 1 + 3e-7)))
    assert close.compared == [1, 2, 3, 4, 5, 6], "from the start, without a checkpoint"
    assert close.passed
    assert close.to_json()["result"] == "close"
    assert "processor: Another, AVX2 -> " in close.line
    far = verify(plan_of(pulled(run, tmp_path / "far", 1.01)))
    assert not far.passed
    assert far.to_json()["result"] == "different"


def test_on_another_machine_actions_come_from_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, rarely in (("SHARE", 1e-9), ("MEASURED", 1)):
        monkeypatch.setattr(fingerprints, name, rarely)
    surefoot.train("Pendulum-v1", run_dir=tmp_path / "run", **FIELDS)
    original = DiagonalGaussian.transform
    monkeypatch.setattr(DiagonalGaussian, "transform", lambda self, noise: original(self, noise) + 0.1)
    assert list(read_fingerprints(tmp_path / "run").rows) == [1, 2, 3, 5], "after the checkpoints of 2 and 4 too"
    assert not verify(plan_of(tmp_path / "run")).passed, "on the same machine they are sampled"
    there = pulled(tmp_path / "run", tmp_path / "there", 1 + 3e-7)
    shutil.copytree(tmp_path / "run" / "checkpoints", there / "checkpoints")
    (there / "checkpoints/384/manifest.json").unlink()  # which has the file before it came there
    plan = plan_of(there)
    assert (plan.first, plan.last) == (5, 5), "after a checkpoint"
    assert plan.line.endswith("repeats one iteration, from checkpoints/256, with the recorded actions")
    verified = verify(plan)
    assert verified.result == "close"
    assert verified.largest is not None
    assert verified.largest.stage == "gradient"
    without = verify(replace(plan, record=replace(plan.record, taken={})))
    assert without.first is not None
    assert without.first.stage in ("inputs", "actions")


def test_the_model_card_says_what_repeats_and_what_is_pulled_repeats_from_the_start(run: Path, tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    write_repository(run, tmp_path / "hub", "me/run", Options(episodes=0, verify=True))
    card = (tmp_path / "hub" / "README.md").read_text()
    assert "Verified: iterations 5–6 repeat to the last bit, by `surefoot verify` on " in card
    assert verify(plan_of(tmp_path / "hub")).compared == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_on_another_machine_two_ranks_take_their_own_actions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {**FIELDS, "steps": 192, "rollout": {"environments": 2, "steps": 16}, "run_dir": tmp_path / "run"}
    on_ranks(2, lambda rank: surefoot.train("Pendulum-v1", **fields) and None, tmp_path / "trained")
    there = pulled(tmp_path / "run", tmp_path / "there", 1 + 3e-7)
    original = DiagonalGaussian.transform
    monkeypatch.setattr(DiagonalGaussian, "transform", lambda self, noise: original(self, noise) + 0.1)
    plan = plan_of(there, 1)
    assert on_ranks(2, lambda rank: verify(plan).line, tmp_path / "verified")[0].startswith(
        "close: iteration 1, the first gradient"
    )


@pytest.mark.slow
def test_runs_of_two_ranks_and_of_text_with_adapters_repeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{n} and ", "completion": f"{n + 1}."} for n in range(32)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    control = ["CartPole-v1", "--preset", "none", "--engine", "eager", "--steps", "192", "--rollout.environments", "4"]
    text = ["sft", "--data.train", "rows.jsonl", "--data.batch", "8", "--steps", "32"]
    runs = {
        "ranks": [*control, "--rollout.steps", "16", "--ranks", "2"],
        "base": [*text, "--model", "pocket"],
        "adapters": [*text, "--model", "runs/base", "--adapter.rank", "2"],
    }
    for name, words in runs.items():
        for command in (["train", *words, "--name", name], ["verify", f"runs/{name}", "--all"]):
            made = subprocess.run([sys.executable, "-m", "surefoot", *command], capture_output=True, text=True, timeout=250)
            assert made.returncode == 0, made.stdout + made.stderr
        assert "repeat to the last bit" in made.stdout


def test_without_fingerprints_or_with_damaged_ones_there_is_one_line(run: Path, tmp_path: Path) -> None:
    surefoot.train("CartPole-v1", run_dir=tmp_path / "off", **{**FIELDS, "fingerprints": False})
    assert not (tmp_path / "off" / FINGERPRINTS).exists()
    with pytest.raises(SurefootError, match="train it again with fingerprints = true"):
        plan_of(tmp_path / "off")
    with pytest.raises(SurefootError, match="iteration 9: has no fingerprints; the nearest one that has is 6"):
        plan_of(run, 9)
    shutil.copytree(run, tmp_path / "copy")
    content = bytearray((tmp_path / "copy" / FINGERPRINTS).read_bytes())
    content[-9] ^= 1
    (tmp_path / "copy" / FINGERPRINTS).write_bytes(content)
    with pytest.raises(SurefootError, match="is not what the run wrote"):
        plan_of(tmp_path / "copy")
