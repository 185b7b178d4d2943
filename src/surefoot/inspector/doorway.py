"""How a browser is opened without telling its address to everyone on the machine.

The arguments of a program can be read by every user of a machine, and the address holds a token. So the browser is given a file
that only its owner can read, which leads to the address and is removed as soon as somebody is inside. (Jupyter does the same.)
"""

import contextlib
import os
import signal
import tempfile
from pathlib import Path
from types import FrameType

PAGE = """<!doctype html>
<meta charset="utf-8"><meta name="referrer" content="no-referrer"><meta http-equiv="refresh" content="0;url={address}">
<title>Surefoot</title><a href="{address}">To the inspector</a>
"""


class Doorway:
    """A file that leads to an address, until it is removed.

    folder   where it is made; by default the home folder, as browsers in a sandbox see no other temporary one
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.path: Path | None = None

    def make(self, address: str) -> str | None:
        """The file's own address; None where no file can be made."""
        for folder in [self.folder] if self.folder else [os.path.expanduser("~"), None]:
            with contextlib.suppress(OSError):
                handle, name = tempfile.mkstemp(".html", "surefoot-", folder)  # readable by its owner alone
                self.path = Path(name).absolute()
                try:
                    with os.fdopen(handle, "w", encoding="utf-8") as file:
                        file.write(PAGE.format(address=address))
                except OSError:  # the disk is full
                    self.remove()
                    raise
                return self.path.as_uri()
        return None

    def remove_when_killed(self) -> None:
        """Remove it, too, where a signal ends the program, which ends as it would have. From the main thread alone."""
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:  # under nohup it is ignored
                signal.signal(number, self._killed)

    def _killed(self, number: int, frame: FrameType | None) -> None:
        self.remove()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    def remove(self) -> None:
        """Once somebody is inside, or nobody can get inside any more."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)
