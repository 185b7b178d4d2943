"""Models are loaded completely or rejected in one line, and saved completely or not at all."""

import json
import os
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import MptConfig

from surefoot.errors import SurefootError
from surefoot.language.data.batches import left_padded, right_padded
from surefoot.language.models.loading import context_length, load_model, no_dropout, save_model
from surefoot.language.models.pocket import pocket
from surefoot.language.models.reward_model import RewardModel, copy_standardisation, new_reward_model

from . import tiny


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """There is no network; the hosts that were asked for."""
    hosts: list[str] = []

    def no_network(host: str, *args: Any, **kwargs: Any) -> Any:
        hosts.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    return hosts


@torch.no_grad()
def logits_of(model: Any, length: int = 12) -> Tensor:
    ids = torch.arange(length).unsqueeze(0) * 7 % tiny.VOCABULARY
    return model(input_ids=ids).logits


def test_folder_of_every_family_loads_as_written(family: str, folders: dict[str, Path]) -> None:
    model, tokenizer = load_model(folders[family])
    assert torch.equal(logits_of(model), logits_of(tiny.model(family)))
    assert model.dtype == torch.float32
    assert not model.training
    assert len(tokenizer) == tiny.VOCABULARY
    assert context_length(model) == 128


def test_saved_model_loads_in_plain_transformers_with_identical_logits(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = loaded
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)), alpha=0.01)
    save_model(model, tokenizer, tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(logits_of(plain), logits_of(model))
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("hello")["input_ids"] == tokenizer("hello")["input_ids"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "no temporary folder is left"


def test_loading_removes_dropout_in_every_family(family: str, tmp_path: Path) -> None:
    rates = {"gpt2": {"attn_pdrop": 0.5, "embd_pdrop": 0.5, "resid_pdrop": 0.5}}.get(family, {"attention_dropout": 0.5})
    before = tiny.model(family, **rates).train()
    assert not torch.equal(logits_of(before), logits_of(before)), "the config asks for dropout"
    model, _ = load_model(tiny.write_folder(tmp_path, family, **rates))
    assert torch.equal(logits_of(model), logits_of(model.train()))
    assert {getattr(model.config, key) for key in rates} == {0.0}
    no_dropout(MptConfig())  # whose rate is a whole number


def test_bfloat16_weights_load_in_float32(folders: dict[str, Path], tmp_path: Path) -> None:
    tiny.model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    model, _ = load_model(tmp_path)
    original = tiny.model("llama").to(torch.bfloat16).state_dict()
    for name, weights in model.state_dict().items():
        assert weights.dtype == torch.float32, name
        assert torch.equal(weights, original[name].float()), name


# ---- pocket -----------------------------------------------------------------------------------------------------------


def test_pocket_depends_only_on_its_seed_and_preserves_the_global_generator() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, _ = pocket(seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    again, _ = load_model("pocket", seed=1)
    other, _ = load_model("pocket", seed=2)
    assert torch.equal(logits_of(one), logits_of(again))
    assert not torch.equal(logits_of(one), logits_of(other))


def test_saved_pocket_loads_with_its_tokenizer_and_chat_template(tmp_path: Path) -> None:
    model, tokenizer = pocket("abc ", seed=4)
    save_model(model, tokenizer, tmp_path)
    again, same = load_model(tmp_path)
    ids = torch.tensor([same("a cab")["input_ids"]])
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)
    assert same.decode(ids[0]) == "a cab"
    assert same.chat_template == tokenizer.chat_template


def test_empty_alphabet_and_repeated_characters_are_rejected() -> None:
    for alphabet in ("", "abca"):
        with pytest.raises(SurefootError, match=r"^alphabet=.*each only once$"):
            pocket(alphabet)


# ---- reward models ----------------------------------------------------------------------------------------------------


ROWS = [[5, 9, 33, 7, 1], [12, 6], [40, 41, 42, 1]]


@torch.no_grad()
def test_score_is_read_at_the_last_real_token_with_any_padding(loaded: tuple[Any, Any]) -> None:
    model = new_reward_model(loaded[0], seed=1)
    alone = torch.cat([model(*right_padded([row], 0)) for row in ROWS])
    assert alone.unique().numel() == 3
    for padded in (left_padded, right_padded):
        for pad in (0, 77):
            ids, mask = padded([*ROWS, [8] * 9], pad)
            torch.testing.assert_close(model(ids, mask)[:3], alone, rtol=1e-5, atol=1e-5)
            everywhere = model.prefix_scores(ids, mask)
            torch.testing.assert_close(everywhere[0][mask[0]][-1], alone[0], rtol=1e-5, atol=1e-5)


def test_score_of_left_padded_text_has_a_finite_gradient() -> None:
    model = new_reward_model(tiny.model("llama"), seed=1)
    model(*left_padded(ROWS, 0)).sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    assert model.head.weight.grad is not None
    assert model.head.weight.grad.any()


def test_reward_model_has_its_own_trunk_and_a_seeded_head(folders: dict[str, Path]) -> None:
    policy, _ = load_model(folders["llama"])
    state = torch.get_rng_state()
    one, same, other = new_reward_model(policy, 1), new_reward_model(policy, 1), new_reward_model(policy, 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one.head.weight, same.head.weight)
    assert not torch.equal(one.head.weight, other.head.weight)
    assert not {id(p) for p in one.parameters()} & {id(p) for p in policy.parameters()}


def test_head_starts_with_variance_one_over_width_plus_one() -> None:
    wide = tiny.model("llama", hidden_size=1024, num_attention_heads=4)
    weight = new_reward_model(wide, 1).head.weight.detach()
    assert float(weight.var()) * 1025 == pytest.approx(1, abs=0.15)
    assert abs(float(weight.mean())) * 1025**0.5 < 0.15


@torch.no_grad()
def test_standardised_scores_have_mean_0_std_1_and_the_same_order(folders: dict[str, Path]) -> None:
    model = new_reward_model(load_model(folders["llama"])[0], seed=1)
    ids, mask = right_padded(ROWS, 0)
    before = model.logits(ids, mask)
    model.standardise(model.raw(ids, mask))
    after = model(ids, mask)
    torch.testing.assert_close(model.logits(ids, mask) - model.offset, after, atol=1e-5, rtol=0)
    assert float(after.mean()) == pytest.approx(0, abs=1e-5)
    assert float(after.std(correction=0)) == pytest.approx(1, abs=1e-5)
    assert torch.equal(after.argsort(), before.argsort())
    with pytest.raises(SurefootError, match="std 0 on 3 demonstrations"):
        model.standardise(torch.ones(3))


def test_standardisation_is_copied_only_to_a_model_with_the_same_head(tmp_path: Path) -> None:
    model, tokenizer = pocket()
    saved, same, other = (new_reward_model(model, seed, tokenizer) for seed in (1, 1, 2))
    saved.standardise(torch.tensor([1.0, 4.0]))
    saved.save(tmp_path / "model")
    for scores, numbers in ((same, (2.5, 1.5)), (other, (0, 1))):
        copy_standardisation(scores, tmp_path / "model")
        assert (float(scores.mean), float(scores.std)) == numbers


# ---- rejections ---------------------------------------------------------------------------------------------------------


def damaged(folder: Path, tmp_path: Path, damage: Callable[[Path], None]) -> Path:
    copied = tmp_path / "model"
    shutil.copytree(folder, copied)
    damage(copied)
    return copied


def edit_config(**fields: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return damage


def edit_weights(change: Callable[[dict[str, Tensor]], None]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def without(*names: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return damage


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def shard_missing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def foreign_tokenizer(folder: Path) -> None:
    from surefoot.language.models.pocket import character_tokenizer

    character_tokenizer("".join(map(chr, range(32, 300)))).save_pretrained(folder)


NORM = "model.layers.1.input_layernorm.weight"
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (without("config.json"), "has no config.json"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{") and None, "can't be read"),
    "no weights": (without("model.safetensors"), r"has no weights \(model.safetensors\)"),
    "truncated weights": (truncate, "can't be read"),
    "a shard is missing": (shard_missing, "model-00001-of-00002.safetensors is missing"),
    "no tokenizer": (without("tokenizer.json", "tokenizer_config.json"), r"has no tokenizer \(tokenizer.json\)"),
    "tokenizer is no JSON": (lambda f: (f / "tokenizer.json").write_text("{") and None, "its tokenizer can't be read"),
    "a weight is missing": (edit_weights(lambda t: t.__delitem__(NORM)), f"its weights lack {NORM}; copy both"),
    "a weight is not finite": (
        edit_weights(lambda t: t.update({NORM: t[NORM] * torch.nan})),
        f"{NORM} has numbers .*not finite",
    ),
    "the config has more layers": (edit_config(num_hidden_layers=3), "its weights lack .* and 8 more; copy both"),
    "the config has fewer layers": (edit_config(num_hidden_layers=1), "beyond what config.json describes, .* and 8 more"),
    "other widths": (edit_config(intermediate_size=16), r"don't fit config.json: .* is \[.*\] and should be \[.*\]"),
    "a classifier": (edit_config(architectures=["LlamaForSequenceClassification"]), "not causal .LlamaForSequence"),
    "a model of pictures": (edit_config(model_type="vit", architectures=["ViTModel"]), r"not causal \(ViTModel\)"),
    "a kind nobody knows": (edit_config(model_type="nonsense"), "can't be read"),
    "the tokenizer of another": (foreign_tokenizer, "ids go up to 273 and the model has embeddings for 102"),
    "an adapter": (lambda f: (f / "config.json").rename(f / "adapter_config.json") and None, "contains only an adapter"),
}


def test_damaged_and_unsupported_models_are_rejected_in_one_line(folders: dict[str, Path], tmp_path: Path) -> None:
    for name, (damage, expected) in DAMAGE.items():
        folder = damaged(folders["llama"], tmp_path / name, damage)
        with pytest.raises(SurefootError, match=expected) as caught:
            load_model(folder)
        assert str(caught.value).startswith(f"model='{folder}': "), name


def test_models_that_read_later_tokens_are_rejected(tmp_path: Path) -> None:
    from transformers import BertConfig, BertLMHeadModel

    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    BertLMHeadModel(BertConfig(vocab_size=tiny.VOCABULARY, **shape)).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(SurefootError, match=r"its logits depend on later tokens, like an encoder's \(BertLMHeadModel\)"):
        load_model(tmp_path)


def test_extra_weights_in_the_folder_are_ignored(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = damaged(folders["llama"], tmp_path, edit_weights(lambda t: t.update({"v_head.summary.weight": torch.ones(1)})))
    model, _ = load_model(folder)
    assert torch.equal(logits_of(model), logits_of(tiny.model("llama")))


def test_generation_config_that_transformers_refuses_to_write_can_be_saved(folders: dict[str, Path], tmp_path: Path) -> None:
    """Some hub models set a temperature without ``do_sample``, which ``transformers`` refuses to save."""

    def damage(folder: Path) -> None:
        (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "eos_token_id": [1, 2]}))

    model, tokenizer = load_model(damaged(folders["llama"], tmp_path, damage))
    save_model(model, tokenizer, tmp_path / "again")
    assert json.loads((tmp_path / "again" / "generation_config.json").read_text())["eos_token_id"] == [1, 2]


def test_missing_folder_is_rejected_without_contacting_the_hub(asked: list[str]) -> None:
    os.makedirs("models/sft")
    Path("models/sft/config.json").touch()
    for name, expected in {
        "./nowhere": "no such folder",
        "~/no/such/model": "no such folder",
        "models/sfx": r"no such folder; did you mean 'models/sft'\?",
        "models/sft/config.json": "is a file",
    }.items():
        with pytest.raises(SurefootError, match=rf"^model='{name}': {expected}"):
            load_model(name)
    assert asked == []


@pytest.mark.parametrize(
    ("name", "hint", "offline"),
    [("gpt-no-such", "", True), ("rm", r"; did you mean 'runs/rm'\?", True), ("pocked", r"; did you mean 'pocket'\?", False)],
)
def test_hub_id_without_a_network_fails_after_at_most_one_request(
    name: str, hint: str, offline: bool, asked: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    os.makedirs("runs/rm")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    monkeypatch.setattr("surefoot.language.models.loading.getproxies", dict)
    with pytest.raises(SurefootError, match=rf"^model='{name}': no such folder here, and the hub can't be reached{hint}; give"):
        load_model(name)
    assert len(asked) == (0 if offline else 1), "no retries"
    assert capfd.readouterr() == ("", "")


def test_cached_model_needs_no_network(
    folders: dict[str, Path], tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache has the layout that ``huggingface_hub`` recognises."""
    commit = "0" * 40
    repository = tmp_path / "models--someone--tiny"
    shutil.copytree(folders["gpt2"], repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    for place in ("huggingface_hub.constants.HF_HUB_CACHE", "transformers.utils.hub.constants.HF_HUB_CACHE"):
        monkeypatch.setattr(place, str(tmp_path))
    model, tokenizer = load_model("someone/tiny")
    assert asked == []
    assert torch.equal(logits_of(model), logits_of(tiny.model("gpt2")))
    assert len(tokenizer) == tiny.VOCABULARY


def test_code_in_a_model_folder_runs_only_if_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(Path("cache").absolute()))
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "modeling.py").write_text("import pathlib\npathlib.Path('ran').touch()\nraise RuntimeError('ran')\n")
    auto = {"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto, "architectures": ["Own"]}))
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tiny.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(SurefootError, match=r"Python code.*set trust_remote_code = true if you trust it$"):
        load_model(tmp_path)
    assert not Path("ran").exists()
    with pytest.raises(SurefootError, match="RuntimeError: ran"):
        load_model(tmp_path, trust_remote_code=True)
    assert Path("ran").exists()


def test_missing_package_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SurefootError, match=r"^model='pocket' needs transformers.*pip install .*\[language\]'"):
        load_model("pocket")


def test_models_that_are_not_reward_models_are_rejected(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(SurefootError, match=r"is not a reward model \(LlamaForCausalLM\)"):
        RewardModel.load(folders["llama"])
    with pytest.raises(SurefootError, match=r"no such folder"):
        RewardModel.load(tmp_path / "none")
    with pytest.raises(SurefootError, match=r"'pocket': is not a reward model"):
        RewardModel.load("pocket")


# ---- writing ----------------------------------------------------------------------------------------------------------


def test_failed_save_keeps_the_older_model(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = load_model(folders["llama"])
    save_model(model, tokenizer, tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    with torch.no_grad():
        next(model.parameters()).add_(1)

    def disk_full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(type(tokenizer), "save_pretrained", disk_full)
        with pytest.raises(SurefootError, match=r"out: a model is not saved \(No space left on device\)"):
            save_model(model, tokenizer, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    save_model(model, tokenizer, tmp_path / "out")
    assert torch.equal(logits_of(load_model(tmp_path / "out")[0]), logits_of(model))


def test_folder_with_other_files_is_not_overwritten(folders: dict[str, Path], tmp_path: Path) -> None:
    model, tokenizer = load_model(folders["llama"])
    for name in ("thesis.tex", "config.json", "src/app.js"):  # a project whose settings are in a file of that name
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
        with pytest.raises(SurefootError, match="contains something that is not a model"):
            save_model(model, tokenizer, tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
    shutil.copytree(folders["llama"], tmp_path / "of transformers")
    save_model(model, tokenizer, tmp_path / "of transformers")
    (tmp_path / "of transformers" / "manifest.json").write_text("{}")  # damaged
    save_model(model, tokenizer, tmp_path / "of transformers")
    (tmp_path / "of transformers" / "README.md").write_text("my card")
    with pytest.raises(SurefootError, match=r"not a model \(README\.md\); choose an empty folder"):
        save_model(model, tokenizer, tmp_path / "of transformers")


def test_models_of_pictures_and_quantised_weights_are_rejected_before_they_are_read(tmp_path: Path) -> None:
    """``transformers`` loads some families as causal models, with a vision tower that text rows never reach."""
    from transformers import AutoConfig

    text = {"vocab_size": tiny.VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    seeing = AutoConfig.for_model("gemma3", vision_config=vision, text_config=text)
    quantised = AutoConfig.for_model("llama", **text)
    quantised.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    for number, (config, message) in enumerate(
        (
            (seeing, r"has vision_config in its config.json \(gemma3\), and only text is trained; use a model of text alone"),
            (quantised, r"its weights are quantised \(bitsandbytes\); use the model"),
        )
    ):
        config.save_pretrained(folder := tmp_path / str(number))
        tiny.tokenizer().save_pretrained(folder)
        save_file({}, folder / "model.safetensors")
        for load in (load_model, RewardModel.load):
            with pytest.raises(SurefootError, match=message):
                load(folder)
