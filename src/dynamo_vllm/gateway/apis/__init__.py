"""The APIs that the frontend does not have, or has in another shape: a worker of the model answers them."""
