"""Groups of responses to one prompt: which have a learning signal, and which make a batch (DAPO's dynamic sampling)."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from surefoot.core.distributed import all_sum
from surefoot.language.data.datasets import Prompts
from surefoot.language.sampling.sampler import Samples


def with_signal(total: Tensor, valid: Tensor, samples: int) -> Tensor:
    """True for a prompt with at least two responses whose scores differ.   [N], [N] -> [N / samples]"""
    total, valid = total.view(-1, samples), valid.view(-1, samples)
    lowest = total.masked_fill(~valid, torch.inf).amin(-1)
    return total.masked_fill(~valid, -torch.inf).amax(-1) > lowest


def gather_signal(mine: Tensor, places: Sequence[int], count: int) -> list[bool]:
    """The signal of a round's prompts on all ranks, by their places in it.   [prompts of this rank]"""
    signal = torch.zeros(count, device=mine.device)
    signal[list(places)] = mine.to(signal.dtype)
    return [bool(one) for one in all_sum(signal).tolist()]


def choose_groups(signal: Sequence[bool], wanted: int) -> list[int]:
    """The sampled groups that make the batch, in order: the first ``wanted`` with signal, filled up with some without."""
    first = sorted(range(len(signal)), key=lambda place: (not signal[place], place))
    return sorted(first[:wanted])


def rows_of_batch(
    signal: Sequence[bool], places: Sequence[int], wanted: int, share: int, samples: int
) -> tuple[Tensor, Tensor]:
    """This rank's rows of the batch among all that it sampled, and which of them are trained on.   [rows], [rows] bool

    signal   of every sampled group, over all ranks
    places   of the groups of this rank among them
    wanted   groups of the batch, over all ranks: the same ones as in one process
    share    a rank with fewer of these keeps others, untrained, so that it has rows for every minibatch
    samples  rows of a group
    """
    chosen = set(choose_groups(signal, wanted))
    mine = [number for number, place in enumerate(places) if place in chosen]
    others = [number for number, place in enumerate(places) if place not in chosen]
    groups = sorted(mine + others[: max(0, share - len(mine))])
    rows = torch.tensor(groups).unsqueeze(-1) * samples + torch.arange(samples)
    return rows.flatten(), torch.tensor([places[number] in chosen for number in groups]).repeat_interleave(samples)


def concat_prompts(parts: Sequence[Prompts]) -> Prompts:
    """The prompts of several rounds."""
    columns = {name: [value for part in parts for value in part.columns[name]] for name in parts[0].columns}
    prompts = [prompt for part in parts for prompt in part.prompts]
    return replace(parts[0], prompts=prompts, ids=[ids for part in parts for ids in part.ids], columns=columns)


def concat_samples(parts: Sequence[Samples], pad_id: int) -> Samples:
    """The responses of several rounds, padded to one length."""
    before = max(part.prompt.shape[1] for part in parts)
    after = max(part.actions.shape[1] for part in parts)

    def left(x: Tensor, value: int = 0) -> Tensor:
        return pad(x, (before - x.shape[1], 0), value=value)

    def right(x: Tensor, value: int = 0) -> Tensor:
        return pad(x, (0, after - x.shape[1]), value=value)

    read = [part.real for part in parts if part.real is not None]
    return replace(
        parts[0],
        prompt=torch.cat([left(part.prompt, pad_id) for part in parts]),
        prompt_mask=torch.cat([left(part.prompt_mask) for part in parts]),
        actions=torch.cat([right(part.actions, pad_id) for part in parts]),
        mask=torch.cat([right(part.mask) for part in parts]),
        log_probs=torch.cat([right(part.log_probs) for part in parts]),
        ended=torch.cat([part.ended for part in parts]),
        real=torch.cat([right(mask) for mask in read]) if read else None,
    )
