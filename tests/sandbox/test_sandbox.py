"""The sandbox: each limit works, every namespace is new, and it ends with the process that started it."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from forked import children, left_of

from surefoot import sandbox
from surefoot.errors import SurefootError
from surefoot.sandbox import Limits, bubblewrap

MEGABYTE = 2**20


def result_of(source: str, **limits: Any) -> Any:
    """What ``f()`` of a program returns."""
    outcome = sandbox.run(source, calls=[("f", [], {})], limits=Limits(**limits))
    assert outcome.ended == "done", outcome
    return json.loads(outcome.output)["value"]


def test_a_script_gets_its_input_and_gives_its_output() -> None:
    text = "søren\n" * 50_000  # more than a pipe holds
    outcome = sandbox.run("import sys; sys.stdout.write(sys.stdin.read())", stdin=text)
    assert (outcome.ended, outcome.output.decode()) == ("done", text)


def test_a_script_that_ignores_its_input_ends() -> None:
    assert sandbox.run("print(1)", stdin="x" * MEGABYTE).output == b"1\n"


def test_calls_return_in_order_and_prints_are_not_results() -> None:
    source = "print('hello')\ndef f(a, b=0):\n    print(a)\n    return [a, b]\ndef g(): raise KeyError"
    outcome = sandbox.run(source, calls=[("f", [1], {"b": 2}), ("g", [], {}), ("none", [], {}), ("f", ["é"], {})])
    assert [json.loads(line) for line in outcome.output.splitlines()] == [{"value": [1, 2]}, {}, {}, {"value": ["é", 0]}]


def test_the_outcome_has_the_exit_status() -> None:
    for source, ended in (
        ("", "done"),
        ("1/0", "failed"),
        ("import sys; sys.exit(3)", "failed"),
        ("(", "failed"),
        ("while True: pass", "time"),
    ):
        assert sandbox.run(source, limits=Limits(seconds=0.5)).ended == ended


def test_output_is_truncated_at_its_limit() -> None:
    outcome = sandbox.run("while True: print('x' * 999)", limits=Limits(output=10_000))
    assert (outcome.ended, len(outcome.output)) == ("output", 10_000)


def test_memory_of_all_processes_together_is_bounded() -> None:
    source = """
def f():
    blocks = []
    try:
        while True: blocks.append(bytearray(10 ** 6))
    except MemoryError: return len(blocks)
"""
    for processes in (1, 4):
        share = 512 / processes
        assert 0.5 * share < result_of(source, memory=512 * MEGABYTE, processes=processes) < share * 1.05


@pytest.mark.parametrize("kind", ["os.fork() or time.sleep(9)", "threading.Thread(target=time.sleep, args=(9,)).start()"])
def test_one_process_or_thread_too_many_fails(kind: str) -> None:
    source = f"""
import os, threading, time
def f():
    made = 1
    try:
        while made < 50:
            {kind}
            made += 1
    except (OSError, RuntimeError): return made
"""
    assert result_of(source, processes=3) == 3


def test_open_files_and_what_is_in_them_are_bounded() -> None:
    source = "import os\ndef f():\n    n = 0\n    try:\n        while True: os.dup(0); n += 1\n    except OSError: return n"
    assert result_of(source, files=20) < 20
    source = """
def f():
    written = 0
    for number in range(9):
        try:
            with open(f'/tmp/{number}', 'wb', 0) as file: written += file.write(bytes(2 ** 18))
        except OSError: pass
    return written
"""
    assert 2**19 <= result_of(source, disk=MEGABYTE) <= MEGABYTE


def test_the_sandbox_contains_only_python() -> None:
    source = """
import os, sys
def f():
    found = [os.path.join(folder, file) for folder, _, files in os.walk('/') for file in files]
    return {'root': sorted(os.listdir('/')), 'environment': dict(os.environ), 'ids': os.getresuid() + os.getresgid(),
            'groups': os.getgroups(), 'pid': os.getpid(), 'name': os.uname().nodename, 'cwd': os.getcwd(),
            'programs': os.listdir(os.path.dirname(sys.executable)),
            'shells': [file for file in found if file.endswith(('/sh', '/bash', '/busybox'))],
            'foreign': [file for file in found if not file.startswith(('/usr/', '/lib', '/dev/', '/etc/ld.so', sys.prefix))],
            'writable': sorted({folder for folder, _, _ in os.walk('/') if os.access(folder, os.W_OK)})}
