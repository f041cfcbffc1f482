"""Several hosts as one run.

Processes find each other or name who is missing, refuse to run where they differ, end with a line
that names who is gone, and leave together and in time when one receives SIGTERM; a hang ends; a
start fetches and compiles nothing twice.

For users: `processes.joined`, `processes.agree`, `leaving.signals`, `watchdog.Watchdog`,
`start.model_directory`.
Modules: processes (meeting, agreement, heartbeat), exit_report (when JAX ends the process),
leaving (SIGTERM and Ctrl-C), watchdog (limits of time), start (base model, compiled programs, time
to the first token), keep_log (copies what a host prints into the workdir).
The collectives that the algorithm itself needs are in parallel.py.
"""
