"""Traces: every intermediate number of a few rows of a rollout, from the reward to each visit of the loss.

A recorder copies what the loss reads, when it reads it. So the ratio of a visit is the one whose gradient was taken, the
advantage is the one after normalisation, and the update does not change.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from surefoot.core.algorithms import Objective
from surefoot.core.objective import Batch, clip_bounds, left_out, old_kl, ratio_of, sampler_weights, surrogate
from surefoot.core.rollout import Credit, Evaluation, LearnerState, Rollout
from surefoot.functional import Moments, clip_active, td_residual
from surefoot.functional.masking import keep_only
from surefoot.ranks.collectives import world_size

BRANCHES = ("unclipped", "clipped", "dual_clip", "log_prob", "weighted", "left_out")
"""what ``Visits.branch`` counts: ρÂ; clip(ρ)Â; cÂ, the bound of the dual clip; log π·Â, of algorithms that use a batch once;
wÂ log π with a clipped weight w; 0, of a response that is left out"""
WITH_GRADIENT = (True, False, False, True, True, False)
"""whether gradient flows through each of them"""

OF_OBJECTIVE = ("gamma", "gae_lambda", "baseline", "ratio", "max_weight", "importance_cap", "importance_mode")
"""what a trace has of the objective"""
OF_ROLLOUT = (
    *("mask", "rewards", "values", "next_values", "terminated", "truncated"),
    *("old_log_probs", "ref_log_probs", "behaviour_log_probs"),
)
"""what a traced row has of the rollout, if that has it"""

RowDetails = Callable[[Rollout, int, slice], dict[str, Any]]


@dataclass(frozen=True)
class Visits:
    """What the loss read of a row, on each pass.   All [K, T]: K passes over the batch, T steps

    Under TRPO the first pass is the policy's step, and the others are the critic's, which show the policy after that step.
    """

    updates: Tensor
    """optimizer steps of the run before this visit; −1 without a visit: masked, or the passes ended early"""
    log_probs: Tensor
    """log π_θ of the action, at that time"""
    ratio: Tensor
    """ρ = exp(log π_θ − log π_old); 1 where the batch has no old log-probabilities"""
    advantages: Tensor
    """Â as used: (A − mean) / √(variance + 1e-8)"""
    mean: Tensor
    """that A was normalised by; 0 where nothing was"""
    variance: Tensor
    """that A was normalised by; 1 where nothing was"""
    surrogate: Tensor
    """the maximised term, such as min(ρÂ, clip(ρ)Â)"""
    branch: Tensor
    """which term that is: an index into ``BRANCHES``"""
    values: Tensor | None = None
    """V at that time; None without a critic"""
    weights: Tensor | None = None
    """what the surrogate is multiplied by, to correct for the sampler; None without ``importance_cap``"""
    penalty_kl: Tensor | None = None
    """KL(π_old‖π_θ) that ``Trace.beta`` weighs, 0 where the penalty does not apply; None without a penalty"""

    @property
    def gradient_flows(self) -> Tensor:
        """Whether the surrogate has a gradient; False without a visit.   [K, T] bool"""
        flows = torch.tensor(WITH_GRADIENT)[self.branch.long()] & (self.updates >= 0)
        return flows if self.weights is None else flows & (self.weights != 0)


@dataclass(frozen=True)
class TracedRow:
    """A response, or consecutive steps of one episode.   All [T] unless said otherwise"""

    row: int
    """which row of the rollout: the environment, or the response"""
    start: int
    """index of its first step here"""
    about: dict[str, Any]
    """plain values about it. On text ``prompt`` and ``tokens``, a string for each; in control ``episode``, ``step``, ``seed``,
    ``before`` and ``observed``, from which the reset and actions can be replayed"""
    actions: Tensor
    """[T] or [T, action]; tokens of text"""
    mask: Tensor
    """True at a decision of the policy"""
    rewards: Tensor
    """r, the optimised reward"""
    reward_parts: dict[str, Tensor]
    """its parts: ``environment`` in control, before any normalisation; ``score`` and ``kl`` on text"""
    values: Tensor
    """V under θ_old; zeros without a critic"""
    next_values: Tensor
    """V of the true successor"""
    terminated: Tensor
    truncated: Tensor
    td_residuals: Tensor
    """δ = r + γ V′ − V, with V′ = 0 where terminated"""
    advantages: Tensor
    """A, before any normalisation"""
    returns: Tensor
    """R̂, the critic's targets"""
    visits: Visits
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    behaviour_log_probs: Tensor | None = None


