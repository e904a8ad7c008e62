r"""``@torchrun``: the tasks of a ``@parallel`` step as the nodes of one PyTorch job.

Imports go one way (``tests/unit/test_layering.py`` checks it)::

    decorator -> executor -> supervisor -> membership -> channel -> gang -> failure -> errors
                                        \-> process, logs -> launch_spec, devices, network -> errors

Only ``decorator``, ``executor`` and ``address_book`` work with Metaflow; ``errors`` borrows its base exception.
Inside a task nothing but the standard library and Metaflow is needed.
"""

# Metaflow loads its plugins, this package among them, while it is imported itself. So it comes first,
# also where one of our modules is the first import of a program, as when an artifact is loaded.
import metaflow  # noqa: F401
