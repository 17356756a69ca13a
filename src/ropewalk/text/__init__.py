"""Strings and token ids: tokenizers, streams of text, chat templates, grammars. Knows no model."""
