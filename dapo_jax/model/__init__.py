"""Qwen2.5: the network, its attention, and its Hugging Face form."""
