"""What is padded with, what ends a response, and what of a conversation is trained."""

import html
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from surefoot.errors import SurefootError
from surefoot.language.data.tokens import Tokens, left_padded, positions, right_padded
from surefoot.language.deadline import DeadlineExceeded, with_deadline
from surefoot.language.models.loading import ALPHABET, character_tokenizer, pocket

from . import tiny

CHATML = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
"""turns end with EOS and a line break; what the assistant wrote is not marked"""
BEGUN = [{"role": "user", "content": "2+2?"}]
SAID = [*BEGUN, {"role": "assistant", "content": "4"}]
LONG = [*SAID, {"role": "user", "content": "3+3?"}, {"role": "assistant", "content": "six"}]


def tokens_with(template: str | None = None, **special: Any) -> Tokens:
    tokenizer = character_tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    for name, value in special.items():
        setattr(tokenizer, name, value)
    return Tokens(tokenizer)


def written(tokens: Tokens, ids: list[int], trained: list[bool]) -> list[str]:
    """The text of each run of trained ids, special tokens shown."""
    runs: list[list[int]] = []
    for i, (token, kept) in enumerate(zip(ids, trained, strict=True)):
        if kept and not trained[i - 1]:
            runs.append([])
        if kept:
            runs[-1].append(token)
    return [tokens.tokenizer.decode(run) for run in runs]


# ---- padding ----------------------------------------------------------------------------------------------------------

BATCHES = st.lists(st.lists(st.integers(1, 90), min_size=1, max_size=6), min_size=1, max_size=5)


@given(BATCHES, st.integers(0, 99))
def test_padding_keeps_every_row_whatever_pads(rows: list[list[int]], pad: int) -> None:
    for padded in (left_padded, right_padded):
        ids, mask = padded(rows, pad)
        assert [row[kept].tolist() for row, kept in zip(ids, mask, strict=True)] == rows
        assert (ids[~mask] == pad).all()
        assert (ids.dtype, mask.dtype) == (torch.int64, torch.bool)
        assert ids.shape[1] == max(map(len, rows))
    assert left_padded(rows, pad)[1][:, -1].all()
    assert right_padded(rows, pad)[1][:, 0].all()


@given(BATCHES)
def test_position_ids_count_the_real_tokens_alone(rows: list[list[int]]) -> None:
    for padded in (left_padded, right_padded):
        _, mask = padded(rows, 0)
        assert [p[m].tolist() for p, m in zip(positions(mask), mask, strict=True)] == [[*range(len(row))] for row in rows]


def test_no_rows_make_an_empty_batch() -> None:
    assert left_padded([], 0)[0].shape == (0, 0)
    assert right_padded([[], []], 0)[1].shape == (2, 0)


# ---- pad and EOS ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("special", "pad"),
    [
        ({}, "⟨pad⟩"),
        ({"pad_token": None}, "⟨unk⟩"),
        ({"pad_token": "⟨eos⟩"}, "⟨unk⟩"),
        ({"pad_token": "⟨eos⟩", "unk_token": "⟨eos⟩", "bos_token": "⟨pad⟩"}, "⟨pad⟩"),
        ({"pad_token": None, "unk_token": None}, "⟨system⟩"),
    ],
)
def test_pad_is_never_eos(special: dict[str, Any], pad: str) -> None:
    tokenizer = character_tokenizer()
    for name, value in special.items():
        setattr(tokenizer, name, value)
    before = len(tokenizer)
    tokens = Tokens(tokenizer)
    assert tokenizer.convert_ids_to_tokens(tokens.pad_id) == pad
    assert tokens.pad_id not in tokens.eos_ids
    assert len(tokenizer) == before, "nothing is added, so no model must be resized"