@dataclass(frozen=True)
class Trace:
    """A few rows of one iteration, with the numbers that the arithmetic needs."""

    iteration: int
    steps: int
    """of the run, when the iteration was over: as in metrics.jsonl"""
    gamma: float
    gae_lambda: float
    baseline: str | None
    """what was subtracted from returns: as in the objective"""
    clip: float | None
    """ε below 1, as it was scheduled; None where nothing clips"""
    clip_high: float | None
    """ε above 1"""
    dual_clip: float | None
    beta: float
    """weight of a penalty on KL(π_old‖π_θ); 0 without one"""
    rows: list[TracedRow] = field(default_factory=list)
    ratio: str = "token"
    """whether ρ is of each token, or of the whole response: as in the objective"""
    max_weight: float | None = None
    """the largest weight, of a clipped weight; None of every other objective"""
    importance_cap: float | None = None
    """as in the objective"""
    importance_mode: str = "token_truncate"


class Recorder:
    """Chooses the iterations and rows to trace.

    every      steps of the budget between two traces; the run's first iteration has one
    rows       how many rows, spread over the batch; they differ from trace to trace
    row_details   returns plain values about some steps of a row
    """

    def __init__(self, every: int, rows: int, row_details: RowDetails = lambda rollout, row, steps: {}) -> None:
        self.every, self.rows, self.row_details = every, rows, row_details
        self.recording: Recording | None = None

    def begin(
        self, rollout: Rollout, credit: Credit, objective: Objective, state: LearnerState, clip_scale: float, beta: float
    ) -> "Recording | None":
        """Begin to record an update, if it is traced; an earlier recording that was not taken is dropped."""
        # Due where a multiple of ``every`` lies among the iteration's steps: that needs no state, so resuming changes nothing.
        due = -state.steps % self.every < max(1, rollout.steps * world_size())
        self.recording = None
        if due and (segments := choose_segments(rollout, self.rows, state.iteration)):
            about = [self.row_details(rollout, row, steps) for row, steps in segments]
            self.recording = Recording(rollout, credit, objective, segments, about, clip_scale, beta)
        return self.recording

    def take(self, state: LearnerState) -> Trace | None:
        """The trace of the finished iteration; None if it was not traced."""
        recording, self.recording = self.recording, None
        return None if recording is None else recording.trace(state)


class Recording:
    """The trace of an update in progress."""

    def __init__(
        self,
        rollout: Rollout,
        credit: Credit,
        objective: Objective,
        segments: list[tuple[int, slice]],
        about: list[dict[str, Any]],
        clip_scale: float,
        beta: float,
    ) -> None:
        self.rollout, self.credit, self.objective, self.clip_scale, self.beta = rollout, credit, objective, clip_scale, beta
        self.segments, self.about = segments, about
        self.slots = torch.full_like(rollout.mask, -1, dtype=torch.int64)  # [B, T]: index of each step in the record
        self.size = 0
        for row, steps in segments:
            count = steps.stop - steps.start
            numbers = torch.arange(self.size, self.size + count, device=self.slots.device)
            self.slots[row, steps] = torch.where(rollout.mask[row, steps], numbers, -1)
            self.size += count
        self.visited = torch.zeros(self.size, dtype=torch.int64)
        self.records: dict[str, list[Tensor]] = {}
        self.normalised_by(None)

    def normalised_by(self, moments: Moments | None) -> None:
        """Set the moments by which the advantages of the next visits are normalised."""
        self.mean, self.variance = (0.0, 1.0) if moments is None else (float(moments.mean), float(moments.var))

    @torch.no_grad()
    def visit(self, part: Batch, evaluation: Evaluation, updates: int) -> None:
        """Record what the loss reads of a micro-batch.

        part         numbered rows of the batch, with advantages as used
        evaluation   of them, at the present θ
        updates      optimizer steps of the run so far
        """
        assert part.flat_index is not None, "a recording needs to know which rows it sees"
        slots = self.slots.flatten()[part.flat_index]
        hit = slots >= 0
        at = slots[hit].cpu()
        if not len(at):
            return
        log_probs, advantages = evaluation.log_probs[hit], part.advantages[hit]
        old = evaluation.log_probs if part.old_log_probs is None else part.old_log_probs
        ratio = ratio_of(evaluation.log_probs, old, part.mask, self.objective)[hit]
        gain = surrogate(log_probs, ratio, advantages, self.objective, self.clip_scale)
        branch = branches(ratio, advantages, self.objective, self.clip_scale)
        if self.objective.drop_above_kl is not None:
            dropped = left_out(evaluation.log_probs, old, part.advantages, part.mask, self.objective)[hit]
            gain, branch = gain.masked_fill(dropped, 0), branch.masked_fill(dropped, BRANCHES.index("left_out"))
        values = {
            "updates": torch.full_like(slots[hit], updates, dtype=torch.int32),
            "log_probs": log_probs,
            "ratio": ratio,
            "advantages": advantages,
            "mean": torch.full_like(advantages, self.mean),
            "variance": torch.full_like(advantages, self.variance),
            "surrogate": gain,
            "branch": branch,
        }
        if evaluation.values is not None:
            values["values"] = evaluation.values[hit]
        if (weights := sampler_weights(part, self.objective)) is not None:
            values["weights"] = weights[hit]
        if self.objective.penalty is not None:
            values["penalty_kl"] = keep_only(old_kl(evaluation, part), part.penalised)[hit]
        visit = int(self.visited[at[0]])  # every row is read once a pass, so those of a minibatch are in the same one
        for name, x in values.items():
            passes = self.records.setdefault(name, [])
            if visit == len(passes):
                passes.append(torch.full((self.size,), -1 if name == "updates" else 0, dtype=x.dtype))
            passes[visit][at] = x.cpu()
        self.visited[at] += 1

    def trace(self, state: LearnerState) -> Trace:
        """The finished trace."""
        objective = self.objective
        low, high, dual_clip = (None, None, None) if objective.clip is None else clip_bounds(objective, self.clip_scale)
        return Trace(
            iteration=state.iteration,
            steps=state.steps,
            clip=low,
            clip_high=high,
            dual_clip=dual_clip,
            beta=self.beta,
            rows=self._rows(),
            **{name: getattr(objective, name) for name in OF_OBJECTIVE},
        )

    def _rows(self) -> list[TracedRow]:
        rollout, credit = self.rollout, self.credit
        residuals = td_residual(
            rollout.rewards, rollout.values, rollout.next_values, terminated=rollout.terminated, gamma=self.objective.gamma
        )
        visits = {name: torch.stack(passes) for name, passes in self.records.items()}
        rows, offset = [], 0
        for (row, steps), about in zip(self.segments, self.about, strict=True):

            def cut(x: Tensor, row: int = row, steps: slice = steps) -> Tensor:
                return keep_only(x[row, steps].cpu(), rollout.mask[row, steps].cpu())  # masked entries may hold anything

            end = offset + steps.stop - steps.start
            rows.append(
                TracedRow(
                    row=row,
                    start=steps.start,
                    about=about,
                    actions=rollout.actions[row, steps].cpu(),
                    reward_parts={name: cut(part) for name, part in rollout.reward_parts.items()},
                    td_residuals=cut(residuals),
                    advantages=cut(credit.advantages),
                    returns=cut(credit.returns),
                    visits=Visits(**{name: x[:, offset:end] for name, x in visits.items()}),
                    **{name: cut(x) for name in OF_ROLLOUT if (x := getattr(rollout, name)) is not None},
                )
            )
            offset = end
        return rows


