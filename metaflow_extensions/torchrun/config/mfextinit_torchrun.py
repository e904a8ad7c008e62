"""Changes one of Metaflow's settings: ``spin`` heeds ``@torchrun``, too, unless the user has set what it heeds."""

# What is no module here becomes a setting of Metaflow.
# Where Metaflow has no `spin`, or reads its settings in another way than in 2.19, all stays as it is.
try:
    from metaflow.metaflow_config import SPIN_ALLOWED_DECORATORS
    from metaflow.metaflow_config_funcs import from_conf

    SPIN_ALLOWED_DECORATORS = from_conf("SPIN_ALLOWED_DECORATORS", [*SPIN_ALLOWED_DECORATORS, "torchrun"])
    del from_conf
except Exception:  # noqa: S110 - `import metaflow` comes by here, and must not fail
    pass
