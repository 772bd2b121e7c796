"""Measures what the web console costs beside a large deployment, and how its page keeps up."""
