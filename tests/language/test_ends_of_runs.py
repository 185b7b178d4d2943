"""How language runs end and resume: the files they leave and the changes they reject."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from killing import assert_same
from safetensors.torch import load_file

import surefoot
from surefoot.errors import SurefootError
from surefoot.files import read_toml
from surefoot.language.analysis.evaluate import evaluate_run
from surefoot.language.data.rows import write_rows
from surefoot.language.language_model import load_language_model
from surefoot.language.models.reward_model import new_reward_model
from surefoot.recipes.reading import make_recipe, to_toml
from surefoot.runs import api
from surefoot.store.checkpoint import latest_checkpoint, load_checkpoint
from surefoot.store.folder import scored_alike
from surefoot.store.metrics import read_metrics

from .tiny import model as tiny_model
from .tiny import tokenizer, write_folder

SCORE = "def score(responses):\n    return [float(len(set(text))) for text in responses]\n"


@pytest.fixture
def files(tmp_path: Path, folders: dict[str, Path]) -> Path:
    """A folder with a model, rows for each kind of run, and a reward function."""
    shutil.copytree(folders["llama"], tmp_path / "model")
    rows = [{"prompt": f"{i % 5}: ", "completion": "abcd"[: i % 4 + 1] * 3} for i in range(24)]
    pairs = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "zyx"} for row in rows]
    prompts = [{"prompt": row["prompt"], "worth": i} for i, row in enumerate(rows)]
    others = [{**row, "completion": "zyx"} for row in rows]
    swapped = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in pairs]
    files = {"rows": rows, "others": others, "pairs": pairs, "swapped": swapped, "prompts": prompts}
    for name, records in files.items():
        write_rows(tmp_path / f"{name}.jsonl", records)
    (tmp_path / "rewards.py").write_text(SCORE)
    return tmp_path


def fields(kind: str, files: Path, **changes: Any) -> dict[str, Any]:
    rows = {"sft": "rows", "reward": "pairs", "language": "prompts"}[kind]
    data: dict[str, Any] = {"train": str(files / f"{rows}.jsonl"), "held_out": str(files / f"{rows}.jsonl"), "max_length": 32}
    table: dict[str, Any] = {"model": str(files / "model"), "steps": 48, "data": data}
    table["optimizer"] = {"learning_rate": 3e-3, "schedule": "constant", "warmup": 0.0}
    if kind == "language":
        table["sampling"] = {"prompts": 8, "max_tokens": 6}
        table["objective"] = {"reuse": {"epochs": 2, "minibatches": 2}}
        table["reward"] = {"terms": [{"function": f"{files}/rewards.py:score"}], "missing_eos": "none"}
    else:
        data["batch"] = 8
    return table | {"checkpoint": {"every": 8}, "evaluation": {"every": 8, "rows": 16}} | changes


KINDS = pytest.mark.parametrize("kind", ["sft", pytest.param("reward", marks=pytest.mark.slow), "language"])


def last(run: Path) -> dict[str, Any]:
    """The newest checkpoint."""
    newest = latest_checkpoint(run / "checkpoints")
    assert newest is not None
    return load_checkpoint(newest)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return dict(last(run)["agent"])


def resume_changed(run: Path, section: str, field: str, value: Any) -> None:
    table = read_toml(run / "config.toml")
    table[section][field] = value
    (run / "config.toml").write_text(to_toml(make_recipe(table)))
    api.resume(run, allow_changes=True)


def saved_differences(run: Path) -> list[str]:
    """Weights in which model/ differs from the latest checkpoint."""
    newest = weights(run)
    (path,) = (run / "model").glob("*.safetensors")
    pairs = []
    for name, tensor in load_file(path).items():
        of_language, of_reward = f"model.{name}", name.replace("model.", "model.backbone.", 1)
        if key := next((key for key in (of_language, of_reward) if key in newest), None):
            pairs.append((name, tensor, newest[key]))
    assert len(pairs) > 10
    return [name for name, tensor, other in pairs if not torch.equal(tensor, other)]


@KINDS
def test_extended_run_continues_from_its_last_weights(kind: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run saves its best model, but an extended run has the weights of an uninterrupted one."""
    table = fields(kind, files)
    if kind != "language":  # the best policy is the first, since training makes these rows less likely
        table["data"]["held_out"] = str(files / ("swapped.jsonl" if kind == "reward" else "others.jsonl"))
    surefoot.train(kind, run_dir=files / "whole", **table)
    surefoot.train(kind, run_dir=files / "short", **table | {"steps": 24, "display": True})
    assert saved_differences(files / "short"), "model/ is the best policy and not the last one"
    assert ", whose evaluation was the best" in "".join(capsys.readouterr())
    surefoot.resume(files / "short", steps=48)
    assert_same(weights(files / "short"), weights(files / "whole"))


