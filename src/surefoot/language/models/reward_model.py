"""A reward model: a language model's trunk with a scalar head.

It is written as its family's ``ForSequenceClassification`` of ``transformers``, whose logit is the score. That class has no
bias, so the mean score on the demonstrations is in config.json, and the rewards of runs subtract it. A family without such a
class is written as a trunk and ``head.safetensors``, as all were before.
"""

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import linear

from surefoot.core.seeding import stream
from surefoot.errors import SurefootError, cause_of, require_package
from surefoot.files import made_from
from surefoot.language.data.batches import positions
from surefoot.language.models.classifier import (
    SCALE,
    Scale,
    TextClassifier,
    classifier_kind,
    make_classifier,
    padding_tokenizer,
    parts_of,
    read_classifier,
    read_scale,
)
from surefoot.language.models.loading import (
    HEAD,
    check_vocabulary,
    is_folder,
    new_model_folder,
    read_config,
    read_only_config,
    read_tokenizer,
    read_weights,
    write_weights,
)
from surefoot.language.models.padding_free import Reading, end_to_end
from surefoot.language.models.policy.lengths import by_length, switch_of
from surefoot.ranks.collectives import in_float64
from surefoot.recipes.models import ModelRecipe
from surefoot.store.checkpoint import non_finite_numbers
from surefoot.store.manifest import check_folder
from surefoot.store.tensors import read_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class RewardModel(nn.Module):
    """A language model's trunk with a scalar head, read at the last real token, or at every token of the answer.

    backbone    returns the hidden states of every token
    head        Linear(width, 1)
    tokenizer   turns text into ids: a reward model reads text, from any policy
    pad_id      a token that is not real even within the mask, as in the classifiers of ``transformers``; None: no such token

    The raw score is the head's output. ``mean`` and ``std`` are 0 and 1 until ``standardise`` is called.
    """

    mean: Tensor
    std: Tensor
    recipe: ModelRecipe | None = None
    """the recipe that it was trained by; None for a model from elsewhere"""
    of_steps: bool = False
    """whether it was trained on labels of steps, and is written as a token classifier"""
    pooled: bool = False
    """whether the score is the sum of the head's outputs over the answer; it is written as a token classifier too"""
    plain: bool | None = None
    """whether it was trained on text alone, or on messages alone; None: on both, or not known"""
    padding_free: bool = False
    """whether it reads texts end to end; only for backbones without ``reason_for_padding``"""

    def __init__(
        self,
        backbone: "PreTrainedModel",
        head: nn.Linear,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        pad_id: int | None = None,
    ) -> None:
        super().__init__()
        self.backbone, self.head, self.tokenizer, self.pad_id = backbone, head, tokenizer, pad_id
        self._takes_positions = "position_ids" in inspect.signature(getattr(backbone, "reader", backbone).forward).parameters
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("std", torch.ones(()))

    def forward(self, ids: Tensor, mask: Tensor, answer: Tensor | None = None) -> Tensor:
        """The rewards of runs for whole texts, padded left or right: (raw − mean) / std.   [B, L], see ``raw`` -> [B]"""
        return (self.raw(ids, mask, answer) - self.mean) / self.std

    def logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        """The logits of the model as ``transformers`` loads it: the rewards of runs plus ``offset``; of steps, ``raw``.

        ids [B, L], mask [B, L] -> [B]
        """
        if self.of_steps or self.pooled:
            return self.raw(ids, mask)
        weight = self.scaled_weight

        def scores(ids: Tensor, mask: Tensor) -> Tensor:
            return linear(self._last_hidden(ids, mask).to(weight.dtype), weight).squeeze(-1)

        return self._by_length(scores, ids, mask)

    def _by_length(self, function: Callable[[Tensor, Tensor], Tensor], ids: Tensor, mask: Tensor) -> Tensor:
        """A function of rows, each read with the frequencies of its own length.   [B, L], [B, L] -> [B, …]"""
        parts = by_length(mask, switch_of(self.backbone))
        if len(parts) == 1:
            return function(ids, mask)
        return torch.cat([function(ids[part], mask[part]) for part in parts])[torch.cat(parts).argsort()]

    def raw(self, ids: Tensor, mask: Tensor, answer: Tensor | None = None) -> Tensor:
        """The head's output at the last real token; with a pooled head, its sum over the answer.   [B, L], [B, L] -> [B]

        answer   True at the answer's tokens; only a pooled head reads it, and needs it   [B, L]

        Raises SurefootError if it is missing.
        """
        if self.pooled:
            if answer is None:
                raise SurefootError("answer=None: a pooled head needs the mask of the answer's tokens; pass it after the mask")
            return self.prefix_scores(ids, mask).masked_fill(~answer, 0).sum(-1)
        return self._by_length(lambda ids, mask: self._score(self._last_hidden(ids, mask)), ids, mask)

    def _score(self, hidden: Tensor) -> Tensor:
        """The head's output, in the dtype of its weights; bfloat16 would round scores to three digits.   [..., d] -> [...]"""
        with torch.autocast(hidden.device.type, enabled=False):
            scores: Tensor = self.head(hidden.to(self.head.weight.dtype)).squeeze(-1)
        return scores

    @property
    def scaled_weight(self) -> Tensor:
        """The head's weight for scores of std 1, as it is written.   [1, width]"""
        return self.head.weight / self.std

    @property
    def offset(self) -> float:
        """The mean score on the demonstrations, which rewards subtract."""
        return float((self.mean - self.head.bias.detach()) / self.std)

    def prefix_scores(self, ids: Tensor, mask: Tensor) -> Tensor:
        """The head's output after every prefix, for use as a critic; undefined outside the mask.   [B, L], [B, L] -> [B, L]"""

        def scores(ids: Tensor, mask: Tensor) -> Tensor:
            read = self._reading(ids, mask)
            of_tokens = self._score(self._hidden(read, mask))
            if read.place is None:
                return of_tokens
            return of_tokens.new_zeros(mask.shape).masked_scatter(mask.bool(), of_tokens)

        return self._by_length(scores, ids, mask)

    @torch.no_grad()
    def standardise(self, raw: Tensor) -> None:
        """Set ``mean`` and ``std`` so that these raw scores become mean 0 and (biased) standard deviation 1.   [N]

        Raises SurefootError if they are not finite or all equal.
        """
        exact = in_float64(raw)
        mean, std = exact.mean(), exact.std(correction=0)
        if not (torch.isfinite(std) and std > 0):
            raise SurefootError(
                f"the reward model's scores have std {float(std):g} on {raw.numel()} demonstrations, so they can't be "
                "standardised; train it longer, or on more pairs"
            )
        self.mean.copy_(mean)
        self.std.copy_(std)

    def save(self, folder: str | Path) -> list[str]:
        """Write model and tokenizer atomically; an older model there is replaced. Return lines for the user, such as that it is
        the model of an unfinished run, whose scores are not standardised.

        Raises SurefootError if the folder contains something else, or if writing fails.
        """
        assert self.tokenizer is not None, "a reward model is saved with its tokenizer"
        tokenizer, pad_id, pads = padding_tokenizer(self.tokenizer)
        of_tokens = self.of_steps or self.pooled
        written = (self.head.weight, pad_id, self.head.bias) if of_tokens else (self.scaled_weight, pad_id)
        classifier = make_classifier(self.backbone, *written)
        lines = []
        if self.recipe is not None and self.mean == 0 and self.std == 1:
            lines.append(
                f"{folder}: its scores are not standardised, because its run has not finished; as a reward, give it a weight "
                "that fits their scale, or resume the run"
            )
        with new_model_folder(Path(folder)) as temporary:
            if classifier is None:
                write_weights(self.backbone, temporary)
                self.tokenizer.save_pretrained(temporary)
                write_head(self, temporary)
                return [
                    *lines,
                    f"{folder}: transformers has no classifier of this family, so only Surefoot reads its head ({HEAD})",
                ]
            numbers = self.offset, float(self.mean), float(self.std), self.head.weight, self.head.bias
            setattr(classifier.config, SCALE, Scale(*numbers, self.pooled, self.plain).record())
            write_weights(classifier, temporary)
            tokenizer.save_pretrained(temporary)
        if not (pads or of_tokens):
            lines.append(
                f"{folder}: the tokenizer has no special token besides EOS to pad with; outside Surefoot, score one text at a "
                "time, since padding with EOS moves the scored token"
            )
        return lines

    @classmethod
    def load(
        cls, folder: str | Path, label: str | None = None, *, trust_remote_code: bool = False, as_stored: bool = False
    ) -> "RewardModel":
        """The reward model in a folder or hub id, in eval mode: one that ``save`` wrote, or a classifier of ``transformers``.

        label       the classifier's label whose logit is the score; None: the only one
        as_stored   keep a trunk that is stored in bfloat16 or float16 so

        Raises SurefootError if there is none, if a part is missing or does not fit, or if it scores only whole texts.
        """
        model = load_reward_model(folder, label, trust_remote_code=trust_remote_code, as_stored=as_stored)
        if isinstance(model, TextClassifier):
            raise SurefootError(
                f"model={str(folder)!r}: {type(model.backbone).__name__} scores only whole texts; use a reward model with a "
                "linear layer on a causal decoder"
            )
        return model

    def _last_hidden(self, ids: Tensor, mask: Tensor) -> Tensor:
        """The hidden state of the last real token.   [B, L], [B, L] -> [B, width]"""
        real = mask.bool() if self.pad_id is None else mask.bool() & (ids != self.pad_id)
        last = (torch.arange(ids.shape[1], device=ids.device) * real).argmax(-1)
        read = self._reading(ids, mask)
        return self._hidden(read, mask)[read.at(torch.arange(len(ids), device=ids.device), last)]

    def _reading(self, ids: Tensor, mask: Tensor) -> Reading:
        return (end_to_end if self.padding_free else Reading)(ids, mask.bool())

    def _hidden(self, read: Reading, mask: Tensor) -> Tensor:
        extra: dict[str, Tensor] = read.options
        if read.place is None:  # padding may come first
            extra = {"attention_mask": mask.long()}
            extra |= {"position_ids": positions(mask)} if self._takes_positions else {}
        with read.laid_out():
            hidden: Tensor = self.backbone(input_ids=read.ids, use_cache=False, **extra).last_hidden_state
        return hidden


