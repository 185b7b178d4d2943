"""Every decoding path samples from the model's own distribution, independent of other rows, padding and global state."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from surefoot.errors import NotFiniteError, SurefootError
from surefoot.language.data.tokens import Tokens
from surefoot.language.language_model import LanguageModel
from surefoot.language.sampling.ends import EndDetector
from surefoot.language.sampling.engines import DecodingPath, Request, Samples
from surefoot.language.sampling.sampler import inverse_cdf, sample, uniform_draws

from . import tiny

PATHS: tuple[DecodingPath, ...] = ("packed", "cached", "recomputed")
PROMPTS = [[20, 31, 42, 53, 64, 75, 86], [33], [47, 48, 49], [90, 91, 92, 93]]
EOS = (1, 40, 50, 60, 70, 80)
"""six EOS ids among 102 tokens, so that response lengths vary"""


def draw(model: Any, prompts: Sequence[Sequence[int]] = PROMPTS, path: DecodingPath | None = None, **options: Any) -> Samples:
    """Sample three responses of at most 16 tokens per prompt. The pad token is also in a prompt."""
    count = len(prompts) * options.get("samples", 3)
    defaults = {"samples": 3, "max_tokens": 16, "eos_ids": EOS, "pad_id": 31, "seeds": range(100, 100 + count)}
    return sample(model, Request(**{"prompts": prompts, **defaults, **options}), path=path)


def own_logits(model: Any, prompt: Sequence[int], response: Sequence[int]) -> Tensor:
    """The model's logits for each response token, without padding, cache or other rows.   -> [T, vocabulary]"""
    with torch.no_grad():
        return model(input_ids=torch.tensor([[*prompt, *response]]), use_cache=False).logits[0, len(prompt) - 1 : -1]


