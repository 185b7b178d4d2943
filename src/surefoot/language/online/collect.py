"""Collects rollouts of text: samples responses, scores them, and subtracts the KL to the reference from the reward.

It uses the four models of PPO on text: policy, critic, reference and reward.
"""

import copy
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surefoot.calls import Threads
from surefoot.core.learner import START_TOLERANCE
from surefoot.core.minibatches import select_rows
from surefoot.core.rollout import LearnerState, Metrics, Rollout
from surefoot.core.seeding import derived_seed
from surefoot.errors import SurefootError
from surefoot.functional import kl_k1, kl_k3, kl_shaped_rewards, masked_mean, proportional_kl_control, successor_values
from surefoot.functional.masking import keep_only, last_kept
from surefoot.language.data.batches import EpochSampler, FromData, pack_batch, row_lengths
from surefoot.language.data.datasets import Prompts, repeat_prompts
from surefoot.language.data.tokens import Tokens
from surefoot.language.metrics import distinct_n, eos_rate, mean_length, repeated_share
from surefoot.language.models.placement import shares_base, whole
from surefoot.language.models.policy import LanguagePolicy, ReferencePolicy
from surefoot.language.models.policy.lengths import switch_of
from surefoot.language.models.policy.passes import Inputs, in_micro_batches
from surefoot.language.models.quantised import has_quantised
from surefoot.language.online.responses import (
    Responses,
    concat_prompts,
    final_rewards,
    gather_signal,
    length_penalty,
    rows_of_batch,
    token_rewards,
    with_signal,
)
from surefoot.language.online.turns import Conversation, Environments, as_samples, tool_metrics
from surefoot.language.rewards.model import ModelReward
from surefoot.language.rewards.scores import Reward, Scores, concat_scores, mean_and_std
from surefoot.language.rewards.terms import FunctionReward, function_rewards, parts_of
from surefoot.language.sampling.ends import Ends
from surefoot.language.sampling.engines import Engine, OnFinished, Request, Samples
from surefoot.language.sampling.kv_cache import CACHE_TOLERANCE, logits_alone
from surefoot.language.sampling.sampler import concat_samples, log_softmax
from surefoot.ranks.collectives import (
    all_max,
    all_sum,
    exchange,
    in_float64,
    mean_over_ranks,
    rank,
    sum_count,
    together,
    world_size,
)
from surefoot.recipes.language import LanguageRecipe
from surefoot.sharding import gathered, is_sharded

COMPARED = 16
"""tokens at the end of a row whose log-probabilities are compared with those of the row by itself"""
ADAPTED_BETA = "reference_beta"
"""key of an adapted β in ``LearnerState.coefficients``"""


@dataclass(frozen=True)
class SampledBatch:
    """All that this rank sampled in an iteration: N rows, all samples of a prompt side by side."""

    responses: Responses
    scores: Scores
    total: Tensor
    """[N] the final rewards, before the KL"""
    rows: Tensor
    """the rows that make the batch"""
    trained: Tensor
    """[rows] whether a row is trained on"""
    rounds: int
    without_signal: float
    """share of the sampled groups, on all ranks, without signal"""
    seconds_sampling: float
    seconds_scoring: float


