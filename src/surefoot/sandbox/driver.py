"""Set limits, then run a program or call its functions, inside the sandbox: Python receives this file as text.

Nothing here is trusted once the program runs. Results leave as JSON, one line for each call, and the process that started the
sandbox compares them, so a forged line gains no more than a returned value. Standard library only.
"""

import json
import os
import resource
import sys

READY = b"ready\n"
"""the first bytes of output; everything after them belongs to the program"""


def main() -> None:
    job = _job()
    for name, value in job["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 2)
    os.write(1, READY)
    if job["calls"] is None:
        exec(compile(job["source"], "program.py", "exec"), {"__name__": "__main__"})
        return
    results = os.dup(1)
    os.dup2(null, 0)
    os.dup2(null, 1)
    names = {"__name__": "program"}
    exec(compile(job["source"], "program.py", "exec"), names)
    for name, args, kwargs in job["calls"]:
        try:
            line = json.dumps({"value": names[name](*args, **kwargs)}, allow_nan=False)  # type: ignore[operator]
        except BaseException:
            line = "{}"
        unwritten = line.encode() + b"\n"
        while unwritten:
            unwritten = unwritten[os.write(results, unwritten) :]
    os._exit(0)


def _job() -> dict:  # type: ignore[type-arg]  # the sandbox's Python may be older than ours
    """The job from stdin. Not a byte more is read: the rest is the program's input."""
    length = b""
    while not length.endswith(b"\n"):
        length += os.read(0, 1)
    text = b""
    while len(text) < int(length):
        text += os.read(0, int(length) - len(text))
    return json.loads(text)  # type: ignore[no-any-return]


if __name__ == "__main__":
    sys.path[:] = [path for path in sys.path if path]  # import nothing from the working directory
    main()
