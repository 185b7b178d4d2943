"""All sampling engines interpret a request in the same way and return responses in the same format."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.errors import SurefootError
from surefoot.language.data.tokens import Tokens
from surefoot.language.online import engine as engines
from surefoot.language.online.engine import InProcess
from surefoot.language.sampling.continuous import Continuous
from surefoot.language.sampling.ends import Ends
from surefoot.language.sampling.engines import Engine, Request, samples_of
from surefoot.language.sampling.rows import CACHE_SHARE, row_bytes
from surefoot.language.sampling.sampler import sample
from surefoot.language.sampling.vllm import VllmServer
from surefoot.recipes.reading import make_recipe

from . import tiny
from .test_sampler import EOS, PROMPTS, expect_own_log_probs
from .vllm_stand_in import StandIn

text_of = Tokens(tiny.tokenizer()).decode
MAKE: dict[str, Callable[[Any], Engine]] = {
    "packed": lambda model: InProcess(model, "packed"),
    "model": lambda model: InProcess(model, "model"),
    "seven rows": lambda model: InProcess(model, rows=7),
    "continuous": lambda model: Continuous(model, rows=6),  # a response that ends makes room
}


def request(count: int = 12, first: int = 100, **changes: Any) -> Request:
    """A request for three responses of at most 16 tokens to each of four prompts."""
    settings = {"samples": 3, "max_tokens": 16, "eos_ids": EOS, "pad_id": 0, "temperature": 0.8, "decode": text_of}
    return Request(**{"prompts": PROMPTS, "seeds": range(first, first + count), **settings, **changes})


@pytest.fixture(params=[*MAKE, "vllm"])
def engine(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[Engine]:
    """Each engine on the same small model; "vllm" uses a stand-in server."""
    if request.param == "vllm":
        server = StandIn(folders["llama"])
        table = {"model": str(folders["llama"]), "data": {"train": "rows"}, "reward": {"terms": ["some:reward"]}}
        recipe = make_recipe({"kind": "language", **table, "server": {"url": server.url}})
        model = tiny.model("llama")
        made: Engine = VllmServer(recipe, model, Tokens(tiny.tokenizer(), model), str(folders["llama"]), 64)
    else:
        made = MAKE[request.param](tiny.model("llama"))
    made.use(0)
    yield made
    made.close()
    if request.param == "vllm":
        server.close()


def test_responses_are_prompt_major_and_end_at_eos_or_at_the_limit(engine: Engine) -> None:
    drawn = engine.sample(request())
    assert set(drawn.finish_reasons) == {"stop", "length"}
    assert drawn.prompt.shape == drawn.prompt_mask.shape == (12, 7)
    assert drawn.actions.shape == drawn.mask.shape == drawn.log_probs.shape
    assert len(drawn.actions) == len(drawn.ended) == 12
    assert drawn.mask.shape[1] == drawn.lengths.max() <= 16
    for row, (response, reason) in enumerate(zip(drawn.responses(), drawn.finish_reasons, strict=True)):
        assert not any(token in EOS for token in response[:-1])
        assert reason == ("stop" if response[-1] in EOS else "length")
        assert reason == "stop" or len(response) == 16
        assert drawn.prompt[row][drawn.prompt_mask[row]].tolist() == PROMPTS[row // 3]
        length = int(drawn.lengths[row])
        assert drawn.mask[row].tolist() == [t < length for t in range(drawn.mask.shape[1])]
        assert not drawn.actions[row, length:].any()
        assert not drawn.log_probs[row, length:].any()
    assert drawn.log_probs.dtype == torch.float32
    assert drawn.missing is None


def test_on_finished_gets_stopped_responses_except_from_the_continuous_engine(engine: Engine) -> None:
    finished: dict[int, list[int]] = {}
    drawn = engine.sample(request(on_finished=lambda number, ids: finished.update({number: list(ids)})))
    responses, reasons = drawn.responses(), drawn.finish_reasons
    ended = {number: responses[number] for number, reason in enumerate(reasons) if reason == "stop"}
    known = {} if engine.name == "continuous" else ended
    assert {number: ids for number, ids in finished.items() if number in ended} == known
    assert all(ids == responses[number] for number, ids in finished.items())


def test_responses_end_with_the_token_that_completes_a_stop_string(engine: Engine) -> None:
    free = engine.sample(request(eos_ids=(1,)))
    first, second = [text_of(response) for response in free.responses() if len(response) > 7][:2]
    stop = [first[3:5], second[6]]
    drawn = engine.sample(request(eos_ids=(1,), stop=stop))
    ended = 0
    for response, reason in zip(drawn.responses(), drawn.finish_reasons, strict=True):
        assert not any(word in text_of(response[:-1]) for word in stop)
        complete = any(word in text_of(response) for word in stop)
        assert reason == ("stop" if complete or response[-1] == 1 else "length")
        ended += complete
    assert ended > 1


def test_stop_text_that_is_a_special_token_ends_responses_by_its_id(engine: Engine) -> None:
    tokens = Tokens(tiny.tokenizer())
    free = engine.sample(request(eos_ids=(1,))).responses()
    marker = next(i for i in sorted(tokens.special_ids - {1}) if any(i in ids[1:-1] for ids in free))
    options = Ends(tokens, (tokens.decode([marker], special=True),)).options
    drawn = engine.sample(request(**options))
    ended = [ids[-1] == marker for ids in drawn.responses()]
    assert any(ended)
    assert all(marker not in ids[:-1] for ids in drawn.responses())
    assert all(reason == "stop" for reason, end in zip(drawn.finish_reasons, ended, strict=True) if end)


def test_responses_at_the_limit_are_truncated_unless_they_end_with_eos(engine: Engine) -> None:
    cut = engine.sample(request(eos_ids=(), max_tokens=5))
    assert cut.finish_reasons == ["length"] * 12
    assert cut.lengths.tolist() == [5] * 12
    ended = engine.sample(request(eos_ids=range(tiny.VOCABULARY), max_tokens=1))
    assert ended.finish_reasons == ["stop"] * 12
    assert ended.lengths.tolist() == [1] * 12


def test_same_seeds_repeat_responses_and_other_seeds_do_not(engine: Engine) -> None:
    first, again, other = (engine.sample(request(first=seed)) for seed in (100, 100, 500))
    assert torch.equal(first.actions, again.actions)
    assert torch.equal(first.log_probs, again.log_probs)
    assert first.responses() != other.responses()
    assert len({tuple(response) for response in first.responses()}) > 6, "samples of the same prompt differ"


def test_greedy_sampling_takes_the_likeliest_tokens_without_seeds(engine: Engine) -> None:
    drawn = engine.sample(request(greedy=True, seeds=(), samples=1))
    for prompt, response in zip(PROMPTS, drawn.responses(), strict=True):
        with torch.no_grad():
            logits = engine.model(input_ids=torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        assert response == logits.argmax(-1).tolist()


def test_updated_weights_are_used_and_their_version_is_reported(engine: Engine) -> None:
    before = engine.sample(request())
    assert before.version == 0
    model = engine.model
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)))
    engine.use(7)
    after = engine.sample(request())
    assert after.version == 7
    assert after.responses() != before.responses()
    expect_own_log_probs(model, PROMPTS, after, 0.8, within=1e-4)


def test_sampling_preserves_the_global_generator_training_mode_and_attention_setting(engine: Engine) -> None:
    model = engine.model.train()
    before, attention = torch.get_rng_state(), model.config._attn_implementation
    engine.sample(request())
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training for module in model.modules())
    assert model.config._attn_implementation == attention


def test_invalid_requests_are_rejected(engine: Engine) -> None:
    with pytest.raises(SurefootError, match="seeds: 1 given"):
        engine.sample(request(seeds=[1]))


# ---- engines in this process --------------------------------------------------------------------------------------------


def test_engine_is_chosen_for_the_model_and_states_its_reason() -> None:
    small = tiny.model("gemma")
    assert (InProcess(small).name, InProcess(small).reason) == ("packed", "small gemma in float32")
    experts = InProcess(tiny.model("mixtral"))
    assert (experts.name, experts.reason) == ("model", "no packed weights for mixtral")
    half = InProcess(tiny.model("llama").bfloat16())
    assert (half.name, half.reason) == ("model", "packed weights compute in float32")
    with pytest.raises(SurefootError, match=r"^sampling\.engine='packed': no packed weights for mixtral; set engine = 'auto'"):
        InProcess(tiny.model("mixtral"), "packed")


def test_wrong_packed_weights_are_an_error_only_if_requested() -> None:
    model = tiny.model("llama")
    assert InProcess(model, "model").sample(request()).path == "cached"
    model.model.layers[1].mlp.act_fn = torch.nn.Tanh()
    assert InProcess(model).sample(request()).path == "cached"
    with pytest.raises(
        SurefootError, match=r"sampling\.engine='packed': packed weights give other log-prob.*set engine = 'auto'"
    ):
        InProcess(model, "packed").sample(request())


@pytest.mark.parametrize(
    ("family", "rows", "look_every"), [("llama", 2, 1), ("gpt2", 5, 3), ("gemma", 1, 50), ("qwen2", 10, 4)]
)
def test_row_limit_and_interval_of_end_checks_change_no_token(family: str, rows: int, look_every: int) -> None:
    model = tiny.model(family)
    for changes in ({}, {"stop": ["e", "ab"], "eos_ids": (1,)}):
        wanted = sample(model, request(**changes))
        drawn = sample(model, request(**changes), rows=rows, look_every=look_every)
        for name in ("prompt", "prompt_mask", "actions", "mask", "ended"):
            assert torch.equal(getattr(drawn, name), getattr(wanted, name)), name
        torch.testing.assert_close(drawn.log_probs, wanted.log_probs, atol=5e-5, rtol=0)


# ---- responses from external engines ------------------------------------------------------------------------------------


def samples_from(answers: Sequence[tuple[list[int], list[float]] | None], stopped: bool = False, **changes: Any) -> Any:
    one_prompt = request(prompts=[[20]], samples=len(answers), **changes)
    with_stopped = [None if answer is None else (*answer, stopped) for answer in answers]
    return samples_of(one_prompt, with_stopped, torch.device("cpu"), "vllm", 3)


def test_missing_responses_become_empty_rows() -> None:
    drawn = samples_from([([30, 40], [-1.0, -2.0]), None, ([31] * 16, [-0.5] * 16)])
    assert drawn.finish_reasons == ["stop", "error", "length"]
    assert drawn.lengths.tolist() == [2, 0, 16]
    assert drawn.responses() == [[30, 40], [], [31] * 16]
    assert drawn.missing.tolist() == [False, True, False]


def test_tokens_after_a_missed_end_are_cut() -> None:
    stop = text_of([30, 31])
    assert len(Tokens(tiny.tokenizer()).decode([30, 31])) == 2
    drawn = samples_from([([33, 40, 34], [-1.0] * 3), ([33, 30, 31, 35], [-1.0] * 4)], stop=[stop])
    assert drawn.responses() == [[33, 40], [33, 30, 31]]
    assert drawn.ended.all()


def test_short_responses_without_an_end_are_an_error() -> None:
    with pytest.raises(SurefootError, match=r"has 2 tokens, without EOS or stop string, and max_tokens=16"):
        samples_from([([30, 31], [-1.0, -1.0])])
    assert samples_from([([30, 31], [-1.0, -1.0])], stopped=True).finish_reasons == ["stop"], "the engine reported the end"


# ---- rows and memory ----------------------------------------------------------------------------------------------------


def test_row_limit_comes_from_a_share_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model("llama")
    wanted = InProcess(model).sample(request())
    each = row_bytes(model.config, 7 + 16, 4)
    assert each == 2 * 2 * 2 * 8 * 23 * 4 + 24 * tiny.VOCABULARY, "keys and values of 2 layers, 2 heads of width 8; logits"
    monkeypatch.setattr(engines, "total_memory", lambda device: int(5.5 * each / CACHE_SHARE))
    tight = InProcess(model)
    assert tight.rows_for(request()) == 5
    assert InProcess(model, rows=3).rows_for(request()) == 3
    seen: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    drawn = tight.sample(request())
    assert torch.equal(drawn.actions, wanted.actions)
    assert max(seen) <= 5
    monkeypatch.setattr(engines, "total_memory", lambda device: None)
    assert InProcess(model).rows_for(request()) is None
