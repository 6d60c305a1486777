"""What keeps a student's code in its place: limits of the kernel, and walls where this system has them.

`LAYERS`, each left out where it does not work (`available` tries them):
  user        when we are root: an unprivileged user of its own, so that plain permissions hold
  namespaces  no network, no sight of other processes, and all that it started ends with it
  files       Landlock: only its own folder can be written, only the interpreter, system libraries and its tree be read,
              no TCP, no signals to processes outside
The limits (time, memory, processes, size of a file) always hold. Linux; elsewhere only the limits do.
"""

import contextlib
import ctypes
import os
import re
import resource
import signal
import struct
import sys
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path

LAYERS = ("user", "namespaces", "files")
PROCESSES, FILE_SIZE, OPEN_FILES = 64, 8 << 20, 256
SYSTEM = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin", "/etc", "/opt", "/proc", "/sys", "/nix", "/dev/urandom")
RESERVED = 301  # the least pid_max that the kernel takes
FIRST_UID = 61_000  # of the unprivileged users, one for each job at a time
_NEWUSER, _NEWPID, _NEWNET, _NEWIPC = 0x10000000, 0x20000000, 0x40000000, 0x08000000
_PDEATHSIG, _DUMPABLE, _SUBREAPER, _NO_NEW_PRIVS = 1, 4, 36, 38


def limit(cpu: float, memory: int, processes: int | None = None, file_size: int = FILE_SIZE) -> None:
    """Seconds of computing; bytes of address space on top of what is mapped now; tasks; bytes of a file."""
    mapped = 0
    if os.path.exists("/proc/self/statm"):
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _lower(resource.RLIMIT_CPU, int(cpu) + 1, 5)  # a signal that can be told from others, then the end
    _lower(resource.RLIMIT_FSIZE, file_size)
    _lower(resource.RLIMIT_NOFILE, OPEN_FILES)
    _lower(resource.RLIMIT_CORE, 0)
    if sys.platform == "linux":  # elsewhere it is unreliable
        _lower(resource.RLIMIT_AS, mapped + memory)
    if processes is not None:
        _lower(resource.RLIMIT_NPROC, processes)


def _lower(which: int, value: int, more: int = 0) -> None:
    hard = resource.getrlimit(which)[1]
    soft, top = (x if hard == resource.RLIM_INFINITY else min(x, hard) for x in (value, value + more))
    resource.setrlimit(which, (soft, top))


def confined(function: Callable[[], int], layers: Iterable[str], number: int, readable, writable, **limits) -> None:
    """In a fresh fork: run `function` behind these layers and leave with its status; 128 + n when signal n ended it.

    Three processes: this one leads the session; below it a keeper, which inside a pid namespace takes everything with
    it when it ends; below that the one that runs `function`. None of the first two runs a student's code.
    """
    os.setsid()
    _die_with_parent()
    if "user" in layers:
        os.setgroups([])
        os.setresgid(*[FIRST_UID + number] * 3)
        os.setresuid(*[FIRST_UID + number] * 3)
        _prctl(_DUMPABLE, 1)  # or /proc/self would belong to root
        _die_with_parent()
    tasks = PROCESSES + _tasks()
    if "namespaces" in layers:
        _lower(resource.RLIMIT_NPROC, tasks)
        _unshare()
        tasks = PROCESSES
    _fork_and_wait(lambda: _keep(lambda: _run(function, layers, readable, writable, processes=tasks, **limits)))


def _run(function, layers, readable, writable, **limits) -> int:
    _die_with_parent()
    limit(**limits)
    if "files" in layers:
        landlock(readable, writable)
    return function()


def _keep(function: Callable[[], int]) -> int:
    """Reap whatever is left to us until the runner ends, then end the rest."""
    _die_with_parent()
    _prctl(_SUBREAPER, 1)
    if os.getpid() == 1 and _own_pid_max():
        Path("/proc/sys/kernel/pid_max").write_text(str(RESERVED + PROCESSES))
    runner = _fork(function)
    while True:
        pid, status = os.wait()
        if pid == runner:
            break
    end_children()
    return _code(status)


def bounds_processes(layers: Iterable[str]) -> bool:
    """Whether a fork bomb stays small: the kernel's limit for a user does not hold for root."""
    return os.geteuid() != 0 or "user" in layers or ("namespaces" in layers and _own_pid_max())


