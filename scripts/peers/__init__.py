"""Compares dynamo-vllm with other servers of the same model, measured by turns."""
