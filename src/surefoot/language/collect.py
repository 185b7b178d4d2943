"""Responses and what they earn, as a rollout: sample, score, and take the KL to the reference off the reward.

The four roles of PPO on text meet here: the policy samples, the critic says V, the reference is the anchor, the reward scores.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from surefoot.errors import SurefootError
from surefoot.functional import kl_k1, kl_shaped_rewards, masked_mean, place_scores, proportional_kl_control, successor_values
from surefoot.kinds import LanguageRecipe
from surefoot.language.data import Prompts
from surefoot.language.metrics import distinct_n, eos_rate, mean_length, repeated_share
from surefoot.language.policy import LanguagePolicy, ReferencePolicy, in_parts
from surefoot.language.rewards import FunctionReward, Reward, Scores
from surefoot.language.sampler import Samples, sample
from surefoot.language.tokens import Tokens, text_of
from surefoot.language.walk import Walk
from surefoot.learner import START_TOLERANCE
from surefoot.rollout import LearnerState, Metrics, Rollout, map_tensors
from surefoot.run.distributed import all_sum, rank, world_size
from surefoot.seeding import derived_seed

ANCHOR = "reference_beta"
"""where ``LearnerState.coefficients`` keeps an adapted β"""


def repeated(prompts: Prompts, rows: Sequence[int], samples: int = 1) -> Prompts:
    """Some of the prompts, each as often as it is answered."""
    rows = [row for row in rows for _ in range(samples)]
    columns = {name: [column[row] for row in rows] for name, column in prompts.columns.items()}
    return Prompts([prompts.prompts[row] for row in rows], [prompts.ids[row] for row in rows], columns, prompts.dropped)


def told(answers: "Answers", columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Prompt and response of each answer, with what is known of it."""
    pairs = zip(answers.prompts.prompts, answers.responses, strict=True)
    return [
        {"prompt": text_of(prompt), "response": response, **{name: column[row] for name, column in columns.items()}}
        for row, (prompt, response) in enumerate(pairs)
    ]


class Answers:
    """Samples with their text and scores: what collecting and evaluating both need."""

    def __init__(self, samples: Samples, prompts: Prompts, tokens: Tokens) -> None:
        self.samples, self.prompts = samples, prompts
        self.responses = [tokens.decode(ids) for ids in samples.responses()]

    def scores(self, reward: Reward) -> Scores:
        """What they earn, whether they ended or not, on the device of the samples."""
        found: Scores = map_tensors(
            lambda x: x.to(self.samples.mask.device), reward(self.prompts.prompts, self.responses, self.prompts.columns)
        )
        return found


