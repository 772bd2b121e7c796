"""Options of the kinds of `bench`."""
