"""Registers the extension with Metaflow; nothing else happens here."""

from importlib.util import find_spec

STEP_DECORATORS_DESC = [("torchrun", ".torchrun.decorator.TorchrunDecorator")]
# Commands are made with Metaflow's own copy of click (2.13 to 2.19). Every flow reads them, also those without @torchrun.
try:
    CLIS_DESC = [("torchrun", ".torchrun.show.commands.cli")] if find_spec("metaflow._vendor.click") else []
except ImportError:  # the package around it has another name
    CLIS_DESC = []