def load_reward_model(
    folder: str | Path, label: str | None = None, *, trust_remote_code: bool = False, as_stored: bool = False
) -> RewardModel | TextClassifier:
    """A reward model, or a classifier that scores only whole texts. See ``RewardModel.load``."""
    name = str(folder)
    require_package("transformers", "language", f"reward model {name!r}")
    from transformers import AutoModel

    if name == "pocket":
        raise SurefootError("model='pocket': is not a reward model; train one with kind = 'reward'")
    name = str(Path(name).expanduser()) if is_folder(name) else name
    config = read_config(name, trust_remote_code)
    if not (Path(name) / HEAD).is_file():
        of_tokens = classifier_kind(config, trust_remote_code) == "tokens"
        return _from_classifier(*read_classifier(name, config, label, trust_remote_code, as_stored), of_tokens, name)
    if label is not None:
        raise SurefootError(f"model={name!r}: has no label {label!r}, but one score; unset label")
    backbone = read_weights(AutoModel, name, config, trust_remote_code, as_stored)
    tokenizer = read_tokenizer(name, trust_remote_code)
    check_vocabulary(name, backbone, tokenizer)
    model = RewardModel(backbone, new_head(backbone), tokenizer)
    read_head(model, Path(name))
    return model.eval()


def _from_classifier(
    classifier: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", row: int, of_tokens: bool, name: str
) -> RewardModel | TextClassifier:
    """A RewardModel if trunk and head can be separated; if it was written here, with its head and scale from before scaling.

    A head that was changed since is kept, with the written offset.
    """
    parts = parts_of(classifier, row, of_tokens)
    if parts is None and of_tokens:
        raise SurefootError(
            f"model={name!r}: {type(classifier).__name__} does not score each token from those before it; use a process reward "
            "model with a linear layer on a causal decoder"
        )
    if parts is None:
        return TextClassifier(classifier, tokenizer, row).eval()
    pad_id = None if of_tokens else classifier.config.get_text_config().pad_token_id
    model = RewardModel(*parts, tokenizer, None if pad_id is None else int(pad_id))
    scale = read_scale(classifier.config)
    model.pooled = scale is not None and scale.pooled
    model.of_steps = of_tokens and not model.pooled
    if scale is not None:
        model.plain = scale.plain
        same = is_head(model.head.weight, scale.weight if of_tokens else scale.weight / torch.tensor(scale.std))
        if same:
            model.head.load_state_dict({"weight": scale.weight, "bias": scale.bias})
        model.mean.fill_(scale.mean if same or of_tokens else scale.offset)
        model.std.fill_(scale.std if same or of_tokens else 1)
    return model.eval()


