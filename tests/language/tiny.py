"""Small models with random weights from several families, in memory or as folders written by ``transformers``."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import surefoot
from surefoot.store.checkpoint import load_checkpoint

if TYPE_CHECKING:
    from surefoot.language.online.world import LanguageWorld

VOCABULARY, WIDTH, LAYERS, HEADS = 102, 32, 2, 4
FAMILIES = ("llama", "qwen2", "gpt2", "gemma")


def tokenizer(context: int = 128) -> Any:
    """A tokenizer with one token per printable ASCII character, plus pad, EOS and unk."""
    from surefoot.language.models.pocket import character_tokenizer

    made = character_tokenizer(context=context)
    assert len(made) == VOCABULARY
    return made


def model(family: str, seed: int = 1, scale: float = 4.0, **changes: Any) -> Any:
    """A new model in float32 and eval mode, with 2 layers of width 32; query heads share keys where the family allows it.

    Weights are scaled up so that a wrong token, position or mask clearly changes the logits.
    """
    shared = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "dtype": "float32"}
    build, fields = _SHAPES[family]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = build({**shared, **fields, **changes})
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.ndim == 2 and "embed" not in name and "wte" not in name and "wpe" not in name:
                weight.mul_(scale)
    return made.eval()


def set_probabilities(model: Any, ids: list[int], probabilities: tuple[float, ...]) -> None:
    """Give these tokens fixed probabilities, whatever comes before them."""
    head = model.get_output_embeddings()
    bias = torch.full((head.out_features,), -60.0)
    bias[ids] = torch.tensor(probabilities).log()
    with torch.no_grad():
        head.weight.zero_()
    head.bias = torch.nn.Parameter(bias)


def teach(head: Any, hidden: torch.Tensor, wanted: torch.Tensor) -> None:
    """Set a linear head so that it maps these hidden states to the wanted outputs.   [n, width], [n, out]; n ≤ width"""
    with torch.no_grad():
        head.weight.copy_((torch.linalg.pinv(hidden.double()) @ wanted.double()).T)
        if head.bias is not None:
            head.bias.zero_()


def write_folder(folder: Path, family: str, seed: int = 1, **changes: Any) -> Path:
    """Write a model and its tokenizer with ``save_pretrained``; return the folder."""
    model(family, seed, **changes).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def write_texts(folder: Path, count: int = 13) -> None:
    """Write demonstrations, pairs, labels, answers in steps and a reward function. Texts have different lengths."""
    tables: dict[str, list[dict[str, Any]]] = {"rows": [], "pairs": [], "labels": [], "steps": []}
    for i in range(count):
        prompt, good, parts = f"{i} says ", "abc" * (i % 4 + 1), i % 3 + 1
        tables["rows"].append({"prompt": prompt, "completion": good})
        tables["pairs"].append({"prompt": prompt, "chosen": good, "rejected": "x" * parts})
        tables["labels"].append({"prompt": prompt, "completion": good, "label": i % 3 > 0})
        labels = [i % 2 > 0, False, True][:parts]
        tables["steps"].append({"prompt": prompt, "completions": ["abc", "x", "yy"][:parts], "labels": labels})
    for name, rows in tables.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text("def score(responses):\n    return [float(len(set(t))) for t in responses]\n")


def whole_and_resumed(kind: str, folder: Path, steps: int = 32, **fields: Any) -> list[Any]:
    """The last checkpoints of a run, and of one that was interrupted halfway and resumed, in ``whole`` and ``cut``."""
    surefoot.train(kind, run_dir=folder / "whole", steps=steps, **fields)
    half = {"callback": lambda metrics: metrics["steps"] >= steps // 2}
    surefoot.train(kind, run_dir=folder / "cut", steps=steps, **half, **fields)
    surefoot.resume(folder / "cut")
    return [load_checkpoint(folder / run / "checkpoints" / str(steps)) for run in ("whole", "cut")]


def rejected(result: tuple[int, str, str], *parts: str) -> None:
    """A command ended with exit code 2 and one line that holds these parts."""
    code, _, err = result
    assert code == 2, err
    assert err.startswith("surefoot: ")
    assert err.count("\n") == 1, err
    for part in parts:
        assert part in err, (part, err)


def fields_of(model: object, rows: object, function: str, **changes: Any) -> dict[str, Any]:
    """The fields of a short run on text: batches of 16 responses of at most 8 tokens, which a function scores."""
    table: dict[str, Any] = {
        "model": str(model),
        "steps": 64,
        "data": {"train": str(rows), "max_length": 32},
        "sampling": {"prompts": 16, "max_tokens": 8},
        "reward": {"terms": [{"function": function}], "missing_eos": "none"},
        "optimizer": {"learning_rate": 1e-3},
    }
    return {**table, **changes}


def world_of(fields: Mapping[str, Any]) -> "LanguageWorld":
    """The world of a recipe with these fields."""
    from surefoot.language.online.world import LanguageWorld
    from surefoot.recipes.reading import make_recipe

    recipe = make_recipe({"kind": "language", **fields})
    return LanguageWorld(recipe)


Shape = tuple[Callable[[Mapping[str, Any]], Any], dict[str, Any]]


def _rotary() -> dict[str, Any]:
    return {
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // 2,
        "intermediate_size": 2 * WIDTH,
        "max_position_embeddings": 128,
    }


def _llama() -> Shape:
    from transformers import LlamaConfig, LlamaForCausalLM

    return lambda fields: LlamaForCausalLM(LlamaConfig(**fields)), {**_rotary(), "tie_word_embeddings": False}


def _qwen2() -> Shape:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return lambda fields: Qwen2ForCausalLM(Qwen2Config(**fields)), {**_rotary(), "tie_word_embeddings": True}


def _gemma() -> Shape:
    from transformers import GemmaConfig, GemmaForCausalLM

    return lambda fields: GemmaForCausalLM(GemmaConfig(**fields)), {**_rotary(), "num_key_value_heads": 1, "head_dim": 8}


def _mixtral() -> Shape:
    from transformers import MixtralConfig, MixtralForCausalLM

    return lambda fields: MixtralForCausalLM(MixtralConfig(**fields)), {**_rotary(), "num_local_experts": 4}


def _gpt2() -> Shape:
    from transformers import GPT2Config, GPT2LMHeadModel

    return lambda fields: GPT2LMHeadModel(GPT2Config(**fields)), {
        "n_embd": WIDTH,
        "n_layer": LAYERS,
        "n_head": HEADS,
        "n_positions": 128,
    }


_SHAPES: dict[str, Callable[[], Shape]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "gemma": _gemma,
    "gpt2": _gpt2,
    "mixtral": _mixtral,
}


def logits(model: Any) -> torch.Tensor:
    """Of two rows of twelve tokens."""
    with torch.no_grad():
        scores: torch.Tensor = model(input_ids=torch.arange(24).view(2, 12) * 4 % 100).logits
    return scores


def moved(base: Any, role: str, seed: int = 5) -> None:
    """Have an adapter add something."""
    drawn = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in base.parameters(role):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=drawn))
