"""Bad input of language as a user at the command line meets it: one line with field, value and remedy, exit code 2, and of a
run that had begun the last checkpoint, from which it resumes.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surefoot.language.models.loading import load_model
from surefoot.language.models.pocket import character_tokenizer
from surefoot.language.models.reward_model import new_reward_model
from surefoot.store.checkpoint import load_checkpoint

from . import tiny
from .tiny import rejected

Command = Callable[..., tuple[int, str, str]]

REWARDS = """
import time
from pathlib import Path

def _until_fixed(bad):
    calls = []
    def reward(responses):
        calls.append(1)
        numbers = [float(len(text)) for text in responses]
        return numbers if len(calls) <= 2 or Path("fixed").exists() else bad(responses)
    return reward

def _boom(responses):
    raise RuntimeError("no\\nnetwork")

def _forever(responses):
    time.sleep(3)

raises = _until_fixed(_boom)
hangs = _until_fixed(_forever)

def fine(responses):
    return [1.0] * len(responses)
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of models, whole and not, beside each other."""
    from transformers import BertConfig, BertForMaskedLM, BertLMHeadModel, BertModel, T5Config, T5ForConditionalGeneration

    root = tmp_path_factory.mktemp("bad")
    whole = tiny.write_folder(root / "whole", "llama")

    def copied(name: str, *without: str) -> Path:
        shutil.copytree(whole, root / name)
        for file in without:
            (root / name / file).unlink()
        return root / name

    def with_tokenizer(name: str, tokenizer: Any, of: Path = whole) -> None:
        shutil.copytree(of, root / name, ignore=shutil.ignore_patterns("*token*", "chat*"))
        tokenizer.save_pretrained(root / name)

    copied("weightless", "model.safetensors")
    copied("wordless", "tokenizer.json", "tokenizer_config.json")
    copied("half-wordless", "tokenizer.json")
    copied("cut", "model.safetensors").joinpath("model.safetensors").write_bytes(b"\0" * 1000)
    (root / "empty").mkdir()
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    bert = BertConfig(vocab_size=tiny.VOCABULARY, max_position_embeddings=128, **shape)
    for name, kind in (("encoder", BertModel), ("filler", BertForMaskedLM), ("bert", BertLMHeadModel)):
        kind(bert).save_pretrained(root / name)
        tiny.tokenizer().save_pretrained(root / name)
    both = T5Config(vocab_size=tiny.VOCABULARY, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    T5ForConditionalGeneration(both).save_pretrained(root / "translator")
    tiny.tokenizer().save_pretrained(root / "translator")
    plain = tiny.tokenizer()
    plain.chat_template = None
    with_tokenizer("templateless", plain)
    larger = character_tokenizer("".join(map(chr, range(32, 300))))
    with_tokenizer("larger", larger)
    other = copied("other")
    report = json.loads((other / "tokenizer.json").read_text())
    words = report["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    (other / "tokenizer.json").write_text(json.dumps(report))
    for name in ("whole", "other"):
        new_reward_model(load_model(root / name)[0], 1, load_model(root / name)[1]).save(root / f"scores-{name}")
    with_tokenizer("scores-larger", larger, root / "scores-whole")
    (root / "scores-larger" / "manifest.json").unlink()  # of the model with its own tokenizer
    return root


@pytest.fixture(autouse=True)
def files(tmp_path: Path) -> None:
    """Rows and reward functions, where the command runs."""
    begin = [{"role": "user", "content": "hi"}]
    chat = [*begin, {"role": "assistant", "content": "ho"}]
    for name, row in {
        "prompts": {"prompt": "say "},
        "long": {"prompt": "x" * 200},
        "rows": {"prompt": "say ", "completion": "yes", "chosen": "yes", "rejected": "no"},
        "long-rows": {"prompt": "say ", "completion": "y" * 200},
        "chat": {"prompt": begin, "messages": chat},
        "chat-rows": {"messages": chat, "chosen": chat, "rejected": [*begin, {"role": "assistant", "content": "no"}]},
    }.items():
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "x" * 200}) + "\n")
    (tmp_path / "rewards.py").write_text(REWARDS)


def supervised(kind: str, model: str, data: str = "rows") -> list[str]:
    size = ["--data.batch", "4", "--steps", "8", "--data.max-length", "1024", "--run-dir", "run", "--quiet"]
    return ["train", kind, "--model", model, "--data.train", f"{data}.jsonl", *size]


def online(
    model: str = "M/whole", term: str = '{ function = "rewards.py:fine" }', data: str = "prompts", *more: str
) -> list[str]:
    size = ["--sampling.prompts", "4", "--sampling.max-tokens", "3", "--steps", "16", "--checkpoint-every", "4"]
    size += ["--objective.reuse.epochs", "1", "--objective.reuse.minibatches", "2"]
    where = ["--run-dir", "run", "--quiet", "--reward.terms", f"[{term}]", "--data.train", f"{data}.jsonl"]
    return ["train", "language", "--model", model, *size, *where, *more]


def scored(name: str) -> list[str]:
    return online("M/whole", f'{{ model = "M/{name}" }}')


CAUSAL = "use a causal language model"
OTHER = "its vocabulary differs from that of model="
BELONG = "ids go up to 273 and the model has embeddings for 102 tokens"
NO_TEMPLATE = "line 1: messages need a chat template, which this tokenizer lacks; use text, or set tokenizer.chat_template"
CASES: list[tuple[list[str], tuple[str, ...]]] = [
    (supervised("sft", "M/nowhere"), ("model='M/nowhere': no such folder", "give one that save_pretrained wrote")),
    (supervised("sft", "M/empty"), ("model='M/empty': has no config.json", "save_pretrained")),
    (supervised("sft", "M/weightless"), ("model='M/weightless': has no weights", "copy the whole folder")),
    (supervised("sft", "M/wordless"), ("model='M/wordless': has no tokenizer", "copy the whole folder")),
    (supervised("sft", "M/half-wordless"), ("model='M/half-wordless': its tokenizer can't be read", "copy the whole folder")),
    (supervised("sft", "M/cut"), ("model='M/cut': can't be read", "copy the whole folder again")),
    (supervised("sft", "M/encoder"), ("model='M/encoder': is not causal (BertModel)", CAUSAL)),
    (supervised("sft", "M/translator"), ("model='M/translator': is not causal (T5For", CAUSAL)),
    (supervised("sft", "M/scores-whole"), ("model='M/scores-whole': is not causal", CAUSAL)),
    (supervised("sft", "M/bert"), ("model='M/bert': its logits depend on later tokens", CAUSAL)),
    (online("M/bert"), ("model='M/bert': its logits depend on later tokens", CAUSAL)),
    (supervised("sft", "M/larger"), ("model='M/larger': the tokenizer's", BELONG, "copy the tokenizer of this model")),
    (online(data="long"), ("long.jsonl: all 8 rows are dropped", "128, less sampling.max_tokens=3; shorten")),
    (online("M/whole", '{ function = "rewards.py:fine" }', "long", "--data.max-length", "64"), ("max_length=64; raise it",)),
    (["generate", "M/whole", "--file", "prompts.jsonl", "--max-tokens", "5"], ("prompts.jsonl, line 9: its prompt has 200",)),
    (online("M/templateless", data="chat"), ("chat.jsonl, " + NO_TEMPLATE,)),
    ([*online(), "--reference.model", "M/other"], ("reference.model='M/other'", OTHER, "with the same tokenizer")),
    (
        [*online(), "--critic.own-model", "true", "--critic.start", "M/scores-other"],
        ("critic.start='M/scores-other'", OTHER, "with the same tokenizer"),
    ),
    (
        [*online(), "--critic.own-model", "true", "--critic.start", "M/scores-larger"],
        ("critic.start='M/scores-larger'", BELONG),
    ),
    (
        [*online(), "--critic.own-model", "true", "--critic.start", "M/whole"],
        ("critic.start='M/whole'", "is not a reward model"),
    ),
    (scored("scores-larger"), ("reward.terms[0].model='M/scores-larger'", BELONG, "copy the tokenizer of this model")),
    (scored("whole"), ("reward.terms[0].model='M/whole'", "is not a reward model (LlamaForCausalLM); use one that")),
    (
        online("M/whole", '{ function = "rewards.py:gone" }'),
        ("reward.terms[0].function='rewards.py:gone'", "can't be imported"),
    ),
]


@pytest.mark.parametrize(("words", "parts"), CASES, ids=lambda x: " ".join(x)[:60])
def test_invalid_data_is_rejected_in_one_line_and_leaves_no_folder(
    words: list[str], parts: tuple[str, ...], command: Command, models: Path, tmp_path: Path
) -> None:
    before = sorted(tmp_path.iterdir())
    words, parts = ([word.replace("M/", f"{models}/") for word in each] for each in (words, parts))
    rejected(command(*words), *parts)
    left = [path for path in tmp_path.iterdir() if path.name != "__pycache__"]
    assert sorted(left) == before


def test_long_prompts_are_reported_and_a_reward_model_of_another_tokenizer_gets_text(command: Command, models: Path) -> None:
    code, out, err = command(*(word.replace("M/", f"{models}/") for word in scored("scores-other")))
    assert (code, err) == (0, "")
    assert "prompts.jsonl: dropped, because longer than 125 tokens: 1 prompts" in out.splitlines()


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("raises", ("raised RuntimeError: no network",)),
        ("hangs", ("took longer than reward.deadline=0.3 s for 4 responses", "make it faster, or raise reward.deadline")),
    ],
)
def test_a_failing_reward_function_is_named_and_the_run_goes_on_once_it_is_fixed(
    name: str, parts: tuple[str, ...], command: Command, models: Path, tmp_path: Path
) -> None:
    """It fails in the third iteration."""
    term = f'{{ function = "rewards.py:{name}" }}'
    result = command(*online(str(models / "whole"), term, "prompts", "--reward.deadline", "0.3"))
    rejected(result, f"reward.terms[0].function='rewards.py:{name}': ", *parts, "resume")
    kept = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in kept.iterdir()) == ["4", "8"]
    load_checkpoint(kept / "8")
    (tmp_path / "fixed").touch()
    code, out, err = command("resume", "run", "--quiet")
    assert (code, err) == (0, "")
    assert "after 16 steps" in out


@pytest.mark.parametrize("depth", [100, 700])
def test_a_column_is_read_up_to_the_depth_that_python_copies(
    depth: int, command: Command, models: Path, tmp_path: Path
) -> None:
    (tmp_path / "deep.jsonl").write_text('{"prompt": "a: ", "note": ' + "[" * depth + "]" * depth + "}\n")
    words = ["language", "--model", f"{models}/whole", "--data.train", "deep.jsonl", "--steps", "4", "--name", "deep"]
    result = command("train", *words, "--reward.terms", "rewards.py:fine", "--sampling.max-tokens", "2", "--quiet")
    if depth == 700:
        rejected(result, "deep.jsonl, line 1: column 'note' has lists or objects nested more than 200 deep; remove it")
    else:
        assert result[0] == 0, result


@pytest.mark.parametrize(("kind", "column"), [("language", "note"), ("sft", "completion")])
def test_an_unpaired_surrogate_is_rejected_with_its_row(
    kind: str, column: str, command: Command, models: Path, tmp_path: Path
) -> None:
    """JSON can hold half of a surrogate pair, as slicing text leaves it, and no tokenizer encodes it."""
    rows = [{"prompt": "a: ", "completion": "b", "note": {"tags": ["c"]}} for _ in range(4)]
    rows[2][column] = {"tags": ["cut \ud83d"]} if column == "note" else "cut \ud83d"
    (tmp_path / "cut.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = [kind, "--model", f"{models}/whole", "--data.train", "cut.jsonl", "--steps", "4", "--name", "x"]
    part = f"cut.jsonl, line 3: column {column!r} has half of a character ('\\ud83d'); remove it"
    rejected(command("train", *words, *(["--reward.terms", "rewards.py:fine"] if kind == "language" else [])), part)
