"""Models come in whole or are refused in one line, and go out whole or not at all."""

from pathlib import Path
from typing import Any

import torch

from surefoot.language.models import load_model, pocket
from surefoot.language.pocket import ALPHABET

from . import tiny


@torch.no_grad()
def logits_of(model: Any, length: int = 12) -> torch.Tensor:
    ids = torch.arange(length).unsqueeze(0) * 7 % tiny.VOCABULARY
    return model(input_ids=ids).logits


def test_a_folder_of_every_family_is_loaded_as_it_was_written(family: str, folder: Path) -> None:
    model, tokenizer = load_model(folder)
    assert torch.equal(logits_of(model), logits_of(tiny.model(family)))
    assert model.dtype == torch.float32
    assert not model.training
    assert len(tokenizer) == tiny.VOCABULARY


def test_pocket_is_made_from_its_seed_alone_and_leaves_the_global_generator() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, _ = pocket(seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    again, _ = load_model("pocket", seed=1)
    other, _ = load_model("pocket", seed=2)
    assert torch.equal(logits_of(one), logits_of(again))
    assert not torch.equal(logits_of(one), logits_of(other))


def test_pocket_decodes_what_it_encodes() -> None:
    _, tokenizer = pocket()
    ids = tokenizer(ALPHABET)["input_ids"]
    assert len(ids) == len(ALPHABET) == 96
    assert tokenizer.decode(ids) == ALPHABET
    assert tokenizer.decode(tokenizer("a  b .\n")["input_ids"]) == "a  b .\n"
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 3
    assert tokenizer("é")["input_ids"] == [tokenizer.unk_token_id]


def test_pocket_has_about_a_million_parameters() -> None:
    model, tokenizer = pocket()
    assert 0.7e6 < sum(p.numel() for p in model.parameters()) < 1.1e6
    assert model.config.vocab_size == len(tokenizer)
