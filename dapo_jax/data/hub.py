"""Data sets of the Hugging Face hub by name: OWNER/NAME[@REVISION][:PATTERN].

Files are downloaded once and then read from the hub's cache. The pattern chooses among them, and
may be left out if there is only one. A download that the network breaks off goes on where it was,
by the hub's own client; where the network stays away longer, or the hub answers that it is busy, it
is tried again for a minute.
"""

import fnmatch
import glob
import re
from collections.abc import Sequence
from pathlib import Path

from dapo_jax import gate

_HUB = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?(?::(.+))?")


def named(name: str, suffixes: Sequence[str]) -> bool:
    """Whether a name has the form of a hub data set and is not a local file. suffixes: of files."""
    match = _HUB.fullmatch(name)
    if not match or name.startswith((".", "~")):
        return False
    plain = not match[3] and name.endswith(tuple(suffixes))
    return not plain and not Path(name).exists()


def fetch(name: str, suffixes: Sequence[str]) -> list[Path]:
    """The files of a data set that the name chooses, in the hub's cache. ValueError: they are not
    to be had; the name chooses none of several."""
    import huggingface_hub  # not needed for local files

    repo, revision, pattern = _HUB.fullmatch(name).groups()
    about = dict(repo_id=repo, repo_type="dataset", revision=revision)
    get = lambda file: Path(huggingface_hub.hf_hub_download(filename=file, **about))
    with gate.reading(name, what="no such file, and not to be had as a data set of the hub"):
        if pattern and not glob.has_magic(pattern):  # found in the cache without a network
            return [gate.download(name, lambda: get(pattern))]
        listing = lambda: huggingface_hub.HfApi().list_repo_files(**about)
        every = gate.download(name, listing)
    files = sorted(f for f in every if f.endswith(tuple(suffixes)))
    chosen = [f for f in files if fnmatch.fnmatchcase(f, pattern)] if pattern else files
    if not chosen or (len(chosen) > 1 and not pattern):
        has = f"the data set has {', '.join(files)[:500] or 'none that can be read'}"
        raise ValueError(f"{name}: say which file, as {repo}:FILE or {repo}:PATTERN; {has}")
    with gate.reading(name):
        return [gate.download(f"{repo}:{file}", lambda file=file: get(file)) for file in chosen]