def settled(scores: Scores, ended: Tensor, recipe: LanguageRecipe) -> Tensor:
    """Scores after the treatment of responses that the length limit cut.   [N]"""
    treatment, value = recipe.reward.missing_eos, recipe.reward.missing_eos_value
    if treatment == "penalty":
        return torch.where(ended, scores.total, torch.full_like(scores.total, value))
    if treatment == "subtract":
        return torch.where(ended, scores.total, scores.total - abs(value))
    return scores.total


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
    ) -> None:
        self.recipe, self.policy, self.reference, self.reward, self.gold = recipe, policy, reference, reward, gold
        self.prompts, self.tokens = prompts, tokens
        self.walk = Walk(len(prompts.ids), recipe.seed)
        self.said: list[dict[str, Any]] = []
        """what was answered last, and what it earned"""
        self.budget = (recipe.optimizer.micro_batch_tokens, recipe.optimizer.micro_batch)

    @torch.no_grad()
    def collect(self, state: LearnerState) -> Rollout:
        """One rollout of ``sampling.prompts`` × ``sampling.samples`` responses."""
        recipe, begun = self.recipe, time.perf_counter()
        prompts, group, numbers = self._next_prompts(state.steps)
        answers = self.answer(
            prompts, [derived_seed(recipe.seed, "response", number) for number in numbers], recipe.sampling.samples
        )
        drawn, sampled = answers.samples, time.perf_counter()
        scores = answers.scores(self.reward)
        total = settled(scores, drawn.ended, recipe)
        scored = time.perf_counter()

        inputs = {"prompt": drawn.prompt, "prompt_mask": drawn.prompt_mask}
        mask = drawn.mask & scores.valid.unsqueeze(-1)  # nothing is learned from what has no score
        actions = drawn.actions
        old = in_parts(self.policy, inputs, actions, mask, *self.budget)
        ref_log_probs = in_parts(self.reference.log_probs, inputs, actions, mask, *self.budget)
        beta = state.coefficients.get(ANCHOR, recipe.reference.beta)
        placed = place_scores(total, mask)
        gap = float((drawn.log_probs - old.log_probs)[mask].abs().max()) if mask.any() else 0.0
        log_probs = old.log_probs
        if recipe.sampling.old_log_probs == "sampler":
            log_probs = torch.where(mask, drawn.log_probs, 0.0)
            if self.policy.exact and gap > START_TOLERANCE:
                raise SurefootError(
                    f"sampling.old_log_probs='sampler': what was sampled has other log-probabilities in training, by up to "
                    f"{gap:.2g} (in float32 at most {START_TOLERANCE:g}); set 'trainer'"
                )
        rewards = kl_shaped_rewards(placed, log_probs, ref_log_probs, mask, beta)

        last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
        cut = ~drawn.ended.unsqueeze(-1) if recipe.reward.missing_eos == "bootstrap" else torch.zeros_like(mask[:, :1])
        values = torch.zeros_like(rewards) if old.values is None else old.values
        beyond = torch.zeros_like(rewards[:, 0])
        if recipe.reward.missing_eos == "bootstrap":
            beyond = in_parts(self.policy.values_after, inputs, actions, mask, *self.budget)
        truncated = last & cut
        kl = kl_k1(log_probs, ref_log_probs)
        spent, counted = all_sum(torch.stack([kl.sum(), scores.valid.sum()]).double()).tolist()  # the same β on every rank
        per_response = spent / counted if counted else 0.0
        if recipe.reference.target is not None and counted:
            state.coefficients[ANCHOR] = proportional_kl_control(
                beta, per_response, recipe.reference.target, recipe.responses, recipe.reference.horizon
            )
        gold = None if self.gold is None else answers.scores(self.gold)
        columns = {"reward": scores.column(total), "kl": kl.sum(-1).tolist()}
        self.said = told(answers, columns if gold is None else columns | {"gold": gold.column(gold.total)})
        metrics: Metrics = {
            **self._told(answers, scores, total, gold),
            "kl_reference": float(masked_mean(kl, mask)),
            "kl_reference_response": per_response,
            "reference_beta": beta,
            "sampler_gap": gap,
            "data_epochs": self.walk.epochs,
            "seconds_sampling": sampled - begun,
            "seconds_scoring": scored - sampled,
            "tokens_per_second": float(drawn.mask.sum()) / (sampled - begun),
        }
        return Rollout(
            inputs=inputs,
            actions=actions,
            mask=mask,
            old_log_probs=log_probs,
            values=values,
            next_values=successor_values(values, beyond, truncated=truncated, mask=mask),
            rewards=rewards,
            terminated=last & ~cut,
            truncated=truncated,
            unit="row",
            ref_log_probs=ref_log_probs,
            group=group,
            reward_parts={"score": placed, "kl": kl},
            steps=len(prompts.ids),
            metrics=metrics,
        )

    def answer(self, prompts: Prompts, seeds: Sequence[int], samples: int = 1, greedy: bool = False) -> Answers:
        """One response to each of the prompts, of which so many that stand side by side are the same and are read once."""
        settings = self.recipe.sampling
        drawn = sample(
            self.policy.model,
            prompts.ids[::samples],
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
        return Answers(drawn, prompts, self.tokens)

    def _next_prompts(self, done: int) -> tuple[Prompts, Tensor, list[int]]:
        """This rank's prompts, each as often as it is answered; which of them is which; and the number that each response
        has in the whole run, of which ``done`` were before. By it a response gets a random stream of its own.
        """
        samples = self.recipe.sampling.samples
        rows = self.walk.next(self.recipe.sampling.prompts)
        places = range(rank(), self.recipe.sampling.prompts, world_size())
        numbers = [done + place * samples + sample for place in places for sample in range(samples)]
        return repeated(self.prompts, rows, samples), torch.arange(len(rows)).repeat_interleave(samples), numbers

    def _told(self, answers: Answers, scores: Scores, total: Tensor, gold: Scores | None) -> Metrics:
        """What responses are like, and what they earned."""
        drawn = answers.samples
        found: Metrics = {"reward": scores.mean_of(total)}
        if len(scores.parts) > 1:
            found |= {f"reward_{name}": scores.mean_of(part) for name, part in scores.parts.items()}
        if gold is not None:
            found["gold"] = gold.mean_of(gold.total)
        ids = drawn.responses()
        return found | {
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
