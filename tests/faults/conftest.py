"""The server and the uninterrupted run that others are compared with."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import harness


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    server = harness.Server(tmp_path_factory.mktemp("server"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def whole(server, tmp_path_factory):
    """The workdir of a run that nothing happened to."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    server.run(workdir)
    return workdir
