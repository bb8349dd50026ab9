"""rlhfless: an elastic, serverless-style runtime for RLHF of language models."""

__version__ = "0.1.0"
