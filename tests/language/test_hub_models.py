"""Models on the hub: loading them with ``transformers`` and Surefoot, model cards, samples and evaluation."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from fake_hub import HEADER, TOKEN, Hub, Repository, data_files

import surefoot
from surefoot.compare.card import base_model
from surefoot.language.data.rows import write_rows
from surefoot.language.models.reward_model import RewardModel
from surefoot.recipes.presets import find_recipe

Command = Callable[..., tuple[int, str, str]]
PLAIN = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokens = AutoTokenizer.from_pretrained(sys.argv[1])("2+2=", return_tensors="pt")
print("RESULT", json.dumps(model(input_ids=tokens["input_ids"]).logits[0, -1].tolist()))
"""
ROWS = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(4) for b in range(4)]
REWARD = "def reward(prompts, responses):\n    return [float(len(response)) for response in responses]\n"


def train(command: Command, kind: str, *words: str) -> None:
    code, _, err = command("train", kind, "--quiet", "--seed", "2", *words)
    assert code == 0, err


@pytest.fixture
def sft(command: Command) -> str:
    """An SFT run of the pocket model on data with an absolute path."""
    write_rows("rows.jsonl", ROWS)
    data = str(Path("rows.jsonl").absolute())
    train(command, "sft", "--model", "pocket", "--steps", "32", "--data.train", data, "--data.held-out", data, "--name", "sft")
    return "sft"


