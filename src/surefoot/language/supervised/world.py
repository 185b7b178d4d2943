"""Learning from given rows: demonstrations (SFT) and pairs (a reward model, DPO).

All are REINFORCE in which every row is worth 1: log π of what was demonstrated, or of the answer that was chosen, weighted by
a return of 1 (γ = 0). That is cross-entropy, and the loop, the loss and the learner are the same as everywhere.
"""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surefoot.core.distributed import check_device
from surefoot.core.rollout import EvaluationReport, LearnerState, Metrics, Rollout, map_tensors
from surefoot.errors import SurefootError
from surefoot.language.adapters.files import add_adapter, base_record, load_trained, trained_weights
from surefoot.language.adapters.layers import DropoutGenerator
from surefoot.language.analysis.metrics import mean_log_likelihood
from surefoot.language.data import datasets as data
from surefoot.language.data.batches import EpochSampler
from surefoot.language.data.rows import check_row_count, check_unchanged, read_rows
from surefoot.language.data.tokens import Tokens, decode_row, right_padded
from surefoot.language.memory.check import MemoryCheck, guaranteed_length
from surefoot.language.models.language_model import (
    LanguageModel,
    describe_model,
    load_base,
    load_best_weights,
    model_folder,
    save_result,
)
from surefoot.language.models.loading import context_length
from surefoot.language.models.policy import LanguagePolicy
from surefoot.language.models.reward_model import RewardModel, new_reward_model
from surefoot.language.supervised.demonstrations import Batch, Rows, demonstration_rows, scored
from surefoot.language.supervised.dpo import Anchor, AnchoredPairPolicy, Reference, answer_rows, judged, trained_tokens
from surefoot.language.supervised.preferences import CHOSEN, REJECTED, PairPolicy
from surefoot.recipes.language import DpoRecipe, RewardRecipe, SftRecipe, SupervisedRecipe
from surefoot.recipes.reading import to_table


class RowCollector:
    """The next rows of a walk, as a rollout in which every action is worth 1; or of a pair's two labels, each its ``worth``.

    ``noise`` is what learning from them draws from.
    """

    def __init__(
        self,
        rows: Rows,
        batch: int,
        seed: int,
        device: str = "cpu",
        worth: Sequence[float] | None = None,
        noise: DropoutGenerator | None = None,
    ) -> None:
        self.rows, self.batch, self.walk, self.device, self.worth = rows, batch, EpochSampler(rows.count, seed), device, worth
        self.noise = noise

    def collect(self, state: LearnerState) -> Rollout:
        """No sampling: the rows are what the policy should have done."""
        if self.noise is not None:
            self.noise.start_batch(state.iteration, state.faults)
        inputs, actions, mask = self.rows.tensors(self.walk.next(self.batch))
        tokens = float(mask.sum()) if self.worth is None else trained_tokens(inputs)
        inputs, actions, mask = map_tensors(lambda x: x.to(self.device), (inputs, actions, mask))
        last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
        zeros = torch.zeros(mask.shape, device=mask.device)
        return Rollout(
            inputs=inputs,
            actions=actions,
            mask=mask,
            old_log_probs=None,
            values=zeros,
            next_values=zeros,
            rewards=mask.float() if self.worth is None else mask * torch.tensor(self.worth, device=mask.device),
            terminated=last,
            truncated=torch.zeros_like(mask),
            unit="row",
            steps=len(actions),
            metrics={"data_epochs": self.walk.epochs, "tokens": tokens},
        )

    def state_dict(self) -> dict[str, Any]:
        """Where the walk stands."""
        return self.walk.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        self.walk.load_state_dict(state)


def pair_rows(path: str, tokens: Tokens, limit: int, said: str = "") -> Rows:
    """The pairs in a file whose answers have at most ``limit`` tokens each; ``said`` is how a message says so (``data.room``).

    Raises SurefootError, with file and line, for what is not such a file, and when every pair is too long.
    """
    pairs = data.pairs(read_rows(path), tokens, limit, said)
    both = list(zip(pairs.chosen, pairs.rejected, strict=True))
    lengths = [max(map(len, pair)) for pair in both]
    tensors = partial(pair_tensors, pairs, pad_id=tokens.pad_id)
    return Rows(tensors, both, lengths, [0] * len(both), data.pair_drop_notes(path, limit, pairs))


