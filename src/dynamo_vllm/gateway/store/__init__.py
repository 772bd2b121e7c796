"""Keeps keys, limits and usage in the gateway's database."""
