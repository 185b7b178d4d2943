"""Reward models in ``transformers`` format: any head, label or tokenizer loads, and others compute the saved scores."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import surefoot
from surefoot.errors import SurefootError
from surefoot.language.data.batches import right_padded
from surefoot.language.data.rows import write_rows
from surefoot.language.memory.check import readable_workload
from surefoot.language.models.classifier import TextClassifier
from surefoot.language.models.loading import load_model
from surefoot.language.models.reward_model import RewardModel, load_reward_model, new_reward_model
from surefoot.language.online.world import LanguageWorld
from surefoot.language.rewards.model import ModelReward
from surefoot.language.rewards.terms import load_flag_reward
from surefoot.recipes.reading import make_recipe

from . import tiny

PROMPTS = ["one: ", "two: ", "a longer prompt: "]
RESPONSES = ["yes", "a much longer response", "no."]


def theirs(folder: Path, texts: list[str], side: str = "right") -> Tensor:
    """Scores by plain ``transformers``, as in its documentation and in TRL: padded texts that end with EOS."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).eval()
    padding = {"padding": len(texts) > 1, "padding_side": side}
    rows = tokenizer([text + tokenizer.eos_token for text in texts], return_tensors="pt", **padding)
    with torch.no_grad():
        logits: Tensor = model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]).logits
    return logits[:, 0]


def written(folder: Path, source: Path, seed: int = 3) -> RewardModel:
    """Save a reward model with a non-trivial scale."""
    model, tokenizer = load_model(source)
    scorer = new_reward_model(model, seed, tokenizer)
    scorer.standardise(torch.tensor([-1.0, 0.5, 3.5]))
    scorer.save(folder)
    return scorer


