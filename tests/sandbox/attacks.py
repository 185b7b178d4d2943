"""Programs that try to pass a test without knowing its answer, to hang, to spread, or to leave something behind.

The test is ``solve() == SECRET``. Words in capitals are put in: FILE and PORT, SOCKET and PID are where the secret lies outside
the sandbox, NAME begins every file that an attack writes, SOURCE is the checker's own file.
"""

READERS = {
    "environment": "import os\ndef solve(): return os.environ['SUREFOOT_SECRET']",
    "file": "def solve(): return open('FILE').read()",
    "symlink to a file": """
import os
def solve():
    os.symlink('FILE', '/tmp/NAME')
    try: return open('/tmp/NAME').read()
    finally: os.remove('/tmp/NAME')
""",
    "command line of another process": "def solve(): return open('/proc/PID/cmdline').read().split('\\0')[-2]",
    "environment of another process": """
def solve():
    found = open('/proc/PID/environ').read().split('SUREFOOT_SECRET=')[1]
    return found.split('\\0')[0]
""",
    "root of another process": "def solve(): return open('/proc/PID/root' + 'FILE').read()",
    "network": "import socket\ndef solve(): return socket.create_connection(('127.0.0.1', PORT), 1).recv(99).decode()",
    "abstract socket": """
import socket
def solve():
    with socket.socket(socket.AF_UNIX) as s:
        s.connect('\\0' 'SOCKET')
        return s.recv(99).decode()
""",
}
"""What reads the secret where there is no sandbox: a test sees that it does."""

FORGERS = {
    "exit 0": "import sys\nsys.exit(0)",
    "os._exit": "import os\ndef solve(): os._exit(0)",
    "passed, says it": "print('1 passed'); print('{\"passed\": true, \"score\": 1.0}')\ndef solve(): return True",
    "lines on every descriptor": """
import os
def solve():
    for fd in range(256):
        for line in (b'{"value": true}\\n', b'{"value": null}\\n', b'{"passed": [true], "score": 1}\\n', b'ready\\n'):
            try: os.write(fd, line)
            except OSError: pass
    os._exit(0)
""",
    "one line too many": """
import os, json
def solve():
    for fd in range(3, 64):
        try: os.write(fd, b'{"value": 0}\\n' * 2)
        except OSError: pass
    return 0
""",
    "an object equal to all": "class A:\n    __eq__ = lambda *_: True\n    __hash__ = lambda _: 0\ndef solve(): return A()",
    "equality made true": "import builtins\nbuiltins.all = builtins.any = lambda *_: True\nbuiltins.type = lambda *_: str\n"
    "def solve(): return ''",
    "json made to lie": 'import json\njson.dumps = lambda *_, **__: \'{"value": true, "passed": true}\'\ndef solve(): return 1',
    "the caller's variables": """
import sys
def solve():
    frame = sys._getframe()
    while frame:
        for value in frame.f_locals.values():
            if isinstance(value, dict) and 'expected' in value: return value['expected']
        last, frame = frame, frame.f_back
    return [value for value in last.f_globals.values() if isinstance(value, str)][-1]
""",
    "every object in memory": """
import gc
def solve():
    for found in gc.get_objects():
        if isinstance(found, dict) and 'expected' in found: return found['expected']
""",
    "what is left on stdin": "import sys, os\ndef solve(): return sys.stdin.read() or os.read(0, 9999).decode()",
    "an import hook": """
import sys
class Hook:
    def find_spec(self, name, *_): raise SystemExit(0)
sys.meta_path.insert(0, Hook())
sys.path_hooks.clear()
def solve():
    import decimal
""",
    "not a number": "def solve(): return float('nan')",
    "a number beyond all": "def solve(): return 10 ** 4000",
    "a number that can't be read": "def solve():\n    import sys\n    sys.set_int_max_str_digits(0)\n    return 10 ** 100_000",
    "a list without end": "def solve():\n    a = []\n    a.append(a)\n    return a",
    "the checker overwritten": """
import json, os
def solve():
    for path in ('SOURCE', json.__file__, os.__file__):
        try: open(path, 'w').write('def judge(*_): return True')
        except OSError: pass
    return True
""",
}

