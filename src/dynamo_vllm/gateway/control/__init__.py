"""The control app of the gateway: answers Envoy's questions and serves the APIs that are not hot."""
