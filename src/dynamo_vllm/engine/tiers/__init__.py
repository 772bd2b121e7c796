"""Keeps KV caches that leave an engine in host memory and on disk, through vLLM's OffloadingConnector.

vLLM loads `connector`, `spec` and `disk_tier` by name in the engine's own processes.
"""

CONNECTOR = "TierConnector"
"""The name by which vLLM finds `connector`, and its class there."""
ONLY_TIERS = "dynamo_only_tiers"
"""The field of a request's kv_transfer_params that makes it load its prompt from the tiers although the
engine's own cache has it, beside vLLM's `skip_reading_prefix_cache`. Only the worker itself sends it."""
