"""A vLLM backend for the Dynamo runtime."""

__version__ = "0.3.0.dev0"
