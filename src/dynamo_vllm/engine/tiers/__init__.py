"""Keeps KV caches that leave an engine in host memory and on disk, through vLLM's OffloadingConnector.

vLLM loads `dynamo_vllm.engine.tiers.spec` and `dynamo_vllm.engine.tiers.disk_tier` by name in the engine's
own processes.
"""
