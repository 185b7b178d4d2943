"""Training on answers that are labelled good or bad, or whose steps are: KTO, and reward models by binary cross-entropy.

A reward model is the policy over two labels whose scores are the answer's and 0: the answer is good with probability σ(r). A
process reward model (Lightman et al. 2023, arXiv 2305.20050) scores every step of it at its last token.

KTO (Ethayarajh et al. 2024) compares h = log π_θ(y) − log π_ref(y) with z₀, an estimate of KL(π_θ‖π_ref). The action is the
label. In place of its log-probability stands σ(β(h − z₀)) − 1 if it is good, and σ(β(z₀ − h)) − 1 if it is bad. REINFORCE with
the weights of the labels as rewards then has the gradient of the paper's loss.

z₀ is the mean log-ratio of mismatched answers, which belong to other prompts, or 0 if that is negative. Each row has a fixed
one, that of the next row with another prompt, so the reference scores it once. z₀ is computed for every update on all its rows,
and has no gradient.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from surefoot.core.rollout import Evaluation, Metrics, Policy
from surefoot.errors import SurefootError
from surefoot.functional import kto_loss
from surefoot.language.data import datasets as data
from surefoot.language.data.batches import right_padded
from surefoot.language.data.cache import lengths_of
from surefoot.language.data.rows import rows_hash
from surefoot.language.models.pair_policy import ANSWER, MISMATCHED, PairPolicy, trimmed
from surefoot.language.models.policy.passes import TextPolicy, computing, in_micro_batches
from surefoot.language.models.reward_model import RewardModel
from surefoot.language.supervised.demonstrations import Batch, Rows, batches, demonstration_tensors
from surefoot.language.supervised.preferences import REFERENCE, scored_side, side_of, side_tensors
from surefoot.ranks.collectives import all_sum, in_float64
from surefoot.recipes.supervised import DpoRecipe, PreferenceSettings
from surefoot.sharding import gathered

BASELINE = "baseline"
"""key of z₀ in the inputs   [B]"""
ENDS = "ends"
"""key of the last token of each step in the inputs   [B, S]"""
GOOD, BAD = 0, 1
"""the two actions: labels"""


class KtoPolicy(TextPolicy):
    """The value of a labelled answer by the log-ratio of a language model to its reference.

    model   the trained policy, without a critic
    beta    β, the KL penalty per nat from the reference

    ``inputs`` are {"answer_prompt", "answer_prompt_mask", "answer", "answer_mask"} (see ``DpoPolicy``), {"reference" [B, 2]}
    and {"baseline" [B]}.
    """

    def __init__(self, model: Policy, beta: float) -> None:
        super().__init__()
        self.writer, self.beta, self.exact = model, beta, model.exact  # named as in DpoPolicy: in checkpoint keys
        self.eval()

    def forward(self, inputs: Mapping[str, Tensor], actions: Tensor, mask: Tensor | None = None) -> Evaluation:
        """σ(±β(h − z₀)) − 1 of the labels, and the entropy of a label with probability σ(β(h − z₀)).   [B, 1] -> all [B, 1]"""
        log_probs, reference = answer_log_prob(self.writer, inputs, ANSWER), inputs[REFERENCE][:, :1]
        baseline = inputs[BASELINE].unsqueeze(-1)
        loss = kto_loss(log_probs.unsqueeze(-1), reference, actions == GOOD, baseline, self.beta)
        gain = self.beta * ((log_probs.unsqueeze(-1) - reference) - baseline)
        return Evaluation(-loss, -(gain.sigmoid() * logsigmoid(gain) + (-gain).sigmoid() * logsigmoid(-gain)))

    def costs(self, inputs: Mapping[str, Tensor], mask: Tensor) -> Tensor:
        """Tokens of the answer with its prompt.   [B]"""
        return self._costs(inputs, ANSWER)

    def _costs(self, inputs: Mapping[str, Tensor], side: str) -> Tensor:
        prompt, _, kept = side_of(inputs, side)
        costs: Tensor = self.writer.costs(prompt, kept)
        return costs

    @torch.no_grad()
    def log_ratios(self, inputs: Mapping[str, Tensor], recipe: DpoRecipe, side: str) -> Tensor:
        """log π_θ − log π_ref of one side, in micro-batches.   -> [B]"""
        column, (_, actions, mask) = (ANSWER, MISMATCHED).index(side), side_of(inputs, side)
        most = (recipe.optimizer.micro_batch_tokens, recipe.optimizer.micro_batch)
        log_probs: Tensor = in_micro_batches(
            lambda part, *_: answer_log_prob(self.writer, part, side), inputs, actions, mask, *most, self._costs(inputs, side)
        )
        return log_probs - inputs[REFERENCE][:, column]

    def with_baseline(self, inputs: Mapping[str, Tensor], recipe: DpoRecipe) -> tuple[dict[str, Tensor], Metrics]:
        """The inputs with z₀, the mean over the rows of all ranks, in place of the mismatched answers; and z₀ as a metric."""
        with gathered(self):
            moved = in_float64(self.log_ratios(inputs, recipe, MISMATCHED))
        total, count = all_sum(torch.stack([moved.sum(), torch.ones_like(moved).sum()]))
        baseline = (total / count).clamp(min=0)
        kept = {name: x for name, x in inputs.items() if not name.startswith(MISMATCHED)}
        kept[BASELINE] = baseline.to(kept[REFERENCE]).expand(len(moved))
        return kept, {"kto_baseline": float(baseline)}

    def evaluate(self, rows: Rows, count: int, recipe: DpoRecipe) -> Metrics:
        """Loss, accuracy, margin and log-probabilities on the first ``count`` rows, as far as their labels allow."""
        ratios, references, actions = [], [], []
        for inputs, of_batch, _ in batches(rows.tensors, min(count, rows.count), recipe.data.batch, recipe.device):
            both = [self.log_ratios(inputs, recipe, side) for side in (ANSWER, MISMATCHED)]
            ratios.append(torch.stack(both, -1).cpu().double())
            references.append(inputs[REFERENCE][:, 0].cpu().double())
            actions.append(of_batch[:, 0].cpu())
        moved, other = torch.cat(ratios).unbind(-1)
        log_probs, good = moved + torch.cat(references), torch.cat(actions) == GOOD
        loss = kto_loss(moved, torch.zeros_like(moved), good, other.mean().clamp(min=0), self.beta)
        weights = torch.tensor(label_weights(recipe.preference), dtype=torch.float64)[torch.cat(actions)]
        metrics: Metrics = {"held_out_loss": float((weights * loss).mean())}
        if good.any():
            metrics["held_out_chosen_log_prob"] = float(log_probs[good].mean())
            metrics["held_out_chosen_moved"] = float(moved[good].mean())
        if not good.all():
            metrics["held_out_rejected_log_prob"] = float(log_probs[~good].mean())
        if good.any() and not good.all():
            metrics["held_out_accuracy"] = share_above(moved[good], moved[~good])
            metrics["held_out_margin"] = self.beta * float(moved[good].mean() - moved[~good].mean())
        return metrics


def answer_log_prob(model: Policy, inputs: Mapping[str, Tensor], side: str) -> Tensor:
    """Σ log π of the trained tokens of one side.   -> [B]"""
    prompt, answer, mask = side_of(inputs, side)
    log_probs: Tensor = model(prompt, answer, mask).log_probs
    return log_probs.masked_fill(~mask, 0).sum(-1)


def share_above(first: Tensor, second: Tensor) -> float:
    """The share of all pairs in which the number of the first tensor is larger; a draw counts half.   [N], [M]"""
    ordered = second.sort().values
    below, upto = (torch.searchsorted(ordered, first, right=right) for right in (False, True))
    return float(in_float64(below + upto).mean() / (2 * len(second)))


def label_weights(settings: PreferenceSettings) -> tuple[float, float]:
    """The weights of good and of bad answers."""
    return settings.desirable_weight, settings.undesirable_weight


# ---- rows ---------------------------------------------------------------------------------------------------------------


def kto_rows(answers: data.Labelled, pad_id: int, path: str, limit: int) -> Rows:
    """The rows of labelled answers in a file, and a mismatched answer of at most ``limit`` tokens for each.

    Raises SurefootError if all have one prompt.
    """
    starts = answers.facts.once("starts", lambda: [trained.index(True) for trained in answers.trained])

    def mismatches() -> list[int]:
        return next_with_another([tuple(ids[:start]) for ids, start in zip(answers.ids, starts, strict=True)], path)

    others = answers.facts.once("mismatches", mismatches)
    lengths = lengths_of(answers.ids)
    longest = [max(lengths[row], min(limit, starts[row] + lengths[other] - starts[other])) for row, other in enumerate(others)]

    def mismatched(row: int) -> tuple[list[int], list[bool]]:
        start, other = starts[row], others[row]
        ids = answers.ids[row][:start] + answers.ids[other][starts[other] :]
        return ids[:limit], ([False] * start + answers.trained[other][starts[other] :])[:limit]

    def tensors(rows: Sequence[int]) -> Batch:
        ids, trained = zip(*map(mismatched, rows), strict=True)
        inputs = side_tensors(ANSWER, demonstration_tensors(answers, rows, pad_id))
        other = data.Demonstrations(ids, trained)
        inputs |= side_tensors(MISMATCHED, demonstration_tensors(other, range(len(rows)), pad_id))
        return inputs, labels_of(answers, rows), torch.ones(len(rows), 1, dtype=torch.bool)

    content = answers.facts.once("hash", lambda: rows_hash(zip(answers.ids, answers.trained, answers.good, strict=True)))
    counts = answers.facts.once("trained", lambda: [sum(trained) for trained in answers.trained])
    return Rows(tensors, content, longest, counts)


def next_with_another(prompts: Sequence[tuple[int, ...]], path: str) -> list[int]:
    """For each row, the next row with another prompt; the first row follows the last.

    Raises SurefootError if all prompts are the same.
    """
    count = len(prompts)
    others, following = [0] * count, None
    for place in range(2 * count - 2, -1, -1):
        row, after = place % count, (place + 1) % count
        if prompts[row] != prompts[after]:
            following = after
        if following is not None:
            others[row] = following
    if following is None:
        raise SurefootError(
            f"{path}: all {count} answers have the same prompt, and KTO compares with answers to other prompts; add rows, or "
            "give pairs and set preference.loss = 'dpo'"
        )
    return others


def scored_rows(answers: data.Labelled, pad_id: int) -> Rows:
    """The rows of labelled answers for a reward model."""

    def tensors(rows: Sequence[int]) -> Batch:
        sides = [answers.ids[row] for row in rows], [answers.trained[row] for row in rows]
        return scored_side(ANSWER, *sides, pad_id), labels_of(answers, rows), torch.ones(len(rows), 1, dtype=torch.bool)

    content = answers.facts.once("hash-of-answers", lambda: rows_hash(zip(answers.ids, answers.good, strict=True)))
    lengths = lengths_of(answers.ids)
    return Rows(tensors, content, lengths, [0] * len(lengths))


def good_answers(answers: data.Labelled) -> tuple[list[list[int]], list[list[bool]]]:
    """The ids of the good answers, with their prompts, and which of them are the answer's."""
    good = [row for row, good in enumerate(answers.good) if good]
    return [answers.ids[row] for row in good], [answers.trained[row] for row in good]


