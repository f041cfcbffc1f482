"""How a run went: logs read, the paper's figures drawn, samples leafed through."""
