"""Groups of responses to one prompt: which of them teach something, and which fill a batch (the dynamic sampling of DAPO)."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from surefoot.core.distributed import all_sum
from surefoot.language.data.datasets import Prompts
from surefoot.language.sampling.sampler import Samples


def with_signal(total: Tensor, valid: Tensor, samples: int) -> Tensor:
    """True for a prompt of whose responses two have scores that differ.   [N], [N] -> [N / samples]"""
    total, valid = total.view(-1, samples), valid.view(-1, samples)
    lowest = total.masked_fill(~valid, torch.inf).amin(-1)
    return total.masked_fill(~valid, -torch.inf).amax(-1) > lowest


def over_ranks(mine: Tensor, places: Sequence[int], count: int) -> list[bool]:
    """What all ranks say of the prompts of a round, by their places in it.   [those of this rank]"""
    said = torch.zeros(count, device=mine.device)
    said[list(places)] = mine.to(said.dtype)
    return [bool(one) for one in all_sum(said).tolist()]


def filling(signal: Sequence[bool], wanted: int) -> list[int]:
    """Which of the sampled groups make the batch, in order: the first ``wanted`` with signal, filled up with some without."""
    first = sorted(range(len(signal)), key=lambda place: (not signal[place], place))
    return sorted(first[:wanted])


def rows_of_batch(
    signal: Sequence[bool], places: Sequence[int], wanted: int, share: int, samples: int
) -> tuple[Tensor, Tensor]:
    """This rank's rows of the batch among all that it sampled, and which of them are learned from.   [rows], [rows] bool

    signal   of every sampled group, over all ranks
    places   of the groups of this rank among them
    wanted   groups of the batch, over all ranks: those that one process would choose
    share    a rank with fewer of these keeps others to look at, so that it has rows for every minibatch
    samples  rows of a group
    """
    chosen = set(filling(signal, wanted))
    mine = [number for number, place in enumerate(places) if place in chosen]
    others = [number for number, place in enumerate(places) if place not in chosen]
    groups = sorted(mine + others[: max(0, share - len(mine))])
    rows = torch.tensor(groups).unsqueeze(-1) * samples + torch.arange(samples)
    return rows.flatten(), torch.tensor([places[number] in chosen for number in groups]).repeat_interleave(samples)


def joined_prompts(parts: Sequence[Prompts]) -> Prompts:
    """The prompts of several rounds."""
    columns = {name: [value for part in parts for value in part.columns[name]] for name in parts[0].columns}
    prompts = [prompt for part in parts for prompt in part.prompts]
    return replace(parts[0], prompts=prompts, ids=[ids for part in parts for ids in part.ids], columns=columns)


def joined_samples(parts: Sequence[Samples], pad_id: int) -> Samples:
    """The responses of several rounds, padded alike."""
    before = max(part.prompt.shape[1] for part in parts)
    after = max(part.actions.shape[1] for part in parts)

    def left(x: Tensor, value: int = 0) -> Tensor:
        return pad(x, (before - x.shape[1], 0), value=value)

    def right(x: Tensor, value: int = 0) -> Tensor:
        return pad(x, (0, after - x.shape[1]), value=value)

    real = [part.real for part in parts if part.real is not None]
    return replace(
        parts[0],
        prompt=torch.cat([left(part.prompt, pad_id) for part in parts]),
        prompt_mask=torch.cat([left(part.prompt_mask) for part in parts]),
        actions=torch.cat([right(part.actions, pad_id) for part in parts]),
        mask=torch.cat([right(part.mask) for part in parts]),
        log_probs=torch.cat([right(part.log_probs) for part in parts]),
        ended=torch.cat([part.ended for part in parts]),
        real=torch.cat([right(mask) for mask in real]) if real else None,
    )
