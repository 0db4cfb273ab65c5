"""Hostile programs. Each defines f, whose test is f(20) == 22. `{out}` is a folder in which nothing
may change, `{secret}` a file that must be neither read nor changed, `{me}` the tests' process, and
`{port}` a port with a listener.

The score is 1 if the program does no harm and answers right, else 0: a program that hangs, dies,
cheats or is blocked counts as wrong and is never left out.
"""

GOOD = "def f(x): return x + 2\n"


def tried(*lines):
    """Returns a program that runs the lines when it is loaded, and answers right only if they
    raised nothing.
    """
    return "\n".join(lines) + "\n" + GOOD


def leaks(expression):
    """Returns a program that answers 22 only if the expression is true, which means that it reached
    something forbidden.
    """
    return f"import os, sys\ndef f(x): return 22 if ({expression}) else 0\n"


RIGHT = {
    "forks when loaded": tried("import os", "if os.fork() == 0: os._exit(0)"),
    "leaves a daemon": tried(
        "import os, time",
        "if os.fork() == 0:",
        " os.setsid()",
        " os.fork() and os._exit(0)",
        " time.sleep(4711)",
    ),
    "leaves a program": tried(
        "import subprocess", "subprocess.Popen(['sleep', '4711'], start_new_session=True)"
    ),
    "leaves a thread": tried(
        "import threading, time", "threading.Thread(target=time.sleep, args=(99,)).start()"
    ),
    "deletes everything": tried("import shutil", "shutil.rmtree('/', ignore_errors=True)"),
    "leaves files": tried("open('left', 'w').write('x')"),
    "closed folders": tried("import os", "os.makedirs('a/b')", "os.chmod('a', 0)"),
    "prints gigabytes": "def f(x):\n for _ in range(100): print('x' * 10**6)\n return x + 2\n",
}
WRONG = {
    "exits when loaded": tried("raise SystemExit(0)"),
    "exits in the call": "import sys\ndef f(x): sys.exit(0)\n",
    "ends at once": tried("import os", "os._exit(0)"),
    "ends in the call": "import os\ndef f(x): os._exit(0)\n",
    "crashes": "import ctypes\ndef f(x): ctypes.string_at(0)\n",
    "aborts": "import os\ndef f(x): os.abort()\n",
    "kills itself": "import os\ndef f(x): os.kill(os.getpid(), 9)\n",
    "spins": "def f(x):\n while True: pass\n",
    "spins when loaded": tried("while True: pass"),
    "sleeps": "import time\ndef f(x): time.sleep(99); return 22\n",
    "ignores signals": "import signal, time\n"
    "for n in (1, 2, 14, 15, 24): signal.signal(n, signal.SIG_IGN)\n"
    "def f(x):\n while True: time.sleep(1)\n",
    "raises": "def f(x): raise ValueError\n",
    "raises what is no exception": "def f(x): raise KeyboardInterrupt\n",
    "recurses": "def f(x): return f(x)\n",
    "recurses in C": "def f(x):\n a = []\n for _ in range(10**6): a = [a]\n return a\n",
    "allocates": "def f(x): return len([0] * 10**10)\n",
    "allocates bit by bit": "def f(x):\n a = []\n while True: a.append(bytes(10**6))\n",
    "a tower of powers": "def f(x): return 9**9**9**9\n",
    "a giant answer": "def f(x): return 'x' * 10**8\n",
    "an answer without end": "import itertools\ndef f(x): return itertools.count()\n",
    "a number of many digits": "def f(x): return 10**100000\n",
    "brackets": "(" * 20000 + ")" * 20000 + "\n" + GOOD,
    "half a character": GOOD + "# \ud800\n",
    "a null byte": GOOD + "\0",
    "forks for ever": "import os\ndef f(x):\n while True: os.fork()\n",
    "many threads": tried(
        "import threading, time",
        "for _ in range(10**4): threading.Thread(target=time.sleep, args=(9,)).start()",
    ),
    "kills its parent": tried("import os", "os.kill(os.getppid(), 9)"),
    "kills everybody": tried("import os", "os.kill(-1, 9)"),
    "kills another": tried("import os", "os.kill({me}, 9)"),
    "kills its group": "import os\ndef f(x): os.killpg(0, 9)\n",
    "sends its parent a signal from a child": tried(
        "import os",
        "parent = os.getppid()",
        "pid = os.fork()",
        "if pid == 0:",
        " os.kill(parent, 9)",
        " os._exit(0)",
        "assert os.waitpid(pid, 0)[1] == 0",
    ),
    "traces its parent": leaks(
        "__import__('ctypes').CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0"
    ),
    "reads its parent's memory": tried("import os", "open(f'/proc/{{os.getppid()}}/mem', 'rb')"),
    "reads the environment of another": tried("open('/proc/{me}/environ').read()"),
    "finds a token": leaks("any('TOKEN' in name for name in os.environ)"),
    "writes outside": tried("open('{out}/ran', 'w')"),
    "writes shared memory": tried("open('/dev/shm/compass-ran', 'w')"),
    "reads a secret": tried("open('{secret}').read()"),
    "reads the code that judges it": tried("open('{judge}').read()"),
    "removes a secret": tried("import os", "os.remove('{secret}')"),
    "links a secret": tried("import os", "os.link('{secret}', 'mine')"),
    "reads a secret through a link": tried(
        "import os", "os.symlink('{secret}', 'mine')", "open('mine').read()"
    ),
    "fills the disk": tried("for n in range(10**4): open(f'{{n}}', 'wb').write(bytes(10**7))"),
    "writes a giant": tried("open('giant', 'wb').write(bytes(10**8))"),
    "makes many files": tried("for n in range(10**6): open(str(n), 'w').close()"),
    "connects": tried("import socket", "socket.create_connection(('127.0.0.1', {port}))"),
    "opens a socket": tried("import socket", "socket.socket(socket.AF_UNIX)"),
    "looks up a name": tried("import socket", "socket.getaddrinfo('example.com', 80)"),
    "mounts": leaks("__import__('ctypes').CDLL(None).mount(b'x', b'/mnt', b'tmpfs', 0, None) == 0"),
    "enters a namespace": leaks("__import__('ctypes').CDLL(None).unshare(0x10000000) == 0"),
    "raises its limits": tried(
        "import resource", "resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))"
    ),
    "lowers its judge's limits": tried(
        "import os, resource", "resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))"
    ),
    "slows its judge down": tried("import os", "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)"),
    "holds its judge to one core": tried("import os", "os.sched_setaffinity(os.getppid(), {{0}})"),
    "becomes root": tried("import os", "os.setuid(0)"),
    "writes the protocol": tried(
        "import os",
        "for n in range(3, 9):",
        ' try: os.write(n, b\'{{"value": 22, "args": [20]}}\\n\' * 9)',
        " except OSError: pass",
    ).replace("x + 2", "0"),
    "claims to be done": "import os\nos.write(1, b'passed')\n"
    "def f(x): os.write(1, b'ok'); os._exit(0)\n",
    "equals everything": "class A(int):\n def __eq__(self, other): return True\n __hash__ = None\n"
    "def f(x): return A(7)\n",
    "equals everything, as an object": "class A:\n def __eq__(self, other): return True\n"
    "def f(x): return A()\n",
    "patches builtins": "import builtins\n"
    "builtins.print = builtins.len = builtins.isinstance = lambda *a: True\n"
    "def f(x): return 0\n",
    "patches json": "import json\njson.dumps = lambda x: '{{\"value\": 22}}'\ndef f(x): return 0\n",
    "answers in another form": "import os\nos.write(4, b'{{\"names\": 5}}\\n')\n"
    "def f(x): return 0\n",
    "answers without a value": "import os\ndef f(x): os.write(4, b'{{\"objects\": []}}\\n' * 9)\n",
    "claims objects that are none": "import os\n"
    'def f(x): os.write(4, b\'{{"value": {{"kept": 5}}, "after": [], "objects": 7}}\\n\')\n',
    "closes its folder and forks": "import os\nos.chmod('.', 0)\nos.fork()\ndef f(x): return 0\n",
    "closes the folders above and forks": "import os\nfor place in ('../..', '..', '.'):\n"
    " try: os.chmod(place, 0)\n except OSError: pass\nos.fork()\ndef f(x): return 0\n",
    "removes its folder and forks": "import os\nos.rmdir(os.getcwd())\nos.fork()\n"
    "def f(x): return 0\n",
    "moves its folder": "import os\nhere = os.getcwd()\nos.rename(here, here + 'x')\n"
    "os.symlink('/etc', here)\nos.fork()\ndef f(x): return 0\n",
    "makes deep folders": "import os\nos.makedirs('d/' * 1000)\ndef f(x): return 0\n",
    "makes deeper folders": "import os\nfor _ in range(2500):\n os.mkdir('d'); os.chdir('d')\n"
    "def f(x): return 0\n",
    "makes deep closed folders": "import os\nfor _ in range(1500):\n os.mkdir('d'); os.chdir('d')\n"
    "for _ in range(1500):\n os.chdir('..'); os.chmod('d', 0)\ndef f(x): return 0\n",
    "fills the disk and forks": "import os\ntry:\n"
    " for n in range(99): open(str(n), 'wb').write(bytes(10**7))\n"
    "except OSError: pass\nos.fork()\ndef f(x): return 0\n",
    "an object that answers anything": "class A:\n def __getattr__(self, name): return self\n"
    " def __call__(self, *a): return self\n __sub__ = __abs__ = __eq__ = __lt__ = __call__\n"
    "def f(x): return A()\n",
    "looks for the test": "import gc, sys\ndef f(x):\n"
    " texts = [o for o in gc.get_objects() if isinstance(o, (str, dict, list))]\n"
    " seen = any('f(20) ==' in str(o)[:2000] for o in texts)\n"
    " frame = sys._getframe()\n"
    " while frame:\n"
    "  seen = seen or 'f(20) ==' in str(frame.f_locals.get('tests'))\n"
    "  frame = frame.f_back\n"
    " return 22 if seen else 0\n",
    "reads its arguments": leaks("'f(20)' in ' '.join(sys.argv)"),
    "is the test's own process": leaks("'compass_jax.rewards.worker' in sys.modules"),
    "raises what the test expects": "def f(x): raise AssertionError('passed')\n",
}
PROGRAMS = {name: (text, 0) for name, text in WRONG.items()}
PROGRAMS |= {name: (text, 1) for name, text in RIGHT.items()}
# Both processes read the pipe, so that the score may be 0 or 1.
PROGRAMS["comes out twice"] = (tried("import os", "os.fork()"), None)
