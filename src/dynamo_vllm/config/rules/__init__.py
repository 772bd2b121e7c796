"""Rules that span several options: one function and one message each; `config.checks` runs them."""
