"""Turns a `serve` file into documents for a cluster: pure functions, from topology and settings to text."""
