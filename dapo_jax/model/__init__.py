"""Qwen2.5 and Qwen3: the network, its attention, and its Hugging Face form."""
