"""Finds out the state of a running deployment: its frontends, its workers, their figures."""
