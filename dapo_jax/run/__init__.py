"""What a run leaves on disk: checkpoints and metrics."""
