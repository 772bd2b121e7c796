"""Writes conversations for the demo models, one module per skill; the same seed gives the same text."""