"""
    there = result_of(source)
    assert there["environment"].keys() <= {*bubblewrap.environment(), "PWD"}
    assert set(there["ids"]) == {bubblewrap.NOBODY}
    assert (there["pid"], there["name"], there["cwd"]) == (1, "sandbox", "/tmp")
    assert there["writable"] == ["/tmp"]
    assert len(there["programs"]) == 1
    assert there["shells"] == there["foreign"] == []
    assert not {"home", "root", "proc", "sys", "run", "var", "bin", "sbin", "mnt", "opt"} & set(there["root"])


def test_a_sandbox_has_no_files_of_the_previous_one() -> None:
    assert result_of("def f(): return open('/tmp/x', 'w').write('x')") == 1
    assert result_of("import os\ndef f(): return os.listdir('/tmp')") == []


def test_no_descriptor_of_the_parent_is_open_in_the_sandbox() -> None:
    source = """
import os
def open_(fd):
    try: os.fstat(fd)
    except OSError: return False
    return True
def f(): return [fd for fd in range(3, 64) if open_(fd)]
"""
    assert len(result_of(source)) == 2, "where results go, and nothing at all"


def test_every_namespace_is_new_and_no_privilege_is_left() -> None:
    process, pid = started("import time; time.sleep(60)")
    try:
        for name in ("user", "pid", "net", "ipc", "uts", "mnt", "cgroup"):
            assert os.readlink(f"/proc/{pid}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}"), name
        with open(f"/proc/{pid}/status") as file:
            status = {name: value.strip() for name, _, value in (line.partition(":") for line in file)}
        assert {int(status[f"Cap{kind}"], 16) for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {0}
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
        assert set(status["Uid"].split()) != {"0"}
    finally:
        process.kill()
        process.communicate()


CHILD = """
from surefoot import sandbox
sandbox.check()
print("goes", flush=True)
sandbox.run({!r}, limits=sandbox.Limits(seconds=60))
"""
CLING = """
import ctypes, signal, time
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
while True: time.sleep(60)
"""


@pytest.mark.parametrize("source", ["import time; time.sleep(60)", CLING], ids=["sleeps", "clings"])
def test_a_sandbox_dies_with_the_process_that_started_it(source: str) -> None:
    process, pid = started(source)
    process.kill()
    process.communicate()
    assert left_of([pid]) == []


def started(source: str) -> tuple[subprocess.Popen[bytes], int]:
    """A process that runs a program in a sandbox, and the sandboxed Python below it."""
    process = subprocess.Popen([sys.executable, "-c", CHILD.format(source)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"goes\n"
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        inside = [child for outer in children(process.pid) for child in children(outer)]
        if inside and b"\0-c\0" in Path(f"/proc/{inside[0]}/cmdline").read_bytes()[:80]:
            time.sleep(0.3)  # it has read its job
            return process, inside[0]
        time.sleep(0.02)
    process.kill()
    raise AssertionError("no sandbox has started")


def test_rejected_system_calls_are_not_permitted() -> None:
    """By the filter; with these arguments most would fail otherwise, as invalid, or succeed."""
    numbers = {name: pair[os.uname().machine == "aarch64"] for name, pair in bubblewrap.REJECTED_CALLS.items()}
    source = f"""
import ctypes
def f():
    c = ctypes.CDLL(None, use_errno=True)
    found = {{}}
    for name, number in {numbers}.items():
        c.syscall(ctypes.c_long(number), *[ctypes.c_long(-1)] * 6)
        found[name] = ctypes.get_errno()
    return found
"""
    assert result_of(source) == dict.fromkeys(numbers, errno.EPERM)


def test_an_unsupported_machine_is_rejected() -> None:
    with pytest.raises(SurefootError, match="this machine is 'vax'"):
        bubblewrap.syscall_filter("vax")
    assert bubblewrap.syscall_filter("aarch64") != bubblewrap.syscall_filter("x86_64")


def test_without_bubblewrap_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SurefootError, match="needs bwrap, which is not installed; install the package bubblewrap"):
        sandbox.run("print(1)")


def test_a_bubblewrap_that_does_not_work_runs_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    for folder in (tmp_path, *(parent for parent in tmp_path.parents if parent.name.startswith(("pytest-", "popen-")))):
        folder.chmod(0o755)  # the sandbox starts as nobody
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(SurefootError, match=r"did not start \(bwrap: No permissions to create new namespace"):
        sandbox.run("print(1)")


def test_no_program_survives_an_interrupt() -> None:
    class Stop(Exception):
        pass

    def stop(number: int, frame: Any) -> None:
        raise Stop

    before, left = signal.signal(signal.SIGALRM, stop), signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(Stop):
            sandbox.run("import time; time.sleep(60)", limits=Limits(seconds=60))
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *left)
    assert not [child for child in children(os.getpid()) if b"bwrap" in Path(f"/proc/{child}/cmdline").read_bytes()]
