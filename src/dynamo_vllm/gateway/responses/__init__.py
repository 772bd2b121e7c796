"""Keeps what /v1/responses was asked and answered, so that a conversation can go on from there."""
