"""A language model with its tokenizer: generate, save, and load it from a folder, a run or a checkpoint."""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from surefoot.core.seeding import derived_seed
from surefoot.errors import SurefootError
from surefoot.files import made_from, read_toml
from surefoot.language import quiet_transformers
from surefoot.language.data.chat import Messages
from surefoot.language.data.rows import fault_in
from surefoot.language.data.tokens import Tokens
from surefoot.language.models.adapter_files import (
    load_adapted,
    load_stored,
    load_trained,
    model_weights,
    save_adapter,
    set_reading,
)
from surefoot.language.models.adapters import SharedBase, merge
from surefoot.language.models.classifier import classifier_kind
from surefoot.language.models.loading import HEAD, context_length, load_model, read_config, save_model
from surefoot.language.models.mapped import map_weights
from surefoot.language.models.placement import keeps_stored
from surefoot.language.models.reward_model import RewardModel, copy_standardisation, new_head
from surefoot.language.sampling.ends import Ends
from surefoot.language.sampling.engines import Request
from surefoot.language.sampling.sampler import sample
from surefoot.ranks.collectives import rank
from surefoot.recipes.callables import Functions
from surefoot.recipes.language import LanguageRecipe
from surefoot.recipes.models import ModelRecipe
from surefoot.recipes.reading import make_recipe
from surefoot.store.checkpoint import latest_checkpoint, load_checkpoint, require
from surefoot.store.folder import checkpoint_to_load, is_model, kind_of
from surefoot.store.hub import is_hub_name, local_folder
from surefoot.store.manifest import check_folder, is_checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TOKENIZER_SUFFIXES = (".json", ".txt", ".jinja")
"""suffixes of a tokenizer's text files, which include all that fast tokenizers need"""


class LanguageModel:
    """A causal language model of ``transformers`` and its tokenizer.

    model   an AutoModelForCausalLM
    tokens  its tokenizer, with EOS and padding settled
    recipe  the recipe that it was trained by; None for a model from elsewhere
    """

    def __init__(self, model: "PreTrainedModel", tokens: Tokens, recipe: ModelRecipe | None = None) -> None:
        self.model, self.tokens, self.recipe = model, tokens, recipe
        self.functions: Functions = {}
        """reward functions that its training was given as objects"""

    def __repr__(self) -> str:
        """One line; ``model.model`` shows the layers."""
        count = sum(parameter.numel() for parameter in self.model.parameters())
        return f"<LanguageModel {self.model.config.model_type}, {count:,} parameters>"

    def generate(
        self,
        prompts: Sequence[str | Messages],
        *,
        samples: int = 1,
        max_tokens: int = 64,
        temperature: float = 1.0,
        seed: int = 1,
        stop: str | Sequence[str] = (),
        greedy: bool = False,
        special_tokens: bool = False,
    ) -> list[str]:
        """Responses to text or conversations, prompt-major; the same seed gives the same responses.

        stop             strings that end a response, and are not part of it
        special_tokens   keep special tokens in the text

        Raises SurefootError for an empty list, for what is neither text nor a conversation, and for a prompt longer than the
        model's context.
        """
        check_prompts(prompts)
        drawing: dict[str, Any] = {"samples": samples, "max_tokens": max_tokens, "temperature": temperature, "greedy": greedy}
        stop = (stop,) if isinstance(stop, str) else stop
        return self.generate_ended(prompts, seed=seed, stop=stop, special_tokens=special_tokens, **drawing)[0]

    def generate_ended(
        self,
        prompts: Sequence[str | Messages],
        *,
        samples: int = 1,
        seed: int = 1,
        first: int = 0,
        stop: Sequence[str] = (),
        special_tokens: bool = False,
        **drawing: Any,
    ) -> tuple[list[str], list[bool]]:
        """The result of ``generate``, and for each response whether it ended before ``max_tokens``.

        first     number of the first response, for its seed
        drawing   other fields of a request: ``max_tokens``, ``temperature``, ``greedy``
        """
        ends = Ends(self.tokens, tuple(stop))
        with quiet_transformers():  # the tokenizer warns of long text, which sample rejects
            ids = [self.tokens.encode_prompt(prompt) for prompt in prompts]
        seeds = [derived_seed(seed, "generate", first + index) for index in range(samples * len(prompts))]
        drawn = sample(self.model, Request(ids, seeds, samples=samples, **drawing, **ends.options))
        return [ends.text(response, special_tokens) for response in drawn.responses()], drawn.ended.tolist()

    def save(self, folder: str | Path) -> list[str]:
        """Write a folder that ``transformers`` and ``surefoot.load`` read. Return lines for the user: none."""
        save_model(self.model, self.tokens.tokenizer, folder)
        return []


