"""Runs the commands on the gateway's database."""
