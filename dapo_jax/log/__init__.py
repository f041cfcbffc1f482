"""Metrics, logs and alarms of a run: files, dashboards and the console."""
