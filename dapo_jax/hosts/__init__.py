"""Several hosts as one run.

Processes find each other or name who is missing, refuse to run where they differ, end with a line
that names who is gone, and leave together and in time when one receives SIGTERM; a hang ends; a
start fetches and compiles nothing twice.

The collectives that the algorithm itself needs are in parallel.py.
"""
