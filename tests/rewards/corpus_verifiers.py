"""Verifiers that misbehave, for the workers of test_hostile: the response names one, with an
argument. The tests' process never imports it.
"""

import builtins
import ctypes
import json
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

LIBC = ctypes.CDLL(None, use_errno=True)


def act(row: dict, response: str):
    """The response's number, or what the function that it names does with the rest of the
    response.
    """
    word, _, rest = response.partition(" ")
    return globals()[word](rest) if word in globals() else float(word)


def raises(_):
    raise RuntimeError("no verdict")


def exits(code):
    os._exit(int(code))


def quits(_):
    sys.exit(0)


def interrupts(_):
    raise KeyboardInterrupt


def segfaults(_):
    ctypes.string_at(0)


def aborts(_):
    os.abort()


def sleeps(_):
    time.sleep(60)


def spins(_):
    while True:
        pass


def ignores_sigterm(_):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(1)


def hangs_with_children(_):
    for _ in range(5):
        if os.fork() == 0:
            os.setsid()
            time.sleep(4711)
    time.sleep(4711)


def allocates(_):
    return float(len(bytearray(2**36)))


def recurses(_):
    return recurses(_)


def forks_for_ever(_):
    while True:
        if os.fork() == 0:
            time.sleep(4711)


def leaves_a_program(_):
    subprocess.Popen(["sleep", "4711"], start_new_session=True)
    return 0.5


def leaves_a_daemon(_):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(4711)
        os._exit(0)
    return 0.5


def returns_twice(_):
    return 0.5 if os.fork() else 1.0


def leaves_a_thread(_):
    threading.Thread(target=time.sleep, args=(4711,)).start()
    return 0.5


def writes_to_descriptors(_):
    """Number of descriptors beyond the first three that take anything."""
    taken = 0
    for number in range(3, 4096):
        try:
            os.write(number, b'cposix\nsystem\n(S\'id\'\ntR.\n[0,1.0,"ok",""]\n' * 100)
            taken += 1
        except OSError:
            pass
    return taken


def closes_descriptors(_):
    os.closerange(0, 4096)
    return 0.5


def prints(_):
    for _ in range(200):
        sys.stdout.write("x" * 2**20)
        os.write(2, b"y" * 2**20)
    return 0.5


def kills_its_parent(_):
    os.kill(os.getppid(), signal.SIGKILL)
    return 0.5


def kills_everybody(_):
    os.kill(-1, signal.SIGKILL)


def kills(process):
    os.kill(int(process), signal.SIGKILL)


def kills_its_group(_):
    os.killpg(0, signal.SIGKILL)
    return 0.5


def patches_itself(_):
    sys.modules[__name__].act = lambda response, answer: 1.0
    globals()["float"] = lambda text: 1.0
    return 0.5


def patches_builtins(_):
    builtins.float = lambda text: 1.0
    builtins.isinstance = lambda *_: True
    return 0.5


def patches_json(_):
    json.dumps = lambda *_: "]"
    return 0.5


def patches_the_worker(_):
    import compass_jax.rewards.sandbox as sandbox

    sandbox._read = lambda page: sandbox.Outcome(1.0, "ok")
    sandbox.Zone.run = lambda *_: sandbox.Outcome(1.0, "ok")
    return 0.5


def sets_timers(_):
    signal.signal(signal.SIGALRM, lambda *_: os._exit(9))
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.01)
    return 0.5


def writes(path):
    with open(path, "w") as file:
        file.write("I was here")
    return 1.0


def renames(path):
    with open("here", "w") as file:
        file.write("I was here")
    os.rename("here", path)
    return 1.0


def links(path):
    os.symlink("/etc", path)
    return 1.0


def removes(path):
    os.unlink(path)
    return 1.0


def reads(path):
    with open(path) as file:
        return float(len(file.read()) > 0)


def fills_the_disk(_):
    for number in range(100):
        with open(f"file{number}", "wb") as file:
            file.write(bytes(2**22))


def writes_a_giant(_):
    with open("file", "wb") as file:
        for _ in range(300):
            file.write(bytes(2**20))


def makes_many_files(_):
    for number in range(10_000):
        open(f"file{number}", "w").close()


def nests_folders(_):
    for _ in range(300):
        os.mkdir("d" * 100)
        os.chdir("d" * 100)
    return 0.5


def leaves_files(_):
    with open(os.path.join(tempfile.gettempdir(), "left"), "w") as file:
        file.write("1.0")
    os.makedirs("a/b")
    os.chmod("a", 0)
    return 0.5


def finds_files(_):
    """Number of files in the temporary folder and beside it."""
    here = tempfile.gettempdir()
    return len(os.listdir(here)) + len(os.listdir(os.path.dirname(here))) - 1


def finds_a_token(_):
    return sum("TOKEN" in name or "SECRET" in name for name in os.environ)


def has_a_parent(_):
    return os.getppid() > 0


def finds_processes(_):
    return sum(name.isdigit() for name in os.listdir("/proc"))


def opens_a_socket(_):
    socket.socket()
    return 1.0


def connects(port):
    socket.create_connection(("127.0.0.1", int(port)), timeout=2)
    return 1.0


def opens_a_pair(_):
    socket.socketpair()
    return 1.0


def enters_namespaces(_):
    return LIBC.unshare(0x10000000 | 0x20000) == 0


def mounts(_):
    return LIBC.mount(b"tmpfs", b".", b"tmpfs", 0, None) == 0


def traces(process):
    return LIBC.ptrace(16, int(process), None, None) == 0


def raises_its_limits(_):
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def becomes_root(_):
    os.setuid(0) if os.getuid() else os.chown(tempfile.gettempdir(), 1, 1)
    return 1.0


def shares_memory(_):
    return LIBC.shmget(4711, 4096, 0o1666) >= 0


def gives_text(_):
    return "1"


def gives_nothing(_):
    return None


def gives(text):
    return float(text)


def gives_a_giant(_):
    return 10**400


def gives_its_own_number(_):
    class Mine:
        def __float__(self):
            return 1.0

    return Mine()


def gives_a_list(_):
    return [1.0]


def says_much(_):
    raise RuntimeError("\U0001f600" * 10**6)


def fills_shared_memory(_):
    mmap.mmap(-1, 2**36)
