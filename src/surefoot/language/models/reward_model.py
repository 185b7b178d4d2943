"""A reward model: a language model's trunk with a scalar head."""

import copy
import inspect
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from surefoot.core.seeding import stream
from surefoot.errors import SurefootError, cause_of
from surefoot.language import require_transformers
from surefoot.language.data.tokens import positions
from surefoot.language.models.adapters import merged_state
from surefoot.language.models.loading import (
    HEAD,
    atomic_folder,
    check_vocabulary,
    read_config,
    read_tokenizer,
    read_weights,
)
from surefoot.language.models.loading import pocket as pocket
from surefoot.recipes.language import ModelRecipe
from surefoot.runs.checkpoint import non_finite_numbers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class RewardModel(nn.Module):
    """A language model's trunk with a scalar head, read at the last real token.

    backbone    returns the hidden states of every token
    head        Linear(width, 1)
    tokenizer   turns text into ids: a reward model reads text, from any policy

    A score is (head's output − ``mean``) / ``std``; they are 0 and 1 until ``standardise`` is called.
    """

    mean: Tensor
    std: Tensor
    recipe: ModelRecipe | None = None
    """the recipe that it was trained by; None for a model from elsewhere"""

    def __init__(
        self, backbone: "PreTrainedModel", head: nn.Linear, tokenizer: "PreTrainedTokenizerBase | None" = None
    ) -> None:
        super().__init__()
        self.backbone, self.head, self.tokenizer = backbone, head, tokenizer
        self._takes_positions = "position_ids" in inspect.signature(getattr(backbone, "reader", backbone).forward).parameters
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("std", torch.ones(()))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Scores of whole texts, padded left or right.   ids [B, L], mask [B, L] -> [B]"""
        return (self.raw(ids, mask) - self.mean) / self.std

    def raw(self, ids: Tensor, mask: Tensor) -> Tensor:
        """The head's output at the last real token.   [B, L], [B, L] -> [B]"""
        last = ids.shape[1] - 1 - mask.long().flip(-1).argmax(-1)
        hidden = self._hidden(ids, mask)[torch.arange(len(ids), device=ids.device), last]
        scores: Tensor = self.head(hidden).squeeze(-1)
        return scores

    def prefix_scores(self, ids: Tensor, mask: Tensor) -> Tensor:
        """The head's output after every prefix, for use as a critic; undefined outside the mask.   [B, L], [B, L] -> [B, L]"""
        scores: Tensor = self.head(self._hidden(ids, mask)).squeeze(-1)
        return scores

    @torch.no_grad()
    def standardise(self, raw: Tensor) -> None:
        """Set ``mean`` and ``std`` so that these raw scores become mean 0 and (biased) standard deviation 1.   [N]

        Raises SurefootError if they are not finite or all equal.
        """
        mean, std = raw.double().mean(), raw.double().std(correction=0)
        if not (torch.isfinite(std) and std > 0):
            raise SurefootError(
                f"the reward model's scores have std {float(std):g} on {raw.numel()} demonstrations, so they can't be "
                "standardised; train it longer, or on more pairs"
            )
        self.mean.copy_(mean)
        self.std.copy_(std)

    def save(self, folder: str | Path) -> None:
        """Write backbone, head and tokenizer atomically; an older model there is replaced.

        Raises SurefootError if the folder contains something else, or if writing fails.
        """
        assert self.tokenizer is not None, "a reward model is saved with its tokenizer"
        with atomic_folder(Path(folder)) as temporary:
            self.backbone.save_pretrained(temporary, state_dict=merged_state(self.backbone))
            self.tokenizer.save_pretrained(temporary)
            write_head(self, temporary)

    @classmethod
    def load(cls, folder: str | Path, *, trust_remote_code: bool = False) -> "RewardModel":
        """The reward model in a folder that ``save`` wrote, in eval mode.

        Raises SurefootError if there is none, or if a part is missing or does not fit.
        """
        name = str(Path(folder).expanduser())
        require_transformers(f"reward model {name!r}")
        from transformers import AutoModel

        path = Path(name)
        if not path.is_dir():
            raise SurefootError(f'model={name!r}: no such folder; give a folder that kind = "reward" training wrote')
        if not (path / HEAD).is_file():
            raise SurefootError(f'model={name!r}: has no {HEAD}, so it is not a reward model; train one with kind = "reward"')
        config = read_config(name, trust_remote_code)
        backbone = read_weights(AutoModel, name, config, trust_remote_code)
        tokenizer = read_tokenizer(name, trust_remote_code)
        check_vocabulary(name, backbone, tokenizer)
        model = cls(backbone, new_head(backbone), tokenizer)
        read_head(model, path)
        return model.eval()

    def _hidden(self, ids: Tensor, mask: Tensor) -> Tensor:
        extra = {"position_ids": positions(mask)} if self._takes_positions else {}
        output = self.backbone(input_ids=ids, attention_mask=mask.long(), use_cache=False, **extra)
        hidden: Tensor = output.last_hidden_state
        return hidden


def write_head(model: RewardModel, folder: Path) -> None:
    """Write head, mean and standard deviation of a reward model to a file in a folder."""
    tensors = {**model.head.state_dict(), "mean": model.mean, "std": model.std}
    save_file({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, folder / HEAD)


def read_head(model: RewardModel, folder: Path) -> None:
    """Read them. Raises SurefootError if the file is damaged or of another width."""
    try:
        tensors = load_file(folder / HEAD)
        model.head.load_state_dict({key: tensors.pop(key) for key in ("weight", "bias")})
        model.mean.copy_(tensors.pop("mean"))
        model.std.copy_(tensors.pop("std"))
        for name, tensor in {**model.head.state_dict(), "mean": model.mean, "std": model.std}.items():
            if bad := non_finite_numbers(tensor):
                raise ValueError(f"{name} holds numbers that are {bad}")
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
