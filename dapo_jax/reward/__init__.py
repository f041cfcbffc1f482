"""What a response is worth: reward functions, verifiers by name, judging processes."""
