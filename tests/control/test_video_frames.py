"""Frames of a video: scaled without cropping or distortion, with a readable caption below."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.control.evaluate import EpisodeStep
from surefoot.control.video.frames import FONT, add_caption, caption_height, caption_text, fit_frame, size_from_text
from surefoot.errors import SurefootError

SIDES = st.integers(1, 400)


@given(SIDES, SIDES, st.integers(32, 200), st.integers(32, 200))
def test_a_frame_keeps_its_aspect_ratio_and_is_centred_on_black(h, w, height, width):
    result = fit_frame(np.full((h, w, 3), 255, np.uint8), width, height)
    assert result.shape == (height, width, 3)
    assert set(np.unique(result)) <= {0, 255}
    rows, columns = np.flatnonzero(result.any((1, 2))), np.flatnonzero(result.any((0, 2)))
    inner_h, inner_w = rows[-1] - rows[0] + 1, columns[-1] - columns[0] + 1
    assert result[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()
    assert inner_h == height or inner_w == width
    scale = min(height / h, width / w)
    assert abs(inner_h - h * scale) <= 1
    assert abs(inner_w - w * scale) <= 1
    assert abs((height - inner_h) - 2 * rows[0]) <= 1
    assert abs((width - inner_w) - 2 * columns[0]) <= 1


def test_a_frame_of_the_right_size_is_unchanged():
    picture = np.random.default_rng(1).integers(0, 256, (30, 40, 3), np.uint8)
    assert np.array_equal(fit_frame(picture, 40, 30), picture)
    assert np.array_equal(fit_frame(picture[::-1], 40, 30), picture[::-1]), "strides must not matter"


def test_thin_lines_survive_downscaling():
    for column in range(90, 110):
        picture = np.zeros((200, 400, 3), np.uint8)
        picture[:, column] = 255
        assert fit_frame(picture, 100, 50).max() >= 40


def read(bar, times):
    """The text of a caption, letter by letter, by comparing with the font."""
    ink = bar[:, :, 0] > 128
    rows = np.flatnonzero(ink.any(1))
    top = (bar.shape[0] - 7 * times) // 2
    assert rows[0] >= top
    assert rows[-1] < top + 7 * times
    cells = ink[top : top + 7 * times : times, 2 * times :: times]
    glyphs = {code: letter for letter, code in FONT.items()}
    text = ""
    for left in range(0, cells.shape[1] - 5, 6):
        code = "".join(f"{sum(int(bit) << row for row, bit in enumerate(cells[:, left + i])):02x}" for i in range(5))
        text += glyphs[code]
    return text.rstrip()


@pytest.mark.parametrize(("height", "times"), [(96, 1), (720, 3)])
def test_the_caption_shows_the_text_and_does_not_change_the_frame(height, times):
    room = height - caption_height(height)
    picture = np.random.default_rng(1).integers(0, 256, (room, 320 * times, 3), np.uint8)
    text = "episode 2/3 step 17 reward -0.50 return 1.2e+06"
    result = add_caption(picture, text, height)
    assert result.shape == (height, 320 * times, 3)
    assert np.array_equal(result[:room], picture)
    assert read(result[room:], times) == text


def test_a_caption_wider_than_the_frame_is_cut_off():
    picture = np.zeros((64 - caption_height(64), 64, 3), np.uint8)
    assert read(add_caption(picture, "step 1234567890", 64)[len(picture) :], 1) == "step 12345"


@given(st.integers(0, 10**9), st.floats(), st.floats(), st.integers(0, 999))
def test_the_font_covers_every_possible_caption(step, reward, total, episode):
    for episodes in (1, 1000):
        text = caption_text(EpisodeStep(step, None, reward, total, False), episode, episodes)
        assert set(text) <= set(FONT)
        assert text.split()[-6::2] == ["step", "reward", "return"]


def test_a_value_that_rounds_to_zero_has_no_minus_sign():
    assert "-0" not in caption_text(EpisodeStep(1, None, -1e-9, -1e-9, False), 0, 1)


@pytest.mark.parametrize(("text", "size"), [(" 640X480 ", (640, 480)), ("64x4096", (64, 4096))])
def test_a_size_is_width_times_height(text, size):
    assert size_from_text(text) == size


@pytest.mark.parametrize("text", ["320", "320x241", "32x240", "320x4098", "3e2x240"])
def test_odd_too_small_or_too_large_sizes_are_rejected(text):
    with pytest.raises(SurefootError, match=r"size='.*must be WIDTHxHEIGHT, even numbers from 64 to 4096"):
        size_from_text(text)
