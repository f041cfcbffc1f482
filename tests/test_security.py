"""What the sources must not contain, and what a downloaded template must not do."""

import ast
import pathlib

import pytest

import dapo_jax
from dapo_jax.data import tokenizer

SOURCES = sorted(pathlib.Path(dapo_jax.__file__).parent.rglob("*.py"))
HOSTILE = pathlib.Path(__file__).parent / "data" / "hostile_templates.txt"

# Readers that run what they read, shells, and what runs text.
FORBIDDEN = {
    "pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "pty",
    "commands", "subprocess", "load_pickle()", "allow_pickle=", "torch.load()", "shell=",
    "eval()", "exec()", "compile()", "__import__()", "os.system()", "os.popen()",
}  # fmt: skip
# Each starts one program, by a list of arguments: of this package, by this Python, or
# (alarm_command.py) the one that the user's own config names for alarms; until_done.py `tee` too.
STARTERS = {"processes.py", "tokenizer.py", "kernels.py", "alarm_command.py", "workers.py"}
STARTERS |= {"sandbox.py", "until_done.py"}


def named(node: ast.AST) -> list[str]:
    """Modules that it imports, what it calls by name, the keyword that it is."""
    match node:
        case ast.Import(names=names):
            return [alias.name.split(".")[0] for alias in names]
        case ast.ImportFrom(module=str(module)):
            return [module.split(".")[0]]
        case ast.Call(func=ast.Name(id=name)):
            return [f"{name}()"]
        case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name)):
            return [f"{owner}.{name}()"]
        case ast.keyword(arg=str(name)):
            return [f"{name}="]
    return []


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: file.name)
def test_no_pickle_no_shell_no_eval(file):
    found = {name for node in ast.walk(ast.parse(file.read_text())) for name in named(node)}
    assert found & FORBIDDEN <= ({"subprocess"} if file.name in STARTERS else set())


@pytest.mark.parametrize("template", HOSTILE.read_text().splitlines())
def test_a_hostile_chat_template_is_refused(template):
    made = tokenizer.Tokenizer(1, frozenset({0}), template, {}, None, None, None)
    with pytest.raises(ValueError, match="^chat template (refused by the sandbox|failed): ") as e:
        made.render_chat([("user", "hi")])
    assert "\n" not in str(e.value)
