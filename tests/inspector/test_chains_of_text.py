"""The calculation of a token with dense rewards and with several turns, in a real browser."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from language.tiny import model, tokenizer

import surefoot
from surefoot import read_trace
from surefoot.core.traces import BRANCHES, Trace, TracedRow
from surefoot.language.data.rows import write_rows
from surefoot.language.tasks import rows
from surefoot.store.reading import traces_in

from .test_inspector import bold, number, settled

Begin = Callable[[list[Path]], str]


def language_model(folder: Path, chances: Mapping[str, float]) -> Path:
    """A model that says these characters about as often as told, the empty one being its end, nearly whatever it has read."""
    words, made = tokenizer(), model("gpt2")
    wanted = {words.eos_token_id if not text else words.convert_tokens_to_ids(text): p for text, p in chances.items()}
    with torch.no_grad():
        made.transformer.ln_f.weight.fill_(0.02)
        made.transformer.ln_f.bias.zero_()[0] = 1.0
        made.transformer.wte.weight[:, 0] = -30.0
        for token, p in wanted.items():
            made.transformer.wte.weight[token, 0] = math.log(p)
    made.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def train(folder: Path, start: Path, prompts: list[dict[str, Any]], **fields: Any) -> Path:
    write_rows(folder / "rows.jsonl", prompts)
    surefoot.train(
        "language",
        run_dir=folder / "run",
        model=str(start),
        steps=24,
        data={"train": str(folder / "rows.jsonl"), "max_length": 24},
        optimizer={"learning_rate": 1e-2, "micro_batch_tokens": 4096},
        traces={"every": 1, "rows": 6},
        display=None,
        **fields,
    )
    return folder / "run"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits of which each is right or wrong by itself."""
    folder = tmp_path_factory.mktemp("dense")
    start = language_model(folder / "start", {"2": 0.45, "3": 0.45, "": 0.1})
    prompts = [{"prompt": f"{i:04b}=".replace("0", "2")} for i in range(16)]
    return train(
        folder,
        start,
        prompts,
        sampling={"prompts": 12, "max_tokens": 6},
        reward={"terms": [{"function": "surefoot.language.tasks.successors:steps"}], "missing_eos": "none"},
        reference={"beta": 0.2},
    )


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Games of guessing a number, most of them of several turns."""
    folder = tmp_path_factory.mktemp("turns")
    start = language_model(folder / "start", {**{str(digit): 0.07 for digit in range(1, 8)}, "": 0.5})
    return train(
        folder,
        start,
        rows("guess", 48, 1, 3),
        sampling={"prompts": 12, "max_tokens": 3},
        turns={"environment": "surefoot.language.tasks.guess:Guess", "max_turns": 3},
        reward={"missing_eos": "penalty", "missing_eos_value": -0.5},
        reference={"beta": 0.2},
    )


def opened(page: Any, run: Path, begin: Begin) -> Trace:
    """The steps of a run's last trace."""
    page.goto(begin([run]))
    page.click("nav a[data-view=steps]")
    settled(page)
    return read_trace(traces_in(run / "traces")[-1])


def pick(page: Any, index: int) -> None:
    button = f"#rows button:nth-child({index + 1})"
    if page.get_attribute(button, "aria-selected") != "true":
        page.click(button)
        page.wait_for_selector(f"{button}[aria-selected=true]")


def every_row_adds_up(page: Any, trace: Trace, of_visit: int = 4) -> None:
    lines = 4 if trace.baseline == "critic" else 3  # without a critic there is no TD residual
    for index, row in enumerate(trace.rows):
        pick(page, index)
        assert page.locator("#steps [data-t]").count() == len(row.mask)
        assert page.get_attribute("#audit", "data-wrong") == "0", page.inner_text("#audit")
        kept, passes = int(row.mask.sum()), len(row.visits.updates)
        assert int(page.get_attribute("#audit", "data-count")) >= kept * (lines + of_visit * passes), "each token and pass"


def choose(page: Any, trace: Trace, index: int, t: int) -> TracedRow:
    pick(page, index)
    page.click(f"#steps [data-t='{t}']")
    return trace.rows[index]


def following(page: Any) -> float:
    """A′ of A = δ + γλ A′, as it is written out."""
    return number(page.inner_text('#chain [data-term="advantage"]').split("= ")[2].split(" · ")[-1].strip("( )"))


def test_a_step_earns_on_its_own_token_and_the_chain_adds_up(page: Any, dense: Path, inspector: Begin) -> None:
    trace = opened(page, dense, inspector)
    every_row_adds_up(page, trace)
    inside = [
        (index, t)
        for index, row in enumerate(trace.rows)
        for t, score in enumerate(row.reward_parts["score"][:-1].tolist())
        if score == 1
    ]
    assert len(inside) > 2, "right digits before the last token"
    for index, t in inside[:2]:
        row = choose(page, trace, index, t)
        assert row.about["tokens"][t] in "23"
        assert "r = score − β · KL = 1 − 0.2 · " in page.inner_text('#chain [data-term="reward"]')
        assert bold(page, "reward") == pytest.approx(float(row.rewards[t]), abs=1e-3)
        assert bold(page, "advantage") == pytest.approx(float(row.advantages[t]), abs=1e-3)
        assert following(page) == pytest.approx(float(row.advantages[t + 1]), rel=2e-3), "one step of the same response on"


