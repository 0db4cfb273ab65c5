"""Kernel restrictions of a process: namespaces, Landlock, seccomp, resource limits.

A worker enters the guards in two stages: `separate` before its imports (user and process namespace)
and `confine` after them (all other guards). To detect the guards of a machine, both are tried in
another process: `python -m compass_jax.devices.processes.guards TEMPORARY_FOLDER`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import mmap
import os
import resource
import signal
import struct
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from compass_jax.devices.processes import seccomp
from compass_jax.devices.processes.channel import run_forked

USER = "user namespace"
PROCESSES = "process namespace"
MOUNTS = "mount namespace"
NETWORK = "network namespace"
LANDLOCK = "Landlock"
SECCOMP = "seccomp"
GUARDS = (USER, PROCESSES, MOUNTS, NETWORK, LANDLOCK, SECCOMP)

NOBODY = 65534  # user id that replaces root
TMPFS = "mode=700,size=64m,nr_inodes=4096"
# limit of address space, so that 9**9**9**9 does not take the machine's memory
MEMORY_BYTES = 8 * 2**30
GROWTH_BYTES = 2**30  # address space of tests, in addition to that of the worker
FILE_BYTES = 64 * 2**20
PROCESS_LIMIT = 64
PROGRAM_PROCESSES = 5  # limit for a program that starts processes; they share its memory
FILE_LIMIT = 256
TRIAL_S = 30.0

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_KEEPCAPS = 8
_PR_SET_SECCOMP = 22
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_CAP_DAC_READ_SEARCH = 2
_CAP_SYS_ADMIN = 21


class ProgramFiles(NamedTuple):
    """The files that programs may read."""

    readable: frozenset[str] = frozenset()  # files, and folders with their content
    listed: frozenset[str] = frozenset()  # folders whose entries may only be listed


NO_PROGRAM = ProgramFiles()

_libc = ctypes.CDLL(None, use_errno=True)
_confined: set[str] = set()  # guards of this process and its forks
_program_rules = -1  # descriptor of the Landlock rules for programs
_own_bytes = 0  # address space when `confine` began
_processes = 0  # number of this user's processes in the namespace when `confine` began
_end = math.inf  # deadline of this process, on the monotonic clock


def _call(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _syscall(number: int, what: str, *arguments: object) -> int:
    long = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _call(_libc.syscall(ctypes.c_long(number), *long), what)


def _prctl(option: int, *values: object) -> None:
    arguments = [ctypes.c_ulong(v) if isinstance(v, int) else v for v in values]
    filled = [*arguments, *[ctypes.c_ulong(0)] * (4 - len(arguments))]
    _call(_libc.prctl(ctypes.c_int(option), *filled), f"prctl {option}")


def _unshare(flags: int) -> None:
    _call(_libc.unshare(ctypes.c_int(flags)), "unshare")


def separate(guards: Iterable[str]) -> dict[str, str]:
    """Enters a user and a process namespace. Returns the guards that failed, with the reasons.

    The process must have one thread. Its next child becomes the first process of the new process
    namespace. If it runs as root, the user namespace has a second, unprivileged user for `confine`.
    """
    steps = ((USER, _enter_user_namespace), (PROCESSES, new_process_namespace))
    return _missing((name, step) for name, step in steps if name in guards)


def _missing(steps: Iterable[tuple[str, Callable[[], None]]]) -> dict[str, str]:
    """Runs the steps. Returns the guards that failed, with the reasons."""
    missing = {}
    for name, step in steps:
        try:
            step()
        except OSError as error:
            missing[name] = str(error)
    return missing


def _enter_user_namespace() -> None:
    """Enters a user namespace. A forked process outside of it writes its id maps."""
    target = os.getpid()
    begin, started = os.pipe()
    # The helper stays outside: a map of two users needs rights in the outer namespace.
    helper = os.fork()
    if helper == 0:
        # With this copy open, the read below would not end after a failed unshare.
        os.close(started)
        code = 1
        try:
            if os.read(begin, 1):
                _write_maps(target)
                code = 0
        finally:
            os._exit(code)
    os.close(begin)
    try:
        _unshare(CLONE_NEWUSER)
        os.write(started, b"!")
    finally:
        os.close(started)
        failed = os.waitpid(helper, 0)[1]
    if failed:
        raise OSError(1, "the maps of its users cannot be written")


def _write_maps(target: int) -> None:
    folder = Path(f"/proc/{target}")
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        with contextlib.suppress(OSError):  # a container may lack this user
            for name in ("uid_map", "gid_map"):
                (folder / name).write_text(f"0 0 1\n{NOBODY} {NOBODY} 1\n")
            return
    # Without rights outside, the kernel accepts a map of groups only after this.
    (folder / "setgroups").write_text("deny")
    (folder / "uid_map").write_text(f"{user} {user} 1\n")
    (folder / "gid_map").write_text(f"{group} {group} 1\n")


def confine(
    guards: Iterable[str],
    folder: str,
    readable: Iterable[str],
    of_programs: ProgramFiles = NO_PROGRAM,
) -> dict[str, str]:
    """Enters the remaining guards irreversibly. Returns the guards that failed, with the reasons.

    Args:
        guards: names out of GUARDS.
        folder: the only writable folder; a tmpfs in a mount namespace.
        readable: readable files and folders; the system's libraries are added.
        of_programs: the only files that programs may read (`confine_program`).
    """
    global _own_bytes, _processes
    guards = set(guards)
    _own_bytes = _address_space()
    # without root, the worker and its guardian have the same user
    _processes = len(os.listdir("/proc/self/task")) + (os.geteuid() != 0)
    # Landlock and seccomp require this of a process without CAP_SYS_ADMIN.
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    # seccomp comes last: its filter denies system calls of the other steps.
    steps = (
        (MOUNTS, lambda: _restrict_mounts(folder)),
        (NETWORK, lambda: _unshare(CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS)),
        (USER, lambda: _become_nobody(folder, readable)),
        (LANDLOCK, lambda: _landlock(folder, readable, of_programs, PROCESSES not in guards)),
        (SECCOMP, lambda: _install(seccomp.denied_program())),
    )
    missing = _missing((name, step) for name, step in steps if name in guards)
    # Other processes of the same user can then not trace this one or read its memory.
    _prctl(_PR_SET_DUMPABLE, 0)
    _confined.update(guards - set(missing))
    return missing


def confine_program(processes: int) -> bool:
    """Confines this process for the program that it executes next. Returns False if the number of
    its processes cannot be limited.

    The program may read this Python with its configured packages, and the system's libraries. If
    root became another user, the program keeps the right to read root's folders, since one of them
    may hold its Python. With processes = 1, starting another process kills it.
    """
    if _program_rules >= 0:
        _syscall(446, "landlock_restrict_self", _program_rules, 0)
    if USER in _confined and os.getuid() == NOBODY:
        _keep(_CAP_DAC_READ_SEARCH, inherited=True)
        # For a user other than root, only ambient capabilities survive exec.
        _prctl(_PR_CAP_AMBIENT, 2, _CAP_DAC_READ_SEARCH, 0, 0)
    counted = USER in _confined
    if counted and processes > 1:
        parents = 2  # the worker's child and the process of the tests
        most = _processes + parents + processes
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
        return True
    try:
        _install(seccomp.one_process_program(refuses=not counted))
    except OSError:  # without seccomp, programs run only if all guards are off
        return False
    return True


def close_descriptors() -> None:
    """Closes all descriptors except the first three and that of the Landlock rules for programs."""
    global _program_rules
    first = 3
    if _program_rules >= first:
        if _program_rules > first:
            os.dup2(_program_rules, first, inheritable=False)
        _program_rules = first
        first += 1
    os.closerange(first, 2**16)


def _restrict_mounts(folder: str) -> None:
    """Makes all files read-only except for `folder`, which becomes a new tmpfs, and hides /proc."""
    _unshare(CLONE_NEWNS)
    # MS_REC | MS_PRIVATE: mounts made here do not appear outside of the namespace.
    private = 0x4000 | 1 << 18
    _mount("none", "/", "", private, "")
    attributes = struct.pack("=4Q", 1, 0, 0, 0)  # read-only, recursively
    at_fdcwd = ctypes.c_int(-100)
    recursive = 0x8000
    path = ctypes.c_char_p(b"/")
    _syscall(442, "mount_setattr", at_fdcwd, path, recursive, ctypes.c_char_p(attributes), 32)
    nosuid_nodev = 2 | 4
    _mount("tmpfs", folder, "tmpfs", nosuid_nodev, TMPFS)
    _mount("tmpfs", "/proc", "tmpfs", nosuid_nodev | 1, "size=4k,mode=555")


def _mount(source: str, target: str, kind: str, flags: int, data: str) -> None:
    text = [ctypes.c_char_p(part.encode()) for part in (source, target, kind)]
    options = ctypes.c_char_p(data.encode())
    _call(_libc.mount(*text, ctypes.c_ulong(flags), options), f"mount {target}")


def _become_nobody(folder: str, readable: Iterable[str]) -> None:
    """Changes root to an unprivileged user that may read the same files. Other users are unchanged.

    Model code then owns none of root's files, and its number of processes can be limited.
    """
    if os.geteuid() != 0:
        _keep(_CAP_SYS_ADMIN)
        return
    os.chown(folder, NOBODY, NOBODY)
    # Without this, the change of the user would drop all capabilities.
    _prctl(_PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    _keep(_CAP_SYS_ADMIN, _CAP_DAC_READ_SEARCH)
    # A folder that the new user cannot list fails here, as a missing guard, not at a later import.
    for path in readable:
        if os.path.isdir(path):
            os.listdir(path)


def _keep(*capabilities: int, inherited: bool = False) -> None:
    """Drops all capabilities except these, which become effective."""
    low = sum(1 << c for c in capabilities)
    # Version 3 of capset(2): effective, permitted and inheritable sets, low words then high words.
    header = struct.pack("=Ii", 0x20080522, 0)
    data = struct.pack("=6I", low, low, low if inherited else 0, 0, 0, 0)
    _call(_libc.capset(ctypes.c_char_p(header), ctypes.c_char_p(data)), "capset")


def drop_capabilities() -> None:
    """Drops all capabilities. A process that was root keeps the right to read root's folders."""
    _keep(*((_CAP_DAC_READ_SEARCH,) if os.getuid() == NOBODY else ()))


