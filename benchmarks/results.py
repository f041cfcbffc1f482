"""RESULTS.md: one section a benchmark, rewritten by `--write`."""

import pathlib

RESULTS = pathlib.Path(__file__).with_name("RESULTS.md")


def write(heading: str, section: str) -> None:
    """Put `section`, which begins with `heading` ('## ...'), in place of the old one, or add it."""
    text = RESULTS.read_text() if RESULTS.exists() else "# Measured\n"
    before, found, after = text.partition(heading + "\n")
    rest = after.partition("\n## ")
    tail = "\n## " + rest[2] if found and rest[1] else ""
    RESULTS.write_text(before.rstrip() + "\n\n" + section.rstrip() + "\n" + tail)
