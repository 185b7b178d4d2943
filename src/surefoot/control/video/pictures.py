"""Pictures of one size: whatever was rendered is fitted into it, and a line of small print goes below."""

import numpy as np
import torch
from torch.nn import functional

from surefoot.control.spaces import Array

PADDING = 2
"""rows above and below the small print"""
INK = 224
"""how bright it is"""

# One byte per column from left to right, the lowest bit on top.
FONT = {
    " ": "0000000000", "+": "08083e0808", "-": "0808080808", ".": "0060600000", ",": "0050300000", "/": "2010080402",
    "0": "3e5149453e", "1": "00427f4000", "2": "4261514946", "3": "2141454b31", "4": "1814127f10",
    "5": "2745454539", "6": "3c4a494930", "7": "0171090503", "8": "3649494936", "9": "064949291e",
    "a": "2054545478", "d": "384444487f", "e": "3854545418", "f": "087e090102", "i": "00447d4000", "n": "7c08040478",
    "o": "3844444438", "p": "7c14141408", "r": "7c08040408", "s": "4854545420", "t": "043f444020", "u": "3c4040207c",
    "w": "3c4030403c",
}  # fmt: skip
ROWS, COLUMNS = 7, 6  # the sixth column keeps letters apart


def fitted(picture: Array, width: int, height: int) -> Array:
    """A picture [h, w, 3] of bytes as large as fits into [height, width, 3], in the middle of black; its shape is kept."""
    h, w = picture.shape[:2]
    scale = min(width / w, height / h)
    inner_w, inner_h = min(width, max(1, round(w * scale))), min(height, max(1, round(h * scale)))
    if (inner_h, inner_w) != (h, w):
        channels_first = torch.from_numpy(np.ascontiguousarray(picture)).permute(2, 0, 1)[None]
        # Antialiased: thin lines, such as a pole's, would vanish from every other frame.
        resized = functional.interpolate(channels_first, (inner_h, inner_w), mode="bilinear", antialias=True)
        picture = resized[0].permute(1, 2, 0).numpy()
    if (inner_h, inner_w) == (height, width):
        return np.ascontiguousarray(picture)
    canvas = np.zeros((height, width, 3), np.uint8)
    top, left = (height - inner_h) // 2, (width - inner_w) // 2
    canvas[top : top + inner_h, left : left + inner_w] = picture
    return canvas


def caption_height(height: int) -> int:
    """How many rows of a picture of this height the small print takes."""
    return ROWS * _enlarged(height) + 2 * PADDING * _enlarged(height)


def captioned(picture: Array, text: str, height: int) -> Array:
    """A picture [h, w, 3] with a line of text below, [height, w, 3]; what is too long for its width is cut off."""
    rows, width = height - picture.shape[0], picture.shape[1]
    times = _enlarged(height)
    bar = np.zeros((rows, width, 3), np.uint8)
    ink = np.repeat(np.repeat(_letters(text), times, 0), times, 1)
    top, left = (rows - ink.shape[0]) // 2, 2 * times
    ink = ink[:, : max(0, width - left)]
    bar[top : top + ink.shape[0], left : left + ink.shape[1]] = ink[..., None] * INK
    return np.concatenate([picture, bar])


def _enlarged(height: int) -> int:
    """By how much letters of 7 rows are enlarged."""
    return max(1, height // 240)


def _letters(text: str) -> Array:
    """0 and 1 of a line of text, [7, 6 per letter]."""
    columns = np.frombuffer(b"".join(bytes.fromhex(FONT[letter] + "00") for letter in text), np.uint8)
    return (columns >> np.arange(ROWS, dtype=np.uint8)[:, None]) & 1
