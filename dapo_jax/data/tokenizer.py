"""Text to token ids and back, from a Hugging Face `tokenizer.json` or a SentencePiece model.

    tokenizer = load('Qwen2.5-0.5B/')
    ids = tokenizer.chat([('user', 'What is 6 * 7?')])

Nothing is downloaded and no code of a checkpoint runs: two native libraries read the vocabulary,
and Jinja's sandbox renders the chat template, which is a program that came with the data. A
tokenizer.json and a template are first tried out in a process with time and memory limits.
"""

import contextlib
import functools
import itertools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import sentencepiece
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from dapo_jax import gate
from dapo_jax.data.prompts import Messages

# Qwen2.5 base models end with the first, instruct models with the second. After training, a model
# may use either; a tokenizer that knew only one would let responses run to the length limit.
QWEN_STOPS = ("<|endoftext|>", "<|im_end|>")
MAX_TEXT = 2_000_000  # characters that a chat template may make of a conversation


@dataclass(frozen=True)
class Tokenizer:
    """Made by `load`."""

    vocab_size: int  # largest id + 1; Qwen2.5: 151665, and 151936 or 152064 rows of the embedding
    stop_ids: frozenset[int]  # ids that end a response
    template: str  # Jinja source of the chat template, '' if none was found
    specials: Mapping[str, str]  # bos_token, eos_token, ... as a chat template sees them
    _encode: Callable[[str], list[int]]
    _decode: Callable[[list[int], bool], str]
    _token: Callable[[int], str | None]
    unknown_id: int | None = None  # of words outside the vocabulary; None: it encodes any text

    def encode(self, text: str) -> list[int]:
        """Token ids without added BOS or EOS; special tokens written in the text are recognised.
        ValueError: the text holds half of a surrogate pair, as from bytes that are no UTF-8."""
        with gate.reading(repr(text)[:40], what="is no text"):
            text.encode()
        return self._encode(text)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of the ids. Ids without a token (models have spare rows) are left out."""
        return self._decode([int(i) for i in ids if 0 <= i < self.vocab_size], skip_special)

    def token(self, id: int) -> str:
        """The vocabulary's own spelling of one token ('Ġthe', '▁the'); '' for an unused id."""
        return (self._token(int(id)) or "") if 0 <= id < self.vocab_size else ""

    def unknown_words(self, text: str) -> list[str]:
        """The words of `text`, each once, that the tokenizer can encode only as unknown."""
        words = dict.fromkeys(text.split())
        return [word for word in words if self.unknown_id in self.encode(word)]

    def render_chat(self, messages: Messages) -> str:
        """The prompt text of a conversation, up to where the assistant begins to write. ValueError:
        no chat template, or the template fails or is refused."""
        if not self.template:
            remedy = "name a Jinja file (chat_template), or put chat_template.jinja beside it"
            raise ValueError(f"this tokenizer has no chat template: {remedy}")
        messages = [{"role": role, "content": content} for role, content in messages]
        usual = dict(add_generation_prompt=True, tools=None, documents=None)
        try:
            with _limited(_SECONDS):
                text = _compile(self.template).render(messages=messages, **usual, **self.specials)
            if len(text) > MAX_TEXT:
                raise ValueError(f"makes {len(text):,} characters of a prompt")
            return text
        except SecurityError as e:
            raise ValueError(f"chat template refused by the sandbox: {e}") from e
        except Exception as e:  # a template is a program: any of Python's errors can come out
            why, last = gate.describe(e), messages[-1:]
            raise ValueError(f"chat template failed: {why}; the prompt ends in {last!r:.90}") from e

    def chat(self, messages: Messages) -> list[int]:
        """Token ids of `render_chat(messages)`."""
        return self.encode(self.render_chat(messages))


def load(path: str | Path, chat_template: str | Path = "") -> Tokenizer:
    """Read a tokenizer.

    path: a `tokenizer.json`, a SentencePiece `*.model`, or a folder with one of them.
    chat_template: a Jinja file; without it the `chat_template` of tokenizer_config.json, then
      chat_template.jinja in the same folder.
    stop_ids are those of generation_config.json and tokenizer_config.json, plus Qwen's pair (if the
    vocabulary has it) or SentencePiece's eos.
    ValueError: missing or damaged files, unknown stop token, a template that does not compile or
      cannot render a first prompt, a tokenizer that cannot encode one within the limits."""
    file = _vocabulary_file(Path(path))
    if file.suffix != ".model" or chat_template:
        _try_out(file, chat_template)
    return _load(file, chat_template)


