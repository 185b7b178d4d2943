"""Trains on fixed rows: demonstrations (SFT), pairs of answers and labelled answers (reward models, DPO, KTO).

All of them are REINFORCE with a return of 1 (γ = 0) for the demonstrated tokens, or for the choice of the chosen answer. That
is cross-entropy, so the loop, the loss and the learner are those of every other run.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from surefoot.core.learner import Learner
from surefoot.core.rollout import EvaluationReport, LearnerState, Metrics, Rollout, map_tensors
from surefoot.errors import SurefootError
from surefoot.functional.masking import last_kept
from surefoot.language.blocks import compile_blocks, eager_blocks
from surefoot.language.data import datasets as data
from surefoot.language.data.batches import EpochSampler, FromData
from surefoot.language.data.rows import check_row_count, check_unchanged
from surefoot.language.data.sources import open_rows
from surefoot.language.data.tokens import decode_row
from surefoot.language.language_model import (
    LanguageModel,
    load_base,
    load_best_weights,
    model_files,
    model_folder,
    result_of_shards,
    save_result,
)
from surefoot.language.memory.check import MemoryCheck, guaranteed_length
from surefoot.language.memory.workload import BatchShape
from surefoot.language.metrics import loses_chosen, mean_log_likelihood
from surefoot.language.models.adapter_files import add_adapter, base_record, load_trained, set_reading, trained_weights
from surefoot.language.models.adapters import DropoutGenerator, weights_hash
from surefoot.language.models.loading import context_length
from surefoot.language.models.padding_free import padding_notes
from surefoot.language.models.pair_policy import ANSWER, PairPolicy
from surefoot.language.models.placement import place, shard_role, sharding_of
from surefoot.language.models.policy import LanguagePolicy
from surefoot.language.models.policy.lengths import check_length
from surefoot.language.models.reward_model import RewardModel, new_reward_model
from surefoot.language.supervised.demonstrations import Batch, Rows, batches, demonstration_rows, row_log_probs
from surefoot.language.supervised.labels import (
    BASELINE,
    KtoPolicy,
    StepPolicy,
    good_answers,
    kto_rows,
    label_notes,
    label_weights,
    scored_rows,
    step_notes,
    step_rows,
    step_scores,
)
from surefoot.language.supervised.preferences import REFERENCE, DpoPolicy, dpo_rows, pair_rows, scored_side, trained_tokens
from surefoot.language.supervised.reference import Reference, ReferenceLogProbs
from surefoot.ranks.collectives import check_device, exchanging, sum_count
from surefoot.recipes.supervised import DpoRecipe, RewardRecipe, SftRecipe, SupervisedRecipe
from surefoot.sharding import block_by_block

Made = TypeVar("Made", bound=data.Tokenised)
ScoredTexts = tuple[Sequence[list[int]], Sequence[list[bool]]]
"""the ids of texts, and which of them are the answer's"""


class RowCollector(FromData):
    """The next rows of the data as a rollout in which every action has reward 1; if the actions are labels, their weight.

    label_weights   reward of each label; none: 1
    noise           what training draws dropout from
    complete        adds what the policy's present weights decide to the inputs of a batch, with metrics
    """

    def __init__(
        self,
        rows: Rows,
        batch: int,
        seed: int,
        device: str = "cpu",
        label_weights: Sequence[float] | None = None,
        noise: DropoutGenerator | None = None,
        complete: Callable[[Mapping[str, Tensor]], tuple[dict[str, Tensor], Metrics]] | None = None,
    ) -> None:
        self.rows, self.batch, self.sampler, self.device = rows, batch, EpochSampler(rows.count, seed), device
        self.label_weights, self.noise, self.complete = label_weights, noise, complete

    def collect(self, state: LearnerState) -> Rollout:
        """The next rows: nothing is sampled."""
        if self.noise is not None:
            self.noise.start_batch(state.iteration, state.faults)
        weights = self.label_weights
        inputs, actions, mask = self.rows.tensors(self.sampler.next(self.batch))
        tokens = float(sum_count(int(mask.sum() if weights is None else trained_tokens(inputs)), mask))
        inputs, actions, mask = map_tensors(lambda x: x.to(self.device), (inputs, actions, mask))
        metrics: Metrics = {}
        if self.complete is not None:
            inputs, metrics = self.complete(inputs)
        last = last_kept(mask)
        zeros = torch.zeros(mask.shape, device=mask.device)
        return Rollout(
            inputs=inputs,
            actions=actions,
            mask=mask,
            old_log_probs=None,
            values=zeros,
            next_values=zeros,
            rewards=mask.float() if weights is None else mask * torch.tensor(weights, device=mask.device)[actions],
            terminated=last,
            truncated=torch.zeros_like(mask),
            unit="row",
            steps=len(actions),
            metrics={"data_epochs": self.sampler.epochs, "tokens": tokens, **metrics},
        )


