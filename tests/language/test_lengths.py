"""Every row is read as the model reads it alone: past a switch of frequencies, and by families without masks or positions."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import surefoot
from surefoot.core.rollout import LearnerState
from surefoot.errors import SurefootError
from surefoot.language.data.batches import left_padded, right_padded
from surefoot.language.data.rows import write_rows
from surefoot.language.models.policy import LanguagePolicy, ReferencePolicy
from surefoot.language.models.reward_model import new_reward_model
from surefoot.language.sampling.engines import Request
from surefoot.language.sampling.sampler import prompt_groups, sample
from surefoot.store.metrics import read_metrics

from . import tiny

SWITCH = 24
LONGROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": SWITCH}
LONGROPE |= {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0, 6.0, 8.0, 10.0]}
PROMPTS = [[(7 * i + n) % 90 + 5 for i in range(n)] for n in (3, 20, 23, 24, 25, 30)]
SHAPES: dict[str, dict[str, Any]] = {
    "phi3": {"num_key_value_heads": 2, "rope_parameters": LONGROPE, "original_max_position_embeddings": SWITCH},
    "rwkv": {"attention_hidden_size": 32, "context_length": 128},
    "bart": {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64},
    "roberta": {"is_decoder": True},
}


def small(kind: str, **changes: Any) -> Any:
    """A model with large random weights, so that a wrong position shows."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"vocab_size": tiny.VOCABULARY, "max_position_embeddings": 128}
    ids = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    config = AutoConfig.for_model(kind, **{**shape, **ids, **SHAPES[kind], **changes})
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for weight in model.parameters():
            weight.mul_(4.0 if weight.ndim > 1 else 1.0)
    return model