@KINDS
def test_resume_saves_the_model_of_a_run_killed_before_saving(kind: str, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    surefoot.train(kind, run_dir=files / "whole", **fields(kind, files))

    def interrupt(self: Any, folder: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        for world in ("surefoot.language.online.world.LanguageWorld", "surefoot.language.supervised.world.SupervisedWorld"):
            patched.setattr(f"{world}.finish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            surefoot.train(kind, run_dir=files / "cut", **fields(kind, files))
    assert not (files / "cut" / "model").exists()
    surefoot.resume(files / "cut")
    whole, cut = (sorted((files / run / "model").glob("*.safetensors")) for run in ("whole", "cut"))
    assert [path.name for path in whole] == [path.name for path in cut]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(whole, cut, strict=True))
    with pytest.raises(SurefootError, match="finished, 48 steps are done"):
        surefoot.resume(files / "cut")


def test_last_policy_is_saved_with_a_note_if_all_miss_the_target(
    files: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    """Patience does not stop the run either, since β may still bring the policy back."""
    table = fields(
        "language", files, reference={"beta": 1e-6, "target": 1e-6}, evaluation={"every": 8, "rows": 16, "patience": 2}
    )
    (files / "far.toml").write_text(to_toml(make_recipe({"kind": "language", **table})))
    code, out, err = command("train", str(files / "far.toml"), "--run-dir", str(files), "--name", "far", "--quiet")
    assert code == 0, err
    assert (
        "no evaluation had a score within 1.5 times reference.target=1e-06; model/ is the last policy, not a best one"
        in out + err
    )
    assert not list((files / "far" / "best").glob("[0-9]*"))
    assert read_metrics(files / "far" / "metrics.jsonl")[-1]["steps"] == 48
    assert not saved_differences(files / "far")


@pytest.mark.parametrize(("section", "field", "forgotten"), [("reference", "target", True), ("optimizer", "epsilon", False)])
def test_best_policy_is_forgotten_only_if_scores_are_no_longer_comparable(
    section: str, field: str, forgotten: bool, files: Path
) -> None:
    """Plain rewards can't be compared with rewards minus the cost of the KL."""
    run = interrupted("language", files)
    assert list((run / "best").glob("[0-9]*"))
    resume_changed(run, section, field, 1e-6)
    assert (last(run)["progress"]["best"] is None) == forgotten
    assert bool(list((run / "best").glob("[0-9]*"))) != forgotten


@KINDS
def test_resume_without_held_out_rows_leaves_no_best_policy(kind: str, files: Path) -> None:
    run = interrupted(kind, files)
    assert list((run / "best").glob("[0-9]*"))
    resume_changed(run, "data", "held_out", "none")
    assert not list((run / "best").glob("[0-9]*"))
    assert not saved_differences(run), "model/ is the last policy"


def test_scores_are_comparable_unless_a_setting_that_affects_them_changes() -> None:
    for section, field, values, alike in (
        ("reference", "beta", (0.1, 0.2), False),
        ("reference", "horizon", (100, 200), True),
        ("reward", "gold", ("none", "a:b"), True),
        ("reward", "terms", ([{"url": "u", "weight": 1.0, "retries": 1}], [{"url": "u", "weight": 1.0, "retries": 2}]), True),
        ("reward", "terms", ([{"url": "u", "weight": 1.0}], [{"url": "u", "weight": 2.0}]), False),
        ("evaluation", "rows", (8, 16), False),
        ("evaluation", "patience", (1, 2), True),
    ):
        one, other = ({section: {field: value}} for value in values)
        assert scored_alike(one, other) == alike
        if (section, field) == ("reference", "beta"):
            one, other = ({section: {field: value, "target": 6.0}} for value in values)
            assert scored_alike(one, other), "the score does not include an adapted β"


def interrupted(kind: str, files: Path, **changes: Any) -> Path:
    surefoot.train(
        kind, run_dir=files / "run", callback=lambda metrics: metrics["steps"] >= 24, **fields(kind, files, **changes)
    )
    return files / "run"


@KINDS
@pytest.mark.parametrize("which", ["train", "held_out"])
def test_resume_rejects_changed_rows(which: str, kind: str, files: Path) -> None:
    data = fields(kind, files)["data"]
    data["held_out"] = shutil.copy(data["train"], files / "held.jsonl")
    run = interrupted(kind, files, data=data)
    path = Path(data[which])
    lines = path.read_text().splitlines(keepends=True)
    if kind == "language":  # the columns of prompts count too, since rewards read them
        path.write_text("".join(lines).replace('"worth": 3}', '"worth": 4}'))
    else:
        path.write_text("".join(lines[1:] + lines[:1]))
    with pytest.raises(SurefootError, match=rf"data\.{which}='.*\.jsonl': its content has changed since the checkpoint"):
        surefoot.resume(run)


def test_models_that_a_run_uses_may_not_change(files: Path) -> None:
    """The folder that training started from was overwritten, for example by an extended SFT run; and one of a reward model."""
    scores = new_reward_model(tiny_model("llama"), 1, tokenizer())
    scores.save(files / "scores")
    run = interrupted("language", files, reward={"terms": [{"model": str(files / "scores")}], "missing_eos": "none"})
    with torch.no_grad():
        scores.head.bias.add_(1)
    shutil.rmtree(files / "scores")
    scores.save(files / "scores")
    with pytest.raises(SurefootError, match=r"reward\.terms model='.*': its content has changed"):
        surefoot.resume(run)
    shutil.rmtree(files / "model")
    write_folder(files / "model", "llama", seed=2)
    for again in (surefoot.resume, evaluate_run):
        with pytest.raises(SurefootError, match=r"reference of model='.*': its content has changed"):
            again(run)


def test_runs_with_relative_paths_resume_only_from_their_original_folder(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    relative = {"model": "model", "data": {**fields("sft", files)["data"], "train": "rows.jsonl"}}
    surefoot.train("sft", run_dir=files / "whole", **fields("sft", files, **relative))
    run = interrupted("sft", files, **relative)
    monkeypatch.chdir(files.parent)
    with pytest.raises(SurefootError, match=f"relative paths are from {files}, where the run began"):
        surefoot.resume(run)
    monkeypatch.chdir(files)
    surefoot.resume(run)
    assert_same(weights(run), weights(files / "whole"))


def test_unusable_demonstrations_for_standardisation_are_rejected_before_training(files: Path) -> None:
    with pytest.raises(SurefootError, match=r"nowhere\.jsonl: no such file"):
        surefoot.train("reward", run_dir=files / "run", **fields("reward", files, demonstrations=str(files / "nowhere.jsonl")))
    one = files / "one.jsonl"
    one.write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    with pytest.raises(SurefootError, match=r"one\.jsonl: one row has no standard deviation"):
        surefoot.train("reward", run_dir=files / "run", **fields("reward", files, demonstrations=str(one)))
    assert not (files / "run").exists()


def test_all_eos_tokens_survive_training_and_loading(files: Path) -> None:
    """The generation config lists them; Llama ends turns and texts with different tokens."""
    path = files / "model" / "generation_config.json"
    table = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(table | {"eos_token_id": [1, 2]}))
    trained = surefoot.train("sft", run_dir=files / "run", **fields("sft", files))
    assert trained.tokens.eos_ids == (1, 2)
    assert surefoot.load(files / "run").tokens.eos_ids == (1, 2)
    assert load_language_model(str(files / "run" / "model")).tokens.eos_ids == (1, 2)
