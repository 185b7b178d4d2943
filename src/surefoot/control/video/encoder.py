"""Encode frames as MP4."""

import contextlib
import os
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

from surefoot.control.spaces import Array
from surefoot.errors import SurefootError, require_package
from surefoot.files import writing

OTHER_PATH = "choose another path with --out"


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
            with writing(self.path, OTHER_PATH):
                if kind is not None:
                    self._process.kill()
                elif self._finish() != 0:
                    raise self._failure()
                else:
                    os.replace(self._temporary, self.path)
        finally:
            self._finish()
            self._stderr.close()
            self._temporary.unlink(missing_ok=True)

    def _start(self) -> subprocess.Popen[bytes]:
        with writing(self.path, OTHER_PATH):
            self.path.parent.mkdir(parents=True, exist_ok=True)
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


def ffmpeg_path() -> str:
    """Path of the ffmpeg of imageio-ffmpeg; SurefootError if it is not installed."""
    require_package("imageio-ffmpeg", "video", "a video")
    import imageio_ffmpeg  # type: ignore[import-untyped]

    try:
        return str(imageio_ffmpeg.get_ffmpeg_exe())
    except RuntimeError as error:
        raise SurefootError(f"a video needs ffmpeg, but imageio-ffmpeg has none here ({error}); install ffmpeg") from None
