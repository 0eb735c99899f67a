"""The sections of ``benchmarks/gpu.py``: each answers with rows, and knows what it leaves out when its time is up."""