def labels_of(answers: data.Labelled, rows: Sequence[int]) -> Tensor:
    """The labels of some rows as actions.   -> [B, 1]"""
    return torch.tensor([[GOOD if answers.good[row] else BAD] for row in rows])


def label_notes(path: str, answers: data.Labelled, learner: str = "", weights: tuple[float, float] | None = None) -> list[str]:
    """How many answers have each label, with advice where one label outweighs the other.

    learner   what learns from them, if anything does
    weights   of good and of bad answers

    Raises SurefootError when all answers to learn from have one label: there is nothing to tell apart.

    The advice is Ethayarajh et al.'s (section 4): the good answers together weigh as much as the bad ones, or up to 4/3 of it.
    """
    good = sum(answers.good)
    bad, advice = len(answers.good) - good, ""
    if learner and not (good and bad):
        label = "good" if good else "bad"
        raise SurefootError(f"{path}: all {len(answers.good)} answers are {label}; {learner} needs good and bad ones")
    if weights is not None and good and bad and not 1 <= (share := weights[GOOD] * good / (weights[BAD] * bad)) <= 4 / 3:
        name, weight = ("undesirable", weights[GOOD] * good / bad) if share > 1 else ("desirable", weights[BAD] * bad / good)
        advice = f", weighing {share:.2g} : 1; for 1 : 1 set preference.{name}_weight={weight:.3g}"
    return [f"{path}: {good:,} good and {bad:,} bad answers{advice}"]