def check_prompts(prompts: object) -> None:
    """Raise SurefootError unless these are a list of texts and conversations."""
    if isinstance(prompts, str) or (is_conversation(prompts) and prompts):
        raise SurefootError(f"prompts={prompts!r:.60}: is one prompt; pass a list of prompts, such as [prompt]")
    if not isinstance(prompts, Sequence):
        raise SurefootError(f"prompts={prompts!r:.60}: is a {type(prompts).__name__}; pass a list of prompts")
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt, str) and not is_conversation(prompt):
            raise SurefootError(
                f"prompts[{number}]={prompt!r:.60}: is neither text nor messages; a message has a role and a content"
            )
        if fault := fault_in(prompt):
            raise SurefootError(f"prompts[{number}]: has {fault}; remove it")


def is_conversation(value: object) -> bool:
    """Whether a value is a list of messages."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return False
    return all(isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in value)


def model_folder(name: str) -> str:
    """The folder or hub id of a recipe's model; for a run, the model that it saved.

    Raises SurefootError for a run that has not saved one.
    """
    path = local_folder(Path(name).expanduser())
    if is_hub_name(name):
        name = str(path)
    if is_model(path) or not (path / "config.toml").is_file():
        return name
    if not (path / "model").is_dir() and (path / "adapter").is_dir():
        raise SurefootError(f"model={name!r}: this run saved only an adapter; merge it: surefoot merge {name} --out FOLDER")
    if kind_of(path) == "control":
        raise SurefootError(f"model={name!r}: is an agent of control; name a run of a language model")
    if not (path / "model").is_dir():
        raise SurefootError(f"model={name!r}: this run has not finished, so it has no model yet; run: surefoot resume {name}")
    check_folder(path / "model", f"model={name!r}", required=True)
    return str(path / "model")


@contextmanager
def errors_for(field: str) -> Iterator[None]:
    """Make errors about a model begin with the recipe's field that names it."""
    try:
        yield
    except SurefootError as error:
        message = str(error)
        raise SurefootError(f"{field}={message.removeprefix('model=')}" if message.startswith("model=") else message) from None


def check_compatible(
    field: str, name: str, read_by: tuple[Any, Any], policy: ModelRecipe, tokens: Tokens, longest: int
) -> None:
    """Raise SurefootError unless a model can read every token of the policy: same vocabulary, and a context that is long
    enough.

    read_by  the model and its tokenizer
    longest  tokens of the longest text, responses included
    """
    model, tokenizer = read_by
    if tokenizer.get_vocab() != tokens.tokenizer.get_vocab():
        raise SurefootError(
            f"{field}={name!r}: its vocabulary differs from that of model={policy.model!r}, whose tokens it reads; "
            "use a model with the same tokenizer"
        )
    context = context_length(model)
    if context is not None and longest > context:
        knobs = "data.max_length or sampling.max_tokens" if isinstance(policy, LanguageRecipe) else "data.max_length"
        if isinstance(policy, LanguageRecipe) and policy.turns.conversations:
            knobs = "turns.max_length"
        raise SurefootError(
            f"{field}={name!r}: prompts with their responses have up to {longest} tokens and its context is {context}; lower "
            f"{knobs}"
        )


