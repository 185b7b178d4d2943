"""A language model as training takes it and gives it back: with its tokenizer, from a folder, a run or a checkpoint."""

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import nn

from surefoot.core.distributed import rank
from surefoot.errors import SurefootError
from surefoot.files import made_from
from surefoot.language.adapters.files import load_merged, load_trained, save_adapter
from surefoot.language.adapters.layers import SharedBase
from surefoot.language.data.tokens import Messages, Tokens
from surefoot.language.models.loading import HEAD, context_length, load_model, save_model
from surefoot.language.models.reward_model import RewardModel
from surefoot.language.sampling.sampler import generate
from surefoot.recipes.language import LanguageRecipe, ModelRecipe
from surefoot.runs.checkpoint import latest_checkpoint, load_checkpoint, load_weights, require
from surefoot.runs.folder import checkpoint_to_load

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TOKENIZER_SUFFIXES = (".json", ".txt", ".jinja")
"""the files of a tokenizer that are text; what fast tokenizers need is among them"""


class LanguageModel:
    """A causal language model of ``transformers`` and its tokenizer.

    model   an AutoModelForCausalLM
    tokens  its tokenizer, with what ends and pads a text
    """

    def __init__(self, model: "PreTrainedModel", tokens: Tokens) -> None:
        self.model, self.tokens = model, tokens

    def generate(
        self,
        prompts: Sequence[str | Messages],
        *,
        samples: int = 1,
        max_tokens: int = 64,
        temperature: float = 1.0,
        seed: int = 1,
        stop: Sequence[str] = (),
        greedy: bool = False,
    ) -> list[str]:
        """Responses to text or conversations, prompt by prompt; the same seed gives the same ones.

        Raises SurefootError for an empty list, or a prompt longer than the model's context.
        """
        options: dict[str, Any] = {"temperature": temperature, "seed": seed, "stop": stop, "greedy": greedy}
        return self.generate_ended(prompts, samples=samples, max_tokens=max_tokens, **options)[0]

    def generate_ended(self, prompts: Sequence[str | Messages], **options: Any) -> tuple[list[str], list[bool]]:
        """What ``generate`` gives, and of each response whether it ended by itself and was not cut."""
        return generate(self.model, self.tokens, prompts, **options)

    def save(self, folder: str | Path) -> None:
        """Write a folder that ``transformers`` and ``surefoot.load`` read."""
        save_model(self.model, self.tokens.tokenizer, folder)


def model_folder(name: str) -> str:
    """What a recipe's model means: a run stands for the model it left.

    Raises SurefootError for a run that has not left one yet.
    """
    path = Path(name).expanduser()
    if not (path / "config.toml").is_file():
        return name
    if not (path / "model").is_dir() and (path / "adapter").is_dir():
        raise SurefootError(f"model={name!r}: this run left an adapter alone; merge it: surefoot merge {name} --out FOLDER")
    if not (path / "model").is_dir():
        raise SurefootError(f"model={name!r}: this run has not finished, so it left no model; surefoot resume {name}")
    return str(path / "model")


@contextmanager
def errors_for(field: str) -> Iterator[None]:
    """Whatever is wrong with a model begins with the recipe's field that names it."""
    try:
        yield
    except SurefootError as error:
        said = str(error)
        raise SurefootError(f"{field}={said.removeprefix('model=')}" if said.startswith("model=") else said) from None


def check_compatible(
    field: str, name: str, read_by: tuple[Any, Any], policy: ModelRecipe, tokens: Tokens, longest: int
) -> None:
    """Raise SurefootError unless a model, given with its tokenizer, can read all that the policy reads and writes, by its ids.

    longest  tokens of the longest text, answers included
    """
    model, tokenizer = read_by
    if tokenizer.get_vocab() != tokens.tokenizer.get_vocab():
        raise SurefootError(
            f"{field}={name!r}: has another vocabulary than model={policy.model!r}; it reads the policy's tokens, so both need "
            "the same tokenizer"
        )
    context = context_length(model)
    if context is not None and longest > context:
        knobs = "data.max_length or sampling.max_tokens" if isinstance(policy, LanguageRecipe) else "data.max_length"
        if isinstance(policy, LanguageRecipe) and policy.turns.environment is not None:
            knobs = "turns.max_length"
        raise SurefootError(
            f"{field}={name!r}: prompts with their responses have up to {longest} tokens and its context is {context}; lower "
            f"{knobs}"
        )


def load_language_model(name: str, trust_remote_code: bool = False) -> LanguageModel:
    """What writes text under a name: a run (its best checkpoint), a checkpoint, a ``transformers`` folder or a hub id.

    Raises SurefootError where there is no such thing, or it is a reward model or an agent.
    """
    path = Path(name).expanduser()
    if (path / "config.toml").is_file() or (path / "manifest.json").is_file():
        checkpoint = checkpoint_to_load(path)
        trees = load_checkpoint(checkpoint)
        require(trees, ("recipe",), checkpoint)
        kind = trees["recipe"].get("kind", "control")
        if kind not in ("sft", "dpo", "language"):
            raise SurefootError(
                f"{name}: was trained as kind = {kind!r}, which writes no text; name a run of sft, dpo or language"
            )
        found = from_trees(trees, checkpoint, trust_remote_code)
        assert isinstance(found, LanguageModel)
        return found
    model, tokenizer = load_model(name, trust_remote_code=trust_remote_code)
    return LanguageModel(model, Tokens(tokenizer, model))


