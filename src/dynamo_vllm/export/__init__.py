"""A `serve` file as documents for a cluster: pure functions, from a topology and settings to text."""
