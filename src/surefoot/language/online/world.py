"""Language's side of an online run: the model in its four roles, prompts, and how the policy is judged."""

import math
import sys
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch

from surefoot.core.distributed import check_device, world_size
from surefoot.core.rollout import EvaluationReport, Metrics, Rollout
from surefoot.core.seeding import derived_seed
from surefoot.errors import SurefootError
from surefoot.functional import kl_k1
from surefoot.language.adapters.files import add_adapter, base_record, load_trained, reward_role, trained_weights
from surefoot.language.adapters.layers import VALUE, RoleTrunk, SharedBase, weights_hash
from surefoot.language.analysis.metrics import distinct_n, eos_rate, mean_length, mean_log_likelihood
from surefoot.language.data import datasets as data
from surefoot.language.data.rows import check_row_count, check_unchanged, read_rows, rows_hash
from surefoot.language.data.tokens import decode_row
from surefoot.language.memory.check import MemoryCheck, guaranteed_length
from surefoot.language.models.language_model import (
    LanguageModel,
    check_compatible,
    describe_model,
    errors_for,
    load_base,
    load_best_weights,
    model_folder,
    save_result,
)
from surefoot.language.models.loading import context_length, load_model
from surefoot.language.models.policy import Critic, LanguagePolicy, ReferencePolicy, ValueHead, in_micro_batches
from surefoot.language.models.reward_model import RewardModel
from surefoot.language.online.answers import Answers, settled, texts
from surefoot.language.online.collect import LanguageCollector
from surefoot.language.online.conversations import mean_turns
from surefoot.language.online.mixing import Mixing
from surefoot.language.online.turns import Environments
from surefoot.language.rewards.terms import FunctionReward, ModelReward, NoReward, Reward, load_reward, parts_of
from surefoot.language.supervised.demonstrations import Rows, demonstration_rows, scored
from surefoot.recipes.language import LanguageRecipe
from surefoot.recipes.reading import to_table

REACH = 1.5
"""of how many times ``reference.target`` the KL of the best policy may be"""


