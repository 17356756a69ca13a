"""Ropewalk: text from language models in pure Python."""

__version__ = "0.1.0"
