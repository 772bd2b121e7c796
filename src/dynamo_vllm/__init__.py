"""A vLLM backend for the Dynamo runtime."""

__version__ = "0.1.0"
