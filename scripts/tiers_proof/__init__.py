"""Proves that a prompt found in a KV tier gets the answer that it gets without tiers.

Every case starts one engine without tiers and one with each tier, sends both the same requests, and compares
token ids and log-probabilities. A case in which nothing was loaded from the tier has failed.
"""