def expect_own_log_probs(
    model: Any, prompts: Sequence[Sequence[int]], drawn: Samples, temperature: float, within: float
) -> None:
    repeated = [prompt for prompt in prompts for _ in range(len(drawn.ended) // len(prompts))]
    for i, (prompt, response) in enumerate(zip(repeated, drawn.responses(), strict=True)):
        log_probs = (own_logits(model, prompt, response) / temperature).log_softmax(-1)
        expected = log_probs[range(len(response)), response]
        torch.testing.assert_close(drawn.log_probs[i, : len(response)], expected, atol=within, rtol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("path", PATHS)
def test_log_probs_match_the_models_own_forward_pass(family: str, path: DecodingPath, temperature: float) -> None:
    model = tiny.model(family)
    drawn = draw(model, path=path, temperature=temperature)
    assert drawn.path == path
    assert drawn.lengths.min() < 8, "some responses are short"
    assert drawn.lengths.max() == 16, "some responses are long"
    expect_own_log_probs(model, PROMPTS, drawn, temperature, within=1e-4)


@pytest.mark.parametrize("path", PATHS)
def test_log_probs_match_more_closely_in_float64(family: str, path: DecodingPath) -> None:
    """So the float32 difference is rounding, not a slightly wrong position, mask or scale."""
    model = tiny.model(family).double()
    drawn = draw(model, path=path)
    assert drawn.log_probs.dtype == torch.float64
    # some families compute LayerNorm and RMSNorm in float32 for every dtype
    expect_own_log_probs(model, PROMPTS, drawn, 1.0, within=1e-11 if family == "gpt2" else 1e-5)


def test_every_path_draws_the_same_tokens(family: str) -> None:
    packed, *others = [draw(tiny.model(family), path=path) for path in PATHS]
    for other in others:
        assert torch.equal(packed.actions, other.actions)
        assert torch.equal(packed.mask, other.mask)
        assert torch.equal(packed.ended, other.ended)


@pytest.mark.parametrize("path", PATHS)
def test_tokens_are_drawn_by_inverse_cdf_from_per_response_uniforms(path: DecodingPath) -> None:
    """Each response has its own generator and uses one uniform number per token."""
    model = tiny.model("llama")
    drawn = draw(model, path=path, temperature=0.8)
    for i, response in enumerate(drawn.responses()):
        uniforms = torch.rand(16, dtype=torch.float64, generator=torch.Generator().manual_seed(100 + i)).numpy()
        log_probs = (own_logits(model, PROMPTS[i // 3], response).double() / 0.8).softmax(-1).numpy()
        expected = [int(np.searchsorted(row.cumsum(), u, side="right")) for row, u in zip(log_probs, uniforms, strict=False)]
        assert response == expected


@pytest.mark.parametrize("path", PATHS)
def test_responses_do_not_depend_on_other_rows_order_or_padding(family: str, path: DecodingPath) -> None:
    model = tiny.model(family)
    together = draw(model, path=path)
    seeds = [*range(100, 112)]
    backwards = draw(model, PROMPTS[::-1], seeds=seeds[::-1], path=path, pad_id=7)
    assert backwards.responses() == together.responses()[::-1]
    for g, prompt in enumerate(PROMPTS):
        alone = [draw(model, [prompt], samples=1, seeds=[seeds[3 * g + j]], path=path) for j in range(3)]
        for j, one in enumerate(alone):
            row = 3 * g + j
            length = int(together.lengths[row])
            assert one.responses()[0] == together.responses()[row]
            torch.testing.assert_close(one.log_probs[0], together.log_probs[row, :length], atol=5e-5, rtol=0)


class Watch:
    """Records the input shapes of the model's embedding, which show what is actually computed."""

    def __init__(self, model: Any) -> None:
        self.seen: list[tuple[int, ...]] = []
        model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: self.seen.append(tuple(inputs[0].shape)))


def test_a_prompt_is_read_once_for_all_its_samples(family: str) -> None:
    model = tiny.model(family)
    watch = Watch(model)
    draw(model, samples=8, path="cached")
    assert watch.seen[0] == (len(PROMPTS), 7)
    assert all(shape[1] == 1 for shape in watch.seen[1:])


@pytest.mark.parametrize("path", PATHS)
def test_finished_responses_are_not_computed_further(path: DecodingPath) -> None:
    model = tiny.model("qwen2")
    watch = Watch(model)
    drawn = draw(model, samples=8, path=path)
    rows = [shape[0] for shape in watch.seen[-(drawn.mask.shape[1] - 1) :]]
    going_on = [int((drawn.lengths > t).sum()) for t in range(1, drawn.mask.shape[1])]
    assert rows == going_on
    assert rows[0] > rows[-1]


tokens = cache(lambda: Tokens(tiny.tokenizer()))


@given(
    st.lists(st.sampled_from([b"a", b" ", b"\n", b"\xc3", b"\xa9", b"b\n", b" \xc3", b""]), max_size=8),
    st.lists(st.sampled_from(["é", "a\n", " ", "éé", "b"]), min_size=1, max_size=2),
)
def test_shortcut_that_skips_decoding_misses_no_stop_string(parts: list[bytes], stop: list[str]) -> None:
    """Some tokens are half a character, empty, or stripped at the edge, as in real tokenizers."""
    vocabulary = [b"a", b" ", b"\n", b"\xc3", b"\xa9", b"b\n", b" \xc3", b""]

    def decode(ids: Sequence[int]) -> str:
        return b"".join(vocabulary[i] for i in ids).decode("utf-8", "replace").removeprefix(" ")

    ids = [vocabulary.index(part) for part in parts]
    ending = EndDetector((), stop, decode, len(vocabulary), torch.device("cpu"))
    actions = torch.tensor(ids).view(-1, 1)
    for t in range(1, len(ids) + 1):
        if any(word in decode(ids[: t - 1]) for word in stop):
            break  # already ended
        reached = ending.reached(actions[:t], torch.tensor([0]))
        assert (reached is not None) == any(word in decode(ids[:t]) for word in stop)


def test_generate_returns_text_without_the_stop_string(loaded: tuple[Any, Any]) -> None:
    model, tokens = loaded[0], Tokens(loaded[1], loaded[0])
    free, ended = LanguageModel(model, tokens).generate_ended(["hello", "a", "what is it?"], max_tokens=30, samples=2, seed=3)
    assert len(free) == 6
    assert len(set(free)) > 1
    word = free[0][4:6]
    cut, ended_now = LanguageModel(model, tokens).generate_ended(
        ["hello", "a", "what is it?"], max_tokens=30, samples=2, seed=3, stop=[word]
    )
    assert cut == [answer.partition(word)[0] for answer in free]
    assert ended_now == [over or word in answer for over, answer in zip(ended, free, strict=True)]


@given(st.lists(st.floats(0, 1), min_size=2, max_size=9).filter(lambda w: sum(w) > 0.1), st.floats(0, 1, exclude_max=True))
def test_inverse_cdf_selects_the_interval_of_u_and_no_impossible_token(weights: list[float], u: float) -> None:
    probabilities = torch.tensor(weights, dtype=torch.float64)
    probabilities = torch.where(probabilities < 1e-6, 0, probabilities)
    probabilities /= probabilities.sum()
    taken = int(inverse_cdf(probabilities.log().unsqueeze(0), torch.tensor([u], dtype=torch.float64))[0])
    assert probabilities[taken] > 0
    below, above = float(probabilities[:taken].sum()), float(probabilities[: taken + 1].sum())
    assert below - 1e-12 <= u <= above + 1e-12


@pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
def test_extreme_u_selects_the_first_or_last_possible_token(u: float) -> None:
    log_probs = torch.tensor([[0.0, 0.3, 0.4, 0.3, 0.0, 0.0]]).log()
    assert inverse_cdf(log_probs, torch.tensor([u], dtype=torch.float64)).item() == (1 if u == 0 else 3)


def test_uniforms_of_a_seed_do_not_depend_on_how_many_are_drawn() -> None:
    many = uniform_draws([5, 2**63 - 1, 5], 1000)
    assert torch.equal(many[:, 0], many[:, 2])
    assert not torch.equal(many[:, 0], many[:, 1])
    for count in (1, 7, 33):
        assert torch.equal(uniform_draws([5, 2**63 - 1, 5], count), many[:count])


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
def test_dropout_and_checkpointing_are_disabled_only_while_sampling(family: str) -> None:
    names = ("attn_pdrop", "resid_pdrop", "embd_pdrop") if family == "gpt2" else ("attention_dropout",)
    model = tiny.model(family, **dict.fromkeys(names, 0.5))
    quiet = draw(model)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def settings() -> list[tuple[bool, bool]]:
        return [(module.training, getattr(module, "gradient_checkpointing", False)) for module in model.modules()]

    before = settings()
    assert (True, True) in before
    assert draw(model).actions.equal(quiet.actions)
    assert draw(model, path="cached").actions.equal(quiet.actions)
    assert settings() == before


def test_sampled_tensors_can_be_used_in_training() -> None:
    drawn = draw(tiny.model("llama"))
    ratio = (drawn.log_probs - torch.zeros_like(drawn.log_probs, requires_grad=True)).exp()
    (ratio * drawn.log_probs).sum().backward()  # raises for inference tensors
    assert not drawn.log_probs.requires_grad


def adapted_projection(model: Any) -> None:
    class Adapted(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1e-3 * x

    attention = model.model.layers[0].self_attn
    weight = attention.o_proj.weight
    attention.o_proj = Adapted(*weight.T.shape, bias=False)
    attention.o_proj.weight = weight


def other_activation(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = torch.nn.Tanh()


@pytest.mark.parametrize("change", [adapted_projection, other_activation])
def test_modified_models_are_decoded_by_their_own_forward_pass(change: Any) -> None:
    model = tiny.model("llama")
    change(model)
    drawn = draw(model)
    assert drawn.path == "cached"
    expect_own_log_probs(model, PROMPTS, drawn, 1.0, within=1e-4)
    with pytest.raises(SurefootError, match="path='packed': not available for LlamaForCausalLM"):
        draw(model, path="packed")


def test_cache_with_wrong_logits_is_not_used() -> None:
    """The cached pass of this model skips a layer, as in a defective model family."""
    model = tiny.model("llama")
    other_activation(model)
    layer = model.model.layers[1]
    own = layer.forward

    def defective(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return own(x, *args, **kwargs) if x.shape[1] > 1 else x

    layer.forward = defective
    drawn = draw(model)
    assert drawn.path == "recomputed"
    layer.forward = own
    expect_own_log_probs(model, PROMPTS, drawn, 1.0, within=1e-4)


def test_half_precision_uses_the_models_own_pass_and_float32_log_probs() -> None:
    model = tiny.model("llama", scale=2.0).bfloat16()
    drawn = draw(model)
    assert (drawn.path, drawn.log_probs.dtype) == ("cached", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert draw(tiny.model("llama")).path == "cached"


SMALL = {"vocab_size": 102, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
MINIMAX = {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
OTHERS: dict[str, tuple[dict[str, Any], DecodingPath]] = {
    "mistral": ({**SMALL, "num_key_value_heads": 2, "sliding_window": 6}, "cached"),
    "gemma3_text": ({**SMALL, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6}, "cached"),
    "opt": ({**SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64}, "cached"),
    "bloom": ({"vocab_size": 102, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "cached"),
    "mamba": ({"vocab_size": 102, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}, "cached"),
    "minimax": (MINIMAX | {"layer_types": ["linear_attention", "full_attention"]}, "recomputed"),
    "minimax, the other way round": (MINIMAX | {"layer_types": ["full_attention", "linear_attention"]}, "recomputed"),
    "xlstm": ({"vocab_size": 102, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4}, "recomputed"),
    "openai-gpt": ({"vocab_size": 102, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}, "recomputed"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", OTHERS)
def test_any_causal_language_model_can_be_sampled(kind: str) -> None:
    """Covers sliding windows, learned positions from the mask, ALiBi, recurrent states, no cache, and caches that fail."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape, path = OTHERS[kind]
    config = AutoConfig.for_model(kind.partition(",")[0], **shape, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim == 2 and "A_log" not in name and "embed" not in name:
                    weight.mul_(4)
    prompts = [[30, 31 + i] for i in range(len(PROMPTS))] if kind == "xlstm" else PROMPTS  # it ignores masks
    drawn = draw(model, prompts)
    assert drawn.path == path
    assert drawn.lengths.unique().numel() > 3
    expect_own_log_probs(model, prompts, drawn, 1.0, within=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": []}, "prompts: the list is empty"),
        ({"prompts": [[5], []]}, r"prompts\[1\]: has no tokens"),
        ({"prompts": [[5], [102]]}, r"prompts\[1\]: token 102 is outside the model's vocabulary of 102"),
        ({"prompts": [[5] * 113]}, r"prompts\[0\]: 113 tokens and max_tokens=16 don't fit into the model's context of 128"),
        ({"eos_ids": (1, 50_000)}, "eos_ids: token 50000 is outside"),
        ({"temperature": 0.0}, "temperature=0.0: .*greedy"),
        ({"seeds": [1, 2]}, r"seeds: 2 given for 4 prompts x samples=3"),
        ({"stop": ["a", ""], "decode": str}, "stop=.*non-empty"),
        ({"path": "quick"}, "path='quick': choose one of packed, cached, recomputed"),
    ],
)
def test_invalid_requests_raise_a_one_line_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SurefootError, match=message):
        draw(tiny.model("gpt2"), **options)


def test_last_position_of_the_context_can_be_used(family: str) -> None:
    model = tiny.model(family)
    for more in (1, 3):
        prompts = [[30] * (128 - more), [31, 32]]
        expect_own_log_probs(model, prompts, draw(model, prompts, max_tokens=more), 1.0, within=1e-4)


def test_non_finite_logits_raise_an_error() -> None:
    model = tiny.model("llama")
    with torch.no_grad():
        next(model.parameters())[33] = torch.nan
    with pytest.raises(NotFiniteError, match="logits"):
        draw(model)