class LanguageWorld:
    """What a recipe of kind "language" is made of."""

    exports_model = True

    def __init__(self, recipe: LanguageRecipe) -> None:
        check_device(recipe.device)
        self.recipe = recipe
        self.memory = MemoryCheck(recipe)
        model, self.tokens = load_base(recipe)
        self.result = LanguageModel(model, self.tokens)
        self.base = add_adapter(recipe, model, model_folder(recipe.model))
        """where adapters are trained: what they share"""
        context, longest = context_length(model), recipe.data.max_length + recipe.max_response_tokens
        settings, bounds = recipe.reward, {"deadline": recipe.reward.deadline, "tolerated": recipe.reward.tolerated}
        self.environments, limit = None, context
        if recipe.turns.environment is not None:
            limit = min(context or sys.maxsize, recipe.turns.max_length or sys.maxsize)
            room = min(recipe.data.max_length, limit - recipe.sampling.max_tokens), limit - recipe.sampling.max_tokens
            self.environments = Environments(recipe.turns, room, **bounds)
        self.reward: Reward = NoReward()
        if settings.terms:
            read = None if self.base is None else partial(reward_role, self.base)
            self.reward = load_reward(settings.terms, **bounds, device=recipe.device, read=read)
        self.gold = None
        if settings.gold is not None:
            self.gold = FunctionReward(
                settings.gold,
                deadline=settings.deadline,
                tolerated=settings.tolerated,
                name="gold",
                field="reward.gold",
            )
        self.model_summary = [] if self.base is None else [self.base.summary()]
        self.warnings: list[str] = []
        self.room = data.token_limit(recipe.data.max_length, limit, recipe.sampling.max_tokens)
        if self.room[0] < 1:
            raise SurefootError(
                f"sampling.max_tokens={recipe.sampling.max_tokens}: leaves no room for a prompt in a context of {limit} "
                f"tokens; set at most {max(1, (limit or longest) - 1)}"
            )
        train = self._prompts(recipe.data.train)
        self.held_out = None
        if recipe.data.held_out is not None and recipe.evaluation.rows:
            self.held_out = self._prompts(recipe.data.held_out)
        self.demonstrations = None
        if recipe.evaluation.demonstrations is not None:
            self.demonstrations = self._demonstrations(recipe.evaluation.demonstrations, context)
        held_out = [] if self.held_out is None else self.held_out.ids
        evaluated = min(len(held_out), recipe.evaluation.rows)
        asked = [(train, -(-recipe.sampling.prompts // world_size()) * recipe.sampling.samples)]  # by each rank, of a reward
        asked += [] if self.held_out is None else [(self.held_out, evaluated)]
        self.mixed = None
        if recipe.mixing.sft_coefficient:
            assert recipe.mixing.demonstrations is not None
            self.mixed = self._demonstrations(recipe.mixing.demonstrations, context)
        for part in self._functions():
            for prompts, _ in asked:
                part.check_columns(prompts.columns)
            self.warnings += part.late(*((count, prompts.columns) for prompts, count in asked))
        self.longest = max(map(len, [*train.ids, *held_out])) + recipe.sampling.max_tokens
        if self.environments is not None:
            self.longest = longest if limit in (None, sys.maxsize) else limit or longest
        self.warnings += self.memory.check(
            prompt=max(1, guaranteed_length([len(ids) for ids in train.ids], recipe.steps // recipe.sampling.samples)),
            response=1,
            most=recipe.max_response_tokens,
            evaluated=evaluated,
            demonstrated=None if self.demonstrations is None else self.demonstrations.first(recipe.evaluation.rows),
            mixed=None if self.mixed is None else (recipe.mixed_batch, *self._mixed_tokens(self.mixed)),
        )
        bf16 = recipe.precision == "bfloat16"
        critic: Literal["head"] | Critic | None = "head" if recipe.objective.baseline == "critic" else None
        if critic is not None and recipe.critic.own_model:
            critic = self._critic(model)
        self.policy = LanguagePolicy(
            model,
            critic,
            self.tokens.pad_id,
            recipe.sampling.temperature,
            checkpointing=recipe.gradient_checkpointing,
            bf16=bf16,
            balanced=recipe.objective.router_coefficient > 0,
        )
        self.policy.to(recipe.device)
        self.reference = self._reference(bf16).to(recipe.device)
        roles = (self.policy, self.reference, self.reward, self.gold)
        self.collector = LanguageCollector(recipe, *roles, train, self.tokens, self.environments)
        self.auxiliary_loss = self._mixing()

    def _prompts(self, path: str) -> data.Prompts:
        if self.environments is not None:
            return data.prompts_without_ids(read_rows(path))
        found = data.prompts(read_rows(path), self.tokens, *self.room)
        unused = () if self._functions() else found.unused
        self.warnings += data.drop_notes(path, self.room[0], found.dropped, unused=unused, rows="prompts")
        return found

    def _functions(self) -> list[FunctionReward]:
        """The rewards that may read columns."""
        parts = (*parts_of(self.reward), self.gold)
        return [part for part in parts if isinstance(part, FunctionReward)]

    def _demonstrations(self, path: str, context: int | None) -> Rows:
        limit, said = data.token_limit(sys.maxsize, context)
        rows = demonstration_rows(path, self.tokens, limit, said)
        self.warnings += rows.notes
        return rows

    def _mixed_tokens(self, rows: Rows) -> tuple[int, int]:
        """Tokens of the longest demonstration that is surely mixed in, and those of a mean one that are trained."""
        recipe, reuse = self.recipe, self.recipe.objective.reuse
        updates = -(-recipe.steps // recipe.responses) * (reuse.epochs * reuse.minibatches if reuse else 1)
        return guaranteed_length(rows.lengths, updates * recipe.mixed_batch), sum(rows.trained) // rows.count

    def _mixing(self) -> Mixing | None:
        if self.mixed is None:
            return None
        recipe, coefficient = self.recipe, self.recipe.mixing.sft_coefficient
        policy, seed = self._supervised(), derived_seed(recipe.seed, "mixing")
        return Mixing(policy, self.mixed, recipe.mixed_batch, coefficient, seed, recipe.device, *self.collector.budget)

    def _supervised(self) -> LanguagePolicy:
        """The model as SFT has it: at temperature 1, without a critic."""
        checkpointing, bf16 = self.policy.checkpointing, self.policy.bf16
        return LanguagePolicy(self.policy.model, None, self.tokens.pad_id, checkpointing=checkpointing, bf16=bf16)

    def _critic(self, model: Any) -> Critic:
        start = self.recipe.critic.start
        if self.base is not None:
            return self._critic_role(self.base)
        if start is None:
            return Critic.from_policy(model)
        with errors_for("critic.start"):
            scores: Any = RewardModel.load(model_folder(start), trust_remote_code=self.recipe.trust_remote_code)
        check_compatible("critic.start", start, (scores.backbone, scores.tokenizer), self.recipe, self.tokens, self.longest)
        return Critic.from_reward_model(scores.backbone, scores.head, float(scores.mean), float(scores.std))

    def _critic_role(self, base: SharedBase) -> Critic:
        """A value model that is an adapter of the policy's base."""
        start, settings = self.recipe.critic.start, self.recipe.adapter
        assert settings is not None
        width, like = int(base.trunk.config.get_text_config().hidden_size), next(base.trunk.parameters())
        if start is None:
            base.add(VALUE, settings)
            return Critic(RoleTrunk(base, VALUE), ValueHead(width, like))
        with errors_for("critic.start"):
            scores = reward_role(base, start, VALUE)
        if scores is None:
            raise SurefootError(
                f"critic.start={start!r}: is no adapter of model={self.recipe.model!r}, as the critic is to be; train "
                "it with [adapter] on that model, or unset it"
            )
        scores.backbone.requires_grad_(True)
        return Critic.from_reward_trunk(scores.backbone, scores.head, float(scores.mean), float(scores.std))

    def _reference(self, bf16: bool) -> ReferencePolicy:
        if self.recipe.reference.model is None:
            return ReferencePolicy(self.policy, self.base)
        with errors_for("reference.model"):
            model, tokenizer = load_model(
                model_folder(self.recipe.reference.model), trust_remote_code=self.recipe.trust_remote_code
            )
        check_compatible(
            "reference.model", self.recipe.reference.model, (model, tokenizer), self.recipe, self.tokens, self.longest
        )
        return ReferencePolicy(LanguagePolicy(model, None, self.tokens.pad_id, self.recipe.sampling.temperature, bf16=bf16))

    def arithmetic(self) -> list[str]:
        """Parameter counts and the batch arithmetic."""
        recipe, reuse = self.recipe, self.recipe.objective.reuse
        count = sum(p.numel() for p in self.policy.parameters() if p.requires_grad)
        critic = sum(p.numel() for p in self.policy.critic_parameters())
        frozen = f"{count - critic:,} frozen in the reference"
        if self.base is not None:
            frozen = f"{sum(p.numel() for p in self.policy.parameters()) - count:,} frozen, which all roles share"
        epochs, minibatches = (reuse.epochs, reuse.minibatches) if reuse else (1, 1)
        iterations = -(-recipe.steps // recipe.responses)
        environment, limit = recipe.turns.environment, recipe.turns.max_turns
        turns = [] if environment is None else [f"turns: at most {limit} in a conversation, answered by {environment}"]
        at_most = (
            f", fewer with more than one of sampling.rounds = {recipe.sampling.rounds}" if recipe.sampling.rounds > 1 else ""
        )
        mixed = []
        if self.auxiliary_loss is not None:
            mixed = [f"mixed in: {recipe.mixed_batch} of {self.auxiliary_loss.rows.count:,} demonstrations per update"]
        return [
            *self.model_summary,
            *self.warnings,
            *turns,
            f"parameters: {count:,} trained, {critic:,} of them the critic's; {frozen}",
            f"batch: {recipe.sampling.prompts} prompts x {recipe.sampling.samples} samples = {recipe.responses:,} responses",
            f"updates: {epochs} epochs x {minibatches} minibatches = {epochs * minibatches:,} per iteration",
            f"iterations: {recipe.steps:,} / {recipe.responses:,} = {iterations:,}{at_most}",
            f"updates in all: {iterations * epochs * minibatches:,}",
            *mixed,
            *self.memory.summary(),
        ]

    @cached_property
    def frozen(self) -> dict[str, str]:
        """Prints of the models that a checkpoint does not hold: the reference, and those of the reward."""
        found: dict[str, Any] = {}
        if self.recipe.reference.model is not None:
            found = {f"reference.model={self.recipe.reference.model!r}": self.reference}
        elif self.base is None:
            found = {f"reference of model={self.recipe.model!r}": self.reference}
        parts = parts_of(self.reward)
        scored = {f"reward.terms model={part.path!r}": part.model for part in parts if isinstance(part, ModelReward)}
        base = {} if self.base is None else {f"base model={self.recipe.model!r}": self.base.hash}
        return base | {name: weights_hash(model) for name, model in {**found, **scored}.items()}

    @cached_property
    def sources(self) -> dict[str, str]:
        """Prints of all that a checkpoint does not hold."""
        prompts = self.collector.prompts
        columns = zip(*prompts.columns.values(), strict=True) if prompts.columns else [()] * len(prompts.ids)
        rows = zip(prompts.ids, columns, strict=True)
        found = {**self.frozen, f"data.train={self.recipe.data.train!r}": rows_hash(rows)}
        if self.auxiliary_loss is not None:
            found[f"mixing.demonstrations={self.recipe.mixing.demonstrations!r}"] = self.auxiliary_loss.rows.print
        return found

    def trees(self) -> dict[str, Any]:
        """Weights of policy and critic, and what is needed to make a model of them. The reference is where it came from."""
        return {
            "sources": self.sources,
            "agent": trained_weights(self.policy),
            "recipe": to_table(self.recipe),
            "model": describe_model(self.policy.model, self.tokens.tokenizer),
            "beta": self.collector.beta,
            **({} if self.auxiliary_loss is None else {"mixing": self.auxiliary_loss.state_dict()}),
            **base_record(self.base),
        }

    def load(self, trees: dict[str, Any], where: Path) -> list[str]:
        """Take weights and the place in the data from a checkpoint."""
        check_row_count(self.recipe.data.train, trees["collector"]["count"], len(self.collector.prompts.ids))
        check_unchanged(trees.get("sources", {}), self.sources)
        load_trained(self.policy, trees["agent"], where)
        self.collector.load_state_dict(trees["collector"])
        if self.auxiliary_loss is not None and "mixing" in trees:  # not there where mixing was switched on since, on purpose
            self.auxiliary_loss.load_state_dict(trees["mixing"])
        return []

    def answers(self) -> Answers:
        """Sampled answers to the held-out prompts, always with the same random numbers."""
        assert self.held_out is not None
        settings = self.recipe.evaluation
        prompts = data.repeat_prompts(self.held_out, range(min(len(self.held_out.ids), settings.rows)))
        return self.collector.answer(prompts, [derived_seed(settings.seed, "response", row) for row in range(len(prompts.ids))])

    @torch.no_grad()
    def evaluate(self, answers: Answers | None = None) -> EvaluationReport | None:
        """Sampled answers to held-out prompts (``answers()``, if not given): reward less what the KL costs. And how likely
        demonstrations are. Without held-out prompts, what was sampled last stands for their answers.
        """
        found: Metrics = {}
        if self.demonstrations is not None:
            found["held_out_log_likelihood"] = self._log_likelihood(self.demonstrations)
        if self.held_out is None:
            said = self.collector.said if self.recipe.evaluation.rows else []
            return EvaluationReport(None, found, said) if found or said else None
        judged = self.judge(self.answers() if answers is None else answers)
        return replace(judged, metrics=judged.metrics | found)

    def _log_likelihood(self, rows: Rows) -> float | None:
        """That of demonstrations under the policy, at temperature 1 as in SFT; no more rows at a time than in an update."""
        recipe, reuse = self.recipe, self.recipe.objective.reuse
        tokens, size = self.collector.budget
        size = size or max(1, recipe.responses // (reuse.minibatches if reuse else 1))
        return mean_log_likelihood(scored(self._supervised(), rows, recipe.evaluation.rows, size, recipe.device, tokens))

    def judge(self, answers: Answers) -> EvaluationReport:
        """What answers are worth: reward, gold where it is known, KL to the reference, length, diversity. The score is the
        reward less β·KL. Where β is adapted it has no price of its own: there the score is the reward, of a policy that is
        within reach of the target, and nothing beyond.
        """
        drawn = answers.samples
        scores = answers.scores(self.reward)
        total = settled(scores, drawn, self.recipe)
        inputs = {"prompt": drawn.prompt, "prompt_mask": drawn.prompt_mask}
        budget = self.collector.budget
        log_probs = in_micro_batches(self.policy, inputs, drawn.actions, drawn.mask, *budget).log_probs
        kl = kl_k1(log_probs, in_micro_batches(self.reference.log_probs, inputs, drawn.actions, drawn.mask, *budget)).sum(-1)
        spent = float(kl.mean())
        ids = drawn.responses()
        metrics: Metrics = {
            "held_out_reward": scores.mean_of(total),
            "held_out_kl": spent,
            "held_out_length": mean_length(drawn.mask),
            "held_out_eos_rate": eos_rate(drawn.ended),
            "held_out_distinct_2": distinct_n(ids, 2),
        }
        if answers.talks is not None:
            metrics["held_out_turns"] = mean_turns(answers.talks)
        columns: dict[str, Any] = {"reward": scores.column(total), "kl": kl.tolist()}
        if self.gold is not None:
            gold = answers.scores(self.gold, earned=False)
            metrics["held_out_gold"] = gold.mean_of(gold.total)
            columns["gold"] = gold.column(gold.total)
        reward = metrics["held_out_reward"]
        beta, target = self.recipe.reference.beta, self.recipe.reference.target
        if reward is None or (target is not None and spent > REACH * target):
            score = -math.inf
        else:
            score = reward - (beta * spent if target is None else 0.0)
        return EvaluationReport(score, metrics, texts(answers, columns))

    def describe(self, rollout: Rollout, row: int, steps: slice) -> dict[str, Any]:
        """Prompt and tokens as text, and the β of the reward's KL."""
        return decode_row(self.tokens, rollout, row, steps) | {"reference_beta": rollout.metrics["reference_beta"]}

    def finish(self, folder: Path) -> list[str]:
        """Write the best model (the last, where there is no best) to ``model/``, for transformers and for other runs."""
        said = []
        if not load_best_weights(self.policy, folder) and self.held_out is not None:
            target = self.recipe.reference.target
            reach = "" if target is None else f" within {REACH:g} times reference.target={target:g}"
            said = [f"no evaluation had a score{reach}: the policy that is left is the last one, and none was chosen"]
        return [*said, *save_result(self.result, folder, self.recipe, self.base)]

    def close(self) -> None:
        """Nothing is open."""
