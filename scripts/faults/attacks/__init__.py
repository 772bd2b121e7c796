"""Attacks on a running `serve`: harmful clients, schemas, other users and machines, disk, signals."""
