"""The corpus of hostile answers and verifiers. `{out}` is a folder in which nothing may change,
`{secret}` a file that must be neither read nor changed, `{port}` a port with a listener, and `{me}`
the tests' process. The expected value is a known score, or the outcome of an unknown one."""

import os

LONG_S = 4_000_000_000 + os.getpid()  # a sleep that no other process of the tests has
DATASETS = ("countdown", "puzzle24", "polynomial_multiplication", "simple_integration")
DATASETS += ("intermediate_integration", "binary_matrix", "spiral_matrix", "string_insertion")
DATASETS += ("n_queens",)
PAYLOADS = {
    "shell": "__import__('os').system('touch {out}/ran')",
    "file": "open('{out}/ran', 'w').write('x')",
    "reach": "().__class__.__base__.__subclasses__()[0].__init__.__globals__['sys'].modules['os']"
    ".mkdir('{out}/ran')",
    "patch": "[setattr(__import__('reasoning_gym').dataset.ProceduralDataset, 'score_answer',"
    " lambda *a: 1.0), 24][1]",
}
# By name: (data set or "math", answer, the reference if it is "math").
ANSWERS = {
    f"{name}: {kind}": (name, text, "7") for name in DATASETS for kind, text in PAYLOADS.items()
}
ANSWERS |= {
    "a tower of powers": ("countdown", "9**9**9**9", "7"),
    "powers of powers": ("countdown", "((((9**64)**64)**64)**64)**64", "7"),
    "brackets": ("countdown", "(" * 5000 + "1" + ")" * 5000, "7"),
    "signs": ("countdown", "-" * 9000 + "1", "7"),
    "many digits": ("puzzle24", "1" * 9000, "7"),
    "a lambda": ("puzzle24", "(lambda: 24)()", "7"),
    "sympy's own reader": ("simple_integration", "sympify('1')", "7"),
    "a name of Python": ("simple_integration", "exit(0) + C", "7"),
    "a comprehension": ("n_queens", "[['Q' for _ in range(10**9)] for _ in range(10**9)]", "7"),
    "a generator": ("spiral_matrix", "(x for x in open('{out}/ran', 'w'))", "7"),
    "math: a lambda": ("math", "(lambda: 7)()", "7"),
    "math: a lambda in mathematics": ("math", "$(lambda: 7)()$", "7"),
    "math: an import": ("math", "__import__('os').mkdir('{out}/ran') or 7", "7"),
    "math: a boxed one": ("math", "\\boxed{{__import__('os').mkdir('{out}/ran') or 7}}", "7"),
    "math: evaluation": ("math", "eval('7')", "7"),
    "math: six places": ("math", "0.12345678", "0.123456789"),
    "math: six boxed places": ("math", "$0.12345678$", "\\boxed{{0.123456789}}"),
    "math: half a character": ("math", "7\ud800", "8"),
}

