"""Stands in front of a deployment: API keys, limits, usage, and the APIs that keep something."""
