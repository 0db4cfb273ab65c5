"""Hand-written seccomp filters of system calls, for x86_64 and aarch64.

Docs: Documentation/userspace-api/seccomp_filter.rst of Linux. Each program is a list of eight-byte
instructions (code, jump if true, jump if false, value).
"""

from __future__ import annotations

import platform
import struct
import sys


def _numbers(table: str) -> dict[str, tuple[int, int | None]]:
    """Returns the system call numbers from a table "name x86_64 aarch64; ..."."""
    rows = [row.split() for row in table.split(";")]
    return {name: (int(x86), None if arm == "-" else int(arm)) for name, x86, arm in rows}


# The number of each call on x86_64 and aarch64, or "-" if it does not exist. Landlock's calls are
# denied, so that the rules for programs cannot change.
_DENIED = _numbers(
    """
    socket 41 198; connect 42 203; bind 49 200; listen 50 201;
    accept 43 202; accept4 288 242; ptrace 101 117; process_vm_readv 310 270;
    process_vm_writev 311 271; kcmp 312 272; process_madvise 440 440; pidfd_getfd 438 438;
    mount 165 40; umount2 166 39; pivot_root 155 41; chroot 161 51; move_mount 429 429;
    open_tree 428 428; fsopen 430 430; fsconfig 431 431; fsmount 432 432; fspick 433 433;
    mount_setattr 442 442; bpf 321 280; perf_event_open 298 241; add_key 248 217;
    request_key 249 218; keyctl 250 219; io_uring_setup 425 425; io_uring_enter 426 426;
    io_uring_register 427 427; userfaultfd 323 282; open_by_handle_at 304 265;
    name_to_handle_at 303 264; init_module 175 105; finit_module 313 273;
    delete_module 176 106; kexec_load 246 104; kexec_file_load 320 294; reboot 169 142;
    swapon 167 224; swapoff 168 225; syslog 103 116; acct 163 89; quotactl 179 60;
    personality 135 92; iopl 172 -; ioperm 173 -; settimeofday 164 170;
    clock_settime 227 112; adjtimex 159 171; clock_adjtime 305 266; sethostname 170 161;
    setdomainname 171 162; shmget 29 194; shmat 30 196; semget 64 190; msgget 68 186;
    mq_open 240 180; memfd_create 319 279; memfd_secret 447 447; fanotify_init 300 262;
    vhangup 153 58; setpriority 141 140; ioprio_set 251 30; sched_setscheduler 144 119;
    sched_setparam 142 118; sched_setattr 314 274; landlock_create_ruleset 444 444;
    landlock_add_rule 445 445; migrate_pages 256 238; move_pages 279 239
    """
)
# calls with a process id as first argument; 0 is the caller
_OWN = {"prlimit64": (302, 261), "sched_setaffinity": (203, 122)}
_NAMESPACES = {"unshare": (272, 97), "setns": (308, 268), "clone": (56, 220), "clone3": (435, 435)}
_SIGNALS = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
}
_PIDFD_SIGNAL = (424, 424)  # takes a descriptor instead of a process id
# calls that set the receiver of a descriptor's signals, by the value of their second argument
_OWNER = {
    "fcntl": ((72, 25), {"F_SETOWN": 8, "F_SETSIG": 10, "F_SETOWN_EX": 15}),
    "ioctl": ((16, 29), {"FIOSETOWN": 0x8901, "SIOCSPGRP": 0x8902}),
}
_STARTS = {"fork": (57, None), "vfork": (58, None)}
_CLONE_THREAD = 0x00010000
_CLONE_NEWPID = 0x20000000
_CLONE_NAMESPACES = 0x7E020000  # every CLONE_NEW flag of clone
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_LOAD = 0x20
_EQUAL = 0x15
_AT_LEAST = 0x35
_ANY_BIT = 0x45
_RETURN = 0x06
_ALLOW = 0x7FFF0000
_EPERM = 0x00050001
_ENOSYS = 0x00050026
_KILL = 0x80000000
_ARGUMENT = {0: 16, 1: 24}  # offsets of the low halves


