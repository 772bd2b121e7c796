"""Images, videos and audio of requests: fetched within limits, identified by content, decoded."""
