"""A worker that does nothing; see `whole_flow.py`."""