class SupervisedWorld:
    """The model, rows and evaluation of a recipe of kind "sft", "reward" or "dpo"."""

    exports_model = True
    auxiliary_loss = None

    def __init__(self, recipe: SupervisedRecipe) -> None:
        check_device(recipe.device)
        self.recipe = recipe
        self.memory = MemoryCheck(recipe)
        self.preference = isinstance(recipe, RewardRecipe)
        model, self.tokens = load_base(recipe)
        self.base = add_adapter(recipe, model, model_folder(recipe.model))
        """with an adapter: the base that it belongs to"""
        self.frozen = {} if self.base is None else {f"base model={recipe.model!r}": self.base.hash}
        """hashes of the models that a checkpoint does not contain: the base of an adapter, and the reference"""
        self.token_limits = data.token_limit(recipe.data.max_length, context_length(model))
        """the most tokens of a row, by the recipe and the model's context, and how messages call that limit"""
        self.model_summary = [] if self.base is None else [self.base.summary()]
        self.warnings: list[str] = recipe.notes(model.num_parameters())
        self.plain: bool | None = None
        train = self._rows(recipe.data.train)
        self.held_out = None
        if recipe.data.held_out is not None and recipe.evaluation.rows:
            self.held_out = self._rows(recipe.data.held_out)
        self.standardised_on: ScoredTexts = self._standardised_on() if self.preference else ((), ())
        longest = guaranteed_length(train.lengths, recipe.steps, recipe.padding_free)
        check_length(recipe, model, max(train.lengths))
        trained = sum(train.trained) // train.count
        self.warnings += self.memory.check(
            prompt=longest - trained,
            response=trained,
            most=trained,
            evaluated=0 if self.held_out is None else min(self.held_out.count, recipe.evaluation.rows),
            together=2 if recipe.padding_free and isinstance(recipe, DpoRecipe) else 1,
        )
        self.result: LanguageModel | RewardModel
        self.policy: LanguagePolicy | PairPolicy | DpoPolicy | KtoPolicy
        if isinstance(recipe, RewardRecipe):
            self.result = self._reward_model(recipe, model)
            kind = StepPolicy if self.result.of_steps else PairPolicy
            self.policy = kind(self.result, recipe.autocast, recipe.gradient_checkpointing, recipe.padding_free)
        else:
            self.result = LanguageModel(model, self.tokens, recipe)
            self.policy = self._language_policy(model)
        self.model_summary += padding_notes(recipe, self.policy.padding_reason)
        if isinstance(self.policy, LanguagePolicy | PairPolicy) and recipe.engine == "compiled":
            compile_blocks(self.policy)
        self.reference: ReferenceLogProbs | None = None
        self.frozen_model: Reference | None = None
        weights = complete = None
        if isinstance(recipe, DpoRecipe):
            if recipe.has_reference:
                self.reference = self._reference(recipe, train, model)
            if recipe.preference.loss == "kto":
                self.policy = KtoPolicy(self.policy, recipe.reference.beta)
                weights, complete = label_weights(recipe.preference), partial(self.policy.with_baseline, recipe=recipe)
            else:
                preference = recipe.preference
                self.policy = DpoPolicy(self.policy, recipe.reference.beta, preference.loss, preference.margin)
                weights = (1 - recipe.preference.label_smoothing, recipe.preference.label_smoothing)
        self.sharding = sharding_of(recipe)
        self._place(train)
        noise = None if self.base is None else self.base.noise
        self.collector = RowCollector(train, recipe.data.batch, recipe.seed, recipe.device, weights, noise, complete)

    def _reward_model(self, recipe: RewardRecipe, model: Any) -> RewardModel:
        result = new_reward_model(model, recipe.seed, self.tokens.tokenizer, copied=self.base is None)
        result.recipe, result.plain = recipe, self.plain
        set_reading(result, recipe.table)
        return result

    def _language_policy(self, model: Any) -> LanguagePolicy:
        return LanguagePolicy(
            model,
            None,
            self.tokens.pad_id,
            checkpointing=self.recipe.gradient_checkpointing,
            bf16=self.recipe.autocast,
            balanced=self.recipe.objective.router_coefficient > 0,
            padding_free=self.recipe.padding_free,
        )

    def _place(self, train: Rows) -> None:
        """Move the policy to its device, or shard it."""
        if self.sharding is None:
            place(self.policy, self.recipe)
            return
        shard_role(self.policy, self.sharding)
        if self.frozen_model is not None and self.frozen_model.shared is not None:
            self.frozen_model.root = self.policy
        for rows in (train, self.held_out):
            if self.reference is not None and rows is not None:
                rows.tensors([0])  # the reference scores them now, not within another pass of the policy

    def _reference(self, recipe: DpoRecipe, train: Rows, model: Any) -> ReferenceLogProbs:
        """Adds the reference's log-probabilities to the rows of training and evaluation."""
        held_out = () if self.held_out is None else self.held_out.lengths
        shared = None if self.base is None else (model, self.base)
        reference = self.frozen_model = Reference(recipe, self.tokens, max([*train.lengths, *held_out]), shared)
        if reference.hash is not None:
            self.frozen[f"reference.model={recipe.reference.model!r}"] = reference.hash
        elif shared is None:
            self.frozen[f"reference of model={recipe.model!r}"] = weights_hash(model)
        if self.held_out is not None:
            ReferenceLogProbs(self.held_out, reference.log_probs, range(min(recipe.evaluation.rows, self.held_out.count)))
        batches = -(-recipe.steps // recipe.data.batch)
        read = EpochSampler(train.count, recipe.seed).first(batches * recipe.data.batch)
        return ReferenceLogProbs(train, reference.log_probs, read)

    def _standardised_on(self) -> ScoredTexts:
        """The texts on which a reward model's scores get mean 0 and standard deviation 1."""
        assert isinstance(self.recipe, RewardRecipe)
        settings = self.recipe.data
        if self.recipe.preference.loss == "steps":
            return (), ()  # the steps themselves, of data.train
        if self.recipe.demonstrations is None and self.recipe.preference.loss == "binary":
            texts = good_answers(self._read(settings.train, data.labelled))
            if len(texts[0]) < 2:
                raise SurefootError(
                    f"{settings.train}: one good answer has no standard deviation; add at least one more, or set demonstrations"
                )
            return texts
        if self.recipe.demonstrations is None:
            pairs = self._read(settings.train, data.pairs)
            return pairs.chosen, pairs.chosen_trained
        rows = data.demonstrations(open_rows(self.recipe.demonstrations), self.tokens, *self.token_limits)
        self.warnings += data.drop_notes(self.recipe.demonstrations, self.token_limits[0], rows)
        if len(rows.ids) < 2:
            raise SurefootError(f"{self.recipe.demonstrations}: one row has no standard deviation; add at least one more")
        return rows.ids, rows.trained

    def _read(self, path: str, read: Callable[..., Made], **options: Any) -> Made:
        """What a file has, as ids of at most as many tokens as a row may have."""
        settings = self.recipe.data
        source = open_rows(path, settings.columns)
        return read(source, self.tokens, *self.token_limits, control=settings.control_tokens, **options)

    def _rows(self, path: str) -> Rows:
        """The rows of a file. Raises SurefootError, with file and line, if it is invalid, if every row is too long, and if what
        is learned from has one label.
        """
        recipe, pad_id = self.recipe, self.tokens.pad_id
        made: data.Tokenised
        if isinstance(recipe, RewardRecipe) and recipe.preference.loss == "steps":
            made = steps = self._read(path, data.stepped, separator=recipe.preference.separator)
            self.warnings += step_notes(path, steps)
            rows = step_rows(steps, pad_id)
        elif isinstance(recipe, RewardRecipe) and recipe.preference.loss == "binary":
            made = answers = self._read(path, data.labelled)
            self.warnings += label_notes(path, answers, "a reward model")
            rows = scored_rows(answers, pad_id)
        elif isinstance(recipe, DpoRecipe) and recipe.preference.loss == "kto":
            made = answers = self._read(path, data.labelled)
            of_training = ("KTO", label_weights(recipe.preference)) if path == recipe.data.train else ()
            self.warnings += label_notes(path, answers, *of_training)
            rows = kto_rows(answers, pad_id, path, self.token_limits[0])
        elif isinstance(recipe, RewardRecipe | DpoRecipe):
            made = pairs = self._read(path, data.pairs)
            rows = (pair_rows if self.preference else dpo_rows)(pairs, pad_id)
        else:
            made = demonstrations = self._read(path, data.demonstrations)
            rows = demonstration_rows(demonstrations, pad_id)
        self.warnings += data.drop_notes(path, self.token_limits[0], made)
        self.plain = made.plain if path == recipe.data.train else self.plain
        return rows

    def arithmetic(self) -> list[str]:
        """Parameter counts, epochs and updates."""
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
    def sources(self) -> dict[str, str]:
        """Hashes of what a checkpoint does not contain."""
        rows, data_ = {"train": self.collector.rows, "held_out": self.held_out}, self.recipe.data
        return self.frozen | {f"data.{name}={getattr(data_, name)!r}": each.hash for name, each in rows.items() if each}

    def checkpoint_parts(self) -> dict[str, Any]:
        """Weights, and all that is needed to make a model from them."""
        return {
            "sources": self.sources,
            "agent": trained_weights(self.policy),
            "recipe": self.recipe.table,
            "model": model_files(self._model, self.tokens.tokenizer),
            **({} if self.reference is None else {"reference": {"log_probs": self.reference.values}}),
            **base_record(self.base),
        }

    @property
    def _model(self) -> torch.nn.Module:
        return self.result if isinstance(self.result, RewardModel) else self.result.model

    def load(self, parts: dict[str, Any], where: Path, allow_changes: bool) -> list[str]:
        """Load weights and the position in the data from a checkpoint."""
        check_row_count(self.recipe.data.train, parts["collector"]["count"], self.collector.rows.count)
        check_unchanged(parts.get("sources", {}), self.sources)
        load_trained(self.policy, parts["agent"], where)
        if self.reference is not None:
            self.reference.values = parts["reference"]["log_probs"]
        self.collector.load_state_dict(parts["collector"])
        return []

    @torch.no_grad()
    def evaluate(self) -> EvaluationReport | None:
        """Cross-entropy on the held-out rows; for pairs also how often the chosen answer has the higher score."""
        if self.held_out is None:
            return None
        with block_by_block(self.policy), exchanging():  # every rank evaluates the same rows, in the same passes
            return self._evaluated(self.held_out)

    def _evaluated(self, held_out: Rows) -> EvaluationReport:
        rows, batch = self.recipe.evaluation.rows, self.recipe.data.batch
        if isinstance(self.policy, DpoPolicy | KtoPolicy):
            assert isinstance(self.recipe, DpoRecipe)
            metrics = self.policy.evaluate(held_out, rows, self.recipe)
            loss, moved, margin = (metrics.get(f"held_out_{name}") for name in ("loss", "chosen_moved", "margin"))
            # A model that moves away from both answers is no candidate for the best one, however low its loss.
            ruined = moved is not None and margin is not None and loses_chosen(moved, margin / self.recipe.reference.beta)
            return EvaluationReport(None if loss is None or ruined else -loss, metrics)
        most = (self.recipe.optimizer.micro_batch_tokens, self.recipe.optimizer.micro_batch)
        evaluated = list(row_log_probs(self.policy, held_out, rows, batch, self.recipe.device, *most))
        likelihood = mean_log_likelihood(evaluated)
        assert likelihood is not None, "rows without a trained token are an error"
        metrics = {"held_out_loss": -likelihood}
        if self.preference:
            right = sum(int((log_probs > -math.log(2.0))[mask].sum()) for log_probs, mask in evaluated)
            metrics["held_out_accuracy"] = right / sum(int(mask.sum()) for _, mask in evaluated)
        return EvaluationReport(likelihood, metrics)  # for pairs too: it is finer than the accuracy

    def samples(self) -> list[dict[str, Any]]:
        return []

    def try_longest(self, learner: Learner) -> list[str]:
        """Train on the longest rows; see ``MemoryCheck``."""
        return self.memory.try_longest(learner, self._longest)

    def _longest(self, shape: BatchShape) -> Batch:
        """The longest rows, with zeros in place of what models score."""
        rows, tensors = self.collector.rows, self.collector.rows.tensors if self.reference is None else self.reference.plain
        longest = sorted(range(rows.count), key=lambda row: rows.lengths[row], reverse=True)
        many = shape.rows
        if self.recipe.optimizer.micro_batch_tokens is not None:
            many = max(1, many * shape.width // rows.lengths[longest[0]])
        longest = longest[:many]
        inputs, actions, mask = tensors(longest)
        if self.reference is not None:
            inputs = {**inputs, REFERENCE: torch.zeros(len(longest), 2), BASELINE: torch.zeros(len(longest))}
        made: Batch = map_tensors(lambda x: x.to(self.recipe.device), (inputs, actions, mask))
        return made

    def row_details(self, rollout: Rollout, row: int, steps: slice) -> dict[str, Any]:
        """Prompt and tokens as text; nothing for a choice between two answers."""
        return {} if not isinstance(self.recipe, SftRecipe) else decode_row(self.tokens, rollout, row, steps)

    def finish(self, folder: Path) -> list[str]:
        """Write the best model (the last, without held-out rows) to ``model/``, for transformers and for other runs."""
        base = self.base
        if isinstance(self.policy, PairPolicy) and self.recipe.engine == "compiled":
            eager_blocks(self.policy)  # to test and score what is written would take programs of its own
        if self.sharding is None:
            load_best_weights(self.policy, folder)
        else:
            self.result, base, _ = result_of_shards(self.result, folder, base, self.recipe)
        if isinstance(self.result, RewardModel):
            self.result.standardise(self._raw_scores(self.result))
        return save_result(self.result, folder, self.recipe, base, in_place=self.sharding is not None)

    @torch.no_grad()
    def _raw_scores(self, model: RewardModel) -> Tensor:
        """Scores of the texts, or of the steps, that they are standardised on."""
        if model.of_steps:
            rows, on = self.collector.rows, str(next(model.parameters()).device)
            answers = batches(rows.tensors, rows.count, self.recipe.data.batch, on)
            return torch.cat([step_scores(model, inputs, self.recipe.autocast)[mask] for inputs, _, mask in answers])
        (texts, trained), device = self.standardised_on, next(model.parameters()).device
        batch = self.recipe.data.batch
        places = [slice(start, start + batch) for start in range(0, len(texts), batch)]
        sides = (scored_side(ANSWER, texts[place], trained[place], self.tokens.pad_id) for place in places)
        return torch.cat([model.raw(*(x.to(device) for x in side.values())) for side in sides])

    def close(self) -> None:
        """There is nothing to close."""
