"""Changes one of Metaflow's settings: ``spin`` heeds ``@torchrun``, too, unless the user has set what it heeds."""

# What is no module here becomes a setting of Metaflow.
from metaflow import metaflow_config, metaflow_config_funcs

if hasattr(metaflow_config, "SPIN_ALLOWED_DECORATORS"):  # Metaflow has `spin`
    SPIN_ALLOWED_DECORATORS = metaflow_config_funcs.from_conf(
        "SPIN_ALLOWED_DECORATORS", [*metaflow_config.SPIN_ALLOWED_DECORATORS, "torchrun"]
    )
