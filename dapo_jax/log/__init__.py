"""Metrics, logs and alarms of a run: files, dashboards and the console. Not on the reading path.

Promise: every number has one name, one definition and one unit (tags.md); metrics.jsonl has each
step once, also over restarts; a service or a disk that fails is reported once and does not end the
run. Used from outside: `metrics.Writer`, `report`, `guards`, and `python -m dapo_jax.log.tags`.
"""