@pytest.mark.slow
def test_pushed_models_have_the_same_logits_in_transformers_and_keep_their_recipe(
    hub: Hub, sft: str, command: Command, tmp_path: Path
) -> None:
    """Generation, evaluation and further training also accept its hub name."""
    code, out, err = command("push", sft, "org/adder", "--license", "apache-2.0")
    assert code == 0, err
    assert "config.toml: data.train is 'rows.jsonl', without what belongs to this machine\n" in out
    environment = {**os.environ, "HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    completed = subprocess.run(
        [sys.executable, "-c", PLAIN, "org/adder"],
        env={**environment, "HF_TOKEN": TOKEN},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "RESULT" in completed.stdout, completed.stderr
    ours, theirs = surefoot.load("runs/sft"), surefoot.load("hf://org/adder")
    ids = ours.tokens.tokenizer("2+2=", return_tensors="pt")["input_ids"]
    for model in (ours, theirs):
        logits = model.model(input_ids=ids).logits[0, -1]
        assert torch.equal(logits, torch.tensor(json.loads(completed.stdout.partition("RESULT")[2])))
    assert theirs.recipe.kind == "sft"
    assert theirs.recipe.data.train == "rows.jsonl"

    generated = [
        command("generate", name, "--prompt", "1+1=", "--greedy", "--max-tokens", "4")[1] for name in ("sft", "hf://org/adder")
    ]
    assert generated[0] == generated[1] != ""
    assert command("pull", "org/adder", "adder")[0] == 0
    held_out = [
        json.loads(command("evaluate", where, "--json", *more)[1])["held_out_loss"]
        for where, more in (("sft", ()), ("adder", ("--data", "rows.jsonl")), ("hf://org/adder", ("--data", "rows.jsonl")))
    ]
    assert held_out[0] == held_out[1] == held_out[2]
    train(command, "sft", "--model", "hf://org/adder", "--steps", "16", "--data.train", "rows.jsonl", "--name", "next")
    assert f'model = "hf://org/adder@{hub.model("org/adder").head}"' in Path("runs/next/config.toml").read_text()


@pytest.mark.slow
def test_model_cards_have_the_task_tags_data_set_results_and_samples(hub: Hub, command: Command) -> None:
    """A base model that is a local folder is left out."""
    from surefoot.language.models.loading import load_model, save_model

    write_rows("rows.jsonl", ROWS)
    save_model(*load_model("pocket"), "base/small")
    Path("reward.py").write_text(REWARD)
    words = ["--steps", "16", "--sampling.prompts", "8", "--sampling.max-tokens", "4", "--data.train", "rows.jsonl"]
    words += ["--reward.terms", "reward.py:reward", "--name", "ppo", "--data.held-out", "rows.jsonl", "--evaluation.rows", "4"]
    train(command, "language", "--model", "base/small", *words)
    code, _, err = command("push", "ppo", "org/ppo", "--dry-run")
    assert code == 0, err
    card = Path("runs/ppo/hub/README.md").read_text()
    match = HEADER.match(card)
    table = yaml.safe_load(match[1])
    assert (table["library_name"], table["pipeline_tag"]) == ("transformers", "text-generation")
    assert table["tags"][:2] == ["surefoot", "ppo_clip"]
    assert "base_model" not in table, "a local folder is not a hub model"
    (measured,) = table["model-index"][0]["results"]
    assert {metric["type"] for metric in measured["metrics"]} == {"reward"}
    assert measured["dataset"]["name"] == "rows.jsonl"
    assert "## Samples at step" in card
    assert next(Path("runs/ppo/hub/samples").iterdir()).read_text()
    command("push", "ppo", "org/ppo", "--dry-run", "--no-samples")
    assert "## Samples" not in Path("runs/ppo/hub/README.md").read_text()
    assert not Path("runs/ppo/hub/samples").exists()


def test_base_model_is_the_hub_model_of_the_first_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, model in {"sft": "org/base", "dpo": "runs/sft"}.items():
        (Path("runs") / name).mkdir(parents=True)
        (Path("runs") / name / "config.toml").write_text(f'kind = "sft"\nmodel = "{model}"\n')
    for model, base in {
        "runs/dpo": "org/base",
        "org/base": "org/base",
        "hf://org/adder@main": "org/adder",
        "pocket": None,
        "./models/x": None,
        "/models/x": None,
    }.items():
        recipe = find_recipe("sft", {"model": model, "data": {"train": "rows.jsonl"}})
        assert base_model(recipe) == base


@pytest.mark.parametrize(("head", "scores"), [("last", "Sequence"), ("pooled", "Token")])
def test_a_pushed_reward_model_has_the_same_scores_as_the_run(hub: Hub, command: Command, head: str, scores: str) -> None:
    write_rows("pairs.jsonl", [{"prompt": r["prompt"], "chosen": r["completion"], "rejected": "x"} for r in ROWS])
    words = ("--model", "pocket", "--steps", "32", "--data.train", "pairs.jsonl", "--head", head, "--name", "rm")
    train(command, "reward", *words)
    code, _, err = command("push", "rm", "org/rm", "--public")
    assert code == 0, err
    files = hub.model("org/rm").files
    assert f"LlamaFor{scores}Classification" in files["config.json"].decode()
    assert "pipeline_tag: text-classification" in files["README.md"].decode()
    assert f"AutoModelFor{scores}Classification.from_pretrained" in files["README.md"].decode()
    ours, theirs = surefoot.load("runs/rm"), surefoot.load("hf://org/rm")
    assert isinstance(theirs, RewardModel)
    ids, mask = torch.arange(5).unsqueeze(0) + 10, torch.ones(1, 5, dtype=torch.bool)
    inputs = ids, mask, mask & (ids > 12)
    torch.testing.assert_close(ours(*inputs), theirs(*inputs), atol=1e-5, rtol=0)


@pytest.mark.release
@pytest.mark.timeout(600)
def test_hub_how_to_commands_for_data_sets_and_models_run(hub: Hub, tmp_path: Path) -> None:
    """Slow: each command is a process, because ``datasets`` reads the hub's address on import."""
    pytest.importorskip("datasets")
    pairs = [(a, b) for a in range(8) for b in range(8)]
    lines = [
        "".join(json.dumps({"prompt": f"{a}+{b}=", "completion": str(a + b)}) + "\n" for a, b in x)
        for x in (pairs[4:], pairs[:4])
    ]
    hub.repositories["datasets/org/sums"] = Repository()
    hub.repositories["datasets/org/sums"].add(data_files(lines[0].encode(), lines[1].encode(), b"{}\n"))
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "hub.md").read_text("utf-8").partition("## Agents")[0]
    blocks = re.findall(r"^```(console|python)\n(.*?)^```", page, re.M | re.S)
    assert len(blocks) == 6
    settings = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path), "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
    settings |= {"SUREFOOT_CACHE": str(tmp_path / "own"), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for kind, text in blocks:
        lines = [line.removeprefix("$ ") for line in text.splitlines()] if kind == "console" else []
        for words in [shlex.split(line) for line in lines] or [["python", "-c", text]]:
            words = [sys.executable, *(["-m", "surefoot"] if words[0] == "surefoot" else []), *words[1:]]
            completed = subprocess.run(
                words, env={**os.environ, **settings}, cwd=tmp_path, capture_output=True, text=True, timeout=120
            )
            assert completed.returncode == 0, (words, completed.stderr)
    card = HEADER.match(hub.model("org/adder").files["README.md"].decode())
    assert yaml.safe_load(card[1])["datasets"] == ["org/sums"]
    assert (tmp_path / "runs" / "pulled" / "model.safetensors").is_file()