def classifier(folder: Path, labels: dict[int, str], pad: int | None = 0, tokenizer: Any = None, **fields: Any) -> Path:
    """Save a Llama sequence classifier with random weights."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    base = tiny.model("llama").config.to_dict()
    config = LlamaConfig(**{**base, "pad_token_id": pad, "id2label": labels, "label2id": {v: k for k, v in labels.items()}})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = LlamaForSequenceClassification(config)
        torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    (tokenizer or tiny.tokenizer()).save_pretrained(folder)
    return folder


def encoder(folder: Path) -> Path:
    """Save a DistilBERT sentiment classifier whose tokenizer has no EOS."""
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    tokenizer = tiny.tokenizer()
    tokenizer.eos_token, tokenizer.chat_template = None, None
    config = DistilBertConfig(
        vocab_size=tiny.VOCABULARY, dim=32, hidden_dim=64, n_layers=2, n_heads=4, max_position_embeddings=64, pad_token_id=0
    )
    config.id2label, config.label2id = {0: "NEGATIVE", 1: "POSITIVE"}, {"NEGATIVE": 0, "POSITIVE": 1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        DistilBertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# ---- saving -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "side"), [("llama", "left"), ("gpt2", "right")])
def test_transformers_computes_the_scores_of_a_saved_reward_model(
    family: str, side: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    ours = written(tmp_path / "reward", folders[family])
    texts = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    ids, mask = right_padded([[*ours.tokenizer(text)["input_ids"], 1] for text in texts], 0)
    with torch.no_grad():
        logits = ours.logits(ids, mask)
        torch.testing.assert_close(theirs(tmp_path / "reward", texts, side), logits, atol=1e-5, rtol=1e-5)
        rewards = ModelReward(tmp_path / "reward")(PROMPTS, RESPONSES, {}).total
        torch.testing.assert_close(rewards, logits - ours.offset, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(surefoot.load(tmp_path / "reward")(ids, mask), rewards, atol=1e-6, rtol=1e-6)
    assert not list((tmp_path / "reward").glob("head*")), "vLLM loads every weight file in the folder"
    config = json.loads((tmp_path / "reward" / "config.json").read_text())
    assert (config["problem_type"], config["pad_token_id"], len(config["id2label"])) == ("regression", 0, 1)


@pytest.mark.parametrize("has_other", [True, False], ids=["unk is free", "EOS is the only special token"])
def test_eos_stays_the_scored_token_if_it_is_also_the_pad_token(
    folders: dict[str, Path], has_other: bool, tmp_path: Path
) -> None:
    model, tokenizer = load_model(folders["llama"])
    tokenizer.pad_token = tokenizer.eos_token
    if not has_other:
        vocabulary = {str(chr(300 + i)): i for i in range(102)} | {chr(301): 1}
        tokenizer = plain_tokenizer(vocabulary, eos=chr(301))
    scorer = new_reward_model(model, 1, tokenizer)
    notes = scorer.save(tmp_path / "reward")
    config = json.loads((tmp_path / "reward" / "config.json").read_text())
    assert config["pad_token_id"] != 1
    assert bool(notes) != has_other
    text = "".join(map(chr, range(310, 316))) if not has_other else "hello"
    ids = torch.tensor([[*tokenizer(text)["input_ids"], 1]])
    with torch.no_grad():
        wanted = scorer.logits(ids, torch.ones_like(ids, dtype=torch.bool))
    torch.testing.assert_close(theirs(tmp_path / "reward", [text]), wanted, atol=1e-5, rtol=1e-5)
    if has_other:
        both = theirs(tmp_path / "reward", [text, "a longer text"])
        torch.testing.assert_close(both[:1], wanted, atol=1e-5, rtol=1e-5)


def plain_tokenizer(vocabulary: dict[str, int], eos: str) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel(vocabulary, unk_token=eos))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos)


def test_mixture_of_experts_is_saved_with_the_weight_names_of_transformers(tmp_path: Path) -> None:
    source = tiny.write_folder(tmp_path / "mixtral", "mixtral")
    ours = written(tmp_path / "reward", source)
    ids = torch.tensor([[*ours.tokenizer("hello")["input_ids"], 1]])
    with torch.no_grad():
        wanted = ours.logits(ids, torch.ones_like(ids, dtype=torch.bool))
    torch.testing.assert_close(theirs(tmp_path / "reward", ["hello"]), wanted, atol=1e-5, rtol=1e-5)


def changed_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Edit the scale record in a folder's config.json."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config["surefoot_reward"])
    path.write_text(json.dumps(config))
    (folder / "manifest.json").unlink()  # else the change is an error


def test_reloaded_reward_model_is_bit_for_bit_identical(folders: dict[str, Path], tmp_path: Path) -> None:
    """The saved weight is divided by std and rounded, so a run on it alone would diverge within a few updates."""
    ours = written(tmp_path / "reward", folders["llama"])
    ids = torch.arange(40).view(4, 10) + 5
    mask = ids > 0
    assert not torch.equal(ours.scaled_weight * ours.std, ours.head.weight), "otherwise the record would not be needed"
    again = RewardModel.load(tmp_path / "reward")
    for name, tensor in ours.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert torch.equal(again(ids, mask), ours(ids, mask))
    assert torch.equal(again.logits(ids, mask), ours.logits(ids, mask))


def test_head_trained_by_another_program_is_loaded_as_saved(folders: dict[str, Path], tmp_path: Path) -> None:
    written(tmp_path / "reward", folders["llama"])
    tensors = load_file(tmp_path / "reward" / "model.safetensors")
    tensors["score.weight"] += 1
    save_file(tensors, tmp_path / "reward" / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        SurefootError, match=r"model.safetensors does not match its SHA-256 .*manifest.json if the change is yours"
    ):
        RewardModel.load(tmp_path / "reward")
    (tmp_path / "reward" / "manifest.json").unlink()
    assert torch.equal(RewardModel.load(tmp_path / "reward").head.weight, tensors["score.weight"])


def test_damaged_head_record_raises_a_one_line_error(folders: dict[str, Path], tmp_path: Path) -> None:
    for record in ("%", "QUJD", 7, None):
        written(tmp_path / "reward", folders["llama"])
        changed_config(tmp_path / "reward", lambda scale, record=record: scale.update(head=record))
        with pytest.raises(SurefootError, match=r"surefoot_reward.head: can't be read \(.*\); copy the whole folder"):
            RewardModel.load(tmp_path / "reward")


def test_family_without_a_classifier_class_saves_its_head_in_a_file(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.models.auto.modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING", {})
    model, tokenizer = load_model(folders["llama"])
    scorer = new_reward_model(model, 3, tokenizer)
    assert "only Surefoot reads its head" in scorer.save(tmp_path / "reward")[0]
    ids = torch.arange(20).view(2, 10) + 5
    assert torch.equal(RewardModel.load(tmp_path / "reward")(ids, ids > 0), scorer(ids, ids > 0))
    with pytest.raises(SurefootError, match=r"has no label 'good', but one score; unset label"):
        RewardModel.load(tmp_path / "reward", "good")
    (tmp_path / "reward" / "manifest.json").unlink()
    save_file({"weight": torch.ones(1, 3), "bias": torch.ones(1)}, tmp_path / "reward" / "head.safetensors")
    with pytest.raises(SurefootError, match=r"head.safetensors can't be read"):
        RewardModel.load(tmp_path / "reward")


# ---- loading ----------------------------------------------------------------------------------------------------------------


def test_public_reward_model_with_one_label_scores_by_its_logit(tmp_path: Path) -> None:
    folder = classifier(tmp_path / "public", {0: "LABEL_0"})
    texts = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    rewards = ModelReward(folder)(PROMPTS, RESPONSES, {}).total
    torch.testing.assert_close(rewards, theirs(folder, texts), atol=1e-5, rtol=1e-5)
    assert rewards.std() > 0.01


@pytest.mark.parametrize("pad", [1, None], ids=["pads with EOS", "no pad token"])
def test_scored_token_is_the_last_one_that_is_not_the_config_pad_token(pad: int | None, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    folder = classifier(tmp_path / "public", {0: "LABEL_0"}, pad=pad)
    tokenizer, model = tiny.tokenizer(), AutoModelForSequenceClassification.from_pretrained(folder).eval()
    found = ModelReward(folder)(PROMPTS, RESPONSES, {}).total
    for prompt, response, reward in zip(PROMPTS, RESPONSES, found, strict=True):
        ids = torch.tensor([[*tokenizer(prompt + response)["input_ids"], 1]])
        with torch.no_grad():
            torch.testing.assert_close(reward, model(ids).logits[0, 0], atol=1e-5, rtol=1e-5)


def test_label_selects_the_logit_of_an_encoder_that_reads_the_whole_text(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    folder = encoder(tmp_path / "sentiment")
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    for row, label in enumerate(("NEGATIVE", "POSITIVE")):
        rewards = ModelReward(folder, label=label, batch_tokens=40)(PROMPTS, RESPONSES, {}).total
        for prompt, response, reward in zip(PROMPTS, RESPONSES, rewards, strict=True):
            ids = torch.tensor([tiny.tokenizer()(prompt + response)["input_ids"]])
            with torch.no_grad():
                torch.testing.assert_close(reward, model(ids).logits[0, row], atol=1e-5, rtol=1e-5)
    with pytest.raises(SurefootError, match=r"have 70 tokens, more than its context of 64"):
        ModelReward(folder, label="POSITIVE")(["x" * 60], ["y" * 10], {})


def test_messages_are_rendered_with_the_reward_models_own_template(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}" + tokenizer.eos_token
    folder = classifier(tmp_path / "public", {0: "LABEL_0"}, tokenizer=tokenizer)
    reward = ModelReward(folder)([[{"role": "user", "content": "Hi?"}]], ["Hello."], {}).total
    torch.testing.assert_close(reward, theirs(folder, ["[user]Hi?[assistant]Hello."]), atol=1e-5, rtol=1e-5)


def test_classifier_encodes_control_tokens_in_messages_as_text(tmp_path: Path) -> None:
    read = load_reward_model(encoder(tmp_path / "encoder"), "POSITIVE")
    assert isinstance(read, TextClassifier)
    name = next(name for name in read.tokenizer.all_special_tokens if name != read.tokenizer.unk_token)
    read.tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}" + name
    ids = read.encode([{"role": "user", "content": f"Hi{name}?"}], "Hello.")
    places = [place for place, token in enumerate(ids) if token == read.tokenizer.convert_tokens_to_ids(name)]
    assert places == [len(ids) - 1]
    assert "Hello." in read.tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("label", "what"),
    [
        (None, r"has 2 labels \(bad, good\); set label to the one whose logit is the reward"),
        ("god", r"has no label 'god'; did you mean 'good'\? \(it has: bad, good\)"),
    ],
)
def test_model_with_several_labels_requires_a_label(label: str | None, what: str, tmp_path: Path) -> None:
    folder = classifier(tmp_path / "public", {0: "bad", 1: "good"})
    with pytest.raises(SurefootError, match=rf"^reward\.terms\[0\]\.model='.*': {what}"):
        ModelReward(folder, label=label, field="reward.terms[0].model")
    torch.testing.assert_close(
        ModelReward(folder, label="good")(["a"], ["b"], {}).total,
        load_flag_reward([f'{{ model = "{folder}", label = "good" }}'])(["a"], ["b"], {}).total,
    )


def test_incomplete_and_unsuitable_models_are_rejected(folders: dict[str, Path], tmp_path: Path) -> None:
    whole = classifier(tmp_path / "public", {0: "LABEL_0"})

    def broken(name: str) -> Path:
        return Path(shutil.copytree(whole, tmp_path / name))

    for path in (bare := broken("bare")).glob("tokenizer*"):
        path.unlink()
    headless = broken("headless")
    tensors = load_file(headless / "model.safetensors")
    tensors.pop("score.weight")
    save_file(tensors, headless / "model.safetensors", {"format": "pt"})
    for folder, what in ((bare, "has no tokenizer"), (headless, "its weights lack score.weight")):
        with pytest.raises(SurefootError, match=what):
            ModelReward(folder)
    sentiment = encoder(tmp_path / "sentiment")
    with pytest.raises(SurefootError, match=r"DistilBertForSequenceClassification scores only whole texts; use a reward model"):
        ModelReward(sentiment, label="POSITIVE", per="step", separator=";")
    with pytest.raises(SurefootError, match="has no chat template, and the prompts are messages"):
        ModelReward(sentiment, label="POSITIVE").check_prompts([[{"role": "user", "content": "Hi?"}]])


# ---- in runs ----------------------------------------------------------------------------------------------------------------


def online(model: Path, rows: Path, **changes: Any) -> Any:
    table = {
        "kind": "language",
        "model": str(model),
        "steps": 8,
        "data": {"train": str(rows), "max_length": 16},
        "sampling": {"prompts": 4, "max_tokens": 6},
        "objective": {"reuse": {"epochs": 1, "minibatches": 1}},
    }
    return make_recipe({**table, **changes})


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    write_rows(tmp_path / "rows.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    return tmp_path / "rows.jsonl"


def test_run_uses_a_public_model_as_reward_and_as_critic_start(folders: dict[str, Path], rows: Path, tmp_path: Path) -> None:
    public = classifier(tmp_path / "public", {0: "bad", 1: "good"})
    term = {"model": str(public), "label": "good"}
    changes = {"reward": {"terms": [term]}, "critic": {"own_model": True, "start": str(public), "label": "good"}}
    world = LanguageWorld(online(folders["llama"], rows, **changes))
    ids = torch.arange(20).view(2, 10) + 5
    with torch.no_grad():
        wanted = RewardModel.load(public, "good")(ids, ids > 0)
        torch.testing.assert_close(world.policy.critic(ids)[:, -1], wanted, atol=1e-5, rtol=1e-5)


def test_critic_start_must_be_a_decoder_with_the_policys_vocabulary(
    folders: dict[str, Path], rows: Path, tmp_path: Path
) -> None:
    from surefoot.language.models.pocket import character_tokenizer

    other = classifier(tmp_path / "other", {0: "LABEL_0"}, tokenizer=character_tokenizer("abc"))
    sentiment = encoder(tmp_path / "sentiment")
    reward = {"terms": [{"model": str(sentiment), "label": "POSITIVE"}]}
    for start, label, what in (
        (other, None, "critic.start='.*other': its vocabulary differs from that of model="),
        (sentiment, "POSITIVE", "critic.start='.*sentiment': DistilBert.* scores only whole texts"),
        (sentiment, None, "critic.start='.*sentiment': has 2 labels"),
    ):
        critic = {"own_model": True, "start": str(start)} | ({} if label is None else {"label": label})
        with pytest.raises(SurefootError, match=what):
            LanguageWorld(online(folders["llama"], rows, reward=reward, critic=critic))


def test_memory_check_skips_classifiers_that_it_cannot_count(folders: dict[str, Path], rows: Path, tmp_path: Path) -> None:
    reward = {"terms": [{"model": str(encoder(tmp_path / "sentiment")), "label": "POSITIVE"}]}
    workload = readable_workload(online(folders["llama"], rows, reward=reward))
    assert workload.rewards == ()
    decoder = {"terms": [{"model": str(classifier(tmp_path / "public", {0: "LABEL_0"}))}]}
    assert len(readable_workload(online(folders["llama"], rows, reward=decoder)).rewards) == 1


# ---- in TRL and vLLM, with SUREFOOT_TRL_PYTHON and SUREFOOT_VLLM_PYTHON ----------------------------------------------


SCRIPTS = Path(__file__).parent / "elsewhere"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
ASKED = ["one: ", "two: ", "a longer prompt: ", "x: "]
PROGRAMS = {"SUREFOOT_TRL_PYTHON": "TRL", "SUREFOOT_VLLM_PYTHON": "vLLM"}


def printed(variable: str, script: str, *words: str, **settings: str) -> Any:
    """Run a script in another environment and parse the last line of its output as JSON."""
    python = os.environ.get(variable)
    if not python:
        pytest.skip(f"{variable} names no Python with {PROGRAMS[variable]}")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **settings}
    done = subprocess.run([python, SCRIPTS / script, *words], env=environment, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def of_chat(folder: Path, **shape: Any) -> RewardModel:
    """Save and reload a chat reward model with a non-trivial scale and offset."""
    model, tokenizer = tiny.model("llama", **shape), tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    scorer = new_reward_model(model, 3, tokenizer)
    scorer.standardise(torch.tensor([-1.0, 0.5, 3.5]))
    scorer.save(folder)
    return load_reward_model(folder)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("trainer", "chat"), [("grpo", True), ("rloo", False)])
def test_trl_trainers_compute_the_same_scores(trainer: str, chat: bool, tmp_path: Path) -> None:
    ours = of_chat(tmp_path / "reward")
    policy = tiny.write_folder(tmp_path / "policy", "llama", seed=2)
    if chat:
        (policy / "chat_template.jinja").write_text(TEMPLATE)
    prompts = [[{"role": "user", "content": text}] if chat else text for text in ASKED]
    words = (trainer, str(policy), str(tmp_path / "reward"), json.dumps(prompts), str(tmp_path / "out"))
    theirs = printed("SUREFOOT_TRL_PYTHON", "trl_scores.py", *words)
    assert len(theirs["calls"]) == len(theirs["means"]) == 3
    for call, mean in zip(theirs["calls"], theirs["means"], strict=True):
        ids, mask, scores = (torch.tensor(call[name]) for name in ("ids", "mask", "scores"))
        with torch.no_grad():
            torch.testing.assert_close(ours.logits(ids, mask.bool()), scores, atol=1e-5, rtol=1e-5)
        assert mean == pytest.approx(float(scores.mean()), abs=1e-4)
        last = ids.gather(1, mask.sum(-1, keepdim=True) - 1)
        assert bool((last == 1).all()) == chat, "the template ends messages with EOS; plain text has none"
    assert float(scores.std()) > 0.01, "constant scores would match trivially"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("standardised", [False, True])
def test_vllm_computes_the_same_scores(standardised: bool, tmp_path: Path) -> None:
    """Also the standardised rewards of runs, if its pooler subtracts the mean score."""
    ours = of_chat(tmp_path / "reward", hidden_size=128, num_attention_heads=2, num_key_value_heads=1)
    texts = [[*ours.tokenizer(text)["input_ids"], 1] for text in ASKED]
    with torch.no_grad():
        scores = (ours if standardised else ours.logits)(*right_padded(texts, 0))
    quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    cpu = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    words = (str(tmp_path / "reward"), json.dumps(texts), str(ours.offset if standardised else 0.0))
    theirs = printed("SUREFOOT_VLLM_PYTHON", "vllm_scores.py", *words, **quiet, **cpu)
    torch.testing.assert_close(torch.tensor(theirs["scores"]), scores, atol=1e-5, rtol=1e-5)
    assert float(scores.std()) > 0.1, "constant scores would match trivially"