def _load(file: Path, chat_template: str | Path) -> Tokenizer:
    config = _json(file.parent / "tokenizer_config.json")
    generation = _json(file.parent / "generation_config.json")
    named = {
        key: value.get("content") if isinstance(value, dict) else value
        for key, value in config.items()
        if re.fullmatch("(bos|eos|pad|unk)_token", key)
    }

    fields, ids, own = (_sentencepiece if file.suffix == ".model" else _hugging_face)(file)
    stops = {ids[name] for name in (*QWEN_STOPS, *own.values()) if name in ids}
    specials = own | {key: value for key, value in named.items() if isinstance(value, str)}

    listed = generation.get("eos_token_id")
    listed = [] if listed is None else listed if isinstance(listed, list) else [listed]
    known = lambda id: type(id) is int and 0 <= id < fields["vocab_size"]
    wanted = [(id, id if known(id) else None) for id in listed]
    if (eos := specials.get("eos_token")) is not None:
        wanted.append((eos, ids.get(eos)))
    for name, id in wanted:
        if id is None:
            other = f"the stop token {name!r} of the neighbouring config files is not in it"
            raise ValueError(f"{file}: {other}; the files belong to different tokenizers")
        stops.add(id)
    if not stops:
        where = file.parent / "tokenizer_config.json"
        raise ValueError(f"{file}: no stop token is known; name it as eos_token in {where}")

    where, template = _template(file.parent, chat_template)
    try:
        _compile(template)
    except Exception as e:  # Jinja writes Python, which has limits of its own
        line = f"line {e.lineno}: " if isinstance(e, jinja2.TemplateSyntaxError) else ""
        why = gate.describe(e).removeprefix("TemplateSyntaxError: ")
        raise ValueError(f"{where}: {line}not a Jinja template: {why}") from e
    return Tokenizer(stop_ids=frozenset(stops), template=template, specials=specials, **fields)


# Of a first try in a process of its own: a template is a program, and so is a chain of regular
# expressions. The limit counts CPU seconds, so that other work on the machine does not matter; a
# program that only sleeps is ended by the clock.
_SECONDS, _CLOCK_SECONDS, _BYTES = 6, 60, 2 * 10**9
_PROBES = ("What is 6 * 7?\n", "Solve  it: $x^2 = 4$. " * 20, "a" * 500 + "!", "1" * 200, " " * 99,
           "naïve Ünïcode 漢字 😀 e\u0301 \u200b\x00", "")  # fmt: skip


