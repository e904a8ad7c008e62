"""Registers the extension with Metaflow; nothing else happens here."""

STEP_DECORATORS_DESC = [("torchrun", ".torchrun.decorator.TorchrunDecorator")]
CLIS_DESC = [("torchrun", ".torchrun.border.commands.cli")]