def pair_tensors(pairs: data.Pairs, rows: Sequence[int], pad_id: int) -> Batch:
    """Both answers with their prompt, and the choice of the first in every row."""
    inputs = {}
    for side, ids in ((CHOSEN, pairs.chosen), (REJECTED, pairs.rejected)):
        inputs[side], inputs[f"{side}_mask"] = right_padded([ids[row] for row in rows], pad_id)
    return inputs, torch.zeros(len(rows), 1, dtype=torch.long), torch.ones(len(rows), 1, dtype=torch.bool)


class SupervisedWorld:
    """What a recipe of kind "sft", "reward" or "dpo" is made of."""

    exports_model = True
    auxiliary_loss = None

    def __init__(self, recipe: SupervisedRecipe) -> None:
        check_device(recipe.device)
        self.recipe = recipe
        self.memory = MemoryCheck(recipe)
        self.preference = isinstance(recipe, RewardRecipe)
        model, self.tokens = load_base(recipe)
        self.base = add_adapter(recipe, model, model_folder(recipe.model))
        """where an adapter is trained: what it belongs to"""
        self.room = data.token_limit(recipe.data.max_length, context_length(model))
        """tokens of a row at most: what the recipe allows and the model was made for"""
        self.model_summary = [] if self.base is None else [self.base.summary()]
        self.warnings: list[str] = []
        train = self._rows(recipe.data.train)
        self.held_out = None
        if recipe.data.held_out is not None and recipe.evaluation.rows:
            self.held_out = self._rows(recipe.data.held_out)
        self.shown = self._demonstrated() if self.preference else []
        longest, trained = guaranteed_length(train.lengths, recipe.steps), sum(train.trained) // train.count
        self.warnings += self.memory.check(
            prompt=longest - trained,
            response=trained,
            most=trained,
            evaluated=0 if self.held_out is None else min(self.held_out.count, recipe.evaluation.rows),
        )
        bf16 = recipe.precision == "bfloat16"
        self.policy: LanguagePolicy | PairPolicy | AnchoredPairPolicy
        self.anchor: Anchor | None = None
        worth = None
        self.result: LanguageModel | RewardModel
        if self.preference:
            self.result = new_reward_model(model, recipe.seed, self.tokens.tokenizer, copied=self.base is None)
            self.policy = PairPolicy(self.result, bf16, recipe.gradient_checkpointing)
        else:
            self.result = LanguageModel(model, self.tokens)
            self.policy = LanguagePolicy(
                model,
                None,
                self.tokens.pad_id,
                checkpointing=recipe.gradient_checkpointing,
                bf16=bf16,
                balanced=recipe.objective.router_coefficient > 0,
            )
        if isinstance(recipe, DpoRecipe):
            held_out = () if self.held_out is None else self.held_out.lengths
            shared = None if self.base is None else (model, self.base)
            reference = Reference(recipe, self.tokens, max([*train.lengths, *held_out]), shared)
            self.policy = AnchoredPairPolicy(self.policy, recipe.reference.beta, recipe.preference.loss == "ipo")
            self.anchor, wrong = Anchor(train, reference.ask), recipe.preference.label_smoothing
            worth = (1 - wrong, wrong)
            if self.held_out is not None:
                Anchor(self.held_out, reference.ask, recipe.evaluation.rows)
        self.policy.to(recipe.device)
        self.collector = RowCollector(
            train, recipe.data.batch, recipe.seed, recipe.device, worth, None if self.base is None else self.base.noise
        )

    def _demonstrated(self) -> list[list[int]]:
        """What a reward model's scores are to have mean 0 and standard deviation 1 on."""
        assert isinstance(self.recipe, RewardRecipe)
        if self.recipe.demonstrations is None:
            return data.pairs(read_rows(self.recipe.data.train), self.tokens, *self.room).chosen
        found = data.demonstrations(read_rows(self.recipe.demonstrations), self.tokens, *self.room)
        self.warnings += data.drop_notes(self.recipe.demonstrations, self.room[0], found.dropped, unused=found.unused)
        if len(found.ids) < 2:
            raise SurefootError(f"{self.recipe.demonstrations}: one row has no standard deviation; give at least two")
        return found.ids

    def _rows(self, path: str) -> Rows:
        anchored = isinstance(self.recipe, DpoRecipe)
        read = pair_rows if self.preference else answer_rows if anchored else demonstration_rows
        rows = read(path, self.tokens, *self.room)
        self.warnings += rows.notes
        return rows

    def arithmetic(self) -> list[str]:
        """Parameter counts and what the recipe comes to."""
        recipe, rows = self.recipe, self.collector.rows.count
        parameters = sum(p.numel() for p in self.policy.parameters() if p.requires_grad)
        return [
            *self.model_summary,
            *self.warnings,
            f"parameters: {parameters:,}",
            f"rows: {rows:,}; {recipe.steps:,} steps are {recipe.steps / rows:.2f} epochs",
            f"updates: {recipe.steps:,} / {recipe.data.batch} = {-(-recipe.steps // recipe.data.batch):,}",
            *self.memory.summary(),
        ]

    @property
    def frozen(self) -> dict[str, str]:
        """The print of the model that a checkpoint does not hold: the base of an adapter."""
        return {} if self.base is None else {f"base model={self.recipe.model!r}": self.base.hash}

    @property
    def sources(self) -> dict[str, str]:
        """Prints of what a checkpoint does not hold."""
        return self.frozen | {f"data.train={self.recipe.data.train!r}": self.collector.rows.print}

    def trees(self) -> dict[str, Any]:
        """Weights, and what is needed to make a model of them."""
        return {
            "sources": self.sources,
            "agent": trained_weights(self.policy),
            "recipe": to_table(self.recipe),
            "model": describe_model(self._model, self.tokens.tokenizer),
            **({} if self.anchor is None else {"reference": {"log_probs": self.anchor.known}}),
            **base_record(self.base),
        }

    @property
    def _model(self) -> torch.nn.Module:
        return self.result if isinstance(self.result, RewardModel) else self.result.model

    def load(self, trees: dict[str, Any], where: Path) -> list[str]:
        """Take weights and the place in the data from a checkpoint."""
        check_row_count(self.recipe.data.train, trees["collector"]["count"], self.collector.rows.count)
        check_unchanged(trees.get("sources", {}), self.sources)
        load_trained(self.policy, trees["agent"], where)
        if self.anchor is not None:
            self.anchor.known = trees["reference"]["log_probs"]
        self.collector.load_state_dict(trees["collector"])
        return []

    @torch.no_grad()
    def evaluate(self) -> EvaluationReport | None:
        """Cross-entropy on the held-out rows, and for pairs how often the chosen answer has the higher score."""
        if self.held_out is None:
            return None
        rows, batch = self.recipe.evaluation.rows, self.recipe.data.batch
        if isinstance(self.policy, AnchoredPairPolicy):
            assert isinstance(self.recipe, DpoRecipe)
            told = judged(self.policy, self.held_out, rows, self.recipe)
            loss = told["held_out_loss"]
            return EvaluationReport(None if loss is None else -loss, told)
        most = (self.recipe.optimizer.micro_batch_tokens, self.recipe.optimizer.micro_batch)
        found = list(scored(self.policy, self.held_out, rows, batch, self.recipe.device, *most))
        likelihood = mean_log_likelihood(found)
        assert likelihood is not None, "data without a trained token is refused"
        metrics: Metrics = {"held_out_loss": -likelihood}
        if self.preference:
            right = sum(int((log_probs > -math.log(2.0)).sum()) for log_probs, _ in found)
            metrics["held_out_accuracy"] = right / sum(len(mask) for _, mask in found)
        return EvaluationReport(likelihood, metrics)  # also of pairs: less coarse than the accuracy

    def describe(self, rollout: Rollout, row: int, steps: slice) -> dict[str, Any]:
        """Prompt and tokens as text; of a choice between two answers nothing."""
        return {} if not isinstance(self.recipe, SftRecipe) else decode_row(self.tokens, rollout, row, steps)

    def finish(self, folder: Path) -> list[str]:
        """Write the best model (the last, where nothing was held out) to ``model/``, for transformers and for other runs."""
        load_best_weights(self.policy, folder)
        if isinstance(self.result, RewardModel):
            self.result.standardise(self._raw_scores())
        return save_result(self.result, folder, self.recipe, self.base)

    @torch.no_grad()
    def _raw_scores(self) -> Tensor:
        """Scores of what is to have mean 0 and standard deviation 1: demonstrations, or the chosen answers trained on."""
        assert isinstance(self.policy, PairPolicy)
        texts, batch = self.shown, self.recipe.data.batch
        parts = (right_padded(texts[start : start + batch], self.tokens.pad_id) for start in range(0, len(texts), batch))
        device = self.recipe.device
        return torch.cat([self.policy.model.raw(ids.to(device), mask.to(device)) for ids, mask in parts])

    def close(self) -> None:
        """Nothing is open."""
