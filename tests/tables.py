"""Tables of cases: JSON lines in tests/data."""

import json
from pathlib import Path


def cases(name: str) -> list[dict]:
    """The rows of tests/data/NAME.jsonl."""
    file = Path(__file__).parent / "data" / f"{name}.jsonl"
    return [json.loads(line) for line in file.open(encoding="utf-8")]
