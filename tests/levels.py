"""How much the compiler does: `compiled_soon` for what is not about its programs; the pods' one."""

import contextlib
import importlib.util
import os

import pytest
import typed
from jax._src import compiler

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (jax[tpu])"
)

# A case of a test.
slow = lambda *case: pytest.param(*case, marks=pytest.mark.slow)
nightly = lambda *case: pytest.param(*case, marks=pytest.mark.nightly)


@contextlib.contextmanager
def compiled_soon():
    """As `typed.SOON` says, what is compiled within, here and by processes that are started. Also a
    decorator of tests. A program that is there already is left as it is."""
    usual = compiler.get_compile_options

    def options(*arguments, env_options_overrides=None, **named):
        both = typed.OPTIONS | (env_options_overrides or {})
        return usual(*arguments, env_options_overrides=both, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "get_compile_options", options)
        patch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {typed.SOON}")
        yield
