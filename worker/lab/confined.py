"""Run as a program of its own, by `sandbox.py`: put up the walls, then become the program that shall stay inside.

    python confined.py LIMITS_JSON FOLDER PROGRAM…
    python confined.py --missing      prints what this kernel lacks

It knows the standard library alone: nothing of ours is in reach of what runs after it.
"""

import ctypes
import json
import os
import platform
import resource
import signal
import sys
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
if sys.platform.startswith("linux"):
    _LIBC.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
_DEATH_SIGNAL, _NO_NEW_PRIVS, _SECCOMP, _FILTER = 1, 38, 22, 2
_CREATE, _ADD, _RESTRICT = 444, 445, 446  # Landlock's, the same on every architecture

# Landlock's rights, by bit (linux/landlock.h).
_EXECUTE, _WRITE, _READ, _LIST, _TRUNCATE, _IOCTL = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE | _READ | _TRUNCATE | _IOCTL
_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}

# Calls that no snippet needs: network, other processes, rights and owners of files, the system. x86_64, aarch64.
_DENIED: dict[str, tuple[int, ...]] = {
    "x86_64": (
        *(41, 42, 43, 49, 50, 288),  # socket, connect, accept, bind, listen, accept4
        *(57, 58, 109, 112),  # fork, vfork, setpgid, setsid
        *(62, 129, 200, 234, 297),  # kill, rt_sigqueueinfo, tkill, tgkill, rt_tgsigqueueinfo
        *(101, 310, 311, 312),  # ptrace, process_vm_readv and writev, kcmp
        *(
            76,
            90,
            91,
            92,
            93,
            94,
            268,
            260,
        ),  # truncate, chmod, fchmod, chown, fchown, lchown, fchmodat, fchownat
        *(188, 189, 190, 197, 198, 199),  # setxattr, removexattr and theirs
        *(29, 64, 68, 240),  # shmget, semget, msgget, mq_open
        *(
            133,
            259,
            155,
            161,
            165,
            166,
            272,
            308,
        ),  # mknod, pivot_root, chroot, mount, umount2, unshare, setns
        *(103, 163, 164, 167, 168, 169, 170, 171, 172, 173, 175, 176, 179, 227, 246, 313),  # the system's own
        *(141, 142, 144, 203, 251),  # priorities, of any process
        *(248, 249, 250, 298, 303, 304, 321, 323),  # keys, perf, handles, bpf, userfaultfd
    ),
    "aarch64": (
        *(198, 200, 201, 202, 203, 242),
        *(154, 157),
        *(129, 130, 131, 138, 240),
        *(117, 270, 271, 272),
        *(45, 52, 53, 54, 55),
        *(5, 6, 7, 14, 15, 16),
        *(180, 186, 190, 194),
        *(33, 39, 40, 41, 51, 97, 268),
        *(60, 89, 104, 105, 106, 112, 116, 142, 161, 162, 170, 224, 225, 273),
        *(30, 118, 119, 122, 140),
        *(217, 218, 219, 241, 264, 265, 280, 282),
    ),
}
_DENIED_EVERYWHERE = (424, 425, 426, 427, 428, 429, 430, 431, 432, 433, 434, 438, 440, 442, 452)
# pidfd_send_signal, io_uring, open_tree to fspick, pidfd_open, pidfd_getfd, process_madvise, mount_setattr, fchmodat2
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_PRCTL = {"x86_64": 157, "aarch64": 167}
_PRLIMIT = {"x86_64": 302, "aarch64": 261}
_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_THREAD = 0x00010000
_X32 = 0x40000000
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
_LOAD, _EQUAL, _ABOVE, _HAS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06

Instruction = tuple[int, int, int, int]
"""Operation, jump if true, jump if false, operand."""


class _Step(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_ushort),
        ("jt", ctypes.c_ubyte),
        ("jf", ctypes.c_ubyte),
        ("k", ctypes.c_uint),
    ]


class _Program(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.POINTER(_Step))]


