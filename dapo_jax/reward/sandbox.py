"""The tool `python`: code that the policy writes, run in a process of its own.

What holds it: a wall clock, limits of the kernel for processor seconds, memory, sizes of files and
open files; an empty environment; a new session, killed whole; a network name space without a
network where the kernel lets users make one; and a hook of Python's auditing that allows imports of
the standard library and nothing else of files, sockets, processes and native code.

What it cannot keep out: auditing is no wall. Code that knows the interpreter well enough, as by a
mistake in Python's own C code, gets past the hook and then has the rights of the run's user, but
for the limits and, mostly, the network. It may read the standard library and use its share of the
processor. For code of strangers put the run in a container or a virtual machine without secrets.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile

from dapo_jax.reward.tools import Reply, Transcript, argument, last_call

SECONDS, MEMORY, OUTPUT = 5, 1 << 30, 1 << 16  # of clock and processor; bytes; bytes
_OPENING = re.compile(r"```(?:python|py)\n")

# Of two interpreters, one after the other: what the first has loaded, the second cannot find again.
_LIMITS = """
import ctypes, os, resource, sys
seconds, memory, output = map(int, sys.argv[2:])
if ctypes.CDLL(None).unshare(0x50000000):  # CLONE_NEWUSER | CLONE_NEWNET
    pass  # not allowed here: the hook alone keeps sockets out
for name, most in dict(CPU=seconds, AS=memory, FSIZE=output, NOFILE=32, CORE=0).items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (most, most))
os.execv(sys.executable, [sys.executable, "-I", "-S", "-u", "-c", sys.argv[1]])
"""

_RUNNER = """
import os, sys
code, sys.argv = sys.stdin.read(), [""]
for name in "mkfifo mknod setpriority sched_setaffinity sched_setscheduler sched_setparam".split():
    made = vars(os).pop(name, 0)  # auditing does not see them
    os.supports_dir_fd.discard(made)
    sys.modules["posix"].__dict__.pop(name, 0)
import linecache, traceback  # read files of their own when something is wrong
linecache.getlines = lambda *of, **how: []

def hook():
    quiet = frozenset(
        "compile exec marshal.loads object.__getattr__ object.__setattr__ time.sleep "
        "object.__delattr__ code.__new__ sys._getframe builtins.id array.__new__ sys.excepthook "
        "sys.unraisablehook sys._getframemodulename".split())
    library = tuple({p + "/" for p in sys.path if p and not p.endswith(".zip")})
    native = frozenset(
        "ctypes _ctypes _posixsubprocess mmap _socket resource fcntl _signal posix "
        # open files, share memory or run programs, and auditing does not see it
        "readline _tkinter _multiprocessing _posixshmem _dbm _gdbm".split())
    sources = "code", "<string>", "<unknown>"  # none is there: a SyntaxError looks for its line
    starts, kind, text, write, leave = str.startswith, type, str, os.write, os._exit

    def look(event, given):
        path = given[0] if given else None
        if event == "import" and kind(path) is text:
            own = path.split(".")[-1] not in native  # x._ctypes is _ctypes too, to what loads it
            path, quick = given[1], given[1] is None
        else:
            own, quick = event != "import", event in quiet
        if own and quick:
            return
        inside = own and kind(path) is text and ".." not in path and (
            starts(path, library) or path + "/" in library or path in sources)
        if inside and (event in ("os.listdir", "os.scandir", "import") or event == "open" and (
            given[1] in ("r", "rb") or given[1] is None and not given[2] & 3)):
            return
        write(1, b"error: " + event.encode() + b" is not allowed here\\n")
        leave(0)  # and no exception, whose traceback would show this frame

    return look

sys.modules.pop("_signal", 0)  # a handler might run within the hook
sys.addaudithook(hook())
leave = os._exit
del hook, os, name, made
try:
    exec(compile(code, "code", "exec"), {"__name__": "__main__"})
except BaseException as error:
    if not isinstance(error, SystemExit) or error.code:
        print("error:", "".join(traceback.format_exception_only(error)).strip())
leave(0)  # an interpreter that ends asks for more than the hook allows
"""


def python(problem, transcript: Transcript) -> Reply | None:
    """What the code of a turn prints: the argument `code` of a <tool_call>, or a ```python block at
    its end. Turns without code are the response's last."""
    turn = transcript[-1][1].rstrip()
    if (call := last_call(turn)) is not None:
        code = argument(call, "code")
        return Reply(run(code) if code else "error: no code")
    text, _, behind = turn.rpartition("```")
    *before, code = _OPENING.split(text)
    if behind or not before or "\n```" in code:  # no block, or it has ended before
        return None
    return Reply(run(code))


def run(code: str, seconds: int = SECONDS) -> str:
    """What `code` prints, at most OUTPUT bytes, and a line `error: ...` where it fails or is ended;
    'nothing was printed' where there is neither."""
    limits = map(str, (seconds, MEMORY, OUTPUT))
    command = [sys.executable, "-I", "-S", "-c", _LIMITS, _RUNNER, *limits]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as out:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.DEVNULL, cwd=folder,
            env={}, start_new_session=True,
        )  # fmt: skip
        try:
            process.communicate(code.encode(errors="replace"), timeout=seconds + 1)
            ended = ""
        except subprocess.TimeoutExpired:
            ended = f"error: took more than {seconds} s"
        _end(process)
        out.seek(0)
        text = out.read(OUTPUT).decode(errors="replace").rstrip()
    if not ended and process.returncode:
        ended = _WHY.get(-process.returncode, f"error: ended with status {process.returncode}")
        ended = ended.format(seconds=seconds)
    return "\n".join(filter(None, (text, ended))) or "nothing was printed"


_WHY = {
    signal.SIGXCPU: "error: took more than {seconds} s",
    signal.SIGKILL: "error: took more than {seconds} s, or too much memory",
    signal.SIGXFSZ: "error: printed too much",
}


def _end(process: subprocess.Popen) -> None:
    """Whatever it has started goes with it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
