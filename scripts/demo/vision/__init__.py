"""demo-vision: drawn figures, questions about them, and a model that looks at them."""