def set_limits(limits: Mapping[int, int]) -> None:
    """Sets resource limits of this process, none above the present hard limit."""
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def limit(seconds: float, limits_processes: bool) -> None:
    """Limits memory, CPU time, files and, in a user namespace, the number of processes."""
    global _end
    _end = time.monotonic() + seconds
    set_limits(
        {
            resource.RLIMIT_AS: MEMORY_BYTES,
            resource.RLIMIT_CPU: int(seconds) + 2,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_FSIZE: FILE_BYTES,
            resource.RLIMIT_NOFILE: FILE_LIMIT,
            **({resource.RLIMIT_NPROC: PROCESS_LIMIT} if limits_processes else {}),
        }
    )


def seconds_left() -> float:
    """Returns the remaining seconds until the limit set by `limit`, less a reserve."""
    left = _end - time.monotonic()
    return max(0.0, left - min(0.5, left / 8))


def limit_growth() -> None:
    """Limits the address space to the present size plus GROWTH_BYTES."""
    set_limits({resource.RLIMIT_AS: (_own_bytes or _address_space()) + GROWTH_BYTES})


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def new_process_namespace() -> None:
    """Makes the next child the first process of a new process namespace."""
    _unshare(CLONE_NEWPID)


def rejoin(namespace: int) -> None:
    """Makes later children start in `namespace` again (a descriptor of /proc/self/ns/pid)."""
    _call(_libc.setns(ctypes.c_int(namespace), ctypes.c_int(CLONE_NEWPID)), "setns")


