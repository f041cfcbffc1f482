"""VAPO (arXiv 2504.05118): PPO with a value model, on DAPO's path."""