def _machine() -> tuple[int, int]:
    """Returns the column of this machine's call numbers, and its architecture."""
    name = platform.machine()
    if name not in _MACHINES or sys.byteorder != "little":
        raise OSError(38, f"seccomp: the numbers of {name}'s system calls are not known here")
    return _MACHINES[name]


def _instruction(code: int, value: int, true: int = 0, false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, true, false, value)


def _filter(*parts: bytes) -> bytes:
    """Returns a filter that allows what no part rejects. Calls of another architecture are killed,
    x32 calls rejected, and the number of the call is loaded.
    """
    # Offsets in struct seccomp_data: 4 is the architecture, 0 the number of the call.
    prologue = (
        _instruction(_LOAD, 4),
        _instruction(_EQUAL, _machine()[1], 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, 0),
        _instruction(_AT_LEAST, 0x40000000, 0, 1),
        _instruction(_RETURN, _EPERM),
    )
    return b"".join([*prologue, *parts, _instruction(_RETURN, _ALLOW)])


def _reject(call: int, result: int = _EPERM) -> bytes:
    """Returns instructions that end the filter with `result` if the loaded number is `call`."""
    return _instruction(_EQUAL, call, 0, 1) + _instruction(_RETURN, result)


def _decide(call: int, argument: int, test: bytes, yes: int, no: int) -> bytes:
    """Returns instructions that end the filter for a call by a test of an argument."""
    load = _instruction(_LOAD, _ARGUMENT[argument])
    results = _instruction(_RETURN, yes) + _instruction(_RETURN, no)
    return _instruction(_EQUAL, call, 0, 4) + load + test + results


def _allow_only(call: int, argument: int, value: int) -> bytes:
    return _decide(call, argument, _instruction(_EQUAL, value, 0, 1), _ALLOW, _EPERM)


def denied_program() -> bytes:
    """Returns the filter that makes sockets, other processes' memory and limits, mounts, keys,
    io_uring and other calls fail with EPERM.

    The namespace calls of `guards.new_process_namespace` and `guards.rejoin` are allowed. They need
    a capability that model code does not have.
    """
    column, _ = _machine()
    number = {name: numbers[column] for name, numbers in _NAMESPACES.items()}
    return _filter(
        *(_reject(one) for x in _DENIED.values() if (one := x[column]) is not None),
        *(_allow_only(numbers[column], argument=0, value=0) for numbers in _OWN.values()),
        # A filter cannot read clone3's flags, which are in memory. For ENOSYS the C library calls
        # clone instead.
        _reject(number["clone3"], _ENOSYS),
        _allow_only(number["unshare"], argument=0, value=_CLONE_NEWPID),
        _allow_only(number["setns"], argument=1, value=_CLONE_NEWPID),
        _decide(
            number["clone"], 0, _instruction(_ANY_BIT, _CLONE_NAMESPACES, 0, 1), _EPERM, _ALLOW
        ),
    )


def own_signals_program(process: int) -> bytes:
    """Returns the filter that lets signals, also those of descriptors, reach only `process`."""
    column, _ = _machine()
    owners = []
    for numbers, values in _OWNER.values():
        owners += [
            # Another call skips the load, two instructions for each value, and the return. The
            # return is needed because the argument has replaced the number of the call.
            _instruction(_EQUAL, numbers[column], 0, 2 * len(values) + 2),
            _instruction(_LOAD, _ARGUMENT[1]),
            *map(_reject, values.values()),
            _instruction(_RETURN, _ALLOW),
        ]
    signals = (_allow_only(x[column], argument=0, value=process) for x in _SIGNALS.values())
    return _filter(*signals, _reject(_PIDFD_SIGNAL[column]), *owners)


def one_process_program(refuses: bool) -> bytes:
    """Returns the filter that allows new threads but no new processes. With `refuses`, starting a
    process fails with EPERM; otherwise SIGSYS kills the program.
    """
    column, _ = _machine()
    result = _EPERM if refuses else _KILL
    return _filter(
        *(_reject(one, result) for x in _STARTS.values() if (one := x[column]) is not None),
        _reject(_NAMESPACES["clone3"][column], _ENOSYS),
        _decide(
            _NAMESPACES["clone"][column],
            0,
            _instruction(_ANY_BIT, _CLONE_THREAD, 0, 1),
            _ALLOW,
            result,
        ),
    )
