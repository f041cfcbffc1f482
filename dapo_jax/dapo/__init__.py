"""The paper, as small functions: reward, advantage, objective, dynamic sampling, update."""
