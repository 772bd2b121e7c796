"""Runs Envoy, the data plane of the gateway."""