def is_head(written: Tensor, head: Tensor) -> bool:
    """Whether the head in a folder is this one, perhaps rounded to bfloat16."""
    return any(torch.equal(written.detach().float(), x.float()) for x in (head, head.to(torch.bfloat16)))


def copy_standardisation(model: RewardModel, saved: Path) -> None:
    """Copy mean and std from a saved model or adapter, if it has the same head: a run computes them at its end."""
    if saved.is_dir():
        check_folder(saved, str(saved), required=True)
    if (saved / HEAD).is_file():
        with made_from(saved / HEAD):
            tensors = read_tensors(saved / HEAD)
            same, mean, std = torch.equal(tensors["weight"], model.head.weight.detach()), tensors["mean"], tensors["std"]
    elif (saved / "config.json").is_file():
        with made_from(saved):
            if (scale := read_scale(read_only_config(saved))) is None:
                return
            mean, std = torch.tensor(scale.mean), torch.tensor(scale.std)
            same = torch.equal(scale.weight, model.head.weight.detach())
    else:
        return
    if same:
        model.mean.copy_(mean)
        model.std.copy_(std)


def write_head(model: RewardModel, folder: Path) -> None:
    """Write head, mean and standard deviation of a reward model, and how it reads, to a file in a folder."""
    tensors = {**model.head.state_dict(), "mean": model.mean, "std": model.std}
    tensors |= {"pooled": torch.ones(())} if model.pooled else {}
    tensors |= {} if model.plain is None else {"plain": torch.tensor(float(model.plain))}
    save_file({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, folder / HEAD)


def read_head(model: RewardModel, folder: Path) -> None:
    """Read them. Raises SurefootError if the file is damaged or of another width."""
    try:
        tensors = read_tensors(folder / HEAD)
        model.head.load_state_dict({key: tensors.pop(key) for key in ("weight", "bias")})
        model.mean.copy_(tensors.pop("mean"))
        model.std.copy_(tensors.pop("std"))
        model.pooled, plain = bool(tensors.pop("pooled", False)), tensors.pop("plain", None)
        model.plain = None if plain is None else bool(plain)
        for name, tensor in {**model.head.state_dict(), "mean": model.mean, "std": model.std}.items():
            if bad := non_finite_numbers(tensor):
                raise ValueError(f"{name} has numbers that are {bad}")
    except (SafetensorError, OSError, KeyError, RuntimeError, ValueError) as error:
        raise SurefootError(f"model={str(folder)!r}: {HEAD} can't be read ({cause_of(error)}); copy the whole folder") from None


def new_reward_model(
    model: "PreTrainedModel", seed: int, tokenizer: "PreTrainedTokenizerBase | None" = None, *, copied: bool = True
) -> RewardModel:
    """A reward model from a language model: a copy of its trunk (or the trunk itself) and a new head.

    The head's weights are N(0, 1/(d + 1)) for width d, its bias 0 (Stiennon et al. 2020, arXiv 2009.01325).
    """
    backbone: PreTrainedModel = copy.deepcopy(model.base_model) if copied else model.base_model  # type: ignore[assignment]
    assert hasattr(backbone, "save_pretrained"), type(model.base_model)
    head = new_head(backbone)
    with torch.no_grad():
        head.weight.normal_(0, (_hidden_size(backbone) + 1) ** -0.5, generator=stream(seed, "scalar head"))
        head.bias.zero_()
    return RewardModel(backbone, head, tokenizer).eval()


def new_head(backbone: "PreTrainedModel") -> nn.Linear:
    """A linear head with uninitialised weights; initialising it would draw from the global generator."""
    return nn.Linear(_hidden_size(backbone), 1, device="meta").to_empty(device="cpu")


def _hidden_size(model: "PreTrainedModel") -> int:
    return int(model.config.get_text_config().hidden_size)
