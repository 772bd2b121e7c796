"""What several tiers share: processes, a stack of frontend and workers, and a warm vLLM to fork from."""
