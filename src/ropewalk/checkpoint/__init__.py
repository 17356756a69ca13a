"""Model files: found, fetched, read and written. `base.open_checkpoint` opens any of them.

Knows formats and names of tensors; no model, no kernel.
"""