def die_with_parent() -> None:
    """Makes the kernel kill this process when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Makes this process the parent of orphaned descendants."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants(deadline: float) -> bool:
    """Kills this process's descendants until the deadline. Returns whether none is left."""
    while time.monotonic() < deadline:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return True
        for child in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.001)
    return False


def _children() -> list[int]:
    children = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            # The process's name, in brackets, may contain blanks and brackets.
            status = Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()
            if int(status[1]) == os.getpid():
                children.append(int(name))
    return children


def _landlock(
    folder: str, readable: Iterable[str], of_programs: ProgramFiles, processes: bool
) -> None:
    """Allows only reading below `readable` and the system's libraries, and writing below `folder`.

    processes: whether /proc is readable, which is needed to find descendants. Landlock still
    protects memory and environment of processes outside the domain.
    """
    global _program_rules
    if of_programs.readable:  # created once, because there are hundreds of rules
        _program_rules = _rules(folder, *of_programs)
    rules = _rules(folder, {*readable, *_system(), *(("/proc",) if processes else ())})
    _syscall(446, "landlock_restrict_self", rules, 0)
    os.close(rules)


def _rules(folder: str, readable: Iterable[str], listed: Iterable[str] = ()) -> int:
    """Returns a descriptor of a Landlock ruleset."""
    abi = _syscall(444, "landlock_create_ruleset", 0, 0, 1)
    execute, list_names = 1, 1 << 3
    read = execute | 1 << 2 | list_names
    every = (1 << 13) - 1
    every |= 1 << 13 if abi >= 2 else 0  # links and moves between folders
    every |= 1 << 14 if abi >= 3 else 0  # truncate
    every |= 1 << 15 if abi >= 5 else 0  # ioctl of devices
    attributes = [every]
    attributes += [3] if abi >= 4 else []  # bind and connect of TCP
    attributes += [3] if abi >= 6 else []  # signals and abstract sockets
    packed = struct.pack(f"={len(attributes)}Q", *attributes)
    rules = _syscall(444, "landlock_create_ruleset", ctypes.c_char_p(packed), len(packed), 0)
    for paths, access in ((readable, read), (listed, list_names)):
        for path in paths:
            _allow(rules, path, access)
    devices = {"/dev/null": read | 2, "/dev/zero": read, "/dev/urandom": read, "/dev/random": read}
    for path, access in devices.items():
        _allow(rules, path, access)
    special = 1 << 6 | 1 << 11  # no device files
    _allow(rules, folder, every & ~special)
    return rules


