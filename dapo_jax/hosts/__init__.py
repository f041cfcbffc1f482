"""Closed wing: several hosts as one run.

Promise: processes find each other or say who is missing, refuse to run where they differ, and end
with a line that names who is gone; nothing hangs.

Doors: `processes.joined`, `processes.agree`.
Inside: processes (meeting, agreement, heartbeat), last_word (speaks where JAX ends the process).
The collectives that the algorithm itself needs are in parallel.py.
"""
