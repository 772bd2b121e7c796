"""Explains routing: a mirror of what the router knew when it chose a worker."""
