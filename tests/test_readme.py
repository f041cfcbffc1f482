"""README.md and docs/ tell the truth about what can be checked by a machine: flags, fields, files,
functions, the picture of the house and the reader's path."""

import ast
import functools
import importlib
import pathlib
import re

import pytest

from dapo_jax import config

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = {p.name: p.read_text() for p in sorted((ROOT / "docs").glob("*.md"))}
TEXT = "\n".join(
    [README, *PAGES.values(), (ROOT / "tests" / "README.md").read_text()]
    + [
        (ROOT / "configs" / f"{name}.py").read_text().split('"""')[1]
        for name in ("quickstart", "quickstart_grpo", "dapo_math_tiny")
    ]
)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(#[^)\s]*)?\)")


def test_every_config_field_exists():
    fields = set(re.findall(r"--config\.([\w.]+)=", TEXT))
    fields |= set(re.findall(r"\bc\.(\w+(?:\.\w+)+)", TEXT))
    # `section.field` in prose; NAME stands for any.
    sections = {name.split(".")[0] for name in config.SCHEMA if "." in name}
    named = re.findall(r"`((?:{})\.\w+)(?:=[^`]*)?`".format("|".join(sections)), TEXT)
    fields |= {f for f in named if not f.endswith(".NAME") and not f.endswith(".py")}
    fields -= {"loss.NAME"}
    assert len(fields) > 30 and fields <= set(config.SCHEMA)


@pytest.mark.parametrize("module", sorted(set(re.findall(r"python -m (dapo_jax[\w.]+)", TEXT))))
def test_every_flag_exists(module, shell):
    commands = re.findall(rf"python -m {module}(?!\.?\w)((?:[^\n`\\]|\\\n)*)", TEXT)
    flags = {f for c in commands for f in re.findall(r"--(\w+)(?:=|\s|$)", c)} - {"config"}
    words = {c.split()[0] for c in commands if re.match(r"\s+[a-z]", c)}  # subcommands
    done = [shell.python("-m", module, *word, "--help") for word in ((), *((w,) for w in words))]
    said = "".join(x.stdout + x.stderr for x in done)
    assert not [f for f in flags | words if f not in said]


def test_every_flag_in_prose_and_of_launch_exists():
    """`--dry-run`: as a script's, or as a command's name of a flag."""
    sources = [*(ROOT / "launch").glob("*.sh"), *(ROOT / "dapo_jax").rglob("*.py")]
    known = "".join(p.read_text() for p in [*sources, ROOT / "tests" / "conftest.py"])
    flags = set(re.findall(r"`--([a-z_-]+)(?:=[^`]*)?`", TEXT))
    assert len(flags) > 5
    assert not [f for f in flags if f'"{f}"' not in known and f"--{f}" not in known]
    for script, words in re.findall(r"(launch/\w+\.sh)((?: +(?!-- )[^\s`|#]+)*)", TEXT):
        for flag in re.findall(r"--[a-z][a-z_-]*(?==|\s|$)", words):
            assert flag in (ROOT / script).read_text() or script == "launch/test.sh", (script, flag)


def test_every_named_place_exists():
    places = set(re.findall(r"(?:launch|configs|benchmarks|docs|notebooks)/\w+\.\w+", TEXT))
    places |= set(re.findall(r"`((?:tests|dapo_jax)/[\w/]+\.\w+)`", TEXT))
    places |= {f"tests/{test}.py" for test in re.findall(r"`(test_\w+)`", TEXT)}
    places |= set(re.findall(r"!\[[^]]*\]\(([^)]+)\)", README))
    assert len(places) > 50 and not [p for p in places if not (ROOT / p).exists()]


def anchors(page: pathlib.Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {"#" + re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda p: p.name
)
def test_every_link_leads_somewhere(page):
    for file, anchor in LINK.findall(page.read_text()):
        where = (page.parent / file) if file else page
        assert where.exists(), file
        assert not anchor or anchor in anchors(where), file + anchor


@pytest.mark.parametrize("file, name", sorted(set(re.findall(r"`([\w/]+)\.py: (\w+)`", TEXT))))
def test_every_named_function_exists(file, name):
    assert hasattr(importlib.import_module(f"dapo_jax.{file.replace('/', '.')}"), name)


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", TEXT, re.S))
def test_every_python_block_parses_and_imports(code):
    tree = ast.parse(code)
    imports = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    assert imports
    exec(compile(ast.Module(imports, []), "README.md", "exec"), {})


def test_every_metric_exists():
    from dapo_jax.log import tags

    prefixes = {name.split("/")[0] for name in tags.TAGS if "/" in name}
    found = re.findall(r"`((?:{})/[\w/@<>]+)`".format("|".join(prefixes)), TEXT)
    assert len(set(found)) > 5
    for tag in found:
        tags.family(tag)  # or KeyError


PACKAGE = ROOT / "dapo_jax"
BLOCKS = re.split(r"^```\w*\n", README, flags=re.M)[1::2]
HOUSE = next(b for b in BLOCKS if "[log/]" in b)
# From top to bottom and, in a row, from left to right: a room imports from rooms behind it.
ROOMS = [
    r for line in HOUSE.splitlines() for r in re.findall(r"(?<![\w/])\w+(?:\.py|/)(?!:)", line)
]
WINGS = [r for r in ROOMS if f"[{r}]" in HOUSE]
# What there is to read, in that order.
PATH = re.findall(r"`([\w/]+\.py)`", README[README.index("| minutes |") :].split("\n\n")[0])
METHODS = r"critic|staleness|curricul|vapo|positive_(lm|coef)"


def room(file: pathlib.Path) -> str:
    folder = file.relative_to(PACKAGE).parts[0]
    return folder if folder.endswith(".py") else f"{folder}/"


def imported(file: pathlib.Path) -> set[pathlib.Path]:
    """Files of the package that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
    places = [ROOT.joinpath(*name.split(".")) for name in names if name]
    return {p for x in places for p in (x.with_suffix(".py"), x / "__init__.py")} & {*FILES}


FILES = [p for p in sorted(PACKAGE.rglob("*.py")) if p != PACKAGE / "__init__.py"]


@functools.cache
def arrows() -> set[tuple[str, str]]:  # (room, room that it imports from)
    return {(a, b) for f in FILES for p in imported(f) if (a := room(f)) != (b := room(p))}


def test_every_room_is_in_the_picture_once():
    assert len(ROOMS) == len(set(ROOMS)) and set(ROOMS) == {room(p) for p in FILES}
    for line in HOUSE.splitlines():
        if found := re.match(r"(dapo|rollout|model|data)/", line):
            stems = {p.stem for p in (PACKAGE / found[1]).glob("*.py")} - {"__init__"}
            assert stems <= set(re.findall(r"\w+", line)), found[1]
    assert set(WINGS) == {"lab/", "plan/", "hosts/", "log/", "checkpoint/", "pods/", "variants/"}


def test_rooms_import_only_from_rooms_below():
    assert not [(a, b) for a, b in arrows() if ROOMS.index(b) <= ROOMS.index(a)]


def test_the_house_stays_small():
    """At most nine modules at the top, 450 lines a module, 13 layers, 150 arrows."""

    def floor(name: str) -> int:
        return 1 + max((floor(b) for a, b in arrows() if a == name), default=0)

    assert sum(r.endswith(".py") for r in ROOMS) <= 9
    assert not [p for p in FILES if lines(p) > 450]
    assert max(map(floor, ROOMS)) <= 13 and len(arrows()) <= 150


def test_what_a_room_may_not_use():
    """Which rooms stand below says little where they stand side by side: nothing imports the
    planner or the lab, no method is known to DAPO, no text to it, no devices to the data."""
    core = {"dapo/", "rollout/", "model/", "algorithm.py", "reward/"}
    assert not [a for a, b in arrows() if b in ("plan/", "lab/") and a != "lab/"]
    assert not [a for a, b in arrows() if a in core and b == "variants/"]
    for folder, uses in (
        ("dapo/", {"model/", "parallel.py", "gate.py"}),
        ("rollout/", {"model/", "parallel.py", "gate.py"}),
        ("model/", {"parallel.py", "gate.py", "bars.py"}),
        ("data/", {"gate.py", "bars.py"}),
    ):
        assert {b for a, b in arrows() if a == folder} <= uses
    for file in (PACKAGE / "algorithm.py", *PACKAGE.glob("checkpoint/*"), *PACKAGE.glob("log/*")):
        assert file.suffix != ".py" or not re.search(METHODS, file.read_text(), re.I), file


def lines(file: str | pathlib.Path) -> int:
    return len((PACKAGE / file).read_text().splitlines())


def test_the_reader_s_path():
    """Twelve files are all of DAPO, and no wing is needed to read them."""
    assert len(PATH) == len(set(PATH)) == 12
    there = {f"dapo/{p.name}" for p in (PACKAGE / "dapo").glob("[a-z]*.py")}
    assert there - {"dapo/settings.py"} <= set(PATH)
    told = re.search(r"twelve files, about ([\d,]+) lines", README)[1].replace(",", "")
    assert abs(sum(map(lines, PATH)) - int(told)) <= 50
    for file in PATH:
        assert not {room(p) for p in imported(PACKAGE / file)} & set(WINGS), file
    assert lines("algorithm.py") <= 160 and lines("train.py") <= 270


def test_no_docstring_begins_with_of():
    """A sentence has a subject and a verb."""
    kinds, found = ast.Module | ast.ClassDef | ast.FunctionDef, []
    for folder in ("dapo_jax", "benchmarks", "configs", "tests"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, kinds) and (ast.get_docstring(node) or "").startswith("Of "):
                    name = getattr(node, "name", "the module's docstring")
                    found.append(f"{file.relative_to(ROOT)}: {name}")
    assert not found, "\n".join(found)
