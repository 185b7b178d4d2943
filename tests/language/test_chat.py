"""``surefoot chat``: prompts, streamed output, and escaped control characters."""

import builtins
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.cli.language import NO_TEMPLATE, TEMPLATE, talk
from surefoot.errors import SurefootError
from surefoot.language.chat import Chat, ChatOptions, stable_prefix
from surefoot.language.data.tokens import Tokens
from surefoot.language.language_model import LanguageModel, load_language_model
from surefoot.language.models.pocket import pocket

Command = Callable[..., tuple[int, str, str]]
EVIL = "\x1b\x9b\u202e\n"
"""how sequences begin that clear a screen or rename a window, in 7 and in 8 bits; text from right to left; a line's end"""


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path]) -> LanguageModel:
    model = load_language_model(str(folders["llama"]))
    model.tokens.tokenizer.chat_template = None
    return model


@pytest.fixture(scope="module")
def talker() -> LanguageModel:
    model, tokenizer = pocket()
    return LanguageModel(model, Tokens(tokenizer, model))


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has hardly another character to say."""
    model, tokenizer = pocket(EVIL)
    folder = tmp_path_factory.mktemp("evil") / "model"
    LanguageModel(model, Tokens(tokenizer, model)).save(folder)
    return folder


def lines(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


# ---- what a model is asked ----------------------------------------------------------------------------------------------


def test_with_a_template_every_answer_follows_the_whole_conversation(talker: LanguageModel) -> None:
    chat = Chat(talker, ChatOptions(max_tokens=6, greedy=True))
    messages = []
    for line in ("hello", "and you?"):
        messages.append({"role": "user", "content": line})
        wanted = talker.generate([messages], max_tokens=6, greedy=True)[0]
        assert chat.answer(line) == wanted
        messages.append({"role": "assistant", "content": wanted})
    assert chat.messages == messages
    chat.reset()
    assert chat.answer("and you?") == talker.generate([messages[2:3]], max_tokens=6, greedy=True)[0]


def test_without_a_template_each_line_is_a_prompt_by_itself(plain: LanguageModel) -> None:
    chat = Chat(plain, ChatOptions(max_tokens=6, greedy=True))
    lines = ["one ", "two ", "one "]
    assert [chat.answer(line) for line in lines] == plain.generate(lines, max_tokens=6, greedy=True)
    assert chat.messages == []


def test_the_same_seed_and_lines_give_the_same_conversation_and_an_answer_drawn_again_is_another(talker: LanguageModel) -> None:
    def conversation(seed: int) -> list[str]:
        chat = Chat(talker, ChatOptions(max_tokens=12, seed=seed))
        results = []
        for _ in range(2):
            results.append(chat.answer("hello"))
            chat.reset()
        return results

    first = conversation(1)
    assert conversation(1) == first
    assert first[0] != first[1]
    assert conversation(2) != first


def test_an_answer_ends_with_the_context_and_a_prompt_that_fills_it_is_rejected_and_not_remembered(
    plain: LanguageModel, talker: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(Chat(plain, ChatOptions(max_tokens=10_000)).answer("x" * 120)) <= 8
    with pytest.raises(SurefootError, match=r"128 tokens and the model's context is 128; shorten the line"):
        Chat(plain, ChatOptions()).answer("x" * 128)
    chat = Chat(talker, ChatOptions(max_tokens=4))
    chat.answer("hello")
    before = list(chat.messages)
    with pytest.raises(SurefootError, match="/reset"):
        chat.answer("x" * 1024)
    assert chat.messages == before


# ---- what is shown while it writes --------------------------------------------------------------------------------------


def test_the_pieces_of_an_answer_are_the_answer(talker: LanguageModel) -> None:
    pieces: list[str] = []
    answer = Chat(talker, ChatOptions(max_tokens=12)).answer("hello", pieces.append)
    assert "".join(pieces) == answer
    assert len(pieces) > 6, "token by token"


TEXTS = st.text("ab\ufffd", max_size=12)


@given(TEXTS, TEXTS, st.lists(st.text("ab", min_size=1, max_size=3), max_size=2))
def test_streamed_text_is_never_revised(text: str, more: str, stop: list[str]) -> None:
    from surefoot.language.sampling.ends import cut_at_stop

    if cut_at_stop(text, stop) == text:  # drawing ends with a stop string
        assert cut_at_stop(text + more, stop).startswith(stable_prefix(text, stop))
    assert cut_at_stop(text, stop).startswith(stable_prefix(text, stop))


# ---- the command --------------------------------------------------------------------------------------------------------


def test_lines_from_a_pipe_are_answered_until_quit_and_answers_alone_are_on_stdout(
    command: Command, monkeypatch: pytest.MonkeyPatch, talker: LanguageModel
) -> None:
    lines(monkeypatch, "hello\n/reset\nhello\n/quit\nnever\n")
    code, out, err = command("chat", "pocket", "--max-tokens", "8", "--greedy")
    wanted = talker.generate([[{"role": "user", "content": "hello"}]], max_tokens=8, greedy=True)[0]
    assert (code, out) == (0, f"{wanted}\n{wanted}\n")
    assert err == f"{TEMPLATE}\nconversation cleared\n"
    lines(monkeypatch, "hello\n")
    code, out, err = command("chat", "pocket", "--plain", "--max-tokens", "8", "--greedy")
    assert (out, err) == (f"{talker.generate(['hello'], max_tokens=8, greedy=True)[0]}\n", f"{NO_TEMPLATE}\n")
    lines(monkeypatch, "x" * 2000)
    code, out, err = command("chat", "pocket")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("surefoot: chat: the prompt has ")


@pytest.mark.parametrize("leaving", ["/quit", EOFError, KeyboardInterrupt])
def test_a_user_can_regenerate_an_answer_and_quit(
    leaving: str | type[BaseException],
    plain: LanguageModel,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(builtins, "input", Mock(side_effect=["x" * 128, "", "ab", leaving]))
    talk(Chat(plain, ChatOptions(max_tokens=4, greedy=True)), terminal=True)
    out, err = capsys.readouterr()
    assert out.startswith(NO_TEMPLATE)
    assert plain.generate(["ab"], max_tokens=4, greedy=True)[0] in out
    assert err == "chat: the prompt has 128 tokens and the model's context is 128; shorten the line"
    assert out.endswith("\n")


def test_an_interrupted_answer_is_not_part_of_the_chat(talker: LanguageModel) -> None:
    chat = Chat(talker, ChatOptions(max_tokens=4))
    with pytest.raises(KeyboardInterrupt):
        chat.answer("hello", Mock(side_effect=KeyboardInterrupt))
    assert chat.messages == []


# ---- what text may not do to a terminal ---------------------------------------------------------------------------------


def printable(text: str) -> bool:
    return all(c.isprintable() or c in "\n\t" for c in text)


def test_escape_sequences_of_a_model_never_reach_the_terminal(
    command: Command, evil: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines(monkeypatch, "hello\n" * 20)
    code, out, _ = command("chat", str(evil), "--max-tokens", "20")
    assert code == 0
    assert printable(out)
    assert {"\\x1b", "\\x9b", "\\u202e"} <= set(re.findall(r"\\x..|\\u....", out))
    words = ("generate", str(evil), "--prompt", "x", "--max-tokens", "20", "--samples", "20")
    _, raw, _ = command(*words)
    assert set(EVIL) <= set(raw), "what is piped is what the model wrote"
    _, as_json, _ = command(*words, "--json")
    assert printable(as_json)
    assert "".join(f"x → {json.loads(line)['response']}\n" for line in as_json.splitlines()) == raw
    monkeypatch.setattr("surefoot.cli.language.sys.stdout.isatty", lambda: True)
    _, shown, _ = command(*words)
    assert printable(shown)
    assert shown.count("\\x1b") == raw.count("\x1b")
    assert shown.count("\n") == raw.count("\n")
