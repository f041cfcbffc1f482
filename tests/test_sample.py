"""python -m dapo_jax.sample: what it shows is what was drawn, whole characters at a time."""

import copy
import json
import re

import jax
import numpy as np
import pytest
import tokenizers
from tiny_config import __file__ as CONFIG, get_config as tiny
from tokenizers.pre_tokenizers import ByteLevel

from dapo_jax import sample
from dapo_jax.data import prompts, tokenizer as tokenizer_lib
from dapo_jax.model import hf, qwen2


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory):
    """A token a byte, as every byte-level vocabulary can fall back to."""
    vocab = {x: i for i, x in enumerate([*sorted(ByteLevel.alphabet()), "<end>"])}
    folder = tmp_path_factory.mktemp("bytes")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    made.save(str(folder / "tokenizer.json"))
    about = {"eos_token": "<end>", "chat_template": "{{ messages[0].content }}!"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return tokenizer_lib.load(folder), folder


@pytest.fixture(scope="module")
def model(tmp_path_factory, byte_tokenizer):
    """The config of a random model with that vocabulary."""
    c = tiny()
    c.model.vocab_size = 264
    shape = qwen2.shape_from_config(c)
    folder = tmp_path_factory.mktemp("model")
    hf.save(folder, shape, qwen2.init(shape, jax.random.key(0)), tokenizer_dir=byte_tokenizer[1])
    c.model.path, c.data.train = str(folder), "not read"
    c.reward.update({"overlong_buffer_tokens": 0, "overlong_penalty": 0.0})
    return c


def test_characters_come_whole(byte_tokenizer):
    tokenizer, _ = byte_tokenizer
    text = "2 × 3 = 六, 好 🙂 ok"
    ids = [*tokenizer.encode(text), *tokenizer.stop_ids]
    for step in (1, 2, 3, 5):
        shown = []
        screen = sample.Screen(tokenizer, 1, 100, False, shown.append)
        for i in range(0, len(ids), step):
            screen(0, i, np.array(ids[i : i + step]), np.zeros(len(ids[i : i + step])))
            assert text.startswith("".join(shown).removesuffix("\n"))
        assert "".join(shown) == text + "\n"
    # bytes that are no text are shown at the end, and not waited for forever
    broken = tokenizer.encode("好")[:2]
    shown = []
    sample.Screen(tokenizer, 1, 2, False, shown.append)(0, 0, np.array(broken), np.zeros(2))
    assert "".join(shown).strip("\n") == tokenizer.decode(broken)


def test_completions_come_in_order_and_may_start_again(byte_tokenizer):
    tokenizer, _ = byte_tokenizer
    shown, end = [], next(iter(tokenizer.stop_ids))
    screen = sample.Screen(tokenizer, 2, 4, False, shown.append)
    say = lambda i, start, text, *stop: screen(
        i, start, np.array([*tokenizer.encode(text), *stop]), np.zeros(len(text) + len(stop))
    )
    say(0, 0, "ab")  # nothing yet of the second
    say(1, 0, "xyzw")
    assert "".join(shown) == "--- 1 of 2\nab"
    say(0, 0, "ab")  # made again from its beginning
    say(0, 2, "c", end)
    assert "".join(shown) == "--- 1 of 2\nabc\n--- 2 of 2\nxyzw\n"


def test_replies_are_marked(byte_tokenizer):
    tokenizer, _ = byte_tokenizer
    end = [*tokenizer.stop_ids]
    parts = [("4 + 2", -1.0), ("\n6\x1b", np.inf), ("So 6", -1.0)]
    ids = [(tokenizer.encode(text), logp) for text, logp in parts]
    tokens = [*ids[0][0], *end, *ids[1][0], *ids[2][0], *end]
    logps = [-1.0] * 6 + [np.inf] * len(ids[1][0]) + [-1.0] * 5
    for probs, want in ((False, "4 + 2\n[reply: 6\\u{1b}]\nSo 6\n"), (True, " 0.36788  '4'\n")):
        shown = []
        sample.Screen(tokenizer, 1, 99, probs, shown.append)(
            0, 0, np.array(tokens), np.array(logps)
        )
        assert "".join(shown).startswith(want) and ("   reply  '6'\n" in shown) == probs


def draws(c, prompt="6 * 7", **settings):
    shown = []
    texts = sample.sample(c, "/nowhere", prompt, write=shown.append, **settings)
    return texts, "".join(shown)


@pytest.mark.slow
def test_shown_is_drawn(model):
    c = copy.deepcopy(model)
    texts, shown = draws(c, n=3, max_tokens=20)
    told = enumerate(map(prompts.visible, texts), 1)
    assert shown == "".join(f"--- {i} of 3\n{t}\n" for i, t in told)
    assert len(set(texts)) == 3
    assert draws(c, n=2, max_tokens=20)[0] == texts[:2]
    c.eval.temperature = 0.0
    greedy, _ = draws(c, n=2, max_tokens=20)
    assert greedy[0] == greedy[1]
    c.tokenizer.chat = True  # whose template adds a '!'
    chat, _ = draws(c, n=1, max_tokens=20)
    c.tokenizer.chat = False
    assert chat != greedy[:1] and chat == draws(c, "6 * 7!", n=1, max_tokens=20)[0]


@pytest.mark.slow
def test_turns_are_answered(model, tmp_path):
    """What is shown is the row with its replies, and a tool that fails is a line."""
    c, (tool, reply) = copy.deepcopy(model), (tmp_path / "tool.py", "def reply(problem, said):\n")
    tool.write_text(
        f"from dapo_jax.reward.tools import Reply\n{reply}"
        "    return Reply(f'{problem.messages[0][1]} {len(said)}')\n"
    )
    c.rollout.turns, c.rollout.max_response_tokens, c.reward.reply = 2, 400, f"{tool}:reply"
    texts, shown = draws(c, n=2, max_tokens=400)
    for text, seen in zip(texts, shown.split("--- ")[1:], strict=True):
        replies = re.findall(r"^\[reply: 6 \* 7 (\d)\]$", seen, re.M)
        assert replies == ["1", "3"][: text.count("6 * 7")]
    assert "[reply: 6 * 7 1]" in shown
    tool.write_text(f"{reply}    1 / 0\n")
    with pytest.raises(ValueError, match="division by zero"):
        draws(c, n=2, max_tokens=400)


def test_refusals_and_a_warning(model, tmp_path, capsys):
    for prompt, wrong in (("x" * 33, "33 tokens; 1 to .* = 32 are allowed"), ("", "0 tokens")):
        with pytest.raises(ValueError, match=f"prompt: {wrong}"):
            draws(model, prompt, n=1, max_tokens=4)
    words = tokenizers.models.WordLevel({"<unk>": 0, "</s>": 1}, unk_token="<unk>")
    tokenizers.Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    model.tokenizer.path = str(tmp_path)
    with pytest.raises(ValueError, match="prompt: 0 tokens"):
        sample.load(model, str(tmp_path), n=1, max_tokens=4, prompts=["\x1b[2J" + "x" * 9000, ""])
    model.tokenizer.path, said = "", capsys.readouterr().err
    assert said.startswith(r"warning: the tokenizer does not know ['\x1b[2Jx") and len(said) < 600


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ([], "prompt: missing; it is written behind the flags, in quotes\n"),
        (["x"], "--workdir: name the run to sample from"),
        (["--top_p=2", "--workdir=.", "x"], "config.eval.top_p: 2.0 is too large"),
    ],
)
def test_the_command_says_what_is_missing_or_wrong(shell, arguments, wrong):
    done = shell.python("-m", "dapo_jax.sample", f"--config={CONFIG}", *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {wrong}") and done.stderr.count("\n") == 1


def test_the_command_shows_probabilities(shell, model):
    limits = (f"--config.model.path={model.model.path}", "--n=2", "--max_tokens=5", "--probs", "6")
    done = shell.python("-m", "dapo_jax.sample", f"--config={CONFIG}", *limits)
    assert done.returncode == 0, done.stderr
    head, *parts = re.split(r"--- [12] of 2\n", done.stdout)
    assert not head and len(parts) == 2
    for part in parts:
        rows = [re.fullmatch(r" *(\d\.\d{5})  '.+'", line) for line in part.splitlines()]
        assert 1 <= len(rows) <= 5 and all(0 < float(row[1]) <= 1 for row in rows)
