"""What the probe attaches with, one part a file: where embeddings are seen, the optimizers, each rank's own norm, hooks, the log."""