@pytest.mark.slow
def test_messages_of_others_are_shown_and_skipped_and_the_chain_continues_after_them(
    page: Any, turns: Path, inspector: Begin
) -> None:
    trace = opened(page, turns, inspector)
    every_row_adds_up(page, trace)
    gaps = [
        (index, t)
        for index, row in enumerate(trace.rows)
        for t in range(len(row.mask) - 1)
        if row.mask[t] and not row.mask[t + 1]
    ]
    assert len(gaps) > 1, "conversations of several turns"
    for index, t in gaps[:2]:
        row = choose(page, trace, index, t)
        back = next(i for i in range(t + 1, len(row.mask)) if row.mask[i])
        received = "".join(row.about["tokens"][t + 1 : back])
        assert "higher" in received or "lower" in received
        shown = page.query_selector_all("#steps .masked")
        assert "".join(cell.text_content() for cell in shown).replace("⏎", "\n").count(received) >= 1
        assert following(page) == pytest.approx(float(row.advantages[back]), rel=2e-3)
        assert bold(page, "TD residual") == pytest.approx(
            float(row.rewards[t] + trace.gamma * row.values[back] - row.values[t]), abs=2e-3
        ), "V′ is that of the model's next token"
        page.click(f"#steps [data-t='{t + 1}']")
        assert "it is masked" in page.inner_text("#chain")
        assert page.locator("#visits tr").count() == 0
    paid = [
        (index, t, score)
        for index, row in enumerate(trace.rows)
        for t, score in enumerate(row.reward_parts["score"].tolist())
        if score != 0
    ]
    assert paid, "games that were won, or cut"
    index, t, score = paid[0]
    assert choose(page, trace, index, t).mask[t]
    shown = {1.0: "1", -0.5: "−0.5"}[score]
    assert f"r = score − β · KL = {shown} − 0.2 · " in page.inner_text('#chain [data-term="reward"]')


@pytest.mark.parametrize(
    ("region", "branch", "text"),
    [
        ({"max_weight": 1.01}, "weighted", "J = min(ρ, 1.01) Â log π"),
        pytest.param({"clip": 0.2}, "left_out", "J = 0: the response is left out", marks=pytest.mark.slow),
        pytest.param({"beta": 2.0, "fraction": 0.3}, "unclipped", "J = ρÂ", marks=pytest.mark.slow),
    ],
)
def test_the_chain_of_a_clipped_weight_and_of_a_response_that_is_left_out_adds_up(
    page: Any, tmp_path: Path, inspector: Begin, region: dict[str, float], branch: str, text: str
) -> None:
    run = train(
        tmp_path,
        language_model(tmp_path / "start", {"2": 0.45, "3": 0.45, "": 0.1}),
        [{"prompt": f"{i:04b}=".replace("0", "2")} for i in range(16)],
        algorithm="CISPO" if "max_weight" in region else "KL_COV" if "beta" in region else "GRPO",
        sampling={"prompts": 3, "samples": 4, "max_tokens": 6},
        reward={"terms": [{"function": "surefoot.language.tasks.successors:steps"}], "missing_eos": "none"},
        objective={"trust_region": region, "reuse": {"epochs": 3, "minibatches": 1}, "drop_above_kl": 0.001},
    )
    opened(page, run, inspector)
    shown = page.evaluate("location.hash").split("/")[2]  # the most clipped one
    trace = read_trace(run / "traces" / f"{shown}.safetensors")
    every_row_adds_up(page, trace, of_visit=4 if "beta" in region else 3)
    which = torch.tensor(BRANCHES.index(branch))
    index, visit, t = next(
        (index, *place) for index, row in enumerate(trace.rows) for place in (row.visits.branch == which).nonzero().tolist()
    )
    choose(page, trace, index, t)
    page.locator("#visit").fill(str(visit))
    assert text in page.inner_text('#chain [data-term="objective"]')
    if "beta" not in region:
        return
    kl = trace.rows[index].visits.penalty_kl
    assert kl is not None
    for applies in (True, False):
        index, t = next(
            (index, int(at))
            for index, row in enumerate(trace.rows)
            for at in ((row.visits.penalty_kl[2] > 0) == applies).nonzero()  # type: ignore[index]
        )
        choose(page, trace, index, t)
        page.locator("#visit").fill("2")
        shown = page.inner_text('#chain [data-term="penalty"]')
        assert ("β · (exp(x) − 1 − x) = 2 · " if applies else "0: the KL penalty does not apply") in shown


@pytest.mark.parametrize("mode", ["token_truncate", pytest.param("sequence_mask", marks=pytest.mark.slow)])
def test_the_weight_against_the_sampler_is_written_out(page: Any, tmp_path: Path, inspector: Begin, mode: str) -> None:
    run = train(
        tmp_path,
        language_model(tmp_path / "start", {"2": 0.45, "3": 0.45, "": 0.1}),
        [{"prompt": f"{i:04b}=".replace("0", "2")} for i in range(16)],
        algorithm="GRPO",
        precision="bfloat16",
        sampling={"prompts": 3, "samples": 4, "max_tokens": 6},
        reward={"terms": [{"function": "surefoot.language.tasks.successors:steps"}], "missing_eos": "none"},
        objective={"reuse": {"epochs": 2, "minibatches": 1}, "importance_cap": 1.0001, "importance_mode": mode},
    )
    opened(page, run, inspector)
    shown = page.evaluate("location.hash").split("/")[2]
    trace = read_trace(run / "traces" / f"{shown}.safetensors")
    every_row_adds_up(page, trace, of_visit=4)
    row = choose(page, trace, 0, int(trace.rows[0].mask.nonzero()[0]))
    assert row.visits.weights is not None
    text = page.inner_text('#chain [data-term="weight"]')
    assert ("exp(log π_old − log π_b)" if mode == "token_truncate" else "of the whole response") in text
