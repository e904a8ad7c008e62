"""Registers the extension with Metaflow; nothing else happens here."""

STEP_DECORATORS_DESC = [("torchrun", ".torchrun.decorator.TorchrunDecorator")]
