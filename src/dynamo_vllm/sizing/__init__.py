"""What a model needs in memory and what fits on GPUs: arithmetic on a config.json, without vLLM and torch."""
