"""Closed wing: what a run says of itself, to files, to dashboards and to people.

Promise: every number has one name, one definition and one unit (tags.py); metrics.jsonl holds each
step once, also over restarts; a service or a disk that fails is named once and ends nothing.

Doors: `metrics.Writer`, `report`, `guards`, and `python -m dapo_jax.tags`.
Inside: tags (the table), metrics (numbers and files), goodput (where wall time went), hardware
(MFU, memory), profiler (a trace of a step), tensorboard, trackers (W&B, MLflow), bell (a command
for each alarm), report (console, samples), guards (alarms, the end of a run, hangs), scores (avg@k
and its kin).
"""
