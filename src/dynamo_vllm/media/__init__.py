"""Pictures, videos and sounds of requests: fetched within limits, known by their content, decoded."""
