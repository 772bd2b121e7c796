"""Converts a `serve` file into documents for a cluster, with pure functions from topology to text."""
