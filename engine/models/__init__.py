"""Transformer decoders: one `Decoder` that covers its model families by configuration."""
