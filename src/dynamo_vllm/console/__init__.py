"""The web console: a page on a port of its own that shows, tries and operates a deployment."""
