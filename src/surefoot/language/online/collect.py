"""Responses and what they earn, as a rollout: sample, score, and take the KL to the reference off the reward.

The four roles of PPO on text meet here: the policy samples, the critic says V, the reference is the anchor, the reward scores.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surefoot.core.distributed import all_sum, rank, world_size
from surefoot.core.learner import START_TOLERANCE
from surefoot.core.minibatches import select_rows
from surefoot.core.rollout import LearnerState, Metrics, Rollout
from surefoot.core.seeding import derived_seed
from surefoot.errors import SurefootError
from surefoot.functional import (
    kl_k1,
    kl_shaped_rewards,
    masked_mean,
    proportional_kl_control,
    successor_values,
)
from surefoot.functional.masking import keep_only
from surefoot.language.analysis.metrics import distinct_n, eos_rate, mean_length, repeated_share
from surefoot.language.data.batches import EpochSampler
from surefoot.language.data.datasets import Prompts, repeat_prompts
from surefoot.language.data.tokens import Tokens
from surefoot.language.models.policy import LanguagePolicy, ReferencePolicy, in_micro_batches
from surefoot.language.online.answers import Answers, length_penalty, placed, settled, texts
from surefoot.language.online.conversations import as_samples, mean_turns
from surefoot.language.online.groups import joined_prompts, joined_samples, over_ranks, rows_of_batch, with_signal
from surefoot.language.online.turns import Environments
from surefoot.language.rewards.scores import joined_scores, over_all_ranks
from surefoot.language.rewards.terms import FunctionReward, Reward, Scores
from surefoot.language.sampling.sampler import Samples, sample
from surefoot.recipes.language import LanguageRecipe

ANCHOR = "reference_beta"
"""where ``LearnerState.coefficients`` keeps an adapted β"""


@dataclass(frozen=True)
class Harvest:
    """All that this rank sampled in an iteration: N rows, all samples of a prompt side by side."""

    answers: Answers
    scores: Scores
    total: Tensor
    """[N] what is optimised, before the KL"""
    rows: Tensor
    """those that make the batch"""
    taught: Tensor
    """[rows] whether one is learned from"""
    rounds: int
    silent: float
    """share of the sampled groups, on all ranks, without signal"""
    seconds_sampling: float
    seconds_scoring: float


class LanguageCollector:
    """Prompts from a walk over the data, responses by the policy as it is."""

    def __init__(
        self,
        recipe: LanguageRecipe,
        policy: LanguagePolicy,
        reference: ReferencePolicy,
        reward: Reward,
        gold: FunctionReward | None,
        prompts: Prompts,
        tokens: Tokens,
        environments: Environments | None = None,
    ) -> None:
        self.environments = environments
        self.recipe, self.policy, self.reference, self.reward, self.gold = recipe, policy, reference, reward, gold
        self.prompts, self.tokens = prompts, tokens
        self.walk = EpochSampler(len(prompts.ids), recipe.seed)
        self.said: list[dict[str, Any]] = []
        """what was answered last, and what it earned"""
        self.beta = recipe.reference.beta
        """what the KL cost in the last rollout, per nat"""
        self.budget = (recipe.optimizer.micro_batch_tokens, recipe.optimizer.micro_batch)

    @torch.no_grad()
    def collect(self, state: LearnerState) -> Rollout:
        """One rollout of ``sampling.prompts`` × ``sampling.samples`` responses."""
        recipe = self.recipe
        found = self._sampled(state.steps)
        samples = found.answers.samples
        everything = (samples, found.scores.valid, placed(found.scores, found.total, samples, recipe))
        drawn, valid, earned = everything if len(found.rows) == len(found.total) else select_rows(everything, found.rows)
        valid = valid & found.taught

        inputs = {"prompt": drawn.prompt, "prompt_mask": drawn.prompt_mask}
        mask = drawn.mask & valid.unsqueeze(-1)  # nothing is learned from what has no score
        actions = drawn.actions
        old = in_micro_batches(self.policy, inputs, actions, mask, *self.budget)
        ref_log_probs = in_micro_batches(self.reference.log_probs, inputs, actions, mask, *self.budget)
        if recipe.reference.target is None:
            state.coefficients.pop(ANCHOR, None)  # a run may be resumed with its β fixed
        beta = self.beta = state.coefficients.get(ANCHOR, recipe.reference.beta)
        earned = keep_only(earned, mask)
        gap = float((drawn.log_probs - old.log_probs)[mask].abs().max()) if mask.any() else 0.0
        log_probs = old.log_probs
        if recipe.sampling.old_log_probs == "sampler":
            log_probs = torch.where(mask, drawn.log_probs, 0.0)
            if self.policy.exact and gap > START_TOLERANCE:
                raise SurefootError(
                    f"sampling.old_log_probs='sampler': what was sampled has other log-probabilities in training, by up to "
                    f"{gap:.2g} (in float32 at most {START_TOLERANCE:g}); set 'trainer'"
                )
        rewards = kl_shaped_rewards(earned, log_probs, ref_log_probs, mask, beta)

        last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
        cut = ~drawn.ended.unsqueeze(-1) if recipe.reward.missing_eos == "bootstrap" else torch.zeros_like(mask[:, :1])
        values = torch.zeros_like(rewards) if old.values is None else old.values
        beyond = torch.zeros_like(rewards[:, 0])
        if recipe.reward.missing_eos == "bootstrap":
            said = mask if drawn.real is None else drawn.real & valid.unsqueeze(-1)
            beyond = in_micro_batches(self.policy.values_after, inputs, actions, said, *self.budget)
        truncated = last & cut
        kl = kl_k1(log_probs, ref_log_probs)
        spent, counted = all_sum(torch.stack([kl.sum(), valid.sum()]).double()).tolist()  # the same β on every rank
        per_response = spent / counted if counted else 0.0
        if recipe.reference.target is not None and counted:
            state.coefficients[ANCHOR] = proportional_kl_control(
                beta, per_response, recipe.reference.target, recipe.responses, recipe.reference.horizon
            )
        gold = None if self.gold is None else found.answers.scores(self.gold, earned=False)
        scored = zip(found.rows.tolist(), kl.sum(-1).tolist(), valid.tolist(), strict=True)
        spent_on = {row: spent for row, spent, known in scored if known}
        columns = {"reward": found.scores.column(found.total), "kl": [spent_on.get(row) for row in range(len(found.total))]}
        self.said = texts(found.answers, columns if gold is None else columns | {"gold": gold.column(gold.total)})
        metrics: Metrics = {
            **self._told(found, gold),
            "kl_reference": float(masked_mean(kl, mask)),
            "kl_reference_response": per_response,
            "reference_beta": beta,
            "sampler_gap": gap,
            "data_epochs": self.walk.epochs,
            "seconds_sampling": found.seconds_sampling,
            "seconds_scoring": found.seconds_scoring,
            "tokens_per_second": float(found.answers.samples.mask.sum()) / found.seconds_sampling,
        }
        return Rollout(
            inputs=inputs,
            actions=actions,
            mask=mask,
            old_log_probs=log_probs,
            values=values,
            next_values=successor_values(
                values, beyond, truncated=truncated, final_values=beyond.unsqueeze(-1).expand_as(values), mask=mask
            ),
            rewards=rewards,
            terminated=last & ~cut,
            truncated=truncated,
            unit="row",
            ref_log_probs=ref_log_probs,
            group=torch.arange(len(mask) // recipe.sampling.samples).repeat_interleave(recipe.sampling.samples),
            reward_parts={"score": earned, "kl": kl},
            steps=len(found.total),
            metrics=metrics,
        )

    def answer(self, prompts: Prompts, seeds: Sequence[int], samples: int = 1, greedy: bool = False) -> Answers:
        """One response to each of the prompts, of which so many that stand side by side are the same and are read once.

        seeds   one each, also where the policy is greedy: an environment may draw from them
        """
        if self.environments is not None:
            return self._conversations(prompts, seeds, greedy)
        drawn = self._sample(prompts.ids[::samples], seeds, samples, greedy)
        return Answers(drawn, prompts, self.tokens, stop=self.recipe.sampling.stop)

    def _conversations(self, prompts: Prompts, seeds: Sequence[int], greedy: bool) -> Answers:
        """One conversation about each of the rows."""
        assert self.environments is not None
        names, columns = list(prompts.columns), zip(*prompts.columns.values(), strict=True)
        rows = [dict(zip(names, values, strict=True)) for values in columns] if names else [{} for _ in prompts.ids]
        talks = self.environments.converse(
            rows,
            seeds,
            lambda ids, own: self._sample(ids, () if greedy else own, 1, greedy),
            self.tokens,
            self.recipe.sampling.stop,
        )
        device = next(self.policy.parameters()).device
        return Answers(as_samples(talks, self.tokens, device), prompts, self.tokens, talks)

    def _sample(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], samples: int, greedy: bool) -> Samples:
        settings = self.recipe.sampling
        return sample(
            self.policy.model,
            prompts,
            samples=samples,
            max_tokens=settings.max_tokens,
            temperature=settings.temperature,
            eos_ids=self.tokens.eos_ids,
            pad_id=self.tokens.pad_id,
            seeds=() if greedy else seeds,
            stop=settings.stop,
            decode=self.tokens.decode,
            greedy=greedy,
        )

    def _sampled(self, done: int) -> Harvest:
        """Responses to this rank's share of the next prompts, and in further rounds to as many more as groups without signal
        are to be replaced: a quarter of a batch at least, for a few at a time would take many rounds. ``done`` were before.
        """
        settings, world = self.recipe.sampling, world_size()
        parts: list[tuple[Answers, Scores, Tensor]] = []
        signal: list[bool] = []
        places: list[int] = []
        seconds = [0.0, 0.0]
        while len(parts) < settings.rounds and sum(signal) < settings.prompts:
            missing, least = settings.prompts - sum(signal), -(-settings.prompts // 4)
            wanted = max(missing, least, world) if parts else settings.prompts
            begun = time.perf_counter()
            answers = self._answers_to_next(wanted, done + len(signal) * settings.samples)
            sampled = time.perf_counter()
            scores = answers.scores(self.reward)
            total = settled(scores, answers.samples, self.recipe)
            seconds = [seconds[0] + sampled - begun, seconds[1] + time.perf_counter() - sampled]
            at = range(rank(), wanted, world)
            places += [len(signal) + place for place in at]
            signal += over_ranks(with_signal(total, scores.valid, settings.samples), at, wanted)
            parts.append((answers, scores, total))
        share = len(range(rank(), settings.prompts, world))
        rows, taught = rows_of_batch(signal, places, settings.prompts, share, settings.samples)
        answers, scores, total = parts[0] if len(parts) == 1 else self._joined(parts)
        silent = 1 - sum(signal) / len(signal)
        return Harvest(answers, scores, total, rows, taught.to(total.device), len(parts), silent, *seconds)

    def _answers_to_next(self, count: int, done: int) -> Answers:
        """Responses to this rank's share of the next ``count`` prompts. By its number in the whole run, of which ``done`` were
        before, a response gets a random stream of its own.
        """
        samples = self.recipe.sampling.samples
        prompts = repeat_prompts(self.prompts, self.walk.next(count), samples)
        places = range(rank(), count, world_size())
        numbers = [done + place * samples + sample for place in places for sample in range(samples)]
        return self.answer(prompts, [derived_seed(self.recipe.seed, "response", number) for number in numbers], samples)

    def _joined(self, parts: Sequence[tuple[Answers, Scores, Tensor]]) -> tuple[Answers, Scores, Tensor]:
        """Several rounds as one."""
        drawn = joined_samples([answers.samples for answers, _, _ in parts], self.tokens.pad_id)
        prompts = joined_prompts([answers.prompts for answers, _, _ in parts])
        talks = [talk for answers, _, _ in parts for talk in answers.talks or ()]
        scores = [scores for _, scores, _ in parts]
        return (
            Answers(drawn, prompts, self.tokens, talks or None, self.recipe.sampling.stop),
            joined_scores(scores),
            torch.cat([total for _, _, total in parts]),
        )

    def _told(self, found: Harvest, gold: Scores | None) -> Metrics:
        """What all sampled responses are like, and what they earned, whether they are learned from or not."""
        answers, scores, total = found.answers, found.scores, found.total
        drawn = answers.samples
        mean, spread = over_all_ranks(scores, total)
        told: Metrics = {"reward": mean, "score_std": spread}
        if len(scores.parts) > 1:
            told |= {f"reward_{name}": over_all_ranks(scores, part)[0] for name, part in scores.parts.items()}
        if gold is not None:
            told["gold"] = over_all_ranks(gold, gold.total)[0]
        if answers.talks is not None:
            told["turns"] = mean_turns(answers.talks)
        if self.recipe.reward.overlong is not None:
            told["overlong_penalty"] = float(length_penalty(drawn, self.recipe).mean())
        if self.recipe.objective.compares_in_groups:
            told["groups_without_signal"] = found.silent
        if self.recipe.sampling.rounds > 1:
            told["sampling_rounds"] = float(found.rounds)
        ids = drawn.responses()
        return told | {
            "response_length": mean_length(drawn.mask),
            "eos_rate": eos_rate(drawn.ended),
            "distinct_2": distinct_n(ids, 2),
            "repeated": repeated_share(ids),
            "without_score": 1 - float(scores.valid.float().mean()),
        }

    def state_dict(self) -> dict[str, Any]:
        """Where the walk stands; randomness is derived from the seed and the number of responses."""
        return self.walk.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        self.walk.load_state_dict(state)
