"""Private names of Metaflow: the list of all, and the error if one is missing.

Flows without ``@torchrun`` never notice: what `import metaflow` loads takes each name by `known`. Everything that runs a
gang or looks at one begins with `check`, before anything is scheduled. So the code after it just uses the names.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from importlib import import_module
from pkgutil import resolve_name
from typing import Any

from ..errors import TorchrunError

_WORK = "2.13 to 2.19"  # the versions whose sources were read
# By module: classes, functions, attributes, and parameters that are given by name. Each must stand in the module's source;
# so words that stand in any are not listed, and neither is what only some of these versions have.
NAMES = {
    "metaflow._vendor.click": "get_current_context",
    "metaflow.datastore": "FlowDataStore",
    "metaflow.datastore.datastore_storage": "create_on_absent get_datastore_root_from_config list_content load_bytes "
    "path_join path_split",
    "metaflow.datastore.flow_datastore": "data_metadata datastore_root default_storage_impl ds_root "
    "flow_name get_task_datastore len_hint load_data save_data storage_impl _storage_impl",
    "metaflow.datastore.task_datastore": "load_metadata persist save_logs save_metadata",
    "metaflow.decorators": "statically_defined",
    "metaflow.exception": "CommandException",
    "metaflow.flowspec": "num_parallel _parallel_ubf_iter ParallelUBF",
    "metaflow.graph": "func_lineno num_parallel out_funcs parallel_foreach parallel_step source_file split_parents",
    "metaflow.lint": "_checks ensure_static_graph linter LintWarn",
    "metaflow.metaflow_config": "DEFAULT_DATASTORE KUBERNETES_SANDBOX_INIT_SCRIPT UI_URL",
    "metaflow.metaflow_current": "control_task_id Parallel _update_env",
    "metaflow.metaflow_environment": "executable",
    "metaflow.mflog": "LOG_SOURCES TASK_LOG_SOURCE",
    "metaflow.mflog.mflog": "LINE_PARSER",
    "metaflow.plugins": "DATASTORES",
    "metaflow.plugins.cards.card_cli": "resolve_task_from_pathspec",
    "metaflow.plugins.cards.card_creator": "decorator_attributes _run_cards_subprocess",
    "metaflow.plugins.cards.card_datastore": "card_id CardDatastore get_storage_root save_card save_data",
    "metaflow.plugins.cards.card_modules.basic": "BlankCard runtime",
    "metaflow.plugins.cards.card_modules.card": "MetaflowCard RELOAD_POLICY_ONCHANGE RELOAD_POLICY_TOKEN",
    "metaflow.plugins.cards.card_modules.components": "UserComponent with_default_component_id",
    "metaflow.plugins.cards.card_modules.renderer_tools": "render_safely",
    "metaflow.plugins.cards.component_serializer": "_card_component_store _card_creator _card_creator_args "
    "_last_refresh _latest_user_data",
    "metaflow.plugins.kubernetes.kubernetes": "_job",
    "metaflow.plugins.kubernetes.kubernetes_job": "_client _name _namespace",
    "metaflow.plugins.kubernetes.kubernetes_jobsets": "_client dump KubernetesArgoJobSet KubernetesJobSet _kwargs "
    "_name _namespace",
    "metaflow.plugins.parallel_decorator": "_control_task_is_mapper_zero _local_multinode_control_task_step_func "
    "ParallelDecorator setup_distributed_env",
    "metaflow.plugins.timeout_decorator": "secs TimeoutException",
    "metaflow.runtime": "command_options ubf_iter",
    "metaflow.task": "_control_mapper_tasks",
    "metaflow.unbounded_foreach": "UBF_CONTROL",
    "metaflow.user_configs.config_parameters": "UNPACK_KEY",
    "metaflow.util": "get_latest_run_id",
}


def known(name: str, instead: Any = None) -> Any:
    """Return a name of Metaflow's, written as ``module:name``; if it is missing, `instead`, so that imports succeed."""
    try:
        return resolve_name(name)
    except (ImportError, AttributeError):
        return instead


@cache
def check() -> None:
    """Raise `TorchrunError` if Metaflow lacks any of the names."""
    missing = next(_missing(), None)
    if missing is not None:
        version = getattr(sys.modules.get("metaflow"), "__version__", "of unknown version")
        raise TorchrunError(
            f"@torchrun needs {missing}, which this Metaflow ({version}) does not have. Metaflow {_WORK} works: install "
            "that, or a newer metaflow-torchrun."
        )


def _missing() -> Iterator[str]:
    for place, names in NAMES.items():
        try:
            module: Any = import_module(place)
        except ImportError:
            yield place
            continue
        with suppress(AttributeError):  # of a module that another extension has put there
            source = module.__spec__.loader.get_source(place)
            yield from (f"{place}.{name}" for name in names.split() if not re.search(rf"\b{name}\b", source or name))


# --- failures that must harm nobody ----------------------------------------------------------------

# The exception of Metaflow's ``@timeout``.
TimeoutException: Any = known("metaflow.plugins.timeout_decorator:TimeoutException", TorchrunError)
_said: set[str] = set()  # the printed lines of this process; threads may add to it


@contextmanager
def harmless(tell: Callable[[Exception], None] = lambda error: None) -> Iterator[None]:
    """Catch every exception and pass it to `tell`, except our own errors and that of Metaflow's ``@timeout``.

    Signal handlers raise these in the main thread, in the middle of any code. If this caught one, the node would miss
    the end of the gang, and the gang would wait for the node.
    """
    try:
        yield
    except (TorchrunError, TimeoutException):
        raise
    except Exception as error:
        tell(error)


def convenience(what: str) -> AbstractContextManager[None]:
    """Leave `what` out if it fails, and print one line about it, once in a process.

    The failure neither ends a flow nor hides the error that ends it; see `harmless`.
    """

    def tell(error: Exception) -> None:
        if what not in _said:
            _said.add(what)
            with suppress(OSError, ValueError):  # the terminal is gone, or stderr is closed
                sys.stderr.write(f"[torchrun] Left out: {what} ({type(error).__name__}: {error}).\n")
                sys.stderr.flush()

    return harmless(tell)
