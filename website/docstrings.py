"""Leaves out of docstrings what is meant for programs: the part from which Metaflow makes its type stubs."""

from __future__ import annotations

from typing import Any

import griffe


class WithoutStubs(griffe.Extension):
    """Cuts the section ``MF Add To Current`` off, with which a decorator's docstring ends."""

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Cut the docstring of a class."""
        if cls.docstring is not None:
            cls.docstring.value = cls.docstring.value.partition("MF Add To Current\n")[0].rstrip()