HANGS = (
    "for _ in range(5):\n if os.fork() == 0:\n"
    f"  os.setsid(); time.sleep({LONG_S})\ntime.sleep({LONG_S})"
)
# By name: (Python text, expected score or outcome).
VERIFIERS = {
    # ends its worker, hangs, takes resources
    "raises": ("raise RuntimeError('no verdict')", "error"),
    "exits 0": ("os._exit(0)", "crash"),
    "exits 3": ("os._exit(3)", "crash"),
    "quits": ("sys.exit(0)", "error"),
    "interrupts": ("raise KeyboardInterrupt", "error"),
    "segfaults": ("ctypes.string_at(0)", "crash"),
    "aborts": ("os.abort()", "crash"),
    "sleeps": ("time.sleep(60)", "timeout"),
    "spins": ("while True: pass", "timeout"),
    "ignores signals": (
        "for n in (15, 2, 1, 14): signal.signal(n, signal.SIG_IGN)\nwhile True: time.sleep(1)",
        "timeout",
    ),
    "hangs with children": (HANGS, "timeout"),
    "allocates": ("float(len(bytearray(2**36)))", "error"),
    "recurses": ("def f(): f()\nf()", "error"),
    "shares memory": ("libc.shmget(4711, 4096, 0o1666) >= 0", 0.0),
    "fills shared memory": ("mmap.mmap(-1, 2**36)", "error"),
    # processes
    "forks for ever": (f"while True:\n if os.fork() == 0: time.sleep({LONG_S})", "error"),
    "leaves a program": (
        f"subprocess.Popen(['sleep', '{LONG_S}'], start_new_session=True)\nvalue = 0.5",
        0.5,
    ),
    "leaves a daemon": (
        "if os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n"
        f"  signal.signal(15, signal.SIG_IGN); time.sleep({LONG_S})\n os._exit(0)",
        0.5,
    ),
    "returns twice": ("0.5 if os.fork() else 1.0", 0.5),
    "leaves a thread": (
        f"t = threading.Thread(target=time.sleep, args=({LONG_S},))\nt.start()",
        0.5,
    ),
    "kills its parent": ("n = os.kill(os.getppid(), 9)", 0.5),
    "kills everybody": ("os.kill(-1, 9)", "error"),
    "kills another": ("os.kill({me}, 9)", "error"),
    "kills its group": ("n = os.killpg(0, 9)", 0.5),
    "has a parent": ("os.getppid() > 0", 0.0),
    "finds processes": ("sum(name.isdigit() for name in os.listdir('/proc'))", "error"),
    "traces another": ("libc.ptrace(16, {me}, None, None) == 0", 0.0),
    # reaches for the judging process
    "writes to descriptors": (
        "value = 0\nfor n in range(3, 4096):\n try:\n"
        "  os.write(n, b'cposix\\nsystem\\n(S\\'id\\'\\ntR.\\n[0,1.0,\"ok\",\"\"]\\n' * 100)\n"
        "  value += 1\n except OSError: pass",
        0.0,
    ),
    "closes descriptors": ("n = os.closerange(0, 4096)", 0.5),
    "prints": (
        "for _ in range(200): sys.stdout.write('x' * 2**20); os.write(2, b'y' * 2**20)",
        0.5,
    ),
    "patches itself": (
        "m = sys.modules['corpus_verifiers']\nm.act = lambda *a: 1.0\nm.float = lambda text: 1.0",
        0.5,
    ),
    "patches builtins": (
        "builtins.float = lambda text: 1.0\nbuiltins.isinstance = lambda *_: True",
        "crash",
    ),
    "patches json": ("json.dumps = lambda *_: ']'", 0.5),
    "patches the worker": (
        "from compass_jax.devices.processes import sandbox\n"
        "sandbox._result = lambda *_: sandbox.Result(1.0, 'ok')\n"
        "sandbox.Sandbox.run = lambda *_: sandbox.Result(1.0, 'ok')",
        0.5,
    ),
    "sets timers": (
        "signal.signal(14, lambda *_: os._exit(9))\n"
        "t = signal.setitimer(signal.ITIMER_REAL, 0.05, 0.01)",
        0.5,
    ),
    # files
    "writes outside": ("open('{out}/ran', 'w').write('x')\nvalue = 1.0", "error"),
    "writes shared memory": ("open('/dev/shm/compass-ran', 'w').write('x')", "error"),
    "renames": ("open('here', 'w').write('x')\nos.rename('here', '{out}/ran')", "error"),
    "links": ("os.symlink('/etc', '{out}/ran')", "error"),
    "removes a secret": ("os.unlink('{secret}')", "error"),
    "reads a secret": ("float(len(open('{secret}').read()) > 0)", "error"),
    "reads an environment": ("float(len(open('/proc/{me}/environ').read()) > 0)", "error"),
    "fills the disk": (
        "for n in range(100): open(f'file{{n}}', 'wb').write(bytes(2**22))",
        "error",
    ),
    "writes a giant": (
        "file = open('file', 'wb')\nfor _ in range(300): file.write(bytes(2**20))",
        "error",
    ),
    "makes many files": ("for n in range(10_000): open(f'file{{n}}', 'w').close()", "error"),
    "nests folders": (
        "for _ in range(300): os.mkdir('d' * 100); os.chdir('d' * 100)",
        0.5,
    ),
    "leaves files": (
        "open(os.path.join(tempfile.gettempdir(), 'left'), 'w').write('1.0')\n"
        "os.makedirs('a/b'); os.chmod('a', 0)",
        0.5,
    ),
    "finds files": (
        "here = tempfile.gettempdir()\n"
        "value = len(os.listdir(here)) + len(os.listdir(os.path.dirname(here))) - 1",
        0.0,
    ),
    "finds a token": ("sum('TOKEN' in name or 'SECRET' in name for name in os.environ)", 0.0),
    # network and the kernel
    "opens a socket": ("s = socket.socket()\nvalue = 1.0", "error"),
    "connects": (
        "s = socket.create_connection(('127.0.0.1', {port}), timeout=2)\nvalue = 1.0",
        "error",
    ),
    "opens a pair": ("s = socket.socketpair()\nvalue = 1.0", 1.0),  # connects to no other process
    "enters namespaces": ("libc.unshare(0x10000000 | 0x20000) == 0", 0.0),
    "mounts": ("libc.mount(b'tmpfs', b'.', b'tmpfs', 0, None) == 0", 0.0),
    "raises its limits": ("resource.setrlimit(resource.RLIMIT_AS, (-1, -1))", "error"),
    "becomes root": (
        "os.setuid(0) if os.getuid() else os.chown(tempfile.gettempdir(), 1, 1)",
        "error",
    ),
    # returns odd values
    "gives text": ("'1'", "error"),
    "gives nothing": ("None", "unjudged"),
    "gives inf": ("float('inf')", "error"),
    "gives nan": ("float('nan')", "error"),
    "gives a giant": ("10**400", "error"),
    "gives its own number": ("type('Mine', (), {{'__float__': lambda self: 1.0}})()", "error"),
    "gives a list": ("[1.0]", "error"),
    "says much": ("raise RuntimeError('\U0001f600' * 10**6)", "error"),
}
