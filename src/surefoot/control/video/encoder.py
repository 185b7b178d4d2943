"""Pictures to an MP4 that browsers play: H.264, yuv420p, its index in front. Written whole or not at all."""

import contextlib
import os
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

from surefoot.control.spaces import Array
from surefoot.errors import SurefootError, missing_extra


class Encoder:
    """Within ``with``, ``add`` takes pictures [height, width, 3] of bytes; the file is there once it is left without an error.

    Raises SurefootError when the encoder is not installed, or what it says when it fails.
    """

    def __init__(self, path: Path, width: int, height: int, fps: float) -> None:
        self.path, self.shape, self.fps = path, (height, width, 3), fps
        self.frames = 0
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._process: subprocess.Popen[bytes] | None = None

    def add(self, picture: Array) -> None:
        """The next picture. The first one starts the encoder, so that what can't be drawn leaves nothing behind."""
        assert picture.shape == self.shape, f"{picture.shape} in a film of {self.shape}"
        self._process = self._process or self._started()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(picture.tobytes())
        except OSError:  # it has ended already
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
            elif self._ended() != 0:
                raise self._failure()
            else:
                os.replace(self._temporary, self.path)
        except OSError as refused:
            raise self._not_writable(refused) from None
        finally:
            self._ended()
            self._complaints.close()
            self._temporary.unlink(missing_ok=True)

    def _started(self) -> subprocess.Popen[bytes]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._not_writable(error) from None
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115  # closed in __exit__
        height, width, _ = self.shape
        source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", f"{self.fps:g}", "-i", "-"]
        kind = ["-an", "-c:v", "libx264", "-crf", "20", "-pix_fmt", "yuv420p", "-movflags", "+faststart", "-f", "mp4"]
        return subprocess.Popen(
            [program(), "-y", "-loglevel", "error", *source, *kind, str(self._temporary.absolute())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._complaints,
            start_new_session=True,  # Ctrl-C is for this process, which then removes what is half-written
        )

    def _ended(self) -> int:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # its exit code says more
            self._process.stdin.close()
        return self._process.wait()

    def _failure(self) -> SurefootError:
        code = self._ended()
        self._complaints.seek(0)
        said = self._complaints.read().decode(errors="replace").strip().splitlines()
        return SurefootError(f"{self.path}: not written, the encoder failed ({said[-1] if said else f'exit code {code}'})")

    def _not_writable(self, error: OSError) -> SurefootError:
        return SurefootError(f"{self.path}: can't be written ({error.strerror}); choose another place with --out")


def program() -> str:
    """The encoder that imageio-ffmpeg brings; SurefootError where it is not installed."""
    try:
        import imageio_ffmpeg  # type: ignore[import-untyped]
    except ImportError:
        raise missing_extra("imageio-ffmpeg", "video", "a video") from None
    try:
        return str(imageio_ffmpeg.get_ffmpeg_exe())
    except RuntimeError as error:
        raise SurefootError(f"a video needs ffmpeg, and imageio-ffmpeg has none here ({error}); install ffmpeg") from None
