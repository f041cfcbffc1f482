"""DAPO (arXiv 2503.14476) in JAX: a sharded Flax Qwen2.5, a jitted sampler and a jitted update."""

import os
import signal
import sys


def leave(*_, end=os._exit) -> None:  # the real one, whatever a reward is kept from
    """Ends the process at a Ctrl-C."""
    os.write(2, b"interrupted\n")
    end(130)  # 128 + SIGINT


# A command, `python -m dapo_jax.NAME`, imports for seconds from here on. A KeyboardInterrupt in
# there would be a stack, or be lost in a library that tries what it can import; config/cli.py has
# it again as soon as it could be handled.
_command = any(word.split(".")[0] == "dapo_jax" for word in sys.orig_argv)
if _command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, leave)
for _name, _mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")) if _command else ():
    if getattr(sys, _name) is None:  # closed by the caller: a file would get its descriptor
        setattr(sys, _name, open(os.devnull, _mode))  # noqa: SIM115
