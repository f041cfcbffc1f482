"""What the sources must not contain, and what a downloaded template must not do."""

import ast
import pathlib

import pytest

import dapo_jax
from dapo_jax.data import tokenizer

SOURCES = sorted(pathlib.Path(dapo_jax.__file__).parent.rglob("*.py"))
LAUNCH = sorted((pathlib.Path(__file__).parent.parent / "launch").glob("*.sh"))

# Readers that run what they read, and shells.
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml"}
MODULES |= {"subprocess", "commands", "pty"}
# Each starts one program, by a list of arguments: of this package, by this Python, or
# (alarm_command.py) the one that the user's own config names for alarms.
ALLOWED = {
    (f, "subprocess")
    for f in ("processes.py", "tokenizer.py", "kernels.py", "alarm_command.py", "workers.py")
}
CALLS = {"eval", "exec", "compile", "__import__", "system", "popen", "load_pickle"}


def test_no_pickle_no_shell_no_eval():
    assert len(SOURCES) > 20
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names = {alias.name.split(".")[0] for alias in node.names}
                found = {(file.name, name) for name in names & MODULES}
                assert not found - ALLOWED, file
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in MODULES, file
            elif isinstance(node, ast.Call):
                name = getattr(node.func, "id", "")
                owner = getattr(getattr(node.func, "value", None), "id", "")
                attribute = getattr(node.func, "attr", "")
                assert (owner, attribute) != ("torch", "load"), file
                assert name not in CALLS and not (owner == "os" and attribute in CALLS), file
                assert not any(k.arg in ("allow_pickle", "shell") for k in node.keywords), file


def test_the_launch_scripts_hand_values_on_as_they_are():
    """Config values are elements of an array; no line is put together for a shell to parse."""
    assert LAUNCH
    for file in LAUNCH:
        code = [line.split("#")[0] for line in file.read_text().splitlines()]
        assert not any(word in line.split() for line in code for word in ("eval", "sh -c")), file


TEMPLATES = [
    "{{ ''.__class__ }}", "{{ ''['__class__'] }}", "{{ ''|attr('__class__') }}",
    "{{ '{0.__class__}'.format(1) }}", "{% if messages.__class__ %}{% endif %}",
    "{{ messages.__class__.__init__.__globals__ }}", "{{ raise_exception.__globals__ }}",
    "{% for x in ().__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}",
    "{{ self.__init__.__globals__.__builtins__.open('/etc/passwd').read() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ messages.append(1) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ range(10**9) | list }}",
]  # fmt: skip


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_hostile_chat_template_is_refused(template):
    made = tokenizer.Tokenizer(1, frozenset({0}), template, {}, None, None, None)
    with pytest.raises(ValueError, match="^chat template (refused by the sandbox|failed): ") as e:
        made.render_chat([("user", "hi")])
    assert "\n" not in str(e.value)
