"""``surefoot.evaluate`` and ``generate`` on trained models, loaded models and run folders."""

from pathlib import Path
from typing import Any

import pytest

import surefoot
from surefoot.errors import SurefootError
from surefoot.language.language_model import LanguageModel

from .test_online import VOWELS
from .test_supervised import demonstrations, pairs
from .tiny import fields_of, write_texts

SMALL: dict[str, Any] = {"steps": 16, "checkpoint": {"every": 16}, "optimizer": {"learning_rate": 1e-2}}


def supervised(kind: str, model: Path, tmp_path: Path, **fields: Any) -> Any:
    rows = (demonstrations if kind == "sft" else pairs)(tmp_path / "rows.jsonl")
    data = {"train": rows, "held_out": rows, "max_length": 64, "batch": 8}
    return surefoot.train(kind, model=str(model), data=data, run_dir=tmp_path / "run", **SMALL, **fields)


@pytest.mark.parametrize("kind", ["sft", "reward", "dpo"])
def test_trained_model_run_folder_and_loaded_model_have_the_same_metrics(
    kind: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    model = supervised(kind, folders["llama"], tmp_path)
    of_run = surefoot.evaluate(tmp_path / "run")
    of_model = surefoot.evaluate(model)
    assert of_model["held_out_loss"] > 0
    assert of_model == {name: of_run[name] for name in of_model}
    assert surefoot.evaluate(surefoot.load(tmp_path / "run")) == of_model
    assert surefoot.evaluate(model, rows=2)["held_out_loss"] != of_model["held_out_loss"]


def test_an_online_model_is_evaluated_with_the_reward_of_its_run(folders: dict[str, Path], tmp_path: Path) -> None:
    write_texts(tmp_path, 8)
    rows, sampling = str(tmp_path / "rows.jsonl"), {"prompts": 8, "max_tokens": 6}
    data = {"train": rows, "held_out": rows}
    fields = fields_of(folders["llama"], rows, f"{tmp_path}/rewards.py:score", data=data, sampling=sampling, **SMALL)
    model = surefoot.train("language", run_dir=tmp_path / "run", **fields)
    of_run = surefoot.evaluate(tmp_path / "run")["trained"]
    assert surefoot.evaluate(model)["held_out_reward"] == of_run["reward"]


@pytest.mark.parametrize("adapter", ["none", {"rank": 2}])
def test_saving_an_unfinished_reward_model_reports_unstandardised_scores(
    adapter: Any, folders: dict[str, Path], tmp_path: Path, command: Any
) -> None:
    """A run standardises scores when it finishes; the weight of a reward depends on their scale."""
    data = {"train": pairs(tmp_path / "rows.jsonl"), "max_length": 64, "batch": 8}
    fields = {"model": str(folders["llama"]), "data": data, "steps": 16, "checkpoint": {"every": 8}, "adapter": adapter}

    def stop(metrics: dict[str, Any]) -> None:
        if metrics["steps"] == 16:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        surefoot.train("reward", run_dir=tmp_path / "run", callback=stop, **fields)
    line = "its scores are not standardised, because its run has not finished"
    for expected in (True, False):
        code, out, _ = command("merge", str(tmp_path / "run"), "--out", str(tmp_path / "merged"))
        assert code == 0
        assert (line in " ".join(out.split())) == expected
        assert any(line in text for text in surefoot.load(tmp_path / "run").save(tmp_path / "saved")) == expected
        if expected:
            surefoot.resume(tmp_path / "run")


@pytest.mark.parametrize(
    ("prompts", "error"),
    [
        ("one prompt", "prompts='one prompt': is one prompt; pass a list of prompts"),
        ([{"role": "user", "content": "hi"}], "is one prompt; pass a list of prompts, such as [prompt]"),
        (["fine", 5], "prompts[1]=5: is neither text nor messages; a message has a role and a content"),
        ([["hi"]], "prompts[0]=['hi']: is neither text nor messages"),
        (7, "prompts=7: is a int; pass a list of prompts"),
        (["fine", "cut \ud83d"], "prompts[1]: has half of a character ('\\ud83d'); remove it"),
        ([], "prompts: the list is empty; give at least one prompt"),
    ],
)
def test_generate_accepts_only_lists_of_texts_and_conversations(prompts: Any, error: str, folders: dict[str, Path]) -> None:
    model = surefoot.load(folders["llama"])
    with pytest.raises(SurefootError) as raised:
        model.generate(prompts, max_tokens=3)
    assert error in str(raised.value)
    conversation = [{"role": "user", "content": "hi"}]
    free = model.generate(["hi", conversation], max_tokens=12)
    assert model.generate(("hi", tuple(conversation)), max_tokens=12) == free
    assert model.generate(["hi", conversation], max_tokens=12, stop=free[0][3:5])[0] == free[0].partition(free[0][3:5])[0]


def test_train_accepts_a_path_as_model_and_a_string_as_reward(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(VOWELS)
    rows = [{"prompt": f"{i} says "} for i in range(4)]
    sampling = {"prompts": 4, "max_tokens": 3}
    reward = f"{tmp_path / 'rewards.py'}:vowels"
    model = surefoot.train("language", model=folders["llama"], data=rows, reward=reward, sampling=sampling, steps=4)
    assert model.recipe.model == str(folders["llama"])
    assert model.recipe.reward.terms[0].function == reward


def test_evaluate_rejects_models_without_a_recipe_or_with_a_task_and_no_rows(folders: dict[str, Path], tmp_path: Path) -> None:
    model = supervised("sft", folders["llama"], tmp_path)
    with pytest.raises(SurefootError, match=r"^model: has no recipe to evaluate it by; give the run's folder"):
        surefoot.evaluate(LanguageModel(model.model, model.tokens))
    for target in (model, tmp_path / "run"):
        with pytest.raises(SurefootError, match=r"^task='CartPole-v1': this is a model, evaluated on held-out rows; leave"):
            surefoot.evaluate(target, "CartPole-v1")
        for for_agents in ({"episodes": 20}, {"deterministic": False}):
            with pytest.raises(SurefootError, match=r"^\w+=.*: this is a model, evaluated on held-out rows; leave"):
                surefoot.evaluate(target, **for_agents)
        for rows in (0, -1):
            with pytest.raises(SurefootError, match="rows="):
                surefoot.evaluate(target, rows=rows)
