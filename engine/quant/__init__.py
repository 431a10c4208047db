"""Quantised weights as GGUF files hold them."""
