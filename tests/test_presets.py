"""Every number of a preset beside the source that gives it: none is without one."""

import tomllib
from pathlib import Path

import pytest

from dapo_jax import config
from dapo_jax.config import presets

TABLE = tomllib.loads((Path(__file__).parent / "data" / "presets.toml").read_text())
PRESETS = {name: getattr(config, name) for name in ("base", "paper", "verl", "vapo")}
PRESETS |= presets.RECIPES


@pytest.mark.parametrize("name", sorted(PRESETS.keys() - {"base"}))
def test_a_preset_has_the_numbers_of_its_sources_and_no_others(name):
    wanted = PRESETS[TABLE[name]["start"]]()
    for fields in TABLE[name]["sources"].values():
        wanted.update(fields)
    assert config.leaves(PRESETS[name]()) == config.leaves(wanted)
