"""The race's one judge: base model, problems, and held-out accuracy of the weights racers write.

All weights, whoever trained them, are sampled by the same program with the same random numbers, in
a process of its own: evaluation costs no racer anything.
"""

import contextlib
import io
import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import tokenizers

from dapo_jax import build, config as config_lib
from dapo_jax.data import arithmetic, problems
from dapo_jax.data.tokenizer import load as load_tokenizer
from dapo_jax.evaluation import sampling
from dapo_jax.model import hf

PAD = 47  # an id that no text uses


def make_base(base: pathlib.Path, root: pathlib.Path, warmup: dict) -> None:
    """Trains the base by the trainer's own warm-up, exports it by its own converter, and writes
    problems and vocabulary beside it. Left alone where it is whole."""
    if (base / "vocabulary.json").exists():
        return
    run = base.with_name(base.name + "_run")
    python = [sys.executable, "-m"]
    fields = {"steps": 0, "eval.top_p": 1.0} | warmup
    command = [*python, "dapo_jax.train", f"--config={root}/configs/quickstart.py"]
    command += [f"--workdir={run}", *(f"--config.{k}={v}" for k, v in fields.items())]
    subprocess.run(command, check=True, cwd=root)
    if not base.exists():
        command = [*python, "dapo_jax.convert", "to-hf", str(run), str(base), "--dtype=float32"]
        subprocess.run(command, check=True, cwd=root)
    arithmetic.write(base)
    write_vocabulary(base)


def write_vocabulary(base: pathlib.Path) -> None:
    """Beside the problems of `base`: train.json, [prompt, answer] each; a tokenizer for
    `transformers`; vocabulary.json, word -> token id."""
    tok = load_tokenizer(base / "tokenizer.model")
    rows, _ = problems.read([base / "train.jsonl"])
    texts = [[row.messages[-1][1], row.answer] for row in rows]
    (base / "train.json").write_text(json.dumps(texts))
    words = {tok.token(i).removeprefix("▁"): i for i in range(tok.vocab_size)}
    write_tokenizer(base, words)
    check_tokenizer(base, tok, [text for text, _ in texts])
    (base / "vocabulary.json").write_text(json.dumps(words))


def write_tokenizer(base: pathlib.Path, words: dict[str, int]) -> None:
    """tokenizer.json and tokenizer_config.json, for `transformers`: a word is a token."""
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = [word for word, i in words.items() if i in (0, 1, PAD)]
    model.add_special_tokens(special)
    model.save(str(base / "tokenizer.json"))
    names = {i: word for word, i in words.items()}
    settings = {"unk_token": names[0], "eos_token": names[1], "pad_token": names[PAD]}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    (base / "tokenizer_config.json").write_text(json.dumps(settings))


def check_tokenizer(base: pathlib.Path, ours, texts) -> None:
    theirs = tokenizers.Tokenizer.from_file(str(base / "tokenizer.json"))
    for text in texts:
        ids = ours.encode(text)
        if theirs.encode(text).ids != ids or theirs.decode(ids) != ours.decode(ids):
            raise ValueError(f"{base}/tokenizer.json reads {text!r} in another way than ours")


def write_order(base: pathlib.Path, seed: int, n: int) -> None:
    """The first n positions of a seed's stream of problems: the same for all."""
    path = base / f"order_{seed}.json"
    if not path.exists() or len(json.loads(path.read_text())) < n:
        stream = problems.stream(range(len(json.loads((base / "train.json").read_text()))), seed)
        path.write_text(json.dumps([int(stream[i]) for i in range(n)]))


class Judge:
    """Held-out accuracy of Hugging Face directories of the base's shape."""

    def __init__(self, base: pathlib.Path):
        c = config_lib.base()
        c.model.path, c.tokenizer.path = str(base), str(base / "tokenizer.model")
        c.data.train = str(base / "heldout.jsonl")  # is read by name only
        c.eval.files = f"heldout={base / 'heldout.jsonl'}"
        self.c, self.base = c, base
        self.text = build.load_text(c, base, base)
        tok = self.text.tokenizer
        self.machine = build.build_machine(c, tok.vocab_size, tok.stop_ids, base)

    def accuracy(self, directory: pathlib.Path) -> float:
        text = self.text
        decode_params = self.machine.engine.decode_params(self._load(directory))
        draw = build.evaluation_draw(self.c, top_p=1.0)
        evaluator = sampling.Evaluator(self.machine, decode_params, text, self.c.eval.k)
        (scores,) = sampling.evaluate(evaluator, [(text.evals["heldout"], draw)])
        return scores.headline()["avg@k"]

    def require_base(self, directory: pathlib.Path) -> None:
        """ValueError where the weights of `directory` are not the base's, bit for bit: a racer
        that has read and written them wrongly has trained something else."""
        ours, theirs = (jax.device_get(self._load(d)) for d in (self.base, directory))
        if not jax.tree.all(jax.tree.map(np.array_equal, ours, theirs)):
            raise ValueError(f"{directory}: these are not the weights that the run began with")

    def _load(self, directory):
        with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
            m = self.machine
            return hf.load_params(directory, m.shape, m.mesh, self.c.sharding.train.to_dict())


def logits_gap(base: pathlib.Path, racers: dict[str, list[str]], env) -> dict[str, float]:
    """Largest |difference| from our logits, of each other racer, on 4 x 16 token ids."""
    tokens = base / "tokens.npy"
    np.save(tokens, np.random.default_rng(0).integers(2, 44, (4, 16)))
    found = {}
    for name, command in racers.items():
        out = base / f"logits_{name}.npy"
        arguments = [f"--base={base}", f"--out={out}", f"--logits={tokens}", "--steps=0"]
        subprocess.run([*command, *arguments], check=True, env=env | {"TQDM_DISABLE": "1"})
        found[name] = np.load(out)
    (_, ours), *others = found.items()
    return {name: float(np.abs(x - ours).max()) for name, x in others}


def environment(root: pathlib.Path) -> dict[str, str]:
    """One thread, huge pages, no compilation cache: every racer starts cold."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    path = os.pathsep.join(filter(None, [str(root), env.get("PYTHONPATH", "")]))
    return env | {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TOKENIZERS_PARALLELISM": "false",
    }
