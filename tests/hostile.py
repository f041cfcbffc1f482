"""Inputs that parsers stumble over: tables from which test_fuzz.py draws."""

import pyarrow as pa

# Values of flags and fields. A shell would run some of these; nothing here is given to one.
TEXTS = [
    "", "0", "-1", "nan", "inf", "1e999", "-0.0", "0x10", "1_0", "True", "None", "[", "{}", "a=b",
    "é", "\udc80", "../../etc", "--help", "{c.seed}", "%s", "a,b", ",", "~", "~/nope", "gs://", "|",
    "file:///x", "foo://x", "/dev/null", "/proc/nope", ".", "data,data", "fsdp", "x" * 5000,
    str(2**31), str(2**63), str(2**64), "9" * 400, "1e-320", "1e300", "99999999999", "7", "3.5",
    "\x00", "$(touch owned)", "`touch owned`", "; touch owned",
]  # fmt: skip
NUMBERS = ["0", "1", "2", "0.5", "-1", "1e300", "9" * 30, "nan", "x", ""]
SLICES = ["v5e-8", "v5p-16", "v5litepod-4", "2xv6e-16"]
NAMES = ["seed.x", "optim", "__class__", "optim.__dict__", "optim.lr.", "..", "", "a.b", "lrr"]
LIKELY = {  # values of a field by its type, beside its default, bounds and choices
    int: [0, 1, 2, 3, 8, 64, 1000, -1, 2**22, 2**31 - 1],
    float: [0.0, 1e-30, 1e-6, 0.5, 1.0, 2.0, 1e3, 1e6, 1e12, -1.0],
    bool: [True, False],
    str: [],
}

SCALARS = [  # in JSON
    None, True, False, 0, 1, -1, 42, 2**31, 2**64, 10**400, 0.5, 1e300, float("nan"), float("inf"),
    "", "x", "42", "4.0", "1e5", "qwen2", "é", "a" * 3000, "{{ x }}", "\x00",
]  # fmt: skip
DEEP = [b"[" * 90000, b'{"a":' * 90000]

STATEMENTS = [  # of a config file
    "1 / 0", "assert False", "raise SystemExit(2)", "raise KeyError('x')", "import nothing_there",
    "c.optim.lr = 'fast'", "c.optim.learning_rate = 1.0", "c.nope.x = 1", "c.seed = -1", "c = None",
    "c.sampling.dynamic = False", "c.eval = 3", "del c.seed", "return c.optim", "c.optim = c.loss",
    "c.rollout.groups = 2**70", "c.model.num_layers = 0", "open('/nope')", "c.steps = True",
    "c.loss.clip_low = None", "return get_config()", "c.update({'a': 1})",
    "c.update({'seed.a': 1})", "c.update({'optim': {'rows': 3}})",
    "c.update({'reward.verifier': 5})", "c.update(5)", "c.(",
    "c.mesh.data = 3", "exit()", "c.loop = c", "c.reward.mode = 'dapo'", "raise RecursionError",
    "def f(:", "\x00", "é", "c.optim = None", "x = " + "-" * 5000 + "1", "raise MemoryError",
    "c.optim.lr = float('nan')", "c['optim.lr'] = 3", "c.rollout = c.optim", "return {}",
    "c.__dict__.clear()", "object.__setattr__(c.optim, 'lr', 'x')",
]  # fmt: skip

ROWS = [
    {"question": "1 + 1", "answer": "2"},
    {"problem": "1 + 1", "solution": "so \\boxed{2}"},
    {"prompt": [{"role": "user", "content": "1 + 1"}], "reward_model": {"ground_truth": "2"}},
]
COLUMNS = [  # of a parquet file
    lambda: pa.array([2**31 - 1, 0], pa.int32()).view(pa.date32()),
    lambda: pa.array([2**62, 1], pa.int64()).view(pa.duration("s")),
    lambda: pa.array([2**62, 1], pa.int64()).view(pa.timestamp("us")),
    lambda: pa.array([2**62, 1], pa.int64()).view(pa.time64("us")),
    lambda: pa.array([2.5, float("nan")]),
    lambda: pa.array([2.0, 1e300]),
    lambda: pa.array([b"\xff", b"2"]),
    lambda: pa.array([[1], None]),
    lambda: pa.array([{"a": 1}, {"a": 2}]),
    lambda: pa.array([True, False]),
    lambda: pa.array(["2", "3"]).dictionary_encode(),
    lambda: pa.nulls(2),
]

_LETTERS = {c: i + 2 for i, c in enumerate("abcdefghijklmnopqrstuvwxyz0123456789 +*?\\")}
_WORDS = {"type": "WordLevel", "vocab": {"</s>": 0, "[UNK]": 1, **_LETTERS}, "unk_token": "[UNK]"}
_PIECE = {"continuing_subword_prefix": "##", "max_input_chars_per_word": 9}
TOKENIZERS = [
    {"model": _WORDS, "added_tokens": []},
    {"model": _WORDS, "pre_tokenizer": {"type": "Whitespace"}, "decoder": {"type": "Fuse"}},
    {"model": {**_WORDS, "type": "BPE", "merges": []}},
    {"model": {**_WORDS, "type": "WordPiece", **_PIECE}},
    {"model": {"type": "Unigram", "vocab": [["</s>", 0.0], ["1", -1.0]], "unk_id": 0}},
]
_DOUBLE = {"type": "Replace", "pattern": {"String": "1"}, "content": "11"}
_SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
PARTS = [  # of a tokenizer
    *({"normalizer": {"type": t}} for t in ("NFKC", "Lowercase", "Nope", "StripAccents")),
    *({"pre_tokenizer": {"type": "FixedLength", "length": n}} for n in (0, 1, -1)),
    *({"decoder": {"type": "Strip", "content": " ", "start": n, "stop": n}} for n in (0, 5)),
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA/w=="}},
    {"normalizer": {"type": "Sequence", "normalizers": [_DOUBLE] * 40}},
    *(
        {"pre_tokenizer": {**_SPLIT, "pattern": {"Regex": regex}}}
        for regex in ("(a+)+$", "^(a|aa)+$", "(", "\\p{L}+", "")
    ),
]
TEMPLATE = [  # parts of a chat template
    "{{ messages }}", "{{ messages[0].content }}", "{% for m in messages %}", "{% endfor %}", "{{",
    "{% if x %}", "{% endif %}", "{% break %}", "{{ 'a' * 10**10 }}", "{{ 1/0 }}", "{{ x.y.z }}",
    "{{ lipsum(n=10**7) }}", "{{ '%0999999999d'|format(1) }}", "{{ [1]|slice(10**9)|list }}",
    "{{ messages|tojson(indent=10**9) }}", "{{ raise_exception('no') }}", "{% macro f() %}",
    "{% endmacro %}", "{{ f() }}", "{{ ''.__class__ }}", "{{ " + "(" * 3000, "{# ",
    "{{ " + "not " * 5000, "{% include 'x' %}", "text", "{{ messages|sum }}",
    "{{ range(10**9)|list }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
]  # fmt: skip
