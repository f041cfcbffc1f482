"""`python tests/pinned.py MODULE FLAGS`: a command of the package with the hashes of published sets
that the environment's PINS names, as JSON of name -> SHA-256: for files that a test has made."""

import json
import os
import runpy
import sys

from dapo_jax.data import published

if __name__ == "__main__":
    for name, sha256 in json.loads(os.environ["PINS"]).items():
        published.SETS[name] = published.SETS[name]._replace(sha256=sha256)
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
