"""Models made on the spot, so that tests and a first run need no download."""
