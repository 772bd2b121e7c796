"""Counts the tokens of requests that came through a gateway, and reports them to it."""
