"""Vectors of the released Qwen2.5 tokenizer, small tokenizers made here, the sandbox, errors."""

import gzip
import json
import unicodedata

import numpy as np
import pytest
import tokenizers
from tables import cases

from dapo_jax.data import arithmetic, tokenizer
from dapo_jax.data.tokenizer import load


@pytest.fixture(scope="module")
def qwen(assets):
    """The released Qwen2.5 tokenizer."""
    template = assets / "tokenizer" / "chat_template_qwen2.5_instruct.jinja"
    return load(template.parent, template)


@pytest.fixture
def folder(tmp_path):
    """A word-level tokenizer.json with Qwen's special tokens as ids 6, 7, 8; 5 and 9..19 unused."""
    vocab = {"six": 0, "seven": 1, "user": 2, "assistant": 3, "<unk>": 4, "far": 20}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    model.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A <|im_end|>", special_tokens=[("<|im_end|>", 8)]
    )
    model.enable_truncation(2)
    model.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture
def words(tmp_path):
    """The embedded task's SentencePiece model, in words.model; </s> is its only control piece."""
    file = tmp_path / "words.model"
    arithmetic.write_tokenizer(file)
    return file


CHAT = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful "
    "assistant.<|im_end|>\n<|im_start|>user\n",
    "<|im_end|>\n<|im_start|>assistant\n",
)


def test_qwen_vectors(assets, qwen):
    """The rendered conversations among them come out of `render_chat` letter by letter."""
    released = assets / "tokenizer"
    lines = (released / "llamacpp_qwen2_vectors.jsonl").read_bytes().splitlines()
    lines += gzip.decompress((released / "real_text_golden.jsonl.gz").read_bytes()).splitlines()
    vectors = [(v["text"], v["ids"]) for v in map(json.loads, lines)]
    chats = [(t, ids) for t, ids in vectors if t.startswith(CHAT[0]) and t.endswith(CHAT[1])]
    assert (len(vectors), len(chats)) == (474, 50)
    for text, ids in vectors:
        assert qwen.encode(text) == ids
        assert qwen.decode(ids, skip_special=False) == unicodedata.normalize("NFC", text)
    for text, ids in chats:
        asked = [("user", text.removeprefix(CHAT[0]).removesuffix(CHAT[1]))]
        assert qwen.render_chat(asked) == text and qwen.chat(asked) == ids


def test_qwen_facts(assets, qwen):
    facts = json.loads((assets / "tokenizer" / "tokenizer_facts.json").read_text())
    assert qwen.vocab_size == facts["len_tokenizer"] == 151665
    assert qwen.stop_ids == {151643, 151645}
    for token in facts["added_tokens"]:
        assert qwen.token(token["id"]) == token["content"]
        assert qwen.encode(token["content"]) == [token["id"]]
        assert qwen.decode([token["id"]]) == ("" if token["special"] else token["content"])
    assert qwen.token(279) == "Ġthe"
    ids = np.array([151935, *qwen.encode("six times seven"), 152063, -1], np.int32)
    assert qwen.decode(ids) == "six times seven"  # other rows of the embedding have no token


def test_special_tokens_in_text_and_skip_special(folder):
    tok = load(folder)
    assert tok.encode("six seven six") == [0, 1, 0]  # the file's truncation and added token are off
    assert load(folder / "tokenizer.json").encode("six") == [0]
    ids = tok.encode("<|im_start|> six<|im_end|>")
    assert ids == [7, 0, 8]
    assert tok.decode(ids) == "six"
    assert tok.decode(ids, skip_special=False) == "<|im_start|> six <|im_end|>"
    assert tok.decode([0, 5, 19, 1, 21]) == "six seven"
    assert [tok.token(i) for i in (1, 5, 8, 20, 21)] == ["seven", "", "<|im_end|>", "far", ""]
    assert tok.vocab_size == 21  # largest id + 1, not the number of tokens
    assert tok.unknown_words("six times seven, six times nine") == ["times", "seven,", "nine"]
    assert tok.unknown_words("six seven") == []


def test_stop_ids_come_from_qwen_names_and_both_configs(folder):
    assert load(folder).stop_ids == {6, 8}
    (folder / "generation_config.json").write_text('{"eos_token_id": [1]}')
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "six"}}')
    assert load(folder).stop_ids == {6, 8, 0, 1}
    (folder / "generation_config.json").write_text('{"eos_token_id": 4}')
    (folder / "tokenizer_config.json").write_text('{"eos_token": "six", "pad_token": null}')
    assert load(folder).stop_ids == {6, 8, 0, 4}


