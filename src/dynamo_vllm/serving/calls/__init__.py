"""Calls workers without the frontend: finds those of a model, sends each request to the least loaded."""