def branches(ratio: Tensor, advantages: Tensor, objective: Objective, clip_scale: float = 1.0) -> Tensor:
    """The term of the surrogate that was used, as an index into ``BRANCHES``.   [...] uint8

    If clipped and unclipped are equal (inside the band, or with Â = 0), it counts as unclipped.
    """
    if not objective.leaves_old_policy:
        return torch.full_like(ratio, BRANCHES.index("log_prob"), dtype=torch.uint8)
    if objective.max_weight is not None:
        return torch.full_like(ratio, BRANCHES.index("weighted"), dtype=torch.uint8)
    if objective.clip is None:
        return torch.zeros_like(ratio, dtype=torch.uint8)
    low, high, dual_clip = clip_bounds(objective, clip_scale)
    taken = clip_active(ratio, advantages, low, high).to(torch.uint8)
    if dual_clip is not None:
        taken[(advantages < 0) & (ratio > dual_clip)] = BRANCHES.index("dual_clip")
    return taken


def choose_segments(rollout: Rollout, count: int, iteration: int) -> list[tuple[int, slice]]:
    """Rows spread over a rollout, which differ from iteration to iteration, each with its longest segment."""
    rows = rollout.mask.any(-1).nonzero().flatten().tolist()
    count = min(count, len(rows))
    chosen = [rows[(iteration + index * len(rows) // count) % len(rows)] for index in range(count)]
    ended = rollout.terminated | rollout.truncated
    return [(row, longest_segment(rollout.mask[row], ended[row])) for row in chosen]


def longest_segment(mask: Tensor, ended: Tensor) -> slice:
    """The steps between two ends with the most kept steps, from the first kept step to the last.   [T], [T]"""
    ends = [index + 1 for index in (ended & mask).nonzero().flatten().tolist()]
    kept = mask.tolist()
    segments = [(start, stop) for start, stop in zip([0, *ends], [*ends, len(kept)], strict=True) if any(kept[start:stop])]
    start, stop = max(segments, key=lambda segment: sum(kept[segment[0] : segment[1]]))
    return slice(kept.index(True, start), stop - kept[start:stop][::-1].index(True))