def load_language_model(name: str, trust_remote_code: bool = False) -> LanguageModel:
    """Load the language model of a run (its best checkpoint), a checkpoint, a ``transformers`` folder or a hub id.

    ``hf://org/name`` is a repository of ``surefoot push``, whose files are compared with their hashes.

    Raises SurefootError if there is none, or if it is a reward model or an agent.
    """
    path = local_folder(Path(name).expanduser())
    if not is_model(path) and ((path / "config.toml").is_file() or is_checkpoint(path)):
        checkpoint = checkpoint_to_load(path)
        parts = load_checkpoint(checkpoint)
        require(parts, ("recipe",), checkpoint)
        kind = parts["recipe"].get("kind", "control")
        if kind not in ("sft", "dpo", "language"):
            raise SurefootError(
                f"{name}: was trained as kind = {kind!r}, which generates no text; name a run of sft, dpo or language"
            )
        result = from_parts(parts, checkpoint, trust_remote_code)
        assert isinstance(result, LanguageModel)
        return result
    model, tokenizer = load_model(path if is_hub_name(name) else name, trust_remote_code=trust_remote_code)
    return LanguageModel(model, Tokens(tokenizer, model))


def load_saved(folder: Path, trust_remote_code: bool = False) -> LanguageModel | RewardModel:
    """Load the language or reward model in a folder of ``transformers``, with its recipe if that is beside it.

    Raises SurefootError if it is neither.
    """
    config = read_config(str(folder), trust_remote_code)
    reward = (folder / HEAD).is_file() or classifier_kind(config, trust_remote_code) is not None
    load: Any = RewardModel.load if reward else load_language_model
    result: LanguageModel | RewardModel = load(str(folder), trust_remote_code=trust_remote_code)
    if (folder / "config.toml").is_file():
        recipe = make_recipe(read_toml(folder / "config.toml"))
        result.recipe = recipe if isinstance(recipe, ModelRecipe) else None
    return result


def load_base(recipe: ModelRecipe) -> "tuple[PreTrainedModel, Tokens]":
    """Load the model that a recipe starts from, and its tokenizer; with sharding, or weights in bfloat16, 8 or 4 bits, as it is
    stored.
    """
    model, tokenizer = load_model(
        model_folder(recipe.model),
        seed=recipe.seed,
        trust_remote_code=recipe.trust_remote_code,
        as_stored=keeps_stored(recipe) or (recipe.adapter is not None and recipe.adapter.quantize is not None),
    )
    return model, Tokens(tokenizer, model, answers=recipe.data.answers)  # type: ignore[attr-defined]


def model_files(model: nn.Module, tokenizer: "PreTrainedTokenizerBase") -> dict[str, Any]:
    """What a checkpoint needs besides weights: the configuration, the generation config (it lists EOS ids) and the tokenizer's
    files.
    """
    holder: Any = model.backbone if isinstance(model, RewardModel) else model
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        paths = sorted(path for path in Path(folder).iterdir() if path.suffix in TOKENIZER_SUFFIXES)
        files = {path.name: path.read_text("utf-8") for path in paths}
    generation = getattr(holder, "generation_config", None)
    return {
        "config": json.loads(holder.config.to_json_string(use_diff=False)),
        "generation": None if generation is None else json.loads(generation.to_json_string()),
        "tokenizer": files,
    }


def from_parts(parts: dict[str, Any], where: Path, trust_remote_code: bool = False) -> LanguageModel | RewardModel:
    """The language or reward model in a checkpoint. Raises SurefootError if the checkpoint contains neither."""
    require(parts, ("agent", "recipe", "model"), where)
    with made_from(where):
        result = _build_model(parts, where, trust_remote_code)
        recipe = make_recipe(parts["recipe"])
        assert isinstance(recipe, ModelRecipe), "a recipe of another kind has no model"
        result.recipe = recipe
        return result