def test_a_tokenizer_with_one_special_token_pads_with_a_letter() -> None:
    """GPT-2's: <|endoftext|> is its BOS, EOS and unk at once. The mask says what is real."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({"<|end|>": 0, "a": 1}, unk_token="<|end|>"))
    end = "<|end|>"
    tokens = Tokens(PreTrainedTokenizerFast(tokenizer_object=core, eos_token=end, bos_token=end, unk_token=end))
    assert (tokens.pad_id, tokens.eos_ids) == (1, (0,))
    assert tokens.encode_prompt("") == [0]


def test_a_tokenizer_without_eos_is_refused() -> None:
    with pytest.raises(SurefootError, match="no EOS token, so no response could end"):
        tokens_with(eos_token=None)


def test_every_end_of_the_generation_config_is_one_here_if_it_is_a_special_token() -> None:
    model = tiny.model("llama")
    tokenizer = character_tokenizer()
    user, letter = tokenizer.convert_tokens_to_ids("⟨user⟩"), tokenizer.convert_tokens_to_ids("x")
    model.generation_config.eos_token_id = [user, 1, letter, 100_000]
    assert Tokens(tokenizer, model).eos_ids == (1, user)
    model.generation_config.eos_token_id = user
    assert Tokens(tokenizer, model).eos_ids == (1, user)
    model.generation_config.eos_token_id = None
    assert Tokens(tokenizer, model).eos_ids == (1,)


# ---- text -------------------------------------------------------------------------------------------------------------


@given(st.text(ALPHABET, max_size=30))
def test_a_completion_ends_with_eos_and_is_decoded_to_itself(text: str) -> None:
    ids = POCKET.encode_completion(text)
    assert ids[-1] == POCKET.eos_id
    assert POCKET.eos_id not in ids[:-1]
    assert POCKET.decode(ids) == POCKET.decode(torch.tensor(ids)) == text


def test_a_prompt_has_the_tokenizers_beginning_and_never_its_end() -> None:
    from tokenizers.processors import TemplateProcessing

    tokens = tokens_with(bos_token="⟨system⟩")
    bos = tokens.tokenizer.bos_token_id
    ends = TemplateProcessing(single="⟨system⟩ $A ⟨eos⟩", special_tokens=[("⟨system⟩", bos), ("⟨eos⟩", 1)])
    tokens.tokenizer.backend_tokenizer.post_processor = ends
    a = tokens.tokenizer.convert_tokens_to_ids("a")
    assert tokens.tokenizer("a")["input_ids"] == [bos, a, 1], "this one ends whatever it encodes"
    assert tokens.encode_prompt("a") == [bos, a]
    assert tokens.encode_completion("a") == [a, 1]
    assert tokens.encode_prompt("") == [bos]


@given(st.text("aé λ日🙂\n\t", max_size=20))
def test_a_tokenizer_of_bytes_decodes_any_text_to_itself(text: str) -> None:
    """Whose tokens are parts of characters, as GPT-2's are; surrounding and double spaces stay."""
    assert BYTES.decode(BYTES.encode_completion(text)) == text


def test_an_empty_prompt_is_eos_where_there_is_no_bos() -> None:
    assert POCKET.encode_prompt("") == [POCKET.eos_id]


def test_prompt_and_completion_train_the_completion_and_its_eos() -> None:
    ids, trained = POCKET.demonstration({"prompt": "ab", "completion": "cd", "score": 3})
    assert ids == POCKET.encode_prompt("ab") + POCKET.encode_completion("cd")
    assert trained == [False, False, True, True, True]


def test_text_trains_all_but_the_first_token_and_ends() -> None:
    ids, trained = POCKET.demonstration({"text": "abc"})
    assert POCKET.decode(ids) == "abc"
    assert ids[-1] == POCKET.eos_id
    assert trained == [False, True, True, True]


# ---- conversations ----------------------------------------------------------------------------------------------------


def test_a_prompt_of_messages_ends_where_the_assistant_begins() -> None:
    assert POCKET.tokenizer.decode(POCKET.encode_prompt(BEGUN)) == "⟨user⟩2+2?⟨assistant⟩"


def templates() -> dict[str, str]:
    marked = CHATML.replace(
        "{{ '<' + m['role'] + '>' + m['content'] + eos_token + '\n' }}",
        "{{ '<' + m['role'] + '>' }}{% if m['role'] == 'assistant' %}MARKED{% else %}{{ m['content'] + eos_token }}{% endif %}"
        "{{ '\n' }}",
    )
    return {
        "pocket's, marked": pocket()[1].chat_template,
        "by rendering twice": CHATML,
        "marked without EOS": marked.replace("MARKED", "{% generation %}{{ m['content'] }}{% endgeneration %}{{ eos_token }}"),
        "marked beyond EOS": marked.replace(
            "MARKED", "{%- generation -%}{{ m['content'] + eos_token + '\n' }}{% endgeneration %}"
        ),
    }


