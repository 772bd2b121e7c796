"""Looks at a deployment without taking part in it: who is there, which event channels, what routers know."""