# ---- steps ---------------------------------------------------------------------------------------------------------------


class StepPolicy(PairPolicy):
    """Labels each step of an answer as good (0) or bad (1), by a reward model's raw score at its last token.

    ``inputs`` are {"answer" [B, L], "answer_mask" [B, L], "ends" [B, S]}, padded on the right.
    """

    def forward(self, inputs: Mapping[str, Tensor], actions: Tensor, mask: Tensor | None = None) -> Evaluation:
        """Log-probability of each step's label, and the entropy of both labels.   [B, S] -> all [B, S]"""
        self.make_ready()
        scores = self.scores(inputs)
        both = torch.stack([scores, torch.zeros_like(scores)], -1).log_softmax(-1)
        return Evaluation(both.gather(-1, actions.unsqueeze(-1)).squeeze(-1), -(both.exp() * both).sum(-1))

    def scores(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Raw scores of the steps.   -> [B, S]"""
        return step_scores(self.model, inputs, self.bf16, self.checkpointing)


def step_scores(model: RewardModel, inputs: Mapping[str, Tensor], bf16: bool = False, checkpointing: bool = False) -> Tensor:
    """A reward model's raw scores at the ends of the steps.   -> [B, S]"""
    with computing(model, checkpointing, bf16):
        everywhere = model.prefix_scores(*trimmed(inputs[ANSWER], inputs[f"{ANSWER}_mask"]))
    return everywhere.gather(-1, inputs[ENDS]).float()


def step_notes(path: str, answers: data.Stepped) -> list[str]:
    """How many steps have each label. Raises SurefootError if all have one."""
    good, count = answers.facts.once("counts", lambda: [sum(map(sum, answers.good)), sum(map(len, answers.good))])
    if good in (0, count):
        label = "good" if good else "bad"
        raise SurefootError(f"{path}: all {count} steps are {label}; a reward model needs good and bad ones")
    return [f"{path}: {good:,} good and {count - good:,} bad steps"]


def step_rows(answers: data.Stepped, pad_id: int) -> Rows:
    """The rows of answers with a label for each step."""

    def tensors(rows: Sequence[int]) -> Batch:
        ids, mask = right_padded([answers.ids[row] for row in rows], pad_id)
        ends, kept = right_padded([answers.ends[row] for row in rows], 0)
        labels, _ = right_padded([[GOOD if x else BAD for x in answers.good[row]] for row in rows], GOOD)
        return {ANSWER: ids, f"{ANSWER}_mask": mask, ENDS: ends}, labels, kept

    content = answers.facts.once("hash", lambda: rows_hash(zip(answers.ids, answers.ends, answers.good, strict=True)))
    lengths = lengths_of(answers.ids)
    return Rows(tensors, content, lengths, [0] * len(lengths))
