r"""``@torchrun``: the tasks of a ``@parallel`` step as the nodes of one PyTorch job.

``docs/architecture.md`` says which room holds what, and which may import from which;
``tests/unit/test_layering.py`` checks it. Start reading at ``gang/messages.py``. Inside a task nothing but
the standard library and Metaflow is needed.
"""

# Metaflow loads its plugins, this package among them, while it is imported itself. So it comes first,
# also where one of our modules is the first import of a program, as when an artifact is loaded.
import metaflow  # noqa: F401
