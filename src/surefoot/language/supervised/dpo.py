"""DPO as a policy over two answers: scores are what the model has moved from a frozen reference.

Rafailov et al. (2023) read r(y) = β·(log π_θ(y) − log π_ref(y)) as a reward, up to what is common to both answers. With it as
the score, the choice between two answers is the one that a reward model learns (``preferences``), and its policy gradient with
weight 1 on the chosen one is the gradient of the DPO loss. Labels that are wrong at a rate ε are weights 1 − ε and ε on the two
choices, as the average label would be.

IPO (Azar et al. 2023) draws the margin h = r(chosen)/β − r(rejected)/β itself, and not a choice: a normal distribution around h
with variance 1/2, in which label "first" says 1/(2β) and label "second" −1/(2β). Its log-density, the constant left out, is
−(h ∓ 1/(2β))², which is equation 17 of the paper; the weights mean the same.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from surefoot.core.rollout import Evaluation, Metrics, Policy, map_tensors
from surefoot.language.adapters.layers import SharedBase
from surefoot.language.data import datasets as data
from surefoot.language.data.rows import read_rows
from surefoot.language.data.tokens import Tokens
from surefoot.language.models.language_model import check_compatible, errors_for, load_base, model_folder
from surefoot.language.models.loading import load_model
from surefoot.language.models.policy import LanguagePolicy, in_micro_batches
from surefoot.language.supervised.demonstrations import Batch, Rows, demonstration_tensors
from surefoot.language.supervised.preferences import CHOSEN, REJECTED
from surefoot.recipes.language import DpoRecipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Tensors = Callable[[Sequence[int]], Batch]
"""what ``Rows.tensors`` is"""

REFERENCE = "reference"
"""where inputs have Σ log π_ref of both answers   [B, 2]"""


class AnchoredPairPolicy(Policy):
    """Which of two answers is better, by how far a language model has moved from a reference towards each.

    writer   the policy that is trained, without a critic
    beta     β, what a nat away from the reference costs
    ipo      draw the margin (IPO) and not the choice (DPO)

    ``inputs`` are, for each side, {"chosen_prompt" [B, P], "chosen_prompt_mask" [B, P], "chosen" [B, T], "chosen_mask" [B, T]},
    where the mask is True at trained tokens, and {"reference" [B, 2]}.
    """

    def __init__(self, writer: Policy, beta: float, ipo: bool = False) -> None:
        super().__init__()
        self.writer, self.beta, self.ipo, self.exact = writer, beta, ipo, writer.exact
        self.eval()

    def forward(self, inputs: Mapping[str, Tensor], actions: Tensor, mask: Tensor | None = None) -> Evaluation:
        """Log-probability of saying that answer 0 (the chosen) or 1 is better; the entropy of the choice, shared by the actions
        of a row.   [B, K] -> all [B, K]
        """
        moved = self.moved(inputs)
        both = (self.beta * moved).log_softmax(-1)
        entropy = -(both.exp() * both).sum(-1, keepdim=True) / actions.shape[-1]
        return Evaluation(self.said(moved).gather(-1, actions), entropy.expand(actions.shape))

    def said(self, moved: Tensor) -> Tensor:
        """Log-probabilities of both labels, of IPO without the constant.   [B, 2] -> [B, 2]"""
        if not self.ipo:
            return (self.beta * moved).log_softmax(-1)
        margin, wanted = moved[..., :1] - moved[..., 1:], 1 / (2 * self.beta)
        return -(torch.cat([margin - wanted, margin + wanted], -1) ** 2)

    def moved(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """log π_θ − log π_ref of the chosen and the rejected answer.   -> [B, 2]"""
        return answer_log_probs(self.writer, inputs) - inputs[REFERENCE]

    def costs(self, inputs: Mapping[str, Tensor], mask: Tensor) -> Tensor:
        """Tokens of both answers, each with its prompt.   [B]"""
        return sum(  # type: ignore[return-value]
            self.writer.costs(_prompt(inputs, side), inputs[f"{side}_mask"]) for side in (CHOSEN, REJECTED)
        )

    def train(self, mode: bool = True) -> "AnchoredPairPolicy":
        """Stay in evaluation mode: no dropout."""
        return super().train(False)


def _prompt(inputs: Mapping[str, Tensor], side: str) -> dict[str, Tensor]:
    return {"prompt": inputs[f"{side}_prompt"], "prompt_mask": inputs[f"{side}_prompt_mask"]}


def answer_log_probs(writer: Policy, inputs: Mapping[str, Tensor]) -> Tensor:
    """Σ log π of the trained tokens of both answers.   -> [B, 2]"""
    sides = ((_prompt(inputs, side), inputs[side], inputs[f"{side}_mask"]) for side in (CHOSEN, REJECTED))
    return torch.stack([writer(*side).log_probs.masked_fill(~side[2], 0).sum(-1) for side in sides], -1)


def trained_tokens(inputs: Mapping[str, Tensor]) -> float:
    """Those of both answers."""
    return float(inputs[f"{CHOSEN}_mask"].sum() + inputs[f"{REJECTED}_mask"].sum())


def answer_rows(path: str, tokens: Tokens, limit: int, said: str = "") -> Rows:
    """The pairs in a file whose answers have at most ``limit`` tokens each, prompt included.

    Raises SurefootError, with file and line, for what is not such a file, and when every pair is too long.
    """
    pairs = data.pairs(read_rows(path), tokens, limit, said)
    sides = {
        CHOSEN: data.Demonstrations(pairs.chosen, pairs.chosen_trained, 0),
        REJECTED: data.Demonstrations(pairs.rejected, pairs.rejected_trained, 0),
    }

    def tensors(rows: Sequence[int]) -> Batch:
        inputs = {}
        for side, shown in sides.items():
            prompt, inputs[side], inputs[f"{side}_mask"] = demonstration_tensors(shown, rows, tokens.pad_id)
            inputs |= {f"{side}_{name}": found for name, found in prompt.items()}
        return inputs, torch.tensor([[0, 1]]).repeat(len(rows), 1), torch.ones(len(rows), 2, dtype=torch.bool)

    content = list(zip(pairs.chosen, pairs.rejected, pairs.chosen_trained, pairs.rejected_trained, strict=True))
    lengths = [max(len(chosen), len(rejected)) for chosen, rejected, *_ in content]
    trained = [max(sum(chosen), sum(rejected)) for *_, chosen, rejected in content]
    return Rows(tensors, content, lengths, trained, data.pair_drop_notes(path, limit, pairs))


class Anchor:
    """What the reference says of rows: asked when it is first needed, for all of them, and kept; the model is then let go.

    rows   whose tensors come with the answer from now on
    ask    gives Σ log π_ref of both answers of the first so many rows   -> [N, 2]
    count  how many rows are asked about; none: all
    """

    def __init__(self, rows: Rows, ask: Callable[[Tensors, int], Tensor], count: int | None = None) -> None:
        self.plain, self.count = rows.tensors, min(count or rows.count, rows.count)
        self._ask = ask
        self._known: Tensor | None = None
        rows.tensors = self.tensors

    @property
    def known(self) -> Tensor:
        """Σ log π_ref of both answers, on the CPU.   [N, 2]"""
        if self._known is None:
            self._known = self._ask(self.plain, self.count).cpu()
        return self._known

    @known.setter
    def known(self, found: Tensor) -> None:
        self._known = found.cpu()

    def tensors(self, rows: Sequence[int]) -> Batch:
        """The rows with what the reference says of them."""
        inputs, actions, mask = self.plain(rows)
        return {**inputs, REFERENCE: self.known[list(rows)]}, actions, mask


class Reference:
    """The frozen model of a recipe, read anew each time it is asked: between, it takes no memory.

    shared  a model with adapters and its base: where no other is named, the reference is that model with them off

    Raises SurefootError where ``reference.model`` can't be read, or does not read the policy's tokens.
    """

    def __init__(
        self, recipe: DpoRecipe, tokens: Tokens, longest: int, shared: "tuple[PreTrainedModel, SharedBase] | None" = None
    ) -> None:
        self.recipe, self.tokens, self.longest = recipe, tokens, longest
        self.shared = shared if recipe.reference.model is None else None
        if recipe.reference.model is not None:
            self._model()

    @torch.no_grad()
    def ask(self, tensors: Tensors, count: int) -> Tensor:
        """Σ log π_ref of both answers of the first ``count`` rows.   -> [count, 2]"""
        bf16 = self.recipe.precision == "bfloat16"
        writer = LanguagePolicy(self._model(), None, self.tokens.pad_id, bf16=bf16).to(self.recipe.device)
        parts = batches(tensors, count, self.recipe.data.batch, self.recipe.device)
        limit, size = self.recipe.optimizer.micro_batch_tokens, self.recipe.optimizer.micro_batch
        found = []
        with nullcontext() if self.shared is None else self.shared[1].using(None):
            for inputs, _, _ in parts:
                sides = ((_prompt(inputs, side), inputs[side], inputs[f"{side}_mask"]) for side in (CHOSEN, REJECTED))
                sums = [in_micro_batches(_summed(writer), *side, limit, size) for side in sides]
                found.append(torch.stack(sums, -1).cpu())
        return torch.cat(found)

    def _model(self) -> "PreTrainedModel":
        name = self.recipe.reference.model
        if self.shared is not None:
            return self.shared[0]
        if name is None:
            return load_base(self.recipe)[0]
        with errors_for("reference.model"):
            model, tokenizer = load_model(model_folder(name), trust_remote_code=self.recipe.trust_remote_code)
        check_compatible("reference.model", name, (model, tokenizer), self.recipe, self.tokens, self.longest)
        return model


def _summed(writer: LanguagePolicy) -> Callable[[Mapping[str, Tensor], Tensor, Tensor], Tensor]:
    return lambda inputs, actions, mask: writer(inputs, actions, mask).log_probs.sum(-1)


def batches(tensors: Tensors, count: int, batch: int, device: str) -> Iterator[Batch]:
    """The first ``count`` rows, at most ``batch`` at a time."""
    for start in range(0, count, batch):
        yield map_tensors(lambda x: x.to(device), tensors(range(start, min(start + batch, count))))


@torch.no_grad()
def judged(policy: AnchoredPairPolicy, rows: Rows, count: int, recipe: DpoRecipe) -> Metrics:
    """Loss, accuracy, margin and log-probabilities on the first ``count`` rows."""
    count, wrong = min(count, rows.count), recipe.preference.label_smoothing
    weights = torch.tensor([1 - wrong, wrong], dtype=torch.float64)
    moved, known = [], []
    most = (recipe.optimizer.micro_batch_tokens, recipe.optimizer.micro_batch)
    for inputs, actions, mask in batches(rows.tensors, count, recipe.data.batch, recipe.device):
        found = in_micro_batches(lambda part, *_: policy.moved(part), inputs, actions, mask, *most, policy.costs(inputs, mask))
        moved.append(found.double().cpu())
        known.append(inputs[REFERENCE].double().cpu())
    away = torch.cat(moved)
    chosen, rejected = (away + torch.cat(known)).mean(0).tolist()
    margin = policy.beta * (away[:, 0] - away[:, 1])
    return {
        "held_out_loss": -float((policy.said(away) * weights).sum(-1).mean()),
        "held_out_accuracy": float(((margin > 0).double() + 0.5 * (margin == 0)).mean()),
        "held_out_margin": float(margin.mean()),
        "held_out_chosen_log_prob": chosen,
        "held_out_rejected_log_prob": rejected,
    }
