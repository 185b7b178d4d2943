"""Training on answers whose steps are labelled good or bad: process reward models.

The model scores every step at its last token, so a score depends on the steps before it and on no later one. A step is good
with probability σ(score): a policy over two labels for each step, with the scores s and 0. Its policy gradient with weight 1 on
the given labels is that of binary cross-entropy (Lightman et al. 2023, arXiv 2305.20050).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from surefoot.core.rollout import Evaluation
from surefoot.errors import SurefootError
from surefoot.language.data import datasets as data
from surefoot.language.data.batches import right_padded
from surefoot.language.data.cache import lengths_of
from surefoot.language.data.rows import rows_hash
from surefoot.language.models.pair_policy import ANSWER, PairPolicy, trimmed
from surefoot.language.models.policy.passes import computing
from surefoot.language.models.reward_model import RewardModel
from surefoot.language.supervised.demonstrations import Batch, Rows
from surefoot.language.supervised.labels import BAD, GOOD

ENDS = "ends"
"""key of the last token of each step in the inputs   [B, S]"""


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
