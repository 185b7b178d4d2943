"""What a run reads and doesn't keep (frozen models, rows), recognised again when it is resumed."""

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from surefoot.errors import SurefootError


def weights_hash(module: nn.Module) -> str:
    """A hash of every weight by name."""
    found = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()[:32]


def rows_hash(rows: Iterable[object]) -> str:
    """A hash of rows and their order."""
    found = hashlib.sha256()
    for row in rows:
        found.update(f"{row}\n".encode())
    return found.hexdigest()[:32]


def check_count(train: str, before: int, now: int) -> None:
    """Raise SurefootError where ``data.train`` has another number of rows than at the checkpoint."""
    if before != now:
        raise SurefootError(
            f"data.train={train!r}: had {before} rows at the checkpoint and has {now} now; bring the old file back"
        )


def check_same(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raise SurefootError where something is not what it was at the checkpoint. Both: what it is, by field and value."""
    for name, seen in now.items():
        if before.get(name, seen) != seen:
            raise SurefootError(
                f"{name}: is not what it was at the checkpoint (its content has changed since); bring the old one back, or "
                "begin a new run"
            )
