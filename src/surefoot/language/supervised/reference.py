"""The frozen reference of DPO, IPO and KTO: log-probabilities of every answer, computed once before training."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from surefoot.core.minibatches import groups_by_length
from surefoot.core.rollout import map_tensors
from surefoot.language.data.batches import row_lengths
from surefoot.language.data.tokens import Tokens
from surefoot.language.language_model import check_compatible, errors_for, load_base, model_folder
from surefoot.language.models.adapters import SharedBase, weights_hash
from surefoot.language.models.loading import load_model
from surefoot.language.models.placement import keeps_stored, place, shard_role, sharding_of
from surefoot.language.models.policy import LanguagePolicy
from surefoot.language.models.policy.passes import in_micro_batches
from surefoot.language.supervised.demonstrations import Batch, Rows, RowTensors, batches
from surefoot.language.supervised.preferences import REFERENCE, sides_of
from surefoot.ranks.collectives import all_max, exchange, exchanging, share, together
from surefoot.recipes.supervised import DpoRecipe
from surefoot.sharding import block_by_block

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ReferenceLogProbs:
    """Adds the reference's log-probabilities to rows. They are computed once, when first needed; the model is then freed.

    rows      whose tensors include them from now on
    compute   returns Σ log π_ref of both sides of the first rows of some, as many as its second argument   -> [n, 2]
    read      the rows that will be read; any other is computed when it is
    """

    def __init__(self, rows: Rows, compute: Callable[[RowTensors, int], Tensor], read: Iterable[int]) -> None:
        self.plain, self._compute, self._read = rows.tensors, compute, frozenset(read)
        self._values = torch.full((rows.count, 2), torch.nan)
        self._known = torch.zeros(rows.count, dtype=torch.bool)
        rows.tensors = self.tensors

    @property
    def values(self) -> Tensor:
        """Σ log π_ref of both sides, on the CPU; NaN for rows that are not read.   [N, 2]"""
        self._make(())
        return self._values

    @values.setter
    def values(self, values: Tensor) -> None:
        self._values = values.cpu()
        self._known = ~self._values.isnan().any(-1)

    def _make(self, rows: Sequence[int]) -> None:
        """Compute what is missing of ``rows`` and of all that will be read."""
        wanted, self._read = torch.tensor(sorted(self._read.union(rows)), dtype=torch.long), frozenset()
        missing = wanted[~self._known[wanted]].tolist()
        if missing:
            self._values[missing] = self._compute(lambda some: self.plain([missing[n] for n in some]), len(missing)).cpu()
            self._known[missing] = True

    def tensors(self, rows: Sequence[int]) -> Batch:
        """The rows with their reference log-probabilities."""
        inputs, actions, mask = self.plain(rows)
        self._make(rows)
        return {**inputs, REFERENCE: self._values[list(rows)]}, actions, mask


class Reference:
    """The frozen model of a recipe. Every call loads it again, so it takes no memory in between. Several ranks share the rows;
    with sharding also the model, whose blocks are gathered one at a time.

    shared  a model with adapters and its base: unless the recipe names another, the reference is that model without adapters
    root    the sharded policy that holds the shared model, once it is sharded

    Raises SurefootError when ``reference.model`` can't be read, or does not read the policy's tokens.
    """

    def __init__(
        self, recipe: DpoRecipe, tokens: Tokens, longest: int, shared: "tuple[PreTrainedModel, SharedBase] | None" = None
    ) -> None:
        self.recipe, self.tokens, self.longest = recipe, tokens, longest
        self.shared = shared if recipe.reference.model is None else None
        self.root: nn.Module | None = None
        self.limits: tuple[int | None, int | None] = (recipe.optimizer.micro_batch_tokens, recipe.optimizer.micro_batch)
        """tokens and rows of a pass"""
        self.of_shared = None if self.shared is None else self._policy(self.shared[0])  # it is tested while it is whole
        self.hash = None if recipe.reference.model is None else weights_hash(self._model())
        """of the weights that the recipe names as the reference's"""

    @torch.no_grad()
    def log_probs(self, tensors: RowTensors, count: int) -> Tensor:
        """Σ log π_ref of both sides of the first ``count`` rows; all ranks call this.   -> [count, 2]"""
        recipe, sharding = self.recipe, sharding_of(self.recipe)
        with together():
            policy = self.of_shared or self._policy(self._model())
        if sharding is None and self.shared is None:
            place(policy.requires_grad_(False), recipe)
        elif sharding is None:
            policy.to(recipe.device)
        elif self.shared is None:
            shard_role(policy, sharding, frozen=True)
        mine = share(count)

        def of_rank() -> Iterator[Batch]:
            return batches(lambda rows: tensors([mine.start + n for n in rows]), len(mine), recipe.data.batch, recipe.device)

        def summed(inputs: Mapping[str, Tensor], actions: Tensor, mask: Tensor) -> Tensor:
            log_probs: Tensor = policy(inputs, actions, mask).log_probs
            return log_probs.sum(-1)

        def scored() -> list[Tensor]:
            return [
                torch.stack([in_micro_batches(summed, *side, *self.limits) for side in sides_of(inputs)], -1).cpu()
                for inputs, _, _ in of_rank()
            ]

        with nullcontext() if self.shared is None else self.shared[1].using(None):
            if sharding is None:
                with together():
                    sums = scored()
            else:
                # Passes are exchanges, so a rank with fewer of them repeats a row that does not count.
                sides = (side for inputs, _, _ in of_rank() for side in sides_of(inputs))
                own = sum(len(groups_by_length(row_lengths(prompt, mask), *self.limits)) for prompt, _, mask in sides)
                spare = int(all_max(torch.tensor(own))) - own
                with block_by_block(policy if self.root is None else self.root), exchanging():
                    sums = scored()
                    row = map_tensors(lambda x: x.to(recipe.device), tensors([0]))[0]
                    for _ in range(spare):
                        summed(*sides_of(row)[0])
        return torch.cat([of_one for of_one in exchange(torch.cat(sums) if sums else None) if of_one is not None])

    def _policy(self, model: "PreTrainedModel") -> LanguagePolicy:
        options = {"bf16": self.recipe.autocast, "padding_free": self.recipe.padding_free}
        return LanguagePolicy(model, None, self.tokens.pad_id, **options)

    def _model(self) -> "PreTrainedModel":
        name = self.recipe.reference.model
        if name is None:
            return load_base(self.recipe)[0]
        stored: dict[str, Any] = {"as_stored": keeps_stored(self.recipe)}
        with errors_for("reference.model"):
            model, tokenizer = load_model(model_folder(name), trust_remote_code=self.recipe.trust_remote_code, **stored)
        check_compatible("reference.model", name, (model, tokenizer), self.recipe, self.tokens, self.longest)
        return model
