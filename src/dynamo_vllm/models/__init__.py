"""Models of the package and generated ones, so that tests and a first run need no download."""
