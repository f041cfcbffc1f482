"""Metrics, logs and alarms of a run: files, dashboards and the console. Not on the reading path.

Promise: every number has one name, one definition and one unit (tags.py); metrics.jsonl has each
step once, also over restarts; a service or a disk that fails is reported once and does not end the
run.

Used from outside: `metrics.Writer`, `report`, `guards`, and `python -m dapo_jax.log.tags`.
Modules: tags (the table), metrics (numbers and files), goodput (use of wall time), hardware (MFU,
memory), profiler (a trace of a step), tensorboard, trackers (W&B, MLflow), alarm_command (a program
that runs for each alarm), report (console, samples), guards (alarms, reasons to stop).
"""
