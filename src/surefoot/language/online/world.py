"""Online runs of language: the four models, the prompts, and the evaluation of the policy."""

import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from surefoot.core.learner import Learner
from surefoot.core.rollout import EvaluationReport, Metrics, Rollout
from surefoot.core.seeding import derived_seed
from surefoot.errors import SurefootError
from surefoot.functional import kl_k1
from surefoot.language.blocks import compile_blocks
from surefoot.language.data import datasets as data
from surefoot.language.data.cache import lengths_of
from surefoot.language.data.rows import check_row_count, check_unchanged, rows_hash
from surefoot.language.data.sources import open_rows
from surefoot.language.data.tokens import decode_row
from surefoot.language.language_model import (
    LanguageModel,
    check_compatible,
    errors_for,
    load_base,
    load_best_weights,
    model_files,
    model_folder,
    result_of_shards,
    save_result,
)
from surefoot.language.memory.check import MemoryCheck, guaranteed_length
from surefoot.language.memory.workload import BatchShape
from surefoot.language.metrics import distinct_n, eos_rate, mean_log_likelihood
from surefoot.language.models.adapter_files import add_adapter, base_record, load_trained, reward_role, trained_weights
from surefoot.language.models.adapters import VALUE, RoleTrunk, SharedBase, weights_hash
from surefoot.language.models.loading import context_length, load_model
from surefoot.language.models.padding_free import padding_notes
from surefoot.language.models.placement import keeps_stored, place, shard_role, sharding_of, shares_base, whole
from surefoot.language.models.policy import LanguagePolicy, ReferencePolicy
from surefoot.language.models.policy.critic import Critic, ValueHead
from surefoot.language.models.policy.lengths import check_length
from surefoot.language.models.policy.passes import in_micro_batches
from surefoot.language.models.quantised import parameter_count
from surefoot.language.models.reward_model import RewardModel
from surefoot.language.online.collect import LanguageCollector
from surefoot.language.online.engine import make_engine
from surefoot.language.online.responses import Responses, ScoredResponses, concat_scored, final_rewards
from surefoot.language.online.turns import Environments
from surefoot.language.rewards.model import ModelReward
from surefoot.language.rewards.scores import Reward, mean_of
from surefoot.language.rewards.terms import (
    FunctionReward,
    NoReward,
    check_special_texts,
    function_rewards,
    load_reward,
    parts_of,
)
from surefoot.language.sampling.vllm import VllmServer
from surefoot.language.supervised.demonstrations import Rows, SftLoss, demonstration_rows, row_log_probs
from surefoot.ranks.collectives import check_device, exchange, in_float64, share, together, world_size
from surefoot.recipes.callables import GOLD, Functions, find_function
from surefoot.recipes.faults import value_of
from surefoot.recipes.language import LanguageRecipe
from surefoot.recipes.models import Role
from surefoot.sharding import gathered

BEST_KL_FACTOR = 1.5
"""the KL of the best policy is at most this many times ``reference.target``: an adapted β keeps the KL near its target only on
average, and a policy far beyond it has a high reward because it ignores the reference"""


def prompts_hash(prompts: data.Prompts) -> str:
    """A hash of all prompts' ids and columns."""

    def computed() -> str:
        columns = zip(*prompts.columns.values(), strict=True) if prompts.columns else [()] * len(prompts.ids)
        return rows_hash(zip(prompts.ids, columns, strict=True))

    return prompts.facts.once("hash", computed)


