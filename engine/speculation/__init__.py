"""Drafts of the next tokens, verified many at a time: fewer steps for the same output."""