SABOTEURS = {
    "kill the parent": "import os\ndef solve(): os.kill(os.getppid(), 9)",
    "kill everyone": "import os\ndef solve(): os.kill(-1, 9)",
    "kill by number": "import os\ndef solve():\n    os.kill(PID, 9)",
    "stop itself": "import os, signal\ndef solve(): os.kill(os.getpid(), signal.SIGSTOP)",
    "a crash": "import ctypes\ndef solve(): ctypes.string_at(0)",
    "deep recursion": "import sys\nsys.setrecursionlimit(10 ** 9)\ndef solve(): return solve()",
    "fork bomb": "import os\ndef solve():\n    while True:\n        try: os.fork()\n        except OSError: pass",
    "thread bomb": """
import threading, time
def solve():
    while True:
        try: threading.Thread(target=time.sleep, args=(1000,)).start()
        except RuntimeError: pass
""",
    "10 GB": "def solve():\n    a = bytearray(10 ** 10)\n    return 1",
    "10 GB by several": """
import os
def solve():
    for _ in range(8):
        try: os.fork()
        except OSError: pass
    a = []
    while True:
        try: a.append(bytearray(10 ** 6))
        except MemoryError: pass
""",
    "10 GB of files": """
def solve():
    for number in range(10 ** 4):
        open(f'/tmp/NAME{number}', 'wb').write(bytes(10 ** 6))
""",
    "10 GB in no file": """
import os
def solve():
    fds = [os.memfd_create('NAME') for _ in range(50)]
    while True:
        for fd in fds: os.write(fd, bytes(10 ** 6))
""",
    "endless output": "import os\nwhile True: os.write(1, b'x' * 65536)",
    "a long result": "def solve(): return 'x' * 10 ** 7",
    "infinite loop": "def solve():\n    while True: pass",
    "deaf infinite loop": """
import signal
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
def solve():
    while True: pass
""",
    "loop that catches all": """
import signal, time
signal.signal(signal.SIGXCPU, lambda *_: None)
def solve():
    while True:
        try: time.sleep(1000)
        except BaseException: pass
""",
    "reading for ever": "import os\nr, w = os.pipe()\ndef solve(): os.read(r, 1)",
    "huge number": "def solve(): return 9 ** 9 ** 9",
    "thread at exit": "import threading, time, sys\nthreading.Thread(target=time.sleep, args=(1000,)).start()\nsys.exit(0)",
    "daemon": """
import os, time
def solve():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for fd in range(64):
                try: os.close(fd)
                except OSError: pass
            while True: time.sleep(1000)
        os._exit(0)
    return 1
""",
    "a child that holds the output": "import os, time\ndef solve():\n    if os.fork() == 0: time.sleep(1000)\n    return 1",
    "everything closed": "import os, time\ndef solve():\n    os.closerange(0, 256)\n    time.sleep(1000)",
    "files everywhere": """
import os
def solve():
    there = os.path.dirname('FILE')
    for folder in ('/', '/tmp', '/var/tmp', '/dev', '/dev/shm', '/usr/lib', '/run', '/home', '/root', there, '.'):
        for path in (folder, '/proc/PID/root' + folder, '/proc/self/cwd/../..' + folder):
            try: open(os.path.join(path, 'NAME'), 'w').write('x')
            except OSError: pass
""",
    "no limits": """
import resource
def solve():
    for kind in (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE):
        resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
""",
    "another program": """
import os, subprocess
def solve():
    os.system('echo 1 > /tmp/NAME')
    subprocess.run(['/bin/sh', '-c', 'id'])
""",
    "another user": "import os\ndef solve():\n    os.setgroups([]); os.setuid(0)",
    "another root": "import os\ndef solve():\n    os.chroot('/tmp')",
}