def _build_model(
    parts: dict[str, Any], where: Path, trust_remote_code: bool, mapped: Callable[[Any], None] | None = None
) -> LanguageModel | RewardModel:
    """``mapped`` gives a model on the meta device its weights' places; the weights are then read piece by piece."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationConfig

    tokenizer = _build_tokenizer(parts["model"]["tokenizer"], where, trust_remote_code)
    folder = where.absolute().parent.parent
    if "base" in parts:
        adapted, base, scores = load_adapted(parts, where, trust_remote_code)
        merge(base.trunk)
        if scores is None:
            return LanguageModel(adapted, Tokens(tokenizer, adapted))
        scores.tokenizer = tokenizer
        copy_standardisation(scores, folder / "adapter")
        return scores.eval()
    reward = parts["recipe"]["kind"] == "reward"
    saved = dict(parts["model"]["config"])
    config: Any = AutoConfig.for_model(saved.pop("model_type"), **saved)
    auto: Any = AutoModel if reward else AutoModelForCausalLM
    weights = model_weights(parts)
    device = nullcontext() if mapped is None else torch.device("meta")
    with torch.random.fork_rng(devices=[]), device:  # weights are drawn, then overwritten; buffers are computed and stay
        model = auto.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
    if mapped is not None:
        mapped(model)
    if not reward:
        load_stored(model.state_dict(), weights, where)
        if parts["model"].get("generation"):
            model.generation_config = GenerationConfig.from_dict(parts["model"]["generation"])
        return LanguageModel(model.eval(), Tokens(tokenizer, model))
    scores = RewardModel(model, new_head(model), tokenizer)
    set_reading(scores, parts["recipe"])
    load_stored(scores.state_dict(), weights, where)
    copy_standardisation(scores, folder / "model")
    return scores.eval()


def _build_tokenizer(files: dict[str, str], where: Path, trust_remote_code: bool) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            if Path(name).name != name or Path(name).suffix not in TOKENIZER_SUFFIXES:  # a checkpoint may come from anyone
                raise SurefootError(
                    f"{where}: lists {name!r} as a tokenizer file, which Surefoot never writes; don't use this checkpoint"
                )
            (Path(folder) / name).write_text(text, "utf-8")
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    return tokenizer


def save_result(
    result: LanguageModel | RewardModel, folder: Path, recipe: ModelRecipe, base: SharedBase | None, in_place: bool = False
) -> list[str]:
    """Write a run's result to ``model/``, and an adapter to ``adapter/``; return lines for the user. Only rank 0 writes.

    in_place   merge the adapter into the result's own weights, of which no copy is made
    """
    if rank():
        return []
    lines = []
    if recipe.adapter is not None and base is not None:
        save_adapter(base, result, folder / "adapter")
        lines = [f"the adapter is in {folder / 'adapter'}"]
    if recipe.adapter is None or recipe.adapter.merge:
        if in_place and base is not None:
            merge(base.trunk)
        lines += result.save(folder / "model")
        lines.append(f"the model is in {folder / 'model'}")
    return lines


def result_of_shards(
    live: LanguageModel | RewardModel, folder: Path, base: SharedBase | None, recipe: ModelRecipe
) -> tuple[LanguageModel | RewardModel, SharedBase | None, bool]:
    """The result of a run whose models are sharded, on the CPU of this rank: from its best checkpoint, or its last one. Its
    dtype is that of the recipe's weights.

    Its weights lie in a mapped file, so they are never in this rank's own memory all at once.

    live  the run's result, which is sharded
    base  of its adapter

    Returns also the result's base, and whether the checkpoint is the best one.
    """
    best = latest_checkpoint(folder / "best")
    checkpoint = best or latest_checkpoint(folder / "checkpoints")
    assert checkpoint is not None, "a run saves a checkpoint at its end"
    trusted, dtype = recipe.trust_remote_code, torch.bfloat16 if recipe.low_weights else torch.float32
    holder, tokenizer = (
        (live.backbone, live.tokenizer) if isinstance(live, RewardModel) else (live.model, live.tokens.tokenizer)
    )
    result: LanguageModel | RewardModel
    if base is None:
        parts = load_checkpoint(checkpoint, in_files=("agent", "learner"))
        buffers = dict(holder.named_buffers())
        result = _build_model(parts, checkpoint, trusted, lambda model: map_weights(model, folder, buffers, dtype))
    else:
        parts = load_checkpoint(checkpoint)
        model, base, scores = load_adapted(parts, checkpoint, trusted, scratch=folder, dtype=dtype)
        result = LanguageModel(model, Tokens(tokenizer, model)) if scores is None else scores  # type: ignore[arg-type]
    if isinstance(result, RewardModel):
        result.tokenizer = tokenizer
    saved = make_recipe(parts["recipe"])
    result.recipe = saved if isinstance(saved, ModelRecipe) else None
    return result, base, best is not None


def load_best_weights(policy: nn.Module, folder: Path) -> bool:
    """Load the weights of the best checkpoint. Return whether there is one."""
    best = latest_checkpoint(folder / "best")
    if best is not None:
        load_trained(policy, load_checkpoint(best)["agent"], best)
    return best is not None
