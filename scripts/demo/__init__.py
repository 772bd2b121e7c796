"""Makes the demo models: data, tokenizer, training, export, scores. README.md tells how."""
