"""gradscope: why contrastive fine-tuning stops learning, and how to repair it."""

__version__ = "0.1.0"
