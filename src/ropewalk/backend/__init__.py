"""How a model runs on one kind of machine: a batch of tokens goes in, logits come out.

`base` says what a backend is, `cpu` is the one that there is.
"""