@pytest.mark.parametrize("name", templates())
def test_what_the_assistant_wrote_is_trained_with_its_eos_and_nothing_else(name: str) -> None:
    tokens = tokens_with(templates()[name])
    assert written(tokens, *tokens.demonstration({"messages": LONG})) == ["4⟨eos⟩", "six⟨eos⟩"]
    row = {"prompt": LONG[:3], "completion": LONG[3:]}
    ids, trained = tokens.demonstration(row)
    assert written(tokens, ids, trained) == ["six⟨eos⟩"]
    assert ids == tokens.encode_prompt(LONG[:3]) + tokens.encode_completion("six"), "just what sampling would have made"
    assert written(tokens, *tokens.demonstration({"messages": LONG[:3]})) == ["4⟨eos⟩"], "the last word may be the user's"


def test_eos_is_appended_where_a_template_writes_none_after_the_last_answer() -> None:
    tokens = tokens_with(
        "{% for m in messages %}{{ m['role'][0] + m['content'] }}{% endfor %}{% if add_generation_prompt %}a{% endif %}"
    )
    assert written(tokens, *tokens.demonstration({"messages": LONG})) == ["4", "six⟨eos⟩"]


def test_a_template_that_masks_everything_is_refused() -> None:
    template = CHATML + "{% generation %}{% endgeneration %}"
    with pytest.raises(SurefootError, match="marks nothing of the assistant's text as generated"):
        tokens_with(template).demonstration({"messages": SAID})


def test_a_template_that_rewrites_earlier_messages_is_refused() -> None:
    """As those that drop the thinking of all turns but the last."""
    template = "{% for m in messages %}{{ m['content'] if loop.last else '…' }}{% endfor %}"
    with pytest.raises(SurefootError, match="renders the first 1 messages differently when more follow"):
        tokens_with(template).demonstration({"messages": SAID})


def test_messages_without_an_assistant_are_refused() -> None:
    with pytest.raises(SurefootError, match="no message is the assistant's"):
        POCKET.demonstration({"messages": BEGUN})


def test_messages_need_a_chat_template() -> None:
    tokens = tokens_with()
    tokens.tokenizer.chat_template = None
    for use in (lambda: tokens.encode_prompt(BEGUN), lambda: tokens.demonstration({"messages": SAID})):
        with pytest.raises(SurefootError, match="messages need a chat template and this tokenizer has none"):
            use()


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no\nsystem role') }}", "{{ nothing( }}", "{{ messages[0].a.b }}", "{{ 1 + '1' }}"]
)
def test_what_a_template_refuses_is_one_line(template: str) -> None:
    with pytest.raises(SurefootError, match=r"^the chat template rejects these messages \(\w+: [^\n]+\)$"):
        tokens_with(template).encode_prompt(BEGUN)


# ---- replies ----------------------------------------------------------------------------------------------------------

TURN = "{{ '<' + m['role'] + '>' }}{{ m['content'] }}{{ eos_token }}"
SAYS = "And 3<4? Be Surefoot & brief."
REPLY = [{"role": "user", "content": SAYS}]


def chat(turn: str = TURN, before: str = "", over: str = "messages") -> str:
    """A chat template."""
    ask = "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
    return f"{before}{{% for m in {over} %}}{turn}{{% endfor %}}{ask}"


