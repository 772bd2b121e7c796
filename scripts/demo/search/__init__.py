"""Makes demo-embed and demo-rerank, which search the product's documentation."""
