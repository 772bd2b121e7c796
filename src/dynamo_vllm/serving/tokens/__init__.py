"""Lets other processes of a deployment tokenise with a worker's own tokenizer and chat template."""