def load_base(recipe: ModelRecipe) -> "tuple[PreTrainedModel, Tokens]":
    """The model that a recipe starts from."""
    model, tokenizer = load_model(model_folder(recipe.model), seed=recipe.seed, trust_remote_code=recipe.trust_remote_code)
    return model, Tokens(tokenizer, model)


def describe_model(model: nn.Module, tokenizer: "PreTrainedTokenizerBase") -> dict[str, Any]:
    """All that a checkpoint needs besides weights: the configuration, that of generating (what ends a text), and the
    tokenizer's files.
    """
    holder: Any = model.backbone if isinstance(model, RewardModel) else model
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        found = sorted(path for path in Path(folder).iterdir() if path.suffix in TOKENIZER_SUFFIXES)
        files = {path.name: path.read_text("utf-8") for path in found}
    generation = getattr(holder, "generation_config", None)
    return {
        "config": json.loads(holder.config.to_json_string(use_diff=False)),
        "generation": None if generation is None else json.loads(generation.to_json_string()),
        "tokenizer": files,
    }


def from_trees(trees: dict[str, Any], where: Path, trust_remote_code: bool = False) -> LanguageModel | RewardModel:
    """The model that a checkpoint holds: of language, or of rewards; SurefootError where its trees are not those of one."""
    require(trees, ("agent", "recipe", "model"), where)
    with made_from(where):
        return _build_model(trees, where, trust_remote_code)


def _build_model(trees: dict[str, Any], where: Path, trust_remote_code: bool) -> LanguageModel | RewardModel:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationConfig

    tokenizer = _build_tokenizer(trees["model"]["tokenizer"], where, trust_remote_code)
    if "base" in trees:
        return _merged_model(trees, where, tokenizer, trust_remote_code)
    reward = trees["recipe"]["kind"] == "reward"
    told = dict(trees["model"]["config"])
    config: Any = AutoConfig.for_model(told.pop("model_type"), **told)
    auto: Any = AutoModel if reward else AutoModelForCausalLM
    prefix = "writer.model." if trees["recipe"]["kind"] == "dpo" else "model."
    weights = {name.removeprefix(prefix): x for name, x in trees["agent"].items() if name.startswith(prefix)}
    with torch.random.fork_rng(devices=[]):  # the start is drawn, and then overwritten; buffers are computed and stay
        model = auto.from_config(config, trust_remote_code=trust_remote_code)
    if not reward:
        load_weights(model, weights, where)
        if trees["model"].get("generation"):
            model.generation_config = GenerationConfig.from_dict(trees["model"]["generation"])
        return LanguageModel(model.eval(), Tokens(tokenizer, model))
    head = nn.Linear(weights["head.weight"].shape[1], 1)
    scores = RewardModel(model, head, tokenizer)
    load_weights(scores, weights, where)
    _copy_standardisation(scores, where.absolute().parent.parent / "model" / HEAD)
    return scores.eval()


def _build_tokenizer(files: dict[str, str], where: Path, trust_remote_code: bool) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            if Path(name).name != name or Path(name).suffix not in TOKENIZER_SUFFIXES:  # a checkpoint may be somebody else's
                raise SurefootError(f"{where}: names {name!r} as a file of its tokenizer, which is never written; don't use it")
            (Path(folder) / name).write_text(text, "utf-8")
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    return found


def _merged_model(
    trees: dict[str, Any], where: Path, tokenizer: "PreTrainedTokenizerBase", trust_remote_code: bool
) -> LanguageModel | RewardModel:
    """The same of a checkpoint that holds an adapter alone: its base with the adapter merged into it."""
    model, head = load_merged(trees, where, trust_remote_code)
    if head is None:
        return LanguageModel(model, Tokens(tokenizer, model))
    trunk: Any = model.base_model
    scores = RewardModel(trunk, head, tokenizer)
    _copy_standardisation(scores, where.absolute().parent.parent / "adapter" / HEAD)
    return scores.eval()


def _copy_standardisation(scores: RewardModel, left: Path) -> None:
    """Mean and std are found when a run ends, and are in the model it leaves: take them where that has these weights."""
    if left.is_file():
        with made_from(left):
            tensors = load_file(left)
            if torch.equal(tensors["weight"], scores.head.weight.detach()):
                scores.mean.copy_(tensors["mean"])
                scores.std.copy_(tensors["std"])


def save_result(result: LanguageModel | RewardModel, folder: Path, recipe: ModelRecipe, base: SharedBase | None) -> list[str]:
    """Write what a run made to ``model/``, and an adapter to ``adapter/``, by the first rank alone, and say so."""
    if rank():
        return []
    said = []
    if recipe.adapter is not None and base is not None:
        save_adapter(base, result, folder / "adapter")
        said = [f"the adapter is in {folder / 'adapter'}"]
    if recipe.adapter is None or recipe.adapter.merge:
        result.save(folder / "model")
        said.append(f"the model is in {folder / 'model'}")
    return said


def load_best_weights(policy: nn.Module, folder: Path) -> bool:
    """Go back to the weights of the best checkpoint; whether there is one."""
    best = latest_checkpoint(folder / "best")
    if best is not None:
        load_trained(policy, load_checkpoint(best)["agent"], best)
    return best is not None
