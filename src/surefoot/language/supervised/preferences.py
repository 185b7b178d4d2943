"""Training on pairs of answers: policies over the two answers, for reward models and for DPO.

Bradley and Terry (1952): the chosen answer is preferred with probability σ(r_chosen − r_rejected). That is the softmax of the
two scores, a policy with two actions. Its policy gradient with weight 1 on the first, the chosen one, is the gradient of
−log σ(r_chosen − r_rejected).

A reward model learns the scores r. In DPO (Rafailov et al. 2023) the score is r(y) = β·(log π_θ(y) − log π_ref(y)), up to a
term that both answers share. With label noise ε, the weights are 1 − ε and ε on the two choices, as the average label would be.

IPO (Azar et al. 2023) draws the margin h = r(chosen)/β − r(rejected)/β instead of a choice: from a normal distribution around h
with variance 1/2, in which label "first" is 1/(2β) and label "second" −1/(2β). Its log-density, without the constant, is
−(h ∓ 1/(2β))², which is equation 17 of the paper; the weights have the same meaning.

SimPO and ORPO have no reference: they compare the mean log-probabilities per token of the two answers.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from surefoot.core.rollout import Evaluation, Metrics, Policy
from surefoot.functional import orpo_loss, simpo_loss
from surefoot.language.data import datasets as data
from surefoot.language.data.batches import right_padded
from surefoot.language.data.cache import lengths_of
from surefoot.language.data.rows import rows_hash
from surefoot.language.models.pair_policy import CHOSEN, MISMATCHED, REJECTED
from surefoot.language.models.policy.passes import TextPolicy, in_micro_batches
from surefoot.language.supervised.demonstrations import Batch, Rows, batches, demonstration_tensors
from surefoot.ranks.collectives import in_float64
from surefoot.recipes.supervised import DpoRecipe

REFERENCE = "reference"
"""key of Σ log π_ref of both sides in the inputs   [B, 2]"""


# ---- reward models ------------------------------------------------------------------------------------------------------


def pair_rows(pairs: data.Pairs, pad_id: int) -> Rows:
    """The rows of pairs for a reward model."""
    both = pairs.facts.once("hash-of-answers", lambda: rows_hash(zip(pairs.chosen, pairs.rejected, strict=True)))
    longest = _longest(pairs)
    return Rows(partial(pair_tensors, pairs, pad_id=pad_id), both, longest, [0] * len(longest))


def _longest(pairs: data.Pairs) -> list[int]:
    """The length of the longer answer of each pair."""
    return [max(lengths) for lengths in zip(lengths_of(pairs.chosen), lengths_of(pairs.rejected), strict=True)]


def pair_tensors(pairs: data.Pairs, rows: Sequence[int], pad_id: int) -> Batch:
    """Both answers with their prompt, and the choice of the first in every row."""
    inputs: dict[str, Tensor] = {}
    sides = ((CHOSEN, pairs.chosen, pairs.chosen_trained), (REJECTED, pairs.rejected, pairs.rejected_trained))
    for side, ids, trained in sides:
        inputs |= scored_side(side, [ids[row] for row in rows], [trained[row] for row in rows], pad_id)
    return inputs, torch.zeros(len(rows), 1, dtype=torch.long), torch.ones(len(rows), 1, dtype=torch.bool)


def scored_side(side: str, ids: Sequence[list[int]], trained: Sequence[list[bool]], pad_id: int) -> dict[str, Tensor]:
    """Texts as one side of the inputs of a reward model."""
    tokens, mask = right_padded(ids, pad_id)
    return {side: tokens, f"{side}_mask": mask, f"{side}_trained": right_padded(trained, 0)[0].bool()}


# ---- DPO, IPO, SimPO and ORPO -------------------------------------------------------------------------------------------


class DpoPolicy(TextPolicy):
    """Chooses the better of two answers by the scores that a language model gives them.

    model   the trained policy, without a critic
    beta    β: DPO and IPO: the KL penalty per nat from the reference; SimPO: the scale of the margin; ORPO: the weight λ
    loss    of a pair: "dpo", "ipo", "simpo" or "orpo"
    margin  γ of SimPO

    ``inputs`` are, for each side, {"chosen_prompt" [B, P], "chosen_prompt_mask" [B, P], "chosen" [B, T], "chosen_mask" [B, T]},
    where the mask is True at trained tokens, and with a reference {"reference" [B, 2]}.
    """

    def __init__(self, model: Policy, beta: float, loss: str = "dpo", margin: float = 0.0) -> None:
        super().__init__()
        self.writer, self.beta, self.exact = model, beta, model.exact  # "writer" is in checkpoint keys
        self.loss, self.margin = loss, margin
        self.eval()

    def forward(self, inputs: Mapping[str, Tensor], actions: Tensor, mask: Tensor | None = None) -> Evaluation:
        """Log-probability of the label that answer 0 (the chosen) or 1 is better; the entropy of the choice, shared by the
        actions of a row.   [B, K] -> all [B, K]
        """
        scores = self.scores(inputs)
        both = (self.beta * scores).log_softmax(-1)
        entropy = -(both.exp() * both).sum(-1, keepdim=True) / actions.shape[-1]
        return Evaluation(self.label_log_probs(scores).gather(-1, actions), entropy.expand(actions.shape))

    def label_log_probs(self, scores: Tensor) -> Tensor:
        """What stands for the log-probabilities of both labels: minus the loss if that answer was chosen.   [B, 2] -> [B, 2]"""
        if self.loss == "simpo":
            return -simpo_loss(scores, scores.flip(-1), self.beta, self.margin)
        if self.loss == "orpo":
            return -orpo_loss(scores, scores.flip(-1), self.beta)
        if self.loss == "dpo":
            return (self.beta * scores).log_softmax(-1)
        margin, target = scores[..., :1] - scores[..., 1:], 1 / (2 * self.beta)
        return -(torch.cat([margin - target, margin + target], -1) ** 2)

    def scores(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """log π_θ − log π_ref of the chosen and the rejected answer; without a reference, log π_θ per token.   -> [B, 2]"""
        log_probs = answer_log_probs(self.writer, inputs)
        return log_probs - inputs[REFERENCE] if REFERENCE in inputs else log_probs / _lengths(inputs)

    def costs(self, inputs: Mapping[str, Tensor], mask: Tensor) -> Tensor:
        """Tokens of both answers, each with its prompt; of a prompt that is read once for both, once.   [B]"""
        prompt, _, kept = below_each_other(sides_of(inputs))
        first, second = self.writer.costs(prompt, kept).chunk(2)
        if (shared := self.writer.shared(prompt, kept)) is None:
            return first + second
        same, other = shared.group.chunk(2)
        return first + second - torch.where(same == other, shared.saved[: len(same)], 0)

    @torch.no_grad()
    def evaluate(self, rows: Rows, count: int, recipe: DpoRecipe) -> Metrics:
        """Loss, accuracy, margin and log-probabilities on the first ``count`` rows."""
        noise = recipe.preference.label_smoothing
        weights = torch.tensor([1 - noise, noise], dtype=torch.float64)
        scores, log_probs = [], []
        most = (recipe.optimizer.micro_batch_tokens, recipe.optimizer.micro_batch)
        for inputs, actions, mask in batches(rows.tensors, min(count, rows.count), recipe.data.batch, recipe.device):
            costs = self.costs(inputs, mask)
            of_batch = in_micro_batches(lambda part, *_: self.scores(part), inputs, actions, mask, *most, costs).cpu().double()
            known = REFERENCE in inputs
            scores.append(of_batch)
            log_probs.append(of_batch + inputs[REFERENCE].cpu().double() if known else of_batch * _lengths(inputs).cpu())
        of_all = torch.cat(scores)
        chosen, rejected = torch.cat(log_probs).mean(0).tolist()
        margin = self.beta * (of_all[:, 0] - of_all[:, 1])
        moved = {"held_out_chosen_moved": float(of_all[:, 0].mean())} if known else {}
        return {
            "held_out_loss": -float((self.label_log_probs(of_all) * weights).sum(-1).mean()),
            "held_out_accuracy": float((in_float64(margin > 0) + 0.5 * (margin == 0)).mean()),
            "held_out_margin": float(margin.mean()),
            "held_out_chosen_log_prob": chosen,
            "held_out_rejected_log_prob": rejected,
            **moved,
        }


def side_tensors(side: str, rows: Batch) -> dict[str, Tensor]:
    """Prompt, answer and mask of rows as the inputs of one side."""
    prompt, answer, mask = rows
    return {side: answer, f"{side}_mask": mask, **{f"{side}_{name}": x for name, x in prompt.items()}}


def side_of(inputs: Mapping[str, Tensor], side: str) -> Batch:
    """Prompt, answer and mask of one side of the inputs."""
    prompt = {"prompt": inputs[f"{side}_prompt"], "prompt_mask": inputs[f"{side}_prompt_mask"]}
    return prompt, inputs[side], inputs[f"{side}_mask"]


def sides_of(inputs: Mapping[str, Tensor]) -> list[Batch]:
    """Prompt, answer and mask of every side, in the order of the inputs."""
    return [side_of(inputs, name.removesuffix("_prompt")) for name in inputs if name.endswith("_prompt")]


def below_each_other(sides: Sequence[Batch]) -> Batch:
    """Rows of several sides as those of one batch, side by side padded to the same width."""

    def joined(parts: Sequence[Tensor]) -> Tensor:
        width = max(x.shape[1] for x in parts)
        return torch.cat([pad(x, (0, width - x.shape[1])) for x in parts])

    prompts, answers, masks = zip(*sides, strict=True)
    return {name: joined([prompt[name] for prompt in prompts]) for name in prompts[0]}, joined(answers), joined(masks)


def answer_log_probs(model: Policy, inputs: Mapping[str, Tensor]) -> Tensor:
    """Σ log π of the trained tokens of both sides, in one pass if the model reads a prompt once for both.   -> [B, 2]"""
    if getattr(model, "prompts_once", False):
        prompt, answers, mask = below_each_other(sides_of(inputs))
        sums: Tensor = model(prompt, answers, mask).log_probs.masked_fill(~mask, 0).sum(-1)
        return torch.stack(sums.chunk(2), -1)
    return torch.stack([model(*side).log_probs.masked_fill(~side[2], 0).sum(-1) for side in sides_of(inputs)], -1)


def _lengths(inputs: Mapping[str, Tensor]) -> Tensor:
    """The number of trained tokens of both sides.   -> [B, 2]"""
    return torch.stack([mask.sum(-1) for _, _, mask in sides_of(inputs)], -1)


def trained_tokens(inputs: Mapping[str, Tensor]) -> float:
    """The number of trained tokens on all sides but that of mismatched answers."""
    sides = [name.removesuffix("_prompt") for name in inputs if name.endswith("_prompt")]
    return float(sum(inputs[f"{side}_mask"].sum() for side in sides if side != MISMATCHED))


def dpo_rows(pairs: data.Pairs, pad_id: int) -> Rows:
    """The rows of pairs for DPO."""
    sides = {
        CHOSEN: data.Demonstrations(pairs.chosen, pairs.chosen_trained),
        REJECTED: data.Demonstrations(pairs.rejected, pairs.rejected_trained),
    }

    def tensors(rows: Sequence[int]) -> Batch:
        inputs: dict[str, Tensor] = {}
        for side, answers in sides.items():
            inputs |= side_tensors(side, demonstration_tensors(answers, rows, pad_id))
        return inputs, torch.tensor([[0, 1]]).repeat(len(rows), 1), torch.ones(len(rows), 2, dtype=torch.bool)

    sides_of = (pairs.chosen, pairs.rejected, pairs.chosen_trained, pairs.rejected_trained)
    content = pairs.facts.once("hash", lambda: rows_hash(zip(*sides_of, strict=True)))
    trained = pairs.facts.once("trained", lambda: [max(sum(a), sum(b)) for a, b in zip(*sides_of[2:], strict=True)])
    return Rows(tensors, content, _longest(pairs), trained)
