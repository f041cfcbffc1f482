"""Closed wing: several hosts as one run.

Promise: processes find each other or say who is missing, refuse to run where they differ, end with
a line that names who is gone, and leave together and in time when one is asked; nothing hangs.

Doors: `processes.joined`, `processes.agree`, `leaving.signals`.
Inside: processes (meeting, agreement, heartbeat), last_word (speaks where JAX ends the process),
leaving (SIGTERM and Ctrl-C).
The collectives that the algorithm itself needs are in parallel.py.
"""