class LanguageCollector(FromData):
    """Samples responses to the next prompts with the current policy, and scores them.

    reward   ``FunctionReward`` in ``rewards/terms.py`` calls a Python function, ``ModelReward`` in ``rewards/model.py`` a model
    gold     measures the same responses; nothing is trained on it
    engine   samples the responses
    """

    def __init__(
        self,
        recipe: LanguageRecipe,
        policy: LanguagePolicy,
        reference: ReferencePolicy | None,
        reward: Reward,
        gold: FunctionReward | None,
        prompts: Prompts,
        tokens: Tokens,
        engine: Engine,
        environments: Environments | None = None,
    ) -> None:
        self.engine, self.environments = engine, environments
        self.recipe, self.policy, self.reference, self.reward, self.gold = recipe, policy, reference, reward, gold
        self.prompts, self.tokens, self.ends = prompts, tokens, Ends(tokens, recipe.sampling.stop)
        self.sampler = EpochSampler(len(prompts.ids), recipe.seed)
        self.last_samples: list[dict[str, Any]] = []
        """the rows sampled last: prompt, response, reward, KL"""
        self.beta = recipe.reference.beta
        """the KL coefficient of the last rollout, per nat"""
        self.reference_root = policy if reference is None or reference.base is not None else reference.policy
        """the sharded module that holds the reference"""
        models = [part.model for part in parts_of(reward) if isinstance(part, ModelReward)]
        self.reward_roots = [policy if shares_base(model) else model for model in models]
        """those that hold the reward models"""
        self.budget = (recipe.optimizer.micro_batch_tokens, recipe.optimizer.micro_batch)
        self.state: LearnerState | None = None
        """of the run, whose updates number the policy's weights; None before the first rollout"""
        self.compared = False
        """whether log-probabilities were compared with those of single rows"""
        self.ahead: Future[tuple[Responses, float]] | None = None
        """the responses of the next iteration and the seconds that they take, while a server samples them"""

    @torch.no_grad()
    def collect(self, state: LearnerState) -> Rollout:
        """One rollout of ``sampling.prompts`` × ``sampling.samples`` responses."""
        # long because the parts of a rollout are made one after another, in the order in which they need each other
        recipe, self.state, timer = self.recipe, state, state.timer
        batch = self._sample_batch(state)
        drawn = batch.responses.samples
        everything = (drawn, batch.scores.valid, token_rewards(batch.scores, batch.total, drawn, recipe))
        samples, valid, earned = everything if len(batch.rows) == len(batch.total) else select_rows(everything, batch.rows)
        valid = valid & batch.trained

        inputs = {"prompt": samples.prompt, "prompt_mask": samples.prompt_mask}
        mask = samples.mask & valid.unsqueeze(-1)  # a row without a score is not trained on
        actions = samples.actions
        old = None
        if recipe.sampling.old_log_probs != "update":
            with gathered(self.policy), timer.detail("log-probs and values"):
                shared = self.policy.shared(inputs, mask)
                old = in_micro_batches(self.policy, inputs, actions, mask, *self.budget, shared=shared)
        with timer.detail("reference"):
            ref_log_probs = self.reference_log_probs(inputs, actions, mask)
        log_probs, gap = self._old_log_probs(samples, None if old is None else old.log_probs, mask)
        behaviour = None if old is None else self._behaviour_log_probs(samples, mask)
        if recipe.reference.target is None:
            state.coefficients.pop(ADAPTED_BETA, None)  # a run may be resumed with a fixed β
        beta = self.beta = state.coefficients.get(ADAPTED_BETA, recipe.reference.beta)
        earned = keep_only(earned, mask)
        rewards, reward_parts = earned, {"score": earned}
        if ref_log_probs is not None:
            rewards = kl_shaped_rewards(earned, log_probs, ref_log_probs, mask, beta)
            reward_parts["kl"] = kl_k1(log_probs, ref_log_probs)

        values = torch.zeros_like(rewards) if old is None or old.values is None else old.values
        last = last_kept(mask)
        beyond, truncated = torch.zeros_like(rewards[:, 0]), torch.zeros_like(mask)
        if recipe.reward.missing_eos == "bootstrap":
            beyond, cut = self._truncation(samples, inputs, mask, valid)
            truncated = last & cut.unsqueeze(-1)
        kl = reward_parts.get("kl")
        metrics = self._response_metrics(batch, kl, valid) | {"reference_beta": beta}
        if kl is not None:
            metrics["kl_reference"] = mean_over_ranks(float(masked_mean(kl, mask)), int(mask.sum()))
            metrics["kl_reference_response"] = self._adapt_beta(state, kl, valid)
        metrics |= _sampler_metrics(gap, behaviour, log_probs, mask)
        return Rollout(
            inputs=inputs,
            actions=actions,
            mask=mask,
            old_log_probs=None if old is None else log_probs,
            values=values,
            next_values=successor_values(
                values, beyond, truncated=truncated, final_values=beyond.unsqueeze(-1).expand_as(values), mask=mask
            ),
            rewards=rewards,
            terminated=last & ~truncated,
            truncated=truncated,
            unit="row",
            ref_log_probs=ref_log_probs,
            behaviour_log_probs=behaviour,
            group=torch.arange(len(mask) // recipe.sampling.samples).repeat_interleave(recipe.sampling.samples),
            reward_parts=reward_parts,
            steps=len(batch.total),
            metrics=metrics,
        )

    def _truncation(self, samples: Samples, inputs: Inputs, mask: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """The value after each response [B], and whether each [B] is truncated."""
        read = mask if samples.real is None else samples.real & valid.unsqueeze(-1)
        with gathered(self.policy):
            shared = self.policy.shared(inputs, read)
            beyond = in_micro_batches(self.policy.values_after, inputs, samples.actions, read, *self.budget, shared=shared)
        return beyond, ~samples.ended

    def reference_log_probs(self, inputs: Inputs, actions: Tensor, mask: Tensor) -> Tensor | None:
        """log π_ref of the tokens, zeros outside the mask; None without a reference.   [N, T]"""
        if self.reference is None:
            return None
        with gathered(self.reference_root):
            shared = self.reference.policy.shared(inputs, mask)
            log_probs: Tensor = in_micro_batches(self.reference.log_probs, inputs, actions, mask, *self.budget, shared=shared)
        return log_probs

    def _old_log_probs(self, samples: Samples, trainer: Tensor | None, mask: Tensor) -> tuple[Tensor, float | None]:
        """log π_old by ``sampling.old_log_probs``, and the largest gap between sampler and trainer.   [N, T]

        Without those of the trainer, the sampler's measure the KL to the reference, and there is no gap.
        """
        if trainer is None:
            return torch.where(mask, samples.log_probs, 0.0), None
        differences = (samples.log_probs - trainer)[mask].abs()
        largest = differences.max() if mask.any() else differences.new_zeros(())
        gap = float(all_max(largest))
        if self.recipe.sampling.old_log_probs != "sampler":
            return trainer, gap
        if self.policy.exact and gap > START_TOLERANCE:
            raise SurefootError(
                f"sampling.old_log_probs='sampler': log-probabilities differ between sampling and training by up to {gap:.2g} "
                f"(at most {START_TOLERANCE:g} in float32); set 'trainer'"
            )
        return torch.where(mask, samples.log_probs, 0.0), gap

    def _behaviour_log_probs(self, samples: Samples, mask: Tensor) -> Tensor | None:
        """log π of the sampler, if the trainer may compute another number: for metrics and ``importance_cap``.   [N, T]"""
        same = self.engine.exact and self.policy.exact
        return None if same or self.recipe.sampling.old_log_probs == "sampler" else keep_only(samples.log_probs, mask)

    def _adapt_beta(self, state: LearnerState, kl: Tensor, valid: Tensor) -> float:
        """Adapt β for the next rollout if the KL has a target; return the KL per response on all ranks."""
        spent, count = all_sum(in_float64(torch.stack([kl.sum(), valid.sum()]))).tolist()  # the same β on every rank
        per_response = spent / count if count else 0.0
        settings = self.recipe.reference
        if settings.target is not None and count:
            state.coefficients[ADAPTED_BETA] = proportional_kl_control(
                self.beta, per_response, settings.target, self.recipe.responses, settings.horizon
            )
        return float(per_response)

    def respond(self, prompts: Prompts, seeds: Sequence[int], samples: int = 1, greedy: bool = False) -> Responses:
        """One response to each of the prompts; every ``samples`` consecutive prompts are equal and are read once.

        seeds   one each, also if greedy: an environment may draw from them
        """
        if self.environments is not None:
            return self._converse(self.environments, prompts, seeds, greedy)
        drawn = self._sample(prompts.ids[::samples], seeds, samples, greedy, self._begin_scoring(prompts))
        return self._as_responses(drawn, prompts)

    def _begin_scoring(self, prompts: Prompts) -> OnFinished | None:
        """Requests the score of a finished response from reward servers, while others are sampled; None without servers."""
        rewards = function_rewards(self.reward) + ([] if self.gold is None else [self.gold])
        servers = [reward for reward in rewards if reward.begins_early]

        def finished(number: int, ids: Sequence[int]) -> None:
            text = self.ends.text(ids, self.recipe.reward.special_tokens)
            row = {name: column[number] for name, column in prompts.columns.items()}
            for server in servers:
                server.begin(prompts.prompts[number], text, row)

        return finished if servers else None

    def _as_responses(self, drawn: Samples, prompts: Prompts, conversations: Sequence[Conversation] | None = None) -> Responses:
        return Responses(drawn, prompts, self.ends, conversations, self.recipe.reward.special_tokens)

    def _converse(self, environments: Environments, prompts: Prompts, seeds: Sequence[int], greedy: bool) -> Responses:
        names, columns = list(prompts.columns), zip(*prompts.columns.values(), strict=True)
        rows = [dict(zip(names, values, strict=True)) for values in columns] if names else [{} for _ in prompts.ids]
        conversations = environments.converse(
            rows, seeds, lambda ids, of_turn: self._sample(ids, of_turn, 1, greedy), self.ends
        )
        device = next(self.policy.parameters()).device
        return self._as_responses(as_samples(conversations, self.tokens, device), prompts, conversations)

    def _sample(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        samples: int,
        greedy: bool,
        on_finished: OnFinished | None = None,
    ) -> Samples:
        assert self.ahead is None or self.ahead.done(), "settle first: the weights would change while a server samples"
        self.engine.use(None if self.state is None else self.state.updates)
        return self.engine.sample(self._request(prompts, seeds, samples, greedy, on_finished))

    def _request(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], samples: int, greedy: bool, on_finished: OnFinished | None
    ) -> Request:
        settings = self.recipe.sampling
        return Request(
            prompts,
            seeds,
            samples=samples,
            max_tokens=settings.max_tokens,
            temperature=settings.temperature,
            greedy=greedy,
            on_finished=on_finished,
            **self.ends.options,
        )

    def _sample_batch(self, state: LearnerState) -> SampledBatch:
        """Responses to this rank's share of the next prompts.

        Further rounds replace groups without signal, with at least a quarter of a batch each: fewer would take many rounds.
        """
        settings, world, done = self.recipe.sampling, world_size(), state.steps
        parts: list[tuple[Responses, Scores, Tensor]] = []
        signal: list[bool] = []
        places: list[int] = []
        seconds = [0.0, 0.0]
        while len(parts) < settings.rounds and sum(signal) < settings.prompts:
            missing, least = settings.prompts - sum(signal), -(-settings.prompts // 4)
            wanted = max(missing, least, world) if parts else settings.prompts
            with state.timer.section("sampling") as sampling, gathered(self.policy, self.policy.model), together():
                responses, own_seconds = self._respond_to_next(wanted, done + len(signal) * settings.samples)
                self._compare_with_single_rows(responses.samples)
            with state.timer.section("scoring") as scoring, whole(self.reward_roots), together():
                scores = responses.score_with(self.reward)
                total = final_rewards(scores, responses.samples, self.recipe)
            seconds = [seconds[0] + (own_seconds or sampling.seconds), seconds[1] + scoring.seconds]
            at = range(rank(), wanted, world)
            places += [len(signal) + place for place in at]
            signal += gather_signal(with_signal(total, scores.valid, settings.samples), at, wanted)
            parts.append((responses, scores, total))
        if settings.ahead:
            self._sample_ahead(state)
        share = len(range(rank(), settings.prompts, world))
        rows, trained = rows_of_batch(signal, places, settings.prompts, share, settings.samples)
        responses, scores, total = parts[0] if len(parts) == 1 else self._concat(parts)
        without = 1 - sum(signal) / len(signal)
        return SampledBatch(responses, scores, total, rows, trained.to(total.device), len(parts), without, *seconds)

    def _compare_with_single_rows(self, samples: Samples) -> None:
        """Compare the log-probabilities of sampler and trainer, once, with those of the shortest and the longest row by itself.

        Raises SurefootError if they differ in float32: the model reads a row differently beside others, or past some length.
        """
        policy, model = self.policy, self.policy.model
        written = samples.mask.any(-1).nonzero().squeeze(-1)
        if self.compared or not policy.exact or is_sharded(policy) or has_quantised(model) or not len(written):
            return
        self.compared = True
        if model.dtype not in (torch.float32, torch.float64):
            return
        inputs = {"prompt": samples.prompt, "prompt_mask": samples.prompt_mask}
        lengths = row_lengths(inputs, samples.mask)[written]
        rows = written[torch.stack([lengths.argmin(), lengths.argmax()])]
        both, actions, mask, sampled = select_rows((inputs, samples.actions, samples.mask, samples.log_probs), rows)
        with policy.without_values():
            trained = policy(both, actions, mask).log_probs
        for row in range(len(rows)):
            single, own_actions, own_mask = select_rows((both, actions, mask), torch.tensor([row]))
            one = pack_batch(single, own_actions, own_mask, self.tokens.pad_id)
            steps, columns = one.steps[-COMPARED:], one.before[-COMPARED:]
            alone = log_softmax(logits_alone(model, one.ids[0], columns, switch_of(model)), policy.temperature)
            wanted = alone.gather(-1, actions[row, steps].unsqueeze(-1)).squeeze(-1)
            for who, found in (("trainer", trained), *([("sampler", sampled)] if self.engine.exact else [])):
                gap = float((found[row, steps] - wanted).abs().max())
                if not gap <= CACHE_TOLERANCE:
                    raise SurefootError(
                        f"model={self.recipe.model!r}: the {who} computes log-probabilities that differ by up to {gap:.2g} "
                        f"nats from those of a single row of {int(one.last) + 1} tokens (at most {CACHE_TOLERANCE:g} in "
                        f"float32): {type(model).__name__} reads a row differently beside others; use another model"
                    )

    def _respond_to_next(self, count: int, done: int) -> tuple[Responses, float]:
        """Responses to this rank's share of the next ``count`` prompts, and the seconds that they took if they were sampled
        ahead, else 0.

        A response's random stream is that of its number in the whole run, in which ``done`` responses were sampled before.
        """
        prompts, seeds = self._next(self.sampler, count, done)
        if self.ahead is None:
            return self.respond(prompts, seeds, self.recipe.sampling.samples), 0.0
        begun, self.ahead = self.ahead, None
        return begun.result()

    def _next(self, sampler: EpochSampler, count: int, done: int) -> tuple[Prompts, list[int]]:
        """This rank's share of the next ``count`` prompts, and the seeds of their responses."""
        samples = self.recipe.sampling.samples
        prompts = repeat_prompts(self.prompts, sampler.next(count), samples)
        places = range(rank(), count, world_size())
        numbers = [done + place * samples + sample for place in places for sample in range(samples)]
        return prompts, [derived_seed(self.recipe.seed, "response", number) for number in numbers]

    def _sample_ahead(self, state: LearnerState) -> None:
        """Let the server sample the next iteration's responses with the present weights.

        The position in the data stays that of this iteration: a run that is resumed samples them again.
        """
        recipe, done = self.recipe, state.steps + self.recipe.responses
        if done >= recipe.steps:
            return
        samples = recipe.sampling.samples
        prompts, seeds = self._next(copy.copy(self.sampler), recipe.sampling.prompts, done)
        request = self._request(prompts.ids[::samples], seeds, samples, False, self._begin_scoring(prompts))
        with together():
            self.engine.use(state.updates)

        def sample() -> tuple[Responses, float]:
            began = time.perf_counter()
            return self._as_responses(self.engine.sample(request), prompts), time.perf_counter() - began

        self.ahead = Threads().begin(sample)

    def settle(self) -> None:
        """Wait until the server samples for no rank, so that its weights can change."""
        if self.ahead is not None:
            wait([self.ahead])
            exchange(None)

    def _concat(self, parts: Sequence[tuple[Responses, Scores, Tensor]]) -> tuple[Responses, Scores, Tensor]:
        samples = concat_samples([responses.samples for responses, _, _ in parts], self.tokens.pad_id)
        prompts = concat_prompts([responses.prompts for responses, _, _ in parts])
        conversations = [one for responses, _, _ in parts for one in responses.conversations or ()]
        return (
            self._as_responses(samples, prompts, conversations or None),
            concat_scores([scores for _, scores, _ in parts]),
            torch.cat([total for _, _, total in parts]),
        )

    def _response_metrics(self, batch: SampledBatch, kl: Tensor | None, valid: Tensor) -> Metrics:
        """Metrics of all sampled responses, trained on or not; keep their text as ``last_samples``.

        kl [rows, T], valid [rows]
        """
        responses, scores, total = batch.responses, batch.scores, batch.total
        columns: dict[str, Any] = {"reward": scores.column(total)}
        if kl is not None:
            spent = zip(batch.rows.tolist(), kl.sum(-1).tolist(), valid.tolist(), strict=True)
            kl_of = {row: x for row, x, scored in spent if scored}
            columns["kl"] = [kl_of.get(row) for row in range(len(total))]
        mean, std = mean_and_std(scores, total)
        metrics: Metrics = {"reward": mean, "score_std": std}
        count = len(total)
        if len(scores.parts) > 1:
            metrics |= {f"reward_{name}": mean_and_std(scores, part)[0] for name, part in scores.parts.items()}
        if self.gold is not None:
            with together():
                gold = responses.score_with(self.gold, turn_rewards=False)
            columns["gold"] = gold.column(gold.total)
            metrics["gold"] = mean_and_std(gold, gold.total)[0]
        self.last_samples = responses.rows(columns)
        if responses.conversations is not None:
            turns = sum(len(one.turns) for one in responses.conversations) / count
            numbers = {"turns": turns} | tool_metrics(responses.conversations)
            metrics |= {name: mean_over_ranks(x, count) for name, x in numbers.items()}
        if self.recipe.reward.overlong is not None:
            metrics["overlong_penalty"] = mean_over_ranks(float(length_penalty(responses.samples, self.recipe).mean()), count)
        if self.recipe.objective.compares_in_groups:
            metrics["groups_without_signal"] = batch.without_signal
        if self.recipe.sampling.rounds > 1:
            metrics["sampling_rounds"] = float(batch.rounds)
        samples = responses.samples
        if self.engine.name == "vllm":
            missing = samples.finish_reasons.count("error") / count
            metrics["responses_missing"] = mean_over_ranks(missing, count)
        if self.recipe.sampling.ahead and self.state is not None and samples.version is not None:
            metrics["sampler_lag"] = float(self.state.updates - samples.version)
        if not responses.special:
            lost = sum(map(self.ends.loses_special, responses.ids)) / count
            metrics["special_tokens"] = mean_over_ranks(lost, count)
        ids = [one for of_rank in exchange(samples.responses()) for one in of_rank]
        return metrics | {
            "response_length": mean_over_ranks(mean_length(samples.mask), count),
            "eos_rate": mean_over_ranks(eos_rate(samples.ended), count),
            "distinct_2": distinct_n(ids, 2),
            "repeated": repeated_share(ids),
            "without_score": 1 - mean_over_ranks(float(scores.valid.float().mean()), count),
            "data_epochs": self.sampler.epochs,
            "seconds_sampling": batch.seconds_sampling,
            "seconds_scoring": batch.seconds_scoring,
            "tokens_per_second": sum_count(int(samples.mask.sum()), samples.mask) / batch.seconds_sampling,
        }


def _sampler_metrics(gap: float | None, behaviour: Tensor | None, log_probs: Tensor, mask: Tensor) -> Metrics:
    """How far the sampler's log-probabilities lie from the trainer's, of what is known."""
    metrics: Metrics = {} if gap is None else {"sampler_gap": gap}
    if behaviour is not None:
        apart = masked_mean(kl_k3(behaviour, keep_only(log_probs, mask)), mask)
        metrics["sampler_kl"] = mean_over_ranks(float(apart), int(mask.sum()))
    return metrics