def _allow(rules: int, path: str, access: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    if not os.path.isdir(path):
        # The kernel refuses a rule that gives a file the rights of a folder.
        access &= 1 | 2 | 4 | 1 << 14 | 1 << 15
    rule = struct.pack("=Qi", access, place)
    _syscall(445, "landlock_add_rule", rules, 1, ctypes.c_char_p(rule), 0)
    os.close(place)


def _system() -> set[str]:
    fixed = ("/usr", "/bin", "/lib", "/lib64", "/opt", "/etc/ld.so.cache", "/etc/localtime")
    python = {sys.prefix, sys.base_prefix, sys.exec_prefix, *sysconfig.get_paths().values()}
    return {*fixed, *python, os.path.realpath(sys.executable)}


def signal_nobody_else() -> None:
    """Forbids this process to signal other processes; needed if processes share a namespace."""
    _install(seccomp.own_signals_program(os.getpid()))


def _install(program: bytes) -> None:
    code = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: the number of instructions, and their address.
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    _prctl(_PR_SET_SECCOMP, 2, ctypes.c_char_p(header))


def _attempt(folder: str) -> dict[str, str]:
    """Returns the guards that this machine lacks, after entering all of them like a worker."""
    missing = separate(GUARDS)

    def enter(page: mmap.mmap) -> None:
        left = [name for name in GUARDS if name not in missing]
        failed = confine(left, folder, [entry for entry in sys.path if entry])
        page.write(json.dumps(missing | failed).encode())

    return json.loads(run_forked(enter, TRIAL_S).output)


if __name__ == "__main__":
    print(json.dumps(_attempt(sys.argv[1])))