@torch.no_grad()
def generated(model: Any, prompt: list[int], response: list[int]) -> Tensor:
    """log π of a response, each token after the text before it, as ``transformers`` generates it for one prompt."""
    logits = [
        model(input_ids=torch.tensor([prompt + response[:t]]), use_cache=False).logits[0, -1] for t in range(len(response))
    ]
    return torch.stack(logits).log_softmax(-1).gather(-1, torch.tensor(response).unsqueeze(-1)).squeeze(-1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", SHAPES)
def test_sampler_reads_rows_as_the_model_does_alone(kind: str) -> None:
    model = small(kind)
    prompts = PROMPTS if kind == "phi3" else PROMPTS[:3]
    drawn = sample(model, Request(prompts, range(2 * len(prompts)), 6, (1,), 0, samples=2))
    for row, response in enumerate(drawn.responses()):
        wanted = generated(model, prompts[row // 2], response)
        torch.testing.assert_close(drawn.log_probs[row, : len(response)], wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("padding_free", [False, True])
def test_trainer_and_reference_read_every_token_after_its_own_text(padding_free: bool) -> None:
    model = small("phi3")
    policy = LanguagePolicy(model, "head", 0, padding_free=padding_free)
    assert policy.padding_free == padding_free
    torch.nn.init.normal_(policy.value_head.weight)
    responses = [[(5 * i + row) % 90 + 5 for i in range(7)] for row in range(len(PROMPTS))]
    (prompt, prompt_mask), (actions, mask) = left_padded(PROMPTS, 0), right_padded(responses, 0)
    inputs = {"prompt": prompt, "prompt_mask": prompt_mask}
    together = policy(inputs, actions, mask)
    together.log_probs.sum().backward()
    gradient = model.get_input_embeddings().weight.grad.clone()
    model.zero_grad()
    for row, response in enumerate(responses):
        wanted = generated(model, PROMPTS[row], response)
        torch.testing.assert_close(together.log_probs[row].detach(), wanted, atol=1e-4, rtol=0)
        alone = policy({name: x[row : row + 1] for name, x in inputs.items()}, actions[row : row + 1], mask[row : row + 1])
        torch.testing.assert_close(together.values[row], alone.values[0], atol=1e-4, rtol=1e-4)
        alone.log_probs.sum().backward()
        after = policy.values_after({name: x[row : row + 1] for name, x in inputs.items()}, actions[row : row + 1], mask[:1])
        torch.testing.assert_close(policy.values_after(inputs, actions, mask)[row], after[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model.get_input_embeddings().weight.grad, gradient, atol=1e-3, rtol=1e-3)
    reference = ReferencePolicy(policy).log_probs(inputs, actions, mask)
    torch.testing.assert_close(reference, together.log_probs.detach(), atol=1e-4, rtol=0)


@torch.no_grad()
def test_reward_model_scores_a_text_with_the_frequencies_of_its_length() -> None:
    scorer = new_reward_model(small("phi3"), seed=1)
    for padded in (left_padded, right_padded):
        ids, mask = padded(PROMPTS, 0)
        alone = [torch.tensor([prompt]) for prompt in PROMPTS]
        wanted = torch.cat([scorer(row, torch.ones_like(row, dtype=torch.bool)) for row in alone])
        torch.testing.assert_close(scorer(ids, mask), wanted, atol=1e-4, rtol=1e-4)
        everywhere = scorer.prefix_scores(ids, mask)
        for row, text in enumerate(alone):
            own = scorer.prefix_scores(text, torch.ones_like(text, dtype=torch.bool))[0]
            torch.testing.assert_close(everywhere[row][mask[row]], own, atol=1e-4, rtol=1e-4)


def test_responses_of_every_group_have_their_own_seed_and_number() -> None:
    model, finished, eos = small("phi3"), dict[int, list[int]](), range(5, 95, 5)
    report = {"on_finished": lambda number, ids: finished.update({number: list(ids)})}
    drawn = sample(model, Request(PROMPTS, range(12), 6, eos, 0, samples=2, **report)).responses()
    assert drawn == [sample(model, Request([PROMPTS[row // 2]], [row], 6, eos, 0)).responses()[0] for row in range(12)]
    assert finished == {row: ids for row, ids in enumerate(drawn) if ids[-1] in eos} != {}
    assert prompt_groups([9, 10, 11, 4], 2, 10) == [[0, 3], [2], [1]]


def fields(folder: Path, **changes: Any) -> dict[str, Any]:
    """A recipe whose rows stay below the switch, pass it, and are past it."""
    if not (folder / "config.json").is_file():
        small("phi3").save_pretrained(folder)
        tiny.tokenizer().save_pretrained(folder)
        write_rows(folder / "rows.jsonl", [{"prompt": "x" * count} for count in (4, 22, 30, 12)])
        (folder / "count.py").write_text("def count(responses):\n    return [float(len(text) % 3) for text in responses]\n")
    table = {
        "algorithm": "GRPO",
        "steps": 32,
        "data": {"train": str(folder / "rows.jsonl"), "max_length": 64},
        "sampling": {"prompts": 4, "samples": 4, "max_tokens": 8, "old_log_probs": "trainer"},
        "optimizer": {"micro_batch": 3, "learning_rate": 1e-3},
        "reference": {"measure": True},
    }
    return {**tiny.fields_of(folder, "", f"{folder / 'count.py'}:count", **table), **changes}


def test_run_past_the_switch_trains_the_policy_that_samples(tmp_path: Path) -> None:
    surefoot.train("language", run_dir=tmp_path / "run", **fields(tmp_path / "model"))
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert max(row["sampler_gap"] for row in rows) < 1e-4
    assert all(row["ratio_at_start"] == pytest.approx(1, abs=1e-4) for row in rows)
    assert rows[0]["kl_reference"] == pytest.approx(0, abs=1e-6)


def test_model_whose_rows_depend_on_each_other_is_rejected_before_training(folders: dict[str, Path], tmp_path: Path) -> None:
    table = fields(tmp_path / "model", model=str(folders["gpt2"]))
    made = tiny.world_of(table)

    def mixed(_: Any, __: Any, outputs: Any) -> Any:
        outputs.last_hidden_state = outputs.last_hidden_state + 0.1 * outputs.last_hidden_state.mean(0, keepdim=True)
        return outputs

    made.policy.model.base_model.register_forward_hook(mixed)
    with pytest.raises(SurefootError, match=r"the (trainer|sampler) computes .* single row .*GPT2LMHeadModel reads a row"):
        made.collector.collect(LearnerState.seeded(1, 32))


def test_engine_that_cannot_separate_rows_by_their_length_is_rejected(tmp_path: Path) -> None:
    table = fields(tmp_path / "model", sampling={"prompts": 4, "max_tokens": 8, "engine": "continuous"})
    with pytest.raises(SurefootError, match=r"past 24 tokens .*continuous batching"):
        tiny.world_of(table)
