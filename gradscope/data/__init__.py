"""Disk -> records. One file, one data set."""

from __future__ import annotations

from gradscope.registry import Registry

#: name -> data set component; see ``gradscope.data.source`` for what a data set is.
data_sets: Registry = Registry("data set", "gradscope.data")