def _own_pid_max() -> bool:
    """Each pid namespace has a pid_max of its own; before Linux 6.14 this would be the whole machine's."""
    version = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return sys.platform == "linux" and version is not None and tuple(map(int, version.groups())) >= (6, 14)


def _fork(function: Callable[[], int]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        status = function()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(status)


def _fork_and_wait(function: Callable[[], int]) -> None:
    pid = _fork(function)
    os._exit(_code(os.waitpid(pid, 0)[1]))


def _code(status: int) -> int:
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def end_children() -> None:
    """Kill and reap every child of this process, those that it inherits on the way too."""
    while children := _children():
        for pid in children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _children() -> list[int]:
    found, me = [], os.getpid()
    if os.path.exists("/proc/self/stat") and Path("/proc/self/stat").read_text().split()[0] == str(me):
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, IndexError, ValueError):
                if int(path.read_text().rsplit(")", 1)[1].split()[1]) == me:
                    found.append(int(path.parent.name))
    return found


def _tasks() -> int:
    """How many tasks our user has: the kernel's limit counts them all."""
    total, me = 0, os.getuid()
    for path in Path("/proc").glob("[0-9]*/task"):
        with contextlib.suppress(OSError):
            total += len(os.listdir(path)) if path.stat().st_uid == me else 0
    return total


def _die_with_parent() -> None:
    _prctl(_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        _libc().prctl(option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3)


def _libc():
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def _unshare() -> None:
    uid, gid = os.getuid(), os.getgid()
    _check(_libc().unshare(_NEWUSER | _NEWPID | _NEWNET | _NEWIPC), "unshare")
    for file, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        Path(f"/proc/self/{file}").write_text(text)


def landlock(readable: Iterable[str], writable: Iterable[str]) -> None:
    """From now on this process and its children open nothing but these paths and what is below them."""
    libc = _libc()
    version = _check(libc.syscall(444, None, ctypes.c_size_t(0), 1), "landlock")
    everything = (1 << (13 + (version >= 2) + (version >= 3) + (version >= 5))) - 1  # rights came one by one
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    attributes = struct.pack("QQQ", everything, 3, 3)[:size]
    rules = _check(libc.syscall(444, attributes, ctypes.c_size_t(size), 0), "landlock_create_ruleset")
    execute, write_file, read_file, read_dir, truncate = 1, 2, 4, 8, (1 << 14) & everything
    for paths, rights in ((readable, execute | read_file | read_dir), (writable, everything & ~execute)):
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
                allowed = rights if os.path.isdir(path) else rights & (execute | write_file | read_file | truncate)
                rule = struct.pack("=Qi", allowed, opened)
                _check(libc.syscall(445, rules, 1, rule, 0), f"landlock_add_rule {path}")
                os.close(opened)
    _prctl(_NO_NEW_PRIVS, 1)
    _check(libc.syscall(446, rules, 0), "landlock_restrict_self")
    os.close(rules)


def interpreter() -> list[str]:
    """Folders that Python and its packages are read from."""
    paths = {sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.dirname(os.path.realpath(sys.executable))}
    paths |= {p for p in sysconfig.get_paths().values() if p}
    paths |= {p for p in sys.path if "site-packages" in p or "dist-packages" in p}
    return sorted(p for p in paths if p not in ("/", ""))


def available(folder: Path) -> list[str]:
    """The layers behind which Python runs and this folder can be entered, found by trying."""
    layers = [layer for layer in LAYERS if layer != "user" or os.geteuid() == 0]
    if sys.platform != "linux":
        return []
    for dropped in ((), ("user",), ("namespaces",), ("user", "namespaces"), ("files",), LAYERS):
        some = [layer for layer in layers if layer not in dropped]
        if _works(some, folder):
            return some
    return []


def _works(layers: list[str], folder: Path) -> bool:
    def probe() -> int:
        os.open(os.path.realpath(sys.executable), os.O_RDONLY)
        Path(ast_file).read_bytes()
        os.stat(folder / ".")
        return 0

    import ast

    ast_file = ast.__file__
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            readable = [*SYSTEM, *interpreter(), str(folder)]
            confined(probe, layers, 0, readable, ["/dev/null"], cpu=10, memory=1 << 30)
        os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def adopt_orphans() -> None:
    """Processes that lose their parent become children of this one, so that `end_children` finds them."""
    _prctl(_SUBREAPER, 1)