LOOPS = "{% for i in range(99999) %}" * 2 + "{% endfor %}" * 2
TEMPLATES = {
    LOOPS: "a first try takes more than 1 s of",
    "{% for i in [1] %}" * 25 + "{% endfor %}" * 25: "not a Jinja template: SyntaxError: too many",
    "{% if 1 %}" * 200 + "{% endif %}" * 200: "not a Jinja template: IndentationError",
    "{{ " + "[" * 500 + "]" * 500 + " }}": "not a Jinja template: nested too deeply",
    "{{ messages" + ".a" * 5000 + " }}": "not a Jinja template: nested too deeply",
}
DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
SLOW = {
    "model": {"type": "WordLevel", "vocab": {"<|im_end|>": 0, "six": 1}, "unk_token": "six"},
    "normalizer": {"type": "Sequence", "normalizers": [DOUBLE] * 45},
}
REFUSED = [
    *cases("tokenizer_refused"),
    *(dict(files={"chat_template.jinja": text}, named=named) for text, named in TEMPLATES.items()),
    dict(files={"tokenizer_config.json": "[" * 100_000}, named="not valid JSON"),
    dict(files={"tokenizer.json": json.dumps(SLOW)}, named="a first try takes more than 1 s of"),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: f"{case['named']} {case['files']}"[:60])
def test_refused_files_are_named(folder, case, capfd, monkeypatch):
    monkeypatch.setattr(tokenizer, "_SECONDS", 1)  # of the processor
    for name, text in case["files"].items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"\xff\xfe" if text is None else text.encode())
    template = folder / case["template"] if "template" in case else ""
    with pytest.raises(ValueError, match=case["named"]) as e:
        load(folder / case.get("path", "."), template)
    assert str(folder) in str(e.value) and "\n" not in str(e.value)
    assert capfd.readouterr().err == ""  # no panic beside it


def test_template_order(folder):
    tok = load(folder)
    with pytest.raises(ValueError, match="no chat template: name a Jinja file"):
        tok.chat([("user", "six")])
    (folder / "chat_template.jinja").write_text("from jinja file")
    assert load(folder).render_chat([]) == "from jinja file"
    (folder / "tokenizer_config.json").write_text('{"chat_template": "from config"}')
    assert load(folder).render_chat([]) == "from config"
    (folder / "mine.txt").write_text("explicit")
    assert load(folder, folder / "mine.txt").render_chat([]) == "explicit"


def test_whitespace_specials_and_filters_are_those_of_hugging_face(folder):
    (folder / "chat_template.jinja").write_text(
        "  {% if true %}\n{{ eos_token }}|{{ messages[0] | tojson }}\n  {% endif %}\n"
        "{% for m in messages %}{{ loop.index }}{% break %}{% endfor %}"
    )
    (folder / "tokenizer_config.json").write_text('{"eos_token": "six"}')
    tok = load(folder)
    text = tok.render_chat([("user", "<é>"), ("user", "x")])
    assert text == 'six|{"role": "user", "content": "<é>"}\n1'
    assert tok.chat([("user", "<é>")]) == tok.encode(text)


def test_sentencepiece_words(words, tmp_path):
    tok = load(tmp_path)
    assert tok.encode("") == []
    ids = tok.encode("f 4 g + 2")
    assert len(ids) == 5 and load(words).encode("f 4 g + 2") == ids
    assert [tok.token(i) for i in ids] == ["▁f", "▁4", "▁g", "▁+", "▁2"]
    assert tok.decode(ids) == "f 4 g + 2"
    (eos,) = tok.stop_ids
    assert tok.token(eos) == "</s>"
    assert tok.encode("f 4</s>g") == [*ids[:2], eos, ids[2]]
    assert tok.decode([*ids, eos]) == "f 4 g + 2"
    assert tok.decode([*ids, eos, ids[0]], skip_special=False) == "f 4 g + 2</s>f"
    assert tok.decode([*ids, tok.vocab_size, -1]) == "f 4 g + 2"
    assert tok.token(tok.vocab_size) == "" and tok.token(tok.vocab_size - 1)
    (tmp_path / "chat_template.jinja").write_text("f{{ eos_token }}")
    assert load(tmp_path).chat([]) == [ids[0], eos]
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "▁f"}')
    assert load(tmp_path).stop_ids == {eos, ids[0]}


def test_sentencepiece_errors(words, tmp_path):
    whole = words.read_bytes()
    for bad in (b"", b"\x00garbage", whole[:40]):
        words.write_bytes(bad)
        with pytest.raises(ValueError, match="not a SentencePiece model") as e:
            load(tmp_path)
        assert "\n" not in str(e.value)
    (tmp_path / "b.model").write_bytes(whole)
    with pytest.raises(ValueError, match="several SentencePiece .* of them: b.model, words.model"):
        load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(whole)
    assert load(tmp_path).decode([2, 3]) == "0 1"  # words.model is damaged still


def test_a_template_that_is_slow_on_a_row_alone_is_one_line(folder, monkeypatch):
    monkeypatch.setattr(tokenizer, "_SECONDS", 1)
    slow = "{% if 'seven' in messages[0].content %}" + LOOPS + "{% endif %}"
    (folder / "chat_template.jinja").write_text(slow + "{{ messages[0].content }}")
    made = load(folder)
    assert made.render_chat([("user", "six")]) == "six"
    with pytest.raises(ValueError, match="failed: takes more than 1 s of the .* in .*six seven"):
        made.render_chat([("user", "six seven")])
    assert made.render_chat([("user", "six")]) == "six"  # the clock is off again


def test_half_of_a_surrogate_pair_is_one_line(folder, words):
    for made in (load(folder), load(words)):
        with pytest.raises(ValueError, match="is no text: UnicodeEncodeError"):
            made.encode("six \udcff")
