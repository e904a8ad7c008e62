"""What the site shows otherwise than the source has it.

Docstrings are without what is meant for programs: the part from which Metaflow makes its type stubs. The signature of
`run` is the one that it has at runtime, which is made of a table.
"""

from __future__ import annotations

import inspect
from typing import Any

import griffe

from metaflow_extensions.torchrun.plugins.torchrun.executor import TorchrunExecutor


class WithoutStubs(griffe.Extension):
    """Cuts the section ``MF Add To Current`` off, with which a decorator's docstring ends."""

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Cut the docstring of a class."""
        if cls.docstring is not None:
            cls.docstring.value = cls.docstring.value.partition("MF Add To Current\n")[0].rstrip()

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        """Show the arguments of `run` one by one."""
        if func.path.endswith(".TorchrunExecutor.run"):
            func.parameters = griffe.Parameters(
                *map(_parameter, inspect.signature(TorchrunExecutor.run).parameters.values())
            )


def _parameter(given: inspect.Parameter) -> griffe.Parameter:
    default = None if given.default is given.empty else repr(given.default)
    return griffe.Parameter(given.name, kind=griffe.ParameterKind(given.kind.description), default=default)
