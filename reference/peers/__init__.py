"""Adapters that run someone else's implementation on the same checkpoint and write a trace."""
