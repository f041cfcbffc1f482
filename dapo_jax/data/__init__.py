"""Problems, prompts, tokenizers and the verifier: everything on the host side, free of JAX."""
