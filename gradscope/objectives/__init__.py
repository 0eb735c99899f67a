"""Scores -> loss per anchor. One file, one objective."""
