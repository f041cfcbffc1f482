"""What gives rewards and makes steps is handed in, never replaced: no test or benchmark puts a
function of its own in the place of the project's."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
FILES = sorted(p for folder in ("tests", "benchmarks") for p in (ROOT / folder).rglob("*.py"))
# Modules of the algorithm.
CLOSED = {"algorithm", "advantage", "dynamic_sampling", "grading", "objective", "overlong_filter"}
CLOSED |= {"reward", "train", "verifier"}
# The run as a whole has stand-ins where a caller's answer to an interrupted run is tested; the
# race's judge evaluates in a process of its own.
OPEN = {("train", "train"), ("train", "evaluate_policy")}


def replaced(source: str) -> list[str]:
    """module.name of each assignment, `setattr` and `monkeypatch.setattr` on a closed module."""
    found, imported = [], set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported |= {(a.asname or a.name).split(".")[0] for a in node.names}
        if isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            flat = [e for t in targets for e in (t.elts if isinstance(t, ast.Tuple) else [t])]
            found += [(t.value, t.attr) for t in flat if isinstance(t, ast.Attribute)]
        elif isinstance(node, ast.Call) and len(node.args) >= 2:
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            first, second = node.args[:2]
            if name == "setattr" and isinstance(second, ast.Constant):
                found.append((first, second.value))
            if name == "setattr" and isinstance(first, ast.Constant):  # "package.module.name"
                path = ast.parse(str(first.value), mode="eval").body
                found += [(path.value, path.attr)] if isinstance(path, ast.Attribute) else []
    chains = [[*ast.unparse(module).split("."), str(name)] for module, name in found]
    # `c.reward.verifier = ...` sets a field of a config: `c` is no module.
    modules = [tuple(c[-2:]) for c in chains if c[0] in imported | CLOSED | {"dapo_jax"}]
    return [".".join(m) for m in modules if m[0] in CLOSED and m not in OPEN]


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_nothing_is_replaced(file):
    assert replaced(file.read_text()) == []


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("monkeypatch.setattr(verifier, 'verify', f)", ["verifier.verify"]),
        ("monkeypatch.setattr(grading.verifier, 'verify', f)", ["verifier.verify"]),
        ("monkeypatch.setattr('dapo_jax.algorithm.step', f)", ["algorithm.step"]),
        ("train.train_step = f", ["train.train_step"]),
        ("train.a, other.b = f, g", ["train.a"]),
        ("setattr(algorithm, 'step', f)", ["algorithm.step"]),
        ("monkeypatch.setattr(arms.train, 'train', cut)", []),
        ("c.reward.verifier = x; c.rollout.groups = 4; time.sleep(1)", []),
    ],
)
def test_what_counts_as_replaced(line, want):
    assert replaced(line) == want
