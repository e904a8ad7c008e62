"""Tells Metaflow which module holds the names offered as ``from metaflow import ...``."""

toplevel = "toplevel"
