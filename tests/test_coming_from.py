"""docs/coming_from.md: every field there is one of ours, and stands where our hints send theirs."""

import re

from pages import DOCS

from dapo_jax import config
from dapo_jax.config import schema

PAGE = (DOCS / "coming_from.md").read_text()
TABLE = [
    [re.findall(r"`([\w.]+)`", cell) for cell in row.strip("|").split("|")]
    for row in PAGE.splitlines()
    if row.startswith(("| `", "| |"))
]


def test_each_row_leads_from_their_names_to_one_of_our_fields():
    assert len(TABLE) > 30
    for verl, trl, (ours, *_), *_ in TABLE:
        assert ours in config.SCHEMA
        theirs = [*verl[:1], *trl[:1]]
        assert theirs
        for name in set(theirs) - {ours}:
            assert f"did you mean {ours}" in schema.nearest(name), name


def test_what_the_page_says_that_ours_are_called():
    """verl's loss_agg_mode and TRL's loss_type by our normalizers; the presets."""
    choices = config.SCHEMA["loss.normalizer"].choices
    assert {"batch_tokens", "sequence", "constant"} <= set(choices)
    for preset in re.findall(r"`(\w+)\(\)`", PAGE):
        config.validate(getattr(config, preset)(), 1)
    assert config.paper().dynamic_sampling.enabled
