"""The tools that ship: what they answer, and what they keep out."""

import os
import time
from types import SimpleNamespace

import pytest

from dapo_jax.dapo.reward import Grade
from dapo_jax.reward import sandbox, tools
from dapo_jax.reward.tools import Reply


def said(*turns: str):
    return tuple(("assistant", turn) for turn in turns)


@pytest.mark.parametrize(
    ("turn", "answer"),
    [
        ("g 4 + 2", "6"),
        ("so 7 * (2 - 5)", "-21"),
        ("1/3", "0.3333333333"),
        ("0.1 + 0.2", "0.3"),
        ("7 / 7", "1"),
        (
            'x <tool_call>{"name": "calculator", "arguments": {"expression": "2*3"}}</tool_call>',
            "6",
        ),
        ("5 / (1 - 1)", "error: division by zero"),
        ("4 + ", "error: no expression"),
        ("((4 + 2", "error: no expression"),
        ("9" * 999 + "*1", "error: too long an expression"),
        ("2*" + "9" * 800 + "*" + "9" * 150, "error: too large a number"),
        ("1" + "0" * 400 + " / 3", "error: too large a number"),
        ("1 + " * 400 + "x", "the last"),
        ("<tool_call>no JSON</tool_call>", "error: no expression"),
        ("<tool_call>" * 20_000, "the last"),
        (
            '<tool_call>{"arguments": {"expression": "9**9**9"}}</tool_call>',
            "error: numbers, + - *",
        ),
        ('<tool_call>{"arguments": {"expression": "__import__(1)"}}</tool_call>', "error: numbers"),
        ('<tool_call>{"arguments": {"expression": "1e999999999 + 1"}}</tool_call>', "error: "),
        ("Answer: 3", "the last"),
        ("Answer: -3", "the last"),
        ("", "the last"),
    ],
)
def test_calculator(turn, answer):
    began, reply = time.process_time(), tools.calculator(None, said(turn))
    assert (reply is None) == (answer == "the last") and time.process_time() - began < 1
    assert reply is None or reply.text.startswith(answer)