class LanguageWorld:
    """The models, data and evaluation of a recipe of kind "language"."""

    exports_model = True

    def __init__(self, recipe: LanguageRecipe, functions: Functions | None = None) -> None:
        check_device(recipe.device)
        self.recipe, self.functions = recipe, functions or {}
        self.sharding = sharding_of(recipe)
        """None: whole models. Sharded ones are read again for each role: weights in float32 files are not copied into memory"""
        self.memory = MemoryCheck(recipe)
        model, self.tokens = load_base(recipe)
        self.tokens.split = recipe.data.control_tokens != "keep"  # in the replies of environments too
        self.result = LanguageModel(model, self.tokens, recipe)
        self.result.functions = self.functions
        self.base = add_adapter(recipe, model, model_folder(recipe.model))
        """with adapters: the base that all roles share"""
        self.model_summary = [] if self.base is None else [self.base.summary()]
        self.warnings: list[str] = recipe.notes(model.num_parameters())
        context = context_length(model)
        self._load_rewards(context)
        self._load_rows(context)
        self._check_fit()
        critic: Literal["head"] | Critic | None = "head" if recipe.objective.baseline == "critic" else None
        if critic is not None and recipe.critic.own_model:
            critic = self._critic(model)
        self.policy = LanguagePolicy(
            model,
            critic,
            self.tokens.pad_id,
            recipe.sampling.temperature,
            checkpointing=recipe.gradient_checkpointing,
            bf16=recipe.autocast,
            balanced=recipe.objective.router_coefficient > 0,
            padding_free=recipe.padding_free,
            idle_critic="critic" in recipe.idle_roles,
        )
        self.model_summary += padding_notes(recipe, self.policy.padding_reason)
        self._place()
        roles = (self.policy, self.reference, self.reward, self.gold)
        check_length(recipe, self.policy, self.longest)
        self.engine = make_engine(recipe, model, self.tokens, self.longest)
        self.model_summary.append(f"sampling: engine {self.engine.name} ({self.engine.reason})")
        self.collector = LanguageCollector(recipe, *roles, self.prompts, self.tokens, self.engine, self.environments)
        self.auxiliary_loss = self._sft_loss()
        if recipe.engine == "compiled":
            compile_blocks(self.policy, None if self.reference is None else self.reference.policy)

    def _place(self) -> None:
        """Move the policy to its device, then the frozen models; sharded ones part by part."""
        if self.sharding is not None:
            shard_role(self.policy, self.sharding)
        elif not self.recipe.low_weights:  # its copy, the reference, is then made on the device
            place(self.policy, self.recipe)
        with nullcontext() if self.sharding is None or self.base is None else gathered(self.policy):
            self.reference = self._reference()
        if self.sharding is not None or self.recipe.low_weights:
            _ = self.frozen  # hashes of whole weights, as they are stored
        if self.sharding is None and self.recipe.low_weights:
            place(self.policy, self.recipe)
        rewards = [part.model for part in parts_of(self.reward) if isinstance(part, ModelReward)]
        models: list[tuple[Role, torch.nn.Module]] = [("reward", model) for model in rewards]
        if self.reference is not None and self.reference.base is None:
            models.append(("reference", self.reference.policy))
        for role, model in models:
            idle = role in self.recipe.idle_roles and not shares_base(model)
            if self.sharding is None:
                place(model, self.recipe, idle)
            elif not shares_base(model):
                shard_role(model, replace(self.sharding, offload=idle or self.sharding.offload), frozen=True)

    def _load_rewards(self, context: int | None) -> None:
        """Make the environments and load the reward and gold, which the prompts are then checked against."""
        recipe, settings = self.recipe, self.recipe.reward
        bounds: dict[str, Any] = {"deadline": settings.deadline, "tolerated": settings.tolerated}
        self.environments, self.limit = None, context
        """the environments of turns; and the most tokens of prompt and response together, None: no limit"""
        if recipe.turns.conversations:
            self.limit = min(context or sys.maxsize, recipe.turns.max_length or sys.maxsize)
            before_turn = self.limit - recipe.sampling.max_tokens
            limits = min(recipe.data.max_length, before_turn), before_turn
            self.environments = Environments(recipe.turns, limits, self.functions, **bounds)
            self.environments.check(self.tokens, scored=bool(settings.terms))
        self.reward: Reward = NoReward()
        if settings.terms:
            read = None if self.base is None else partial(reward_role, self.base)
            options: dict[str, Any] = {"read": read, "functions": self.functions, "bf16": recipe.autocast}
            options |= {"as_stored": keeps_stored(recipe)}
            self.reward = load_reward(settings.terms, **bounds, **options)
        self.gold = None
        if not settings.special_tokens:
            check_special_texts(self.reward, self.tokens, "set reward.special_tokens = true")
        if settings.gold is not None:
            gold = find_function(GOLD, settings.gold, self.functions)
            self.gold = FunctionReward(gold, **bounds, name="gold", field=GOLD)

    def _load_rows(self, context: int | None) -> None:
        recipe = self.recipe
        self.token_limits = data.token_limit(recipe.data.max_length, self.limit, recipe.sampling.max_tokens)
        self.longest = recipe.data.max_length + recipe.max_response_tokens
        """the most tokens of prompt and response together"""
        if self.token_limits[0] < 1:
            raise SurefootError(
                f"sampling.max_tokens={recipe.sampling.max_tokens}: leaves no room for a prompt in a context of {self.limit} "
                f"tokens; set at most {max(1, (self.limit or self.longest) - 1)}"
            )
        self.prompts = self._prompts(recipe.data.train)
        self.held_out = None
        if recipe.data.held_out is not None and recipe.evaluation.rows:
            self.held_out = self._prompts(recipe.data.held_out)
        self.demonstrations = None
        if recipe.evaluation.demonstrations is not None:
            self.demonstrations = self._demonstrations(recipe.evaluation.demonstrations, context)
        self.mixed = None
        if recipe.mixing.sft_coefficient:
            assert recipe.mixing.demonstrations is not None
            self.mixed = self._demonstrations(recipe.mixing.demonstrations, context)

    def _check_fit(self) -> None:
        """Check the rewards' columns and deadlines and the memory for these rows."""
        recipe, held_out = self.recipe, self.held_out
        evaluated = 0 if held_out is None else min(len(held_out.ids), recipe.evaluation.rows)
        calls = [(self.prompts, -(-recipe.sampling.prompts // world_size()) * recipe.sampling.samples)]  # of each rank
        calls += [] if held_out is None else [(held_out, evaluated)]
        for prompts, _ in calls:
            for model in (part for part in parts_of(self.reward) if isinstance(part, ModelReward)):
                model.check_prompts(prompts.prompts)
            for function in self._functions():
                function.check_rows(prompts.columns)
            if self.environments is not None:
                self.environments.check_columns(prompts.columns)
        for function in self._functions():
            self.warnings += function.deadline_notes(*((count, prompts.columns) for prompts, count in calls))
        if self.environments is None:
            lengths = [*lengths_of(self.prompts.ids), *([] if held_out is None else lengths_of(held_out.ids))]
            self.longest = max(lengths) + recipe.sampling.max_tokens
        elif self.limit not in (None, sys.maxsize):
            self.longest = self.limit or self.longest
        prompts_read = recipe.steps // recipe.sampling.samples
        self.warnings += self.memory.check(
            prompt=max(1, guaranteed_length(lengths_of(self.prompts.ids), prompts_read, recipe.padding_free)),
            response=1,
            most=recipe.max_response_tokens,
            evaluated=evaluated,
            demonstrated=None
            if self.demonstrations is None
            else BatchShape(*self.demonstrations.sizes(recipe.evaluation.rows)),
            mixed=None if self.mixed is None else BatchShape(recipe.mixed_batch, *self._mixed_tokens(self.mixed)),
            together=recipe.sampling.samples if recipe.padding_free else 1,
        )

    def _prompts(self, path: str) -> data.Prompts:
        if self.environments is not None:
            return data.prompts_without_ids(list(open_rows(path, self.recipe.data.columns)))
        settings = self.recipe.data
        rows = open_rows(path, settings.columns)
        prompts = data.prompts(rows, self.tokens, *self.token_limits, control=settings.control_tokens)
        shown = replace(prompts, unused=()) if self._functions() else prompts
        self.warnings += data.drop_notes(path, self.token_limits[0], shown, "prompts")
        return prompts

    def _functions(self) -> list[FunctionReward]:
        """The rewards that may read columns."""
        return [*function_rewards(self.reward), *([] if self.gold is None else [self.gold])]

    @property
    def user_code(self) -> list[Any]:
        """The functions, environments and tools that a run calls."""
        turns = [] if self.environments is None else [self.environments.make, *self.environments.functions.values()]
        return [*(reward.function for reward in self._functions()), *turns]

    def _demonstrations(self, path: str, context: int | None) -> Rows:
        limits = data.token_limit(sys.maxsize, context)
        made = data.demonstrations(open_rows(path), self.tokens, *limits)
        self.warnings += data.drop_notes(path, limits[0], made)
        return demonstration_rows(made, self.tokens.pad_id)

    def _mixed_tokens(self, rows: Rows) -> tuple[int, int]:
        """Tokens of the longest demonstration that is certainly mixed in, and the mean number of trained tokens."""
        recipe = self.recipe
        updates = -(-recipe.steps // recipe.responses) * math.prod(recipe.objective.passes)
        return guaranteed_length(rows.lengths, updates * recipe.mixed_batch), sum(rows.trained) // rows.count

    def _sft_loss(self) -> SftLoss | None:
        if self.mixed is None:
            return None
        recipe, coefficient = self.recipe, self.recipe.mixing.sft_coefficient
        seed = derived_seed(recipe.seed, "mixing")
        return SftLoss(self.policy, self.mixed, recipe.mixed_batch, coefficient, seed, recipe.device, *self.collector.budget)

    def _critic(self, model: Any) -> Critic:
        start = self.recipe.critic.start
        if self.base is not None:
            return self._critic_role(self.base)
        if start is None:
            copied = self.sharding is None
            return Critic.from_policy(model if copied else load_base(self.recipe)[0], copied=copied)
        with errors_for("critic.start"):
            trusted = self.recipe.trust_remote_code
            scores: Any = RewardModel.load(
                model_folder(start), self.recipe.critic.label, trust_remote_code=trusted, as_stored=keeps_stored(self.recipe)
            )
        check_compatible("critic.start", start, (scores.backbone, scores.tokenizer), self.recipe, self.tokens, self.longest)
        trunk, scale = scores.backbone.requires_grad_(True), (float(scores.mean), float(scores.std))
        return Critic.from_reward_model(trunk, scores.head, *scale, copied=self.sharding is None)

    def _critic_role(self, base: SharedBase) -> Critic:
        """A value model that is an adapter on the policy's base."""
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
                f"critic.start={start!r}: is not an adapter of model={self.recipe.model!r}; train it with [adapter] on "
                "that model, or unset it"
            )
        trunk, scale = scores.backbone.requires_grad_(True), (float(scores.mean), float(scores.std))
        return Critic.from_reward_model(trunk, scores.head, *scale, copied=False)

    def _reference(self) -> ReferencePolicy | None:
        """The reference; None if nothing reads it."""
        recipe, name = self.recipe, self.recipe.reference.model
        if not recipe.has_reference:
            return None
        if name is None:
            fresh = load_base(recipe)[0] if self.sharding is not None and self.base is None else None
            return ReferencePolicy(self.policy, self.base, fresh)
        with errors_for("reference.model"):
            model, tokenizer = load_model(
                model_folder(name), trust_remote_code=recipe.trust_remote_code, as_stored=keeps_stored(recipe)
            )
        check_compatible("reference.model", name, (model, tokenizer), recipe, self.tokens, self.longest)
        options = {"bf16": recipe.autocast, "padding_free": recipe.padding_free}
        policy = LanguagePolicy(model, None, self.tokens.pad_id, recipe.sampling.temperature, **options)
        return ReferencePolicy(policy, model=None if self.sharding is None else model)

    def arithmetic(self) -> list[str]:
        """Parameter counts, batch sizes and updates."""
        recipe = self.recipe
        count = sum(p.numel() for p in self.policy.parameters() if p.requires_grad)
        critic = sum(p.numel() for p in self.policy.critic_parameters())
        frozen = "no reference" if self.reference is None else f"{count - critic:,} frozen in the reference"
        if self.base is not None:
            frozen = f"{parameter_count(self.policy) - count:,} frozen, which all roles share"
        epochs, minibatches = recipe.objective.passes
        iterations = -(-recipe.steps // recipe.responses)
        answers = ", ".join([*filter(None, [recipe.turns.environment]), *recipe.turns.tools])
        turns = [f"turns: at most {recipe.turns.max_turns} per conversation, with {answers}"] if answers else []
        rounds = recipe.sampling.rounds
        at_most = f", fewer with more than one of sampling.rounds = {rounds}" if rounds > 1 else ""
        mixed = []
        if self.auxiliary_loss is not None:
            mixed = [f"mixed in: {recipe.mixed_batch} of {self.auxiliary_loss.rows.count:,} demonstrations per update"]
        return [
            *self.model_summary,
            *([f"server: {self.engine.command}"] if isinstance(self.engine, VllmServer) else []),
            *self.warnings,
            *turns,
            f"parameters: {count:,} trained, {critic:,} of them the critic's; {frozen}",
            f"batch: {recipe.sampling.prompts} prompts x {recipe.sampling.samples} samples = {recipe.responses:,} responses",
            f"updates: {epochs} epochs x {minibatches} minibatches = {epochs * minibatches:,} per iteration",
            f"iterations: {recipe.steps:,} / {recipe.responses:,} = {iterations:,}{at_most}",
            f"total updates: {iterations * epochs * minibatches:,}",
            *mixed,
            *self.memory.summary(),
        ]

    @cached_property
    def frozen(self) -> dict[str, str]:
        """Hashes of the models that a checkpoint does not contain: the reference, and those of the reward."""
        models: dict[str, Any] = {}
        if self.recipe.reference.model is not None:
            models = {f"reference.model={self.recipe.reference.model!r}": self.reference}
        elif self.base is None and self.reference is not None:
            models = {f"reference of model={self.recipe.model!r}": self.reference}
        parts = parts_of(self.reward)
        models |= {f"reward.terms model={part.path!r}": part.model for part in parts if isinstance(part, ModelReward)}
        base = {} if self.base is None else {f"base model={self.recipe.model!r}": self.base.hash}
        return base | {name: weights_hash(model) for name, model in models.items()}

    @cached_property
    def sources(self) -> dict[str, str]:
        """Hashes of everything that a checkpoint does not contain."""
        prompts = {"data.train": self.collector.prompts, "data.held_out": self.held_out}
        rows = {"evaluation.demonstrations": self.demonstrations, "mixing.demonstrations": self.mixed}
        hashes = {field: prompts_hash(each) for field, each in prompts.items() if each is not None}
        hashes |= {field: each.hash for field, each in rows.items() if each is not None}
        return self.frozen | {f"{field}={value_of(self.recipe, field)!r}": digest for field, digest in hashes.items()}

    def checkpoint_parts(self) -> dict[str, Any]:
        """Weights of policy and critic, and all that is needed to make a model from them. The reference is not saved."""
        return {
            "sources": self.sources,
            "agent": trained_weights(self.policy),
            "recipe": self.recipe.table,
            "model": model_files(self.policy.model, self.tokens.tokenizer),
            "beta": self.collector.beta,
            **({} if self.auxiliary_loss is None else {"mixing": self.auxiliary_loss.state_dict()}),
            **base_record(self.base),
        }

    def load(self, parts: dict[str, Any], where: Path, allow_changes: bool) -> list[str]:
        """Load weights and the position in the data from a checkpoint."""
        check_row_count(self.recipe.data.train, parts["collector"]["count"], len(self.collector.prompts.ids))
        check_unchanged(parts.get("sources", {}), self.sources)
        load_trained(self.policy, parts["agent"], where)
        self.collector.load_state_dict(parts["collector"])
        if self.auxiliary_loss is not None and "mixing" in parts:  # missing if mixing was switched on since
            self.auxiliary_loss.load_state_dict(parts["mixing"])
        return []

    def sample_held_out(self, shared: bool = False) -> Responses:
        """Responses to the held-out prompts, always with the same random numbers; of several ranks perhaps only its share."""
        assert self.held_out is not None
        settings = self.recipe.evaluation
        rows = range(min(len(self.held_out.ids), settings.rows))
        rows = share(len(rows)) if shared else rows
        prompts = data.repeat_prompts(self.held_out, rows)
        return self.collector.respond(prompts, [derived_seed(settings.seed, "response", row) for row in rows])

    def _evaluate_held_out(self) -> EvaluationReport:
        """The evaluation of ``sample_held_out``, by all ranks together if there is a prompt for each."""
        assert self.held_out is not None
        shared = min(len(self.held_out.ids), self.recipe.evaluation.rows) >= world_size()
        self.collector.settle()
        with gathered(self.policy, self.policy.model), together():
            responses = self.sample_held_out(shared)
        return self.evaluate_responses(responses, shared)

    @torch.no_grad()
    def samples(self) -> list[dict[str, Any]]:
        """Scored responses to the held-out prompts, or without those the last rollout's."""
        if self.held_out is None:
            return self.collector.last_samples if self.recipe.evaluation.rows else []
        return self._evaluate_held_out().samples

    @torch.no_grad()
    def evaluate(self, responses: Responses | None = None) -> EvaluationReport | None:
        """Score responses to held-out prompts (default: ``sample_held_out``), and the log-likelihood of demonstrations.

        Without held-out prompts, the report shows the samples of the last rollout and has no score.
        """
        metrics: Metrics = {}
        if self.demonstrations is not None:
            metrics["held_out_log_likelihood"] = self._log_likelihood(self.demonstrations)
        if self.held_out is None:
            samples = self.samples()
            return EvaluationReport(None, metrics, samples) if metrics or samples else None
        report = self._evaluate_held_out() if responses is None else self.evaluate_responses(responses)
        return replace(report, metrics=report.metrics | metrics)

    def _log_likelihood(self, rows: Rows) -> float | None:
        """Of demonstrations under the policy, at temperature 1 as in SFT; at most as many rows at a time as in an update."""
        recipe, reuse = self.recipe, self.recipe.objective.reuse
        tokens, size = self.collector.budget
        size = size or max(1, recipe.responses // (reuse.minibatches if reuse else 1))
        with gathered(self.policy, self.policy.model), self.policy.as_in_sft():
            log_probs = row_log_probs(self.policy, rows, recipe.evaluation.rows, size, recipe.device, tokens)
            return mean_log_likelihood(log_probs)

    def evaluate_responses(self, responses: Responses, shared: bool = False) -> EvaluationReport:
        """Reward, gold if there is one, KL to the reference if there is one, length and diversity.

        The score is the reward less β·KL. With an adapted β it is the reward, or −∞ if the KL is more than ``BEST_KL_FACTOR``
        times its target.

        shared   these are this rank's share of the responses, and all ranks call this
        """
        scored = self._scored(responses, together if shared else nullcontext)
        if shared and world_size() > 1:
            scored = concat_scored(exchange(scored))
        reward, mean_kl = mean_of(scored.total, scored.valid), 0.0
        metrics: Metrics = {"held_out_reward": reward}
        if scored.kl is not None:
            metrics["held_out_kl"] = mean_kl = float(scored.kl.mean())
        metrics |= {
            "held_out_length": float(in_float64(scored.lengths).mean()),
            "held_out_eos_rate": eos_rate(scored.ended),
            "held_out_distinct_2": distinct_n(scored.ids, 2),
        }
        if scored.turns is not None:
            metrics["held_out_turns"] = sum(scored.turns) / len(scored.turns)
        if scored.gold is not None:
            metrics["held_out_gold"] = mean_of(*scored.gold)
        beta, target = self.recipe.reference.beta, self.recipe.reference.target
        if reward is None or (target is not None and mean_kl > BEST_KL_FACTOR * target):
            score = -math.inf
        else:
            score = reward - (beta * mean_kl if target is None else 0.0)
        return EvaluationReport(score, metrics, scored.rows)

    def _scored(self, responses: Responses, agreed: Callable[[], AbstractContextManager[None]]) -> ScoredResponses:
        """Score responses, and measure their KL to a reference; an error within ``agreed`` is one for all ranks."""
        samples = responses.samples
        with whole(self.collector.reward_roots), agreed():
            scores = responses.score_with(self.reward)
            total = final_rewards(scores, samples, self.recipe)
        inputs = {"prompt": samples.prompt, "prompt_mask": samples.prompt_mask}
        budget = self.collector.budget
        kl = None
        columns: dict[str, Any] = {"reward": scores.column(total)}
        if self.reference is not None:
            with gathered(self.policy, self.policy.model), self.policy.without_values(), agreed():
                log_probs = in_micro_batches(self.policy, inputs, samples.actions, samples.mask, *budget).log_probs
            with gathered(self.collector.reference_root), agreed():
                ref_log_probs = in_micro_batches(self.reference.log_probs, inputs, samples.actions, samples.mask, *budget)
            kl = kl_k1(log_probs, ref_log_probs).sum(-1).cpu()
            columns["kl"] = kl.tolist()
        gold = None
        if self.gold is not None:
            with agreed():
                judged = responses.score_with(self.gold, turn_rewards=False)
            gold = judged.total.cpu(), judged.valid.cpu()
            columns["gold"] = judged.column(judged.total)
        return ScoredResponses(
            total=total.cpu(),
            valid=scores.valid.cpu(),
            kl=kl,
            lengths=samples.mask.sum(-1).cpu(),
            ended=samples.ended.cpu(),
            gold=gold,
            ids=samples.responses(),
            turns=None if responses.conversations is None else [len(one.turns) for one in responses.conversations],
            rows=responses.rows(columns),
        )

    def try_longest(self, learner: Learner) -> list[str]:
        """Train on rows of the longest prompts and responses; see ``MemoryCheck``."""
        return self.memory.try_longest(learner, self._longest)

    def _longest(self, shape: BatchShape) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """A micro-batch of this shape, in which every row begins with another prompt."""
        prompts = torch.zeros(shape.rows, shape.width - shape.decisions, dtype=torch.long, device=self.recipe.device)
        prompts[:, 0] = torch.arange(shape.rows) % self.policy.readout.vocabulary
        actions = prompts.new_zeros(shape.rows, shape.decisions)
        inputs = {"prompt": prompts, "prompt_mask": torch.ones_like(prompts, dtype=torch.bool)}
        return inputs, actions, torch.ones_like(actions, dtype=torch.bool)

    def row_details(self, rollout: Rollout, row: int, steps: slice) -> dict[str, Any]:
        """Prompt and tokens as text, and the β of the KL penalty."""
        return decode_row(self.tokens, rollout, row, steps) | {"reference_beta": rollout.metrics["reference_beta"]}

    def finish(self, folder: Path) -> list[str]:
        """Write the best model (the last, if there is no best) to ``model/``, for transformers and for other runs."""
        notes, base = [], self.base
        if self.sharding is None:
            best = load_best_weights(self.policy, folder)
        else:
            result, base, best = result_of_shards(self.result, folder, base, self.recipe)
            assert isinstance(result, LanguageModel)
            self.result, result.functions = result, self.functions
        if not best and self.held_out is not None:
            target = self.recipe.reference.target
            limit = "" if target is None else f" within {BEST_KL_FACTOR:g} times reference.target={target:g}"
            notes = [f"no evaluation had a score{limit}; model/ is the last policy, not a best one"]
        return [*notes, *save_result(self.result, folder, self.recipe, base, in_place=self.sharding is not None)]

    def close(self) -> None:
        """Close the sampling engine."""
        self.engine.close()
