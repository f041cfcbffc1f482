"""Benchmarks: `python -m benchmarks` lists them. Their results are data: results/NAME.json."""
