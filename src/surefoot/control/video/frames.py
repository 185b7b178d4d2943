"""Fit frames to the size of a video, and put a caption below."""

import math
import re

import numpy as np
import torch
from torch.nn import functional

from surefoot.control.evaluate import EpisodeStep
from surefoot.control.spaces import Array
from surefoot.errors import SurefootError

SMALLEST, LARGEST = 64, 4096
PADDING = 2
"""rows above and below the caption"""
INK = 224
"""brightness of the caption"""

# One byte per column from left to right, the lowest bit on top.
FONT = {
    " ": "0000000000", "+": "08083e0808", "-": "0808080808", ".": "0060600000", ",": "0050300000", "/": "2010080402",
    "0": "3e5149453e", "1": "00427f4000", "2": "4261514946", "3": "2141454b31", "4": "1814127f10",
    "5": "2745454539", "6": "3c4a494930", "7": "0171090503", "8": "3649494936", "9": "064949291e",
    "a": "2054545478", "d": "384444487f", "e": "3854545418", "f": "087e090102", "i": "00447d4000", "n": "7c08040478",
    "o": "3844444438", "p": "7c14141408", "r": "7c08040408", "s": "4854545420", "t": "043f444020", "u": "3c4040207c",
    "w": "3c4030403c",
}  # fmt: skip
ROWS, COLUMNS = 7, 6  # the sixth column separates letters


def size_from_text(text: str) -> tuple[int, int]:
    """``320x240`` as (width, height); SurefootError for anything else."""
    match = re.fullmatch(r"(\d{1,6})x(\d{1,6})", text.strip().lower())
    size = (int(match[1]), int(match[2])) if match else (0, 0)
    if any(side % 2 or not SMALLEST <= side <= LARGEST for side in size):
        raise SurefootError(f"size={text!r}: must be WIDTHxHEIGHT, even numbers from {SMALLEST} to {LARGEST}, such as 320x240")
    return size


def fit_frame(frame: Array, width: int, height: int) -> Array:
    """Scale a uint8 frame [h, w, 3] to fit [height, width, 3], centred on black, with its aspect ratio."""
    h, w = frame.shape[:2]
    scale = min(width / w, height / h)
    inner_w, inner_h = min(width, max(1, round(w * scale))), min(height, max(1, round(h * scale)))
    if (inner_h, inner_w) != (h, w):
        channels_first = torch.from_numpy(np.ascontiguousarray(frame)).permute(2, 0, 1)[None]
        # Antialiased: otherwise thin lines, such as a pole's, vanish from some frames.
        resized = functional.interpolate(channels_first, (inner_h, inner_w), mode="bilinear", antialias=True)
        frame = resized[0].permute(1, 2, 0).numpy()
    if (inner_h, inner_w) == (height, width):
        return np.ascontiguousarray(frame)
    canvas = np.zeros((height, width, 3), np.uint8)
    top, left = (height - inner_h) // 2, (width - inner_w) // 2
    canvas[top : top + inner_h, left : left + inner_w] = frame
    return canvas


def caption_text(at: EpisodeStep, episode: int = 0, episodes: int = 1) -> str:
    """The caption of a frame."""
    which = f"episode {episode + 1}/{episodes} " if episodes > 1 else ""
    return f"{which}step {at.step:<4} reward {_short(at.reward, 2):<7} return {_short(at.total, 1)}"


def _short(value: float, decimals: int) -> str:
    rounded = round(value, decimals) + 0.0 if math.isfinite(value) else value  # + 0.0: no "-0.00"
    return f"{rounded:.{decimals}f}" if abs(value) < 1e5 else f"{value:.1e}"


def captioned(frame: Array, width: int, height: int, text: str | None) -> Array:
    """A frame of any size, scaled to fit [height, width, 3] with a line of text below, or without one if it is None."""
    if text is None:
        return fit_frame(frame, width, height)
    return add_caption(fit_frame(frame, width, height - caption_height(height)), text, height)


def caption_height(height: int) -> int:
    """Rows that the caption takes of a frame of this height."""
    return (ROWS + 2 * PADDING) * _font_scale(height)


def add_caption(frame: Array, text: str, height: int) -> Array:
    """A frame [h, w, 3] with a line of text below, [height, w, 3]; text beyond the width is cut off."""
    rows, width = height - frame.shape[0], frame.shape[1]
    scale = _font_scale(height)
    bar = np.zeros((rows, width, 3), np.uint8)
    ink = np.repeat(np.repeat(_letters(text), scale, 0), scale, 1)
    top, left = (rows - ink.shape[0]) // 2, 2 * scale
    ink = ink[:, : max(0, width - left)]
    bar[top : top + ink.shape[0], left : left + ink.shape[1]] = ink[..., None] * INK
    return np.concatenate([frame, bar])


def _font_scale(height: int) -> int:
    """Scale of the letters, which are 7 rows high."""
    return max(1, height // 240)


def _letters(text: str) -> Array:
    """A line of text as 0 and 1, [7, 6 per letter]."""
    columns = np.frombuffer(b"".join(bytes.fromhex(FONT[letter] + "00") for letter in text), np.uint8)
    return (columns >> np.arange(ROWS, dtype=np.uint8)[:, None]) & 1
