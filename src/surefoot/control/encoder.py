"""Write frames, scaled to one size and with a caption below, as an MP4 that browsers play: H.264, yuv420p, index first."""

import contextlib
import os
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from torch.nn import functional

from surefoot.control.spaces import Array
from surefoot.errors import SurefootError, missing_extra

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


class Encoder:
    """A context manager; ``add`` takes uint8 frames [height, width, 3]. The file appears when the block ends without an error.

    Raises SurefootError when the encoder is not installed or fails.
    """

    def __init__(self, path: Path, width: int, height: int, fps: float) -> None:
        self.path, self.shape, self.fps = path, (height, width, 3), fps
        self.frames = 0
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._process: subprocess.Popen[bytes] | None = None

    def add(self, frame: Array) -> None:
        """Append a frame. The first one starts the encoder, so that a failure to render leaves nothing behind."""
        assert frame.shape == self.shape, f"{frame.shape} in a video of {self.shape}"
        self._process = self._process or self._start()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(frame.tobytes())
        except OSError:  # the encoder has ended
            raise self._failure() from None
        self.frames += 1

    def __enter__(self) -> "Encoder":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._process is None:
            return
        try:
            if kind is not None:
                self._process.kill()
            elif self._finish() != 0:
                raise self._failure()
            else:
                os.replace(self._temporary, self.path)
        except OSError as failure:
            raise self._not_writable(failure) from None
        finally:
            self._finish()
            self._stderr.close()
            self._temporary.unlink(missing_ok=True)

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._not_writable(error) from None
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # closed in __exit__
        height, width, _ = self.shape
        source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", f"{self.fps:g}", "-i", "-"]
        kind = ["-an", "-c:v", "libx264", "-crf", "20", "-pix_fmt", "yuv420p", "-movflags", "+faststart", "-f", "mp4"]
        return subprocess.Popen(
            [ffmpeg_path(), "-y", "-loglevel", "error", *source, *kind, str(self._temporary.absolute())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._stderr,
            start_new_session=True,  # Ctrl-C reaches only this process, which then removes the unfinished file
        )

    def _finish(self) -> int:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the exit code is more useful
            self._process.stdin.close()
        return self._process.wait()

    def _failure(self) -> SurefootError:
        code = self._finish()
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return SurefootError(f"{self.path}: not written, the encoder failed ({lines[-1] if lines else f'exit code {code}'})")

    def _not_writable(self, error: OSError) -> SurefootError:
        return SurefootError(f"{self.path}: can't be written ({error.strerror}); choose another path with --out")


def ffmpeg_path() -> str:
    """Path of the ffmpeg of imageio-ffmpeg; SurefootError if it is not installed."""
    try:
        import imageio_ffmpeg  # type: ignore[import-untyped]
    except ImportError:
        raise missing_extra("imageio-ffmpeg", "video", "a video") from None
    try:
        return str(imageio_ffmpeg.get_ffmpeg_exe())
    except RuntimeError as error:
        raise SurefootError(f"a video needs ffmpeg, but imageio-ffmpeg has none here ({error}); install ffmpeg") from None


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
