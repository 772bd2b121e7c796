"""Ours beside every other server of the same model: started, measured in turns, compared."""