@pytest.mark.parametrize(
    "before",
    [
        "",
        "{{ '<system>You are Surefoot, made by Surefoot.' + eos_token }}",
        "{{ '<system>1234567890' + strftime_now('%Y-%m-%d %H:%M:%S') + eos_token }}",
        "{{ '<user>Surefoot' + eos_token + '<assistant>Surefoot' + eos_token }}",
    ],
)
@pytest.mark.parametrize(
    ("filter_", "made"),
    [
        ("trim", str.strip),
        ("upper", str.upper),
        ("lower", str.lower),
        ("title", lambda text: text.title()),
        ("escape", lambda text: html.escape(text)),
        ("urlencode", lambda text: quote(text)),
    ],
)
def test_a_reply_is_what_the_template_writes_behind_the_assistant_whatever_it_does_to_text(
    before: str, filter_: str, made: Callable[[str], str]
) -> None:
    tokens = tokens_with(chat(TURN.replace("m['content']", f"m['content'] | {filter_}"), before))
    follows = f"<user>{made(SAYS)}⟨eos⟩<assistant>"
    assert tokens.tokenizer.decode(tokens.encode_reply(REPLY, ended=True)) == follows
    assert tokens.tokenizer.decode(tokens.encode_reply(REPLY, ended=False)) == f"⟨eos⟩{follows}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (chat(over="messages[-1:]"), "omits the assistant's message"),
        (chat(turn=TURN.replace("m['content']", "m['content'][:20]")), "omits the assistant's message"),
        (chat(turn=TURN + TURN), "repeats the assistant's message"),
        (chat(before="{% for m in messages %}{{ m['content'] }}{% endfor %}"), "repeats the assistant's message"),
    ],
)
def test_a_template_that_drops_or_repeats_the_assistant_is_refused_where_a_reply_follows(template: str, message: str) -> None:
    with pytest.raises(SurefootError, match=message):
        tokens_with(template).encode_reply(REPLY, ended=True)


# ---- BOS, and time ----------------------------------------------------------------------------------------------------


def test_text_that_begins_with_bos_gets_no_second_one() -> None:
    from tokenizers.processors import TemplateProcessing

    tokens = tokens_with(bos_token="⟨system⟩")
    bos, a = tokens.tokenizer.convert_tokens_to_ids(["⟨system⟩", "a"])
    begins = TemplateProcessing(single="⟨system⟩ $A", special_tokens=[("⟨system⟩", bos)])
    tokens.tokenizer.backend_tokenizer.post_processor = begins
    assert tokens.tokenizer("⟨system⟩a")["input_ids"] == [bos, bos, a], "the tokenizer itself does not look"
    assert tokens.encode_prompt("⟨system⟩a") == tokens.encode_prompt("a") == [bos, a]
    assert tokens.demonstration({"text": "⟨system⟩aa"}) == ([bos, a, a, 1], [False, True, True, True])
    assert tokens.encode_prompt("⟨system⟩⟨system⟩a") == [bos, bos, a], "a second one in the text is the text's"


def test_text_that_ends_with_eos_gets_no_second_one() -> None:
    assert POCKET.encode_completion("ab⟨eos⟩") == POCKET.encode_completion("ab")
    assert POCKET.demonstration({"text": "ab⟨eos⟩"}) == POCKET.demonstration({"text": "ab"})
    assert POCKET.encode_completion("") == [POCKET.eos_id]


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% if i > j and j > i %}x{% endif %}{% endfor %}{% endfor %}"


def test_a_template_without_end_is_one_line_in_every_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    from concurrent.futures import ThreadPoolExecutor

    monkeypatch.setattr("surefoot.language.data.tokens.RENDERING", 0.2)
    tokens = tokens_with(ENDLESS)
    uses = (lambda: tokens.encode_prompt(BEGUN), lambda: tokens.demonstration({"messages": SAID}))
    with ThreadPoolExecutor(1) as pool:
        for use in uses:
            for call in (use, lambda use=use: pool.submit(use).result()):
                with pytest.raises(SurefootError, match=r"^the chat template takes longer than 0\.2 s [^\n]+$"):
                    call()
    assert tokens_with(CHATML).encode_prompt(BEGUN), "others go on"


def test_a_deadline_around_a_rendering_stays_whose_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surefoot.language.data.tokens.RENDERING", 30.0)
    tokens = tokens_with(ENDLESS)
    with pytest.raises(DeadlineExceeded):
        with_deadline(0.2, lambda: tokens.encode_prompt(BEGUN))


def byte_tokenizer() -> Any:
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    core = ByteLevelBPETokenizer()
    core.train_from_iterator(["hello there, hello world"], vocab_size=300, special_tokens=["<|end|>"], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=core._tokenizer, eos_token="<|end|>")


POCKET, BYTES = Tokens(pocket()[1]), Tokens(byte_tokenizer())
