"""Keeps files and runs batches of requests from them, behind everything else that the deployment does."""
