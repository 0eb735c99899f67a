"""Streaming forms of the contrastive loss: the same mathematics as ``objectives``, blocked, without any [N, N] store."""
