"""Computes the memory of a model and what fits on GPUs, from a config.json, without vLLM and torch."""
