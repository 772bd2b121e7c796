"""What the console shows: polled from the deployment, or read from the folder of its `serve`."""
