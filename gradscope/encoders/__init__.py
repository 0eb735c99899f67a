"""Image and text towers; this folder holds the only importers of open_clip and sentence_transformers."""