def _try_out(file: Path, chat_template: str | Path) -> None:
    """Load, encode, decode and render in another process. ValueError: that fails, takes longer than
    _SECONDS or needs more memory than _BYTES."""
    program = [sys.executable, "-m", "dapo_jax.data.tokenizer"]
    program += [str(file), str(chat_template), str(_SECONDS)]
    there = os.environ | {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
    limits = dict(capture_output=True, timeout=_CLOCK_SECONDS)
    try:
        done = subprocess.run(program, env=there, check=False, **limits)
        status, said = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        status, said = None, late.stdout or b""
    if status == 0:
        return
    *_, last = (str(file), *said.decode(errors="replace").splitlines())
    if last.startswith("error: "):
        raise ValueError(last.removeprefix("error: "))
    why = f"ends with exit code {status}: memory over {_BYTES / 1e9:g} GB, or what reads it crashes"
    if status in (None, -signal.SIGXCPU, -signal.SIGKILL):
        why = f"takes more than {_SECONDS} s of the processor"
    raise ValueError(f"{last}: a first try {why}")


def _tried_out(file: Path, chat_template: str, seconds: int) -> None:
    """The work of that process. Prints what it is doing, and 'error: ...' on an error."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    at = f"{file}{' or ' + chat_template if chat_template else ''}"
    print(at, flush=True)
    try:
        made = _load(file, chat_template)
        for text in _PROBES:
            for skip in (True, False):
                made.decode(made.encode(text), skip)
        made.decode(range(200))
        if made.template:
            print(f"{_template(file.parent, chat_template)[0]}: chat template", flush=True)
            made.encode(made.render_chat([("user", "What is 6 * 7?")]))
    except (ValueError, MemoryError) as error:  # errors of a file name it already
        said = gate.describe(error)
        named = isinstance(error, ValueError) and "chat template " not in said
        print(f"error: {said if named else f'{at}: {said}'}", flush=True)
        sys.exit(1)


@contextlib.contextmanager
def _limited(seconds: float):
    """Within the scope, TimeoutError once this thread has used the processor for so long. Only the
    main thread, in which a program renders its prompts, can be stopped like this."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    end = time.thread_time() + seconds

    def look(number, frame) -> None:
        if time.thread_time() > end:
            raise TimeoutError(f"takes more than {seconds} s of the processor")

    before = signal.signal(signal.SIGVTALRM, look)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 0.5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _hugging_face(file: Path) -> tuple[dict, dict[str, int], dict[str, str]]:
    """(fields of `Tokenizer`, token -> id, special tokens that the file itself names)."""
    import tokenizers  # not needed for a SentencePiece model

    text = _text(file)
    # The library raises bare Exceptions, and a panic in Rust is a BaseException.
    with gate.reading(file, what="not a tokenizer.json"), gate.hushed():
        model = tokenizers.Tokenizer.from_str(text)
    model.no_truncation()  # the file may contain the settings of a training run
    model.no_padding()
    ids = model.get_vocab(with_added_tokens=True)

    def encode(text: str) -> list[int]:
        with gate.reading(file, what=f"cannot encode {text[:40]!r}"), gate.hushed():
            return model.encode(text, add_special_tokens=False).ids

    def decode(ids: list[int], skip: bool) -> str:
        with gate.reading(file, what=f"cannot decode the tokens {ids[:9]}"), gate.hushed():
            return model.decode(ids, skip_special_tokens=skip)

    size, unknown = max(ids.values(), default=-1) + 1, getattr(model.model, "unk_token", None)
    fields = dict(vocab_size=size, _encode=encode, _decode=decode, _token=model.id_to_token)
    return fields | {"unknown_id": ids.get(unknown)}, ids, {}


def _sentencepiece(file: Path) -> tuple[dict, dict[str, int], dict[str, str]]:
    """As `_hugging_face`."""
    with gate.reading(file):
        data = file.read_bytes()
    with gate.reading(file, what="not a SentencePiece model"):
        model = sentencepiece.SentencePieceProcessor(model_proto=data)
        if not (size := model.get_piece_size()):
            raise ValueError("it holds no pieces")
    ids = {model.id_to_piece(i): i for i in range(size)}
    control = {piece: i for piece, i in ids.items() if model.is_control(i)}
    marked = frozenset(control.values())
    # SentencePiece itself never reads control pieces from text; Hugging Face tokenizers do.
    marks = re.compile("(" + "|".join(map(re.escape, sorted(control, key=len, reverse=True))) + ")")

    def encode(text: str) -> list[int]:
        parts = marks.split(text) if control else [text]
        return [i for p in parts for i in ([control[p]] if p in control else model.encode(p))]

    def decode(ids: list[int], skip: bool) -> str:
        if skip:
            return model.decode([i for i in ids if i not in marked])
        runs = itertools.groupby(ids, marked.__contains__)
        spelled = lambda run: "".join(map(model.id_to_piece, run))
        return "".join(spelled(run) if mark else model.decode(list(run)) for mark, run in runs)

    fields = dict(vocab_size=size, _encode=encode, _decode=decode, _token=model.id_to_piece)
    own = {"eos_token": model.id_to_piece(model.eos_id())} if model.eos_id() >= 0 else {}
    return fields | {"unknown_id": model.unk_id()}, ids, own


def _vocabulary_file(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        wanted = "tokenizer.json, a SentencePiece *.model, or a folder with one of them"
        raise ValueError(f"{path}: no such file or folder; expected {wanted}")
    for file in (path / "tokenizer.json", path / "tokenizer.model"):
        if file.is_file():
            return file
    models = sorted(path.glob("*.model"))
    if len(models) == 1:
        return models[0]
    wrong = "neither tokenizer.json nor a SentencePiece *.model in this folder"
    if models:
        names = ", ".join(m.name for m in models)
        wrong = f"several SentencePiece models; name one of them: {names}"
    raise ValueError(f"{path}: {wrong}")


def _template(folder: Path, explicit: str | Path) -> tuple[Path, str]:
    """(file it came from, Jinja source)."""
    if explicit:
        return Path(explicit), _text(Path(explicit))
    config = folder / "tokenizer_config.json"
    found = _json(config).get("chat_template")
    if isinstance(found, str):
        return config, found
    file = folder / "chat_template.jinja"
    return file, _text(file) if file.is_file() else ""


class _Sandbox(ImmutableSandboxedEnvironment):
    """Raises on a forbidden attribute. Jinja's own sandbox would return an 'undefined' that prints
    as nothing, although a template that reads such an attribute is wrong or hostile."""

    def unsafe_undefined(self, obj: Any, attribute: str):
        raise SecurityError(f"attribute {attribute!r} of a {type(obj).__name__} is not allowed")


@functools.lru_cache(maxsize=8)
def _compile(source: str) -> jinja2.Template:
    """Compile with the settings of Hugging Face's `apply_chat_template`, but without its clock: a
    prompt that changes with the date would make a run impossible to repeat."""
    env = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.filters["tojson"] = lambda x, **kw: json.dumps(x, **{"ensure_ascii": False} | kw)

    def raise_exception(message: str):
        raise jinja2.TemplateError(message)

    env.globals["raise_exception"] = raise_exception
    return env.from_string(source)


def _text(file: Path) -> str:
    if file.exists() and not file.is_file():
        raise ValueError(f"{file}: is no file")  # a pipe would never end
    with gate.reading(file):
        data = file.read_bytes()
    with gate.reading(file, what="not UTF-8 text"):
        return data.decode("utf-8")


def _json(file: Path) -> dict:
    """The object in a JSON file, {} if there is no such file."""
    if not file.is_file():
        return {}
    text = _text(file)
    with gate.reading(file, what="not valid JSON"):
        value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"{file}: expected a JSON object, found a {type(value).__name__}")
    return value


if __name__ == "__main__":
    _tried_out(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