def test_a_number_is_guessed_by_halving_and_not_otherwise():
    found = set()
    for id in map(str, range(99)):
        problem, low, high, turns = SimpleNamespace(id=id), 1, tools.HIGHEST, []
        while True:
            turns.append(("assistant", str((low + high) // 2)))
            reply = tools.guess(problem, tuple(turns))
            if isinstance(reply, Grade):
                break
            turns.append((reply.role, reply.text))
            low, high = (
                ((low + high) // 2 + 1, high) if reply.text == "+" else (low, (low + high) // 2 - 1)
            )
        number = tools.hidden(problem)
        assert reply == Grade(1.0, True, str(number), {"guesses": (len(turns) + 1) / 2})
        found.add(number)
        other = str(number % tools.HIGHEST + 1)
        said_of = "-" if int(other) > number else "+"
        assert tools.guess(problem, said(other, other, other)) == Reply(said_of, "user")
        assert tools.guess(problem, said(f"0{number}")).right
        for lost in ((other,) * 4, ("16",), ("0",), ("no",), ("",), ("1 2",), ("-1",)):
            assert tools.guess(problem, said(*lost))[:2] == (0.0, False)
    assert found == set(range(1, tools.HIGHEST + 1))


# A library with the code of a module, loaded by its path and perhaps under another name
LOADED = """
import importlib.machinery as m, sys
name, (folder,) = "{}", [p for p in sys.path if p.endswith("lib-dynload")]
path = folder + "/{}" + name.split(".")[-1] + m.EXTENSION_SUFFIXES[0]
print(m.ExtensionFileLoader(name, path).create_module(m.ModuleSpec(name, None, origin=path)))
"""
KEPT_OUT = {
    "open('/etc/passwd').read()": "open is not allowed",
    "open('here', 'w')": "open is not allowed",
    "import os; os.remove('x')": "os.remove is not allowed",
    "import os; print(os.listdir('/'))": "os.listdir is not allowed",
    "import os; os.system('id')": "os.system is not allowed",
    "import os; os.fork()": "os.fork is not allowed",
    "import os; os.kill(1, 9)": "os.kill is not allowed",
    "import os; os.execv('/bin/sh', ['sh'])": "os.exec is not allowed",
    "import subprocess; subprocess.run(['id'])": "import is not allowed",
    "import socket; socket.socket()": "import is not allowed",
    "import urllib.request as u; u.urlopen('http://1.1.1.1')": "import is not allowed",
    "import ctypes": "import is not allowed",
    "import sys; sys.modules.pop('ctypes', 0); import _ctypes": "import is not allowed",
    "open(__import__('os').__file__ + '/../../../../etc/passwd')": "open is not allowed",
    "import os; os.open('/etc/passwd', 0)": "open is not allowed",
    "import os; print(dict(os.environ).get('HOME'))": "None",
    "try: open('x')\nexcept BaseException as e: print('caught')": "error: open is not allowed",
    "import gc; gc.get_objects()": "gc.get_objects is not allowed",
    "import signal": "import is not allowed",
    "import readline; readline.read_history_file('/etc/passwd')": "import is not allowed",
    "import _tkinter": "import is not allowed",
    "import _posixshmem": "import is not allowed",
    "import sys; sys.modules.pop('posix'); import posix": "import is not allowed",
    "import os; [f('here') for f in os.supports_dir_fd if 'mkfifo' in repr(f)]": "nothing was",
    "import os; os.mknod('here')": "has no attribute 'mknod'",
    "import sys; sys.settrace(print)": "sys.settrace is not allowed",
    LOADED.format("_ctypes", ""): "import is not allowed",
    LOADED.format("x._posixsubprocess", ""): "import is not allowed",
    LOADED.format("math", "../"): "import is not allowed",
    "import os; os.posix_spawn('/bin/id', ['id'], {})": "os.posix_spawn is not allowed",
    "import os; os.symlink('/etc/passwd', 'here')": "os.symlink is not allowed",
    "[c for c in object.__subclasses__() if c.__name__ == '_wrap_close'][0]"
    ".__init__.__globals__['system']('id')": "os.system is not allowed",
    "f = lambda: 0\nf.__code__ = f.__code__.replace(co_code=b'd\\xff')\nf()": "ended with status",
    "import os; os.abort()": "ended with status",
    "x = 'a' * (1 << 31)": "MemoryError",
    "def f(): f()\nf()": "RecursionError",
    "print('a' * (1 << 20))": "",
    "1 / 0": "error: ZeroDivisionError: division by zero",
    "raise SystemExit(3)": "error: SystemExit: 3",
    "while True: pass": "took more than 1 s",
    "import time; time.sleep(400)": "took more than 1 s",
    "while True: print('a' * 99)": "aaa",
}


@pytest.mark.slow
def test_the_sandbox_keeps_out_what_it_says():
    began = time.monotonic()
    for code, wanted in KEPT_OUT.items():
        text = sandbox.run(code, seconds=1)
        assert wanted in text and "caught" not in text and len(text) <= sandbox.OUTPUT + 99, (
            code,
            text[:300],
        )
        assert "root:" not in text
    assert not os.path.exists("here") and time.monotonic() - began < 300


def test_the_sandbox_answers():
    for code, text in {
        "print(6 * 7)": "42", "x = 1": "nothing was printed", "import math; print(math.pi)": "3.14",
        "from fractions import Fraction as F; print(F(1, 3) + F(1, 6))": "1/2", "print('漢')": "漢",
        "import json, itertools, statistics; print(json.dumps([1]))": "[1]",
        "print(1); 1 / 0": "1\nerror: ZeroDivisionError",
        "1 +": 'error: File "code", line 1\n    1 +\n       ^\nSyntaxError: invalid syntax',
        "try: exec('1 +')\nexcept SyntaxError as e: print(e)": "invalid syntax (<string>, line 1)",
        "import os; print(set(os.environ) - {'LC_CTYPE'})": "set()",
    }.items():  # fmt: skip
        assert sandbox.run(code).startswith(text), code
    call = '<tool_call>{"name": "python", "arguments": {"code": "print(2)"}}</tool_call>'
    for turn in (call, "Let me see.\n```python\nprint(2)\n```\n"):
        assert tools.TOOLS["python"](None, said(turn)) == Reply("2")
    assert tools.python(None, said("<tool_call>no JSON</tool_call>")) == Reply("error: no code")
    two = "```python\nprint(1)\n```\nNo:\n```py\nx = '```'; print(2)\n```"
    assert tools.python(None, said(two)) == Reply("2")
    for last in ("Answer: 2", two + "\nAnswer: 2", two + "\n```\n2\n```", "```", "```python\n2"):
        assert tools.python(None, said(last)) is None
