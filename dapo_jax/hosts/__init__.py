"""Closed wing: several hosts as one run.

Promise: processes find each other or say who is missing, refuse to run where they differ, end with
a line that names who is gone, and leave together and in time when one is asked; a hang ends; a
start fetches and compiles nothing twice.

Doors: `processes.joined`, `processes.agree`, `leaving.signals`, `watchdog.Watchdog`,
`start.model_directory`.
Inside: processes (meeting, agreement, heartbeat), last_word (speaks where JAX ends the process),
leaving (SIGTERM and Ctrl-C), watchdog (what takes too long), start (base model, compiled programs,
time to the first token), keep_log (copies what a host prints into the workdir).
The collectives that the algorithm itself needs are in parallel.py.
"""
