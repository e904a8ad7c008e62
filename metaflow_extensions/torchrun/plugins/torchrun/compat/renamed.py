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
from inspect import isfunction, signature, unwrap
from pkgutil import resolve_name
from types import CodeType
from typing import Any

from ..errors import TorchrunError

_WORK = "2.13 to 2.19"  # the versions whose sources were read
# By module or class. An attribute of objects counts if a method of their class mentions it. In parentheses: parameters
# that are given by name. What only some of these versions have is not listed.
NAMES = {
    "metaflow._vendor.click": "get_current_context",
    "metaflow.datastore": "FlowDataStore(storage_impl,ds_root)",
    "metaflow.datastore:FlowDataStore": "TYPE _storage_impl datastore_root default_storage_impl flow_name load_data metadata "
    "save_data(len_hint) get_task_datastore(attempt,data_metadata,mode,allow_not_done)",
    "metaflow.datastore.datastore_storage:DataStoreStorage": "TYPE list_content load_bytes path_join path_split "
    "get_datastore_root_from_config(create_on_absent)",
    "metaflow.datastore.exceptions": "DataException",
    "metaflow.datastore.task_datastore:TaskDataStore": "attempt done get load_metadata persist save_logs save_metadata",
    "metaflow.decorators:StepDecorator": "attributes statically_defined",
    "metaflow.exception": "CommandException",
    "metaflow.flowspec": "ParallelUBF",
    "metaflow.flowspec:FlowSpec": "_parallel_ubf_iter",
    "metaflow.flowspec:ParallelUBF": "num_parallel",
    "metaflow.graph:DAGNode": "decorators func_lineno num_parallel out_funcs parallel_foreach parallel_step source_file "
    "split_parents type",
    "metaflow.lint": "LintWarn linter",
    "metaflow.lint:FlowLinter": "_checks check ensure_static_graph",
    "metaflow.metaflow_config": "DEFAULT_DATASTORE KUBERNETES_SANDBOX_INIT_SCRIPT UI_URL",
    "metaflow.metaflow_current": "Parallel",
    "metaflow.metaflow_current:Current": "_update_env",
    "metaflow.metaflow_current:Parallel": "control_task_id",
    "metaflow.metaflow_environment:MetaflowEnvironment": "executable(default)",
    "metaflow.mflog": "LOG_SOURCES TASK_LOG_SOURCE",
    "metaflow.mflog.mflog": "LINE_PARSER",
    "metaflow.plugins": "DATASTORES",
    "metaflow.plugins.cards.card_cli": "resolve_task_from_pathspec",
    "metaflow.plugins.cards.card_creator:CardCreator": "_run_cards_subprocess(final) create(decorator_attributes,mode,final)",
    "metaflow.plugins.cards.card_datastore": "CardDatastore(flow_datastore,pathspec)",
    "metaflow.plugins.cards.card_datastore:CardDatastore": "get_storage_root save_card(card_id) save_data(card_id)",
    "metaflow.plugins.cards.card_modules.basic": "CSS_PATH JS_PATH RENDER_TEMPLATE_PATH read_file",
    "metaflow.plugins.cards.card_modules.card": "MetaflowCard",
    "metaflow.plugins.cards.card_modules.card:MetaflowCard": "RELOAD_POLICY_ONCHANGE RELOAD_POLICY_TOKEN",
    "metaflow.plugins.cards.card_modules.chevron": "render",
    "metaflow.plugins.cards.card_modules.components": "UserComponent with_default_component_id",
    "metaflow.plugins.cards.card_modules.renderer_tools": "render_safely",
    "metaflow.plugins.cards.component_serializer:CardComponentCollector": "_card_component_store get",
    "metaflow.plugins.cards.component_serializer:CardComponentManager": "_card_creator _card_creator_args "
    "_last_refresh _latest_user_data components refresh",
    "metaflow.plugins.kubernetes.kubernetes:Kubernetes": "_job",
    "metaflow.plugins.kubernetes.kubernetes_job:RunningJob": "_client _name _namespace _pod_name",
    "metaflow.plugins.kubernetes.kubernetes_jobsets:JobSetSpec": "_kwargs",
    "metaflow.plugins.kubernetes.kubernetes_jobsets:KubernetesJobSet": "dump worker",
    "metaflow.plugins.kubernetes.kubernetes_jobsets:KubernetesArgoJobSet": "dump worker",
    "metaflow.plugins.kubernetes.kubernetes_jobsets:RunningJobSet": "_client _name _namespace _pod_name",
    "metaflow.plugins.parallel_decorator": "ParallelDecorator _local_multinode_control_task_step_func",
    "metaflow.plugins.parallel_decorator:ParallelDecorator": "_control_task_is_mapper_zero setup_distributed_env",
    "metaflow.plugins.timeout_decorator": "TimeoutException",
    "metaflow.plugins.timeout_decorator:TimeoutDecorator": "secs",
    "metaflow.runtime:CLIArgs": "command_options env task",
    "metaflow.runtime:Task": "ubf_iter",
    "metaflow.task:MetaflowTask": "_control_mapper_tasks",
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
            f"@torchrun needs {missing.replace(':', '.')}, which this Metaflow ({version}) does not have. Metaflow {_WORK} "
            "works: install that, or a newer metaflow-torchrun."
        )


def _missing() -> Iterator[str]:
    for place, words in NAMES.items():
        try:
            owner = resolve_name(place if ":" in place else f"{place}:")
        except (ImportError, AttributeError):
            yield place
            continue
        for word in words.split():
            name, *parameters = re.split("[(,]", word.removesuffix(")"))
            takes = signature(getattr(owner, name, lambda: None)).parameters if parameters else {}
            if not (_has(owner, name) and takes.keys() >= set(parameters)):
                yield f"{place}.{word}"


def _has(owner: Any, name: str) -> bool:
    """Return whether a module or class has a name, or a method of the class mentions it."""
    methods = (unwrap(each) for base in getattr(owner, "__mro__", ()) for each in vars(base).values() if callable(each))
    codes = [each.__code__ for each in methods if isfunction(each)]
    for code in codes:  # it grows meanwhile, by the functions inside
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    return hasattr(owner, name) or any(name in code.co_names for code in codes)


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