class _Ruleset(ctypes.Structure):
    _fields_ = [("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def landlock_version() -> int:
    """0 = this kernel has none."""
    found: int = _LIBC.syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    return max(found, 0)


def missing() -> str:
    """What this kernel lacks; "" = nothing."""
    if platform.machine() not in _DENIED:
        return f"no list of system calls for {platform.machine()}"
    if not landlock_version():
        return "the kernel has no Landlock"
    return (
        "" if _LIBC.prctl(_SECCOMP, _FILTER, None, 0, 0) == -1 and ctypes.get_errno() == 14 else "no seccomp"
    )


def limit(limits: dict[str, Any]) -> None:
    """Of this process and what it becomes."""
    wanted = {
        "RLIMIT_CPU": limits["cpu_s"],
        "RLIMIT_AS": limits["memory"],
        "RLIMIT_DATA": limits["memory"],
        "RLIMIT_FSIZE": limits["file"],
        "RLIMIT_NOFILE": 64,
        "RLIMIT_CORE": 0,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
    }
    for name, value in wanted.items():
        kind = getattr(resource, name, None)
        if kind is None:
            continue
        _, most = resource.getrlimit(kind)
        spare = 1 if name == "RLIMIT_CPU" else 0  # first SIGXCPU, a second later the end
        value = value if most == resource.RLIM_INFINITY else min(value, most - spare)
        try:
            resource.setrlimit(kind, (value, value + spare))
        except (ValueError, OSError):
            if name not in ("RLIMIT_AS", "RLIMIT_DATA", "RLIMIT_MEMLOCK"):  # macOS does not know all of them
                raise


def die_with_parent(parent: int, alarm_s: int) -> None:
    """Whoever started this may be killed: nobody would be left to end what runs here."""
    signal.alarm(alarm_s)
    if sys.platform.startswith("linux"):
        _checked(_LIBC.prctl(_DEATH_SIGNAL, signal.SIGKILL, None, 0, 0))
    if os.getppid() != parent:  # it was killed before this
        raise SystemExit(1)


def wall_off_files(folder: str, readable: list[str]) -> None:
    """Landlock: everything below `folder`, the readable paths to read and to run, nothing else. Raises OSError."""
    version = landlock_version()
    rights = _RIGHTS[max(known for known in _RIGHTS if known <= max(version, 1))]
    rules = _Ruleset(rights, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    handle = _checked(_LIBC.syscall(_CREATE, ctypes.byref(rules), ctypes.c_size_t(size), ctypes.c_uint(0)))
    for path, allowed in [(folder, rights), *((path, _EXECUTE | _READ | _LIST) for path in readable)]:
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue  # not every system has every one of them
        if not os.path.isdir(path):
            allowed &= _OF_FILES
        beneath = _Beneath(allowed & rights, place)
        _checked(_LIBC.syscall(_ADD, handle, ctypes.c_int(1), ctypes.byref(beneath), ctypes.c_uint(0)))
        os.close(place)
    _checked(_LIBC.syscall(_RESTRICT, handle, ctypes.c_uint(0)))
    os.close(handle)


def filter_of(machine: str) -> list[Instruction]:
    """The seccomp filter. The call's number is at 0, the architecture at 4, the low half of argument N at 16 + 8 N."""
    steps: list[Instruction] = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, _ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
    ]
    if machine == "x86_64":
        steps += [(_ABOVE, 0, 1, _X32), (_RETURN, 0, 0, _EPERM)]
    for number in (*_DENIED[machine], *_DENIED_EVERYWHERE):
        steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _EPERM)]
    # What clone3 is asked for cannot be looked at from here: without it the C library takes clone.
    steps += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ENOSYS)]
    # By the first argument: threads and no processes; limits of its own; no longer life than its parent's.
    tests: list[tuple[int, Instruction]] = [
        (_CLONE[machine], (_HAS, 0, 1, _THREAD)),
        (_PRLIMIT[machine], (_EQUAL, 0, 1, 0)),
        (_PRCTL[machine], (_EQUAL, 1, 0, _DEATH_SIGNAL)),
    ]
    for number, test in tests:
        steps += [
            (_EQUAL, 0, 4, number),
            (_LOAD, 0, 0, 16),
            test,
            (_RETURN, 0, 0, _ALLOW),
            (_RETURN, 0, 0, _EPERM),
        ]
    return [*steps, (_RETURN, 0, 0, _ALLOW)]


def wall_off_calls() -> None:
    """Raises OSError."""
    steps = filter_of(platform.machine())
    array = (_Step * len(steps))(*(_Step(*step) for step in steps))
    program = _Program(len(steps), array)
    _checked(_LIBC.prctl(_SECCOMP, _FILTER, ctypes.byref(program), 0, 0))


def _checked(result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


def main(arguments: list[str]) -> None:
    """Never returns but for `--missing`."""
    if arguments == ["--missing"]:
        print(missing())
        return
    limits, folder, *program = arguments
    wanted = json.loads(limits)
    die_with_parent(wanted["parent"], wanted["alarm_s"])
    limit(wanted)
    if sys.platform.startswith("linux"):
        _checked(_LIBC.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0))
        libraries = ["/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache"]
        devices = ["/dev/null", "/dev/urandom", "/dev/zero"]
        wall_off_files(folder, [sys.base_prefix, program[0], *libraries, *devices])
        wall_off_calls()
    os.execv(program[0], program)


if __name__ == "__main__":
    main(sys.argv[1:])
