"""Runs attacks and faults against a running `dynamo-vllm serve`, each as often as requested."""
