"""Attacks and faults against a running `dynamo-vllm serve`, each as often as it is asked for."""
