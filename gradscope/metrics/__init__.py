"""Pure functions on arrays: ranks, recall, intervals, caption geometry."""
