"""One launch as data: what the user asked for, checked, and the argv and environment it becomes.

Everything here is pure: arguments in, values out. argv is a list from beginning to end; it is
quoted only where it is printed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .devices import parse_int, parse_nproc
from .elastic import BACKEND, rendezvous_settings, take_min_nodes
from .errors import EntrypointError, TorchrunConfigError
from .policy import parse_restarts

# What torchrun runs where the entrypoint is a function.
FUNCTION_WORKER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "function_worker.py")

# First on the path of agent and workers: what a worker says of its end comes from there.
WORKER_HOOKS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker_hooks")
# The agent, which is the first Python of a launch, puts its pid there; by that a worker knows that it is one.
_AGENT_VARIABLE = "TORCHRUN_AGENT_PID"

# torchrun's options, from `torch/distributed/run.py` of torch 2.13. Options that a newer torch adds
# are passed on as they come; the table is needed for flags, short names and for what the gang owns.
_VALUED = frozenset(
    {
        *("nnodes", "nproc-per-node", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "max-restarts"),
        *("monitor-interval", "start-method", "event-log-handler", "role", "log-dir", "redirects", "tee"),
        *("local-ranks-filter", "duplicate-stdout-filters", "duplicate-stderr-filters", "node-rank", "master-addr"),
        *("master-port", "local-addr", "logs-specs", "numa-binding", "signals-to-handle", "shutdown-timeout"),
    }
)
_FLAGS = frozenset({"standalone", "module", "no-python", "run-path", "virtual-local-rank"})
_SHORT = {"m": "module", "r": "redirects", "t": "tee"}
_OWN_LOGGING = frozenset({"redirects", "tee"})
_STATIC_BACKEND = "static"

# Settings of an outer torchrun would be taken as defaults by ours (argparse actions of torch's `env`
# in run.py) or by a script that looks at them before torchrun sets its own.
_FOREIGN_PREFIXES = ("PET_", "TORCHELASTIC_")
_FOREIGN_NAMES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    }
)


@dataclass(frozen=True)
class LaunchSpec:
    """One `run` call on one node, validated.

    Attributes
    ----------
    entrypoint : str
        Absolute path of the script, or the module's or (``no-python``) executable's name.
    args : tuple of str
        What the script sees as ``sys.argv[1:]``.
    module : bool
        Whether `entrypoint` is run as ``python -m``.
    nproc : int
        Processes per node.
    num_nodes, node_index : int
        The gang's size and this node's place in it.
    options : tuple of (str, str or None)
        Further torchrun options in hyphen spelling; None marks a flag.
    shown_local_ranks : frozenset of int or None
        Local ranks whose output is shown; None shows all.
    master_port : int or None
        The port the user pinned for the rendezvous; None lets the control node choose.
    max_restarts : int
        How often the gang may be restarted.
    env : tuple of (str, str)
        Variables the user set for this launch.
    cwd : str or None
        Working directory of the workers; None is the task's own.
    python : str
        The interpreter that runs torchrun.
    log_dir : str or None
        Absolute path of where the user wants torchrun's log files kept; None keeps none.
    min_nodes : int or None
        How few nodes torchrun's own elasticity may go on with (``nnodes="MIN:MAX"``, ``rdzv_backend="c10d"``); None
        is the rule: the gang is of a fixed size and restarts as a whole.
    elastic_timeout_s : int
        How long elastic agents wait for each other.
    function : str or None
        Name of the Python function that is called instead of a script.
    source : str or None
        The file whose contents must be the same on all nodes; None: the entrypoint's.
    """

    entrypoint: str
    args: tuple[str, ...]
    module: bool
    nproc: int
    num_nodes: int
    node_index: int
    python: str
    options: tuple[tuple[str, str | None], ...] = ()
    shown_local_ranks: frozenset[int] | None = None
    master_port: int | None = None
    max_restarts: int = 0
    env: tuple[tuple[str, str], ...] = ()
    cwd: str | None = None
    log_dir: str | None = None
    min_nodes: int | None = None
    elastic_timeout_s: int = 600
    function: str | None = None
    source: str | None = None

    @property
    def world_size(self) -> int:
        """Number of workers over all nodes."""
        return self.nproc * self.num_nodes

    def global_rank(self, local_rank: int) -> int:
        """Return the global rank of a worker of this node."""
        return self.node_index * self.nproc + local_rank

    def digest(self) -> str:
        """Return a fingerprint of what must be the same on every node."""
        what = [
            self.function or os.path.basename(self.entrypoint),
            self.module,
            [o for o in self.options if o[0] != "rdzv-id"],
        ]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Rendezvous:
    """Where and under which name the agents of one generation meet.

    Attributes
    ----------
    addr : str
        Address of the control node as this node reaches it.
    port : int
        TCP port of the store that rank 0's agent opens there.
    run_id : str
        Shown to the workers as ``TORCHELASTIC_RUN_ID``.
    restarts : int
        How often the gang was restarted before.
    """

    addr: str
    port: int
    run_id: str
    restarts: int = 0


def agent_command(spec: LaunchSpec, rendezvous: Rendezvous, log_dir: str) -> list[str]:
    """Return the argv of this node's agent: plain torchrun, with a static rendezvous unless the user wants its elasticity."""
    given = dict(spec.options)
    options: list[tuple[str, str | None]] = [
        *_gang_options(spec, given),
        ("nproc-per-node", str(spec.nproc)),
        ("rdzv-endpoint", f"{_bracketed(rendezvous.addr)}:{rendezvous.port}"),
        ("rdzv-id", given.pop("rdzv-id", None) or rendezvous.run_id),
        # Files instead of pipes: complete to the last byte whatever dies, and no rank waits for another.
        ("redirects", "3"),
        ("log-dir", log_dir),
    ]
    command = [spec.python, "-m", "torch.distributed.run"]
    for name, value in [*options, *given.items()]:
        command.append(f"--{name}" if value is None else f"--{name}={value}")
    if spec.max_restarts and spec.min_nodes is None and "run-path" not in given:
        return [*command, *_told_of_restarts(spec, rendezvous.restarts)]
    if spec.module:
        command.append("--module")
    # torchrun fills ${local_rank} into the arguments by string.Template (torch 2.13,
    # elastic/utils/api.py); a doubled dollar comes out as the one that the user wrote.
    # With --no-python the entrypoint itself is not among them.
    entrypoint = spec.entrypoint if "no-python" in given else spec.entrypoint.replace("$", "$$")
    # "--" keeps torchrun's argparse from taking a script's "--d" for an ambiguous option of its own.
    return [*command, "--", entrypoint, *_escaped(spec.args)]


def _gang_options(spec: LaunchSpec, given: dict[str, str | None]) -> list[tuple[str, str | None]]:
    """Return the options that say how the agents find together; takes ``rdzv-conf`` out of `given` where it does."""
    if spec.min_nodes is not None:
        nodes, is_host = f"{spec.min_nodes}:{spec.num_nodes}", spec.node_index == 0
        conf = rendezvous_settings(given.pop("rdzv-conf", None), is_host, spec.elastic_timeout_s)
        restarts = str(spec.max_restarts)
        return [("nnodes", nodes), ("rdzv-backend", BACKEND), ("rdzv-conf", conf), ("max-restarts", restarts)]
    return [
        ("nnodes", str(spec.num_nodes)),
        ("node-rank", str(spec.node_index)),
        ("rdzv-backend", _STATIC_BACKEND),
        # The gang restarts its generations as a whole; torchrun would restart one node alone.
        ("max-restarts", "0"),
    ]


def _told_of_restarts(spec: LaunchSpec, restarts: int) -> list[str]:
    """Return the words that make workers see the gang's restarts in the variables that torchrun sets.

    Each agent runs one generation only, so torchrun (2.13) sets both to 0; ``env`` sets them anew and
    becomes the worker.
    """
    bare = "no-python" in dict(spec.options)
    count, limit = f"TORCHELASTIC_RESTART_COUNT={restarts}", f"TORCHELASTIC_MAX_RESTARTS={spec.max_restarts}"
    # As torchrun starts a script (config_from_args in torch/distributed/run.py, 2.13).
    python = [] if bare else [spec.python, "-u", *(["-m"] if spec.module else [])]
    flag = [] if bare else ["--no-python"]
    return [*flag, "--", "env", count, limit, *_escaped([*python, spec.entrypoint, *spec.args])]


def _escaped(words: Sequence[str]) -> list[str]:
    return [word.replace("$", "$$") for word in words]


def agent_environment(
    spec: LaunchSpec, inherited: Mapping[str, str], omp_threads: int, interface: str | None
) -> dict[str, str]:
    """Return the whole environment of this node's agent and workers.

    Parameters
    ----------
    spec : LaunchSpec
        The launch; its `env` wins over everything, save that our hooks stay first on the path.
    inherited : mapping
        The task's environment. Variables of an outer torchrun are dropped.
    omp_threads : int
        Default for ``OMP_NUM_THREADS``.
    interface : str or None
        Default for ``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME``; None sets none.
    """
    env = {name: value for name, value in inherited.items() if not _is_foreign(name)}
    env.setdefault("OMP_NUM_THREADS", str(omp_threads))
    env.setdefault("PYTHONUNBUFFERED", "1")
    if interface:
        env.setdefault("GLOO_SOCKET_IFNAME", interface)
        env.setdefault("NCCL_SOCKET_IFNAME", interface)
    env.update(spec.env)
    if os.pathsep not in WORKER_HOOKS:
        env[_AGENT_VARIABLE] = ""
        # An empty entry would mean the working directory, so there must be none of ours.
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [WORKER_HOOKS, env.get("PYTHONPATH")]))
    return env


def shown(command: Sequence[str]) -> str:
    """Return `command` quoted so that it can be pasted into a shell."""
    return shlex.join(command)


def _is_foreign(name: str) -> bool:
    return name in _FOREIGN_NAMES or name.startswith(_FOREIGN_PREFIXES)


def _bracketed(addr: str) -> str:
    return f"[{addr}]" if ":" in addr and not addr.startswith("[") else addr


# --- what the user wrote -> values ------------------------------------------------------------


def entrypoint_arguments(given: Mapping[str, Any] | Sequence[Any] | None) -> tuple[str, ...]:
    """Return ``entrypoint_args`` as argv words.

    A mapping becomes ``--key value`` pairs: None or ``""`` is a bare flag, True and False are
    ``true`` and ``false``, lists, tuples and dicts are JSON, everything else is its `str`. A list is
    passed as it is.

    Raises
    ------
    TorchrunConfigError
        If it is neither, or a word contains a NUL character, which no process can be given.
    """
    if given is None:
        return ()
    if isinstance(given, Mapping):
        words = [word for key, value in given.items() for word in _option_words(str(key), value)]
    elif isinstance(given, Sequence) and not isinstance(given, (str, bytes)):
        words = [str(word) for word in given]
    else:
        raise TorchrunConfigError(
            f"entrypoint_args is a {type(given).__name__}, but it must be a dict ({{'lr': 0.1}}) or a list "
            "(['--lr', '0.1'])."
        )
    for word in words:
        if "\0" in word:
            raise TorchrunConfigError(
                f"entrypoint_args contains a NUL character in {word!r}; no process can be given one."
            )
    return tuple(words)


def _option_words(key: str, value: Any) -> list[str]:
    option = key if key.startswith("-") else f"--{key}"
    if value is None or (isinstance(value, str) and value == ""):
        return [option]
    return [option, _as_text(value, key)]


def _as_text(value: Any, key: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple, dict)):
        try:
            return json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise TorchrunConfigError(f"entrypoint_args[{key!r}] can't be written as JSON: {error}.") from error
    return str(value)


def torchrun_options(given: Mapping[str, Any] | Sequence[Any] | None) -> dict[str, str | None]:
    """Return ``torchrun_args`` as a dict: hyphen spelling to value, None for a flag.

    ``["--max-restarts=3"]``, ``["max-restarts", "3"]`` and ``{"max_restarts": 3}`` mean the same.

    Raises
    ------
    TorchrunConfigError
        If it has another form, a value is missing, or one option has two values.
    """
    if given is None:
        return {}
    if isinstance(given, Mapping):
        pairs = _mapping_pairs(given)
    elif isinstance(given, Sequence) and not isinstance(given, (str, bytes)):
        pairs = _sequence_pairs(given)
    else:
        raise TorchrunConfigError(
            f"torchrun_args is a {type(given).__name__}, but it must be a dict ({{'max_restarts': 3}}) or a list "
            "(['--max-restarts=3'])."
        )
    options: dict[str, str | None] = {}
    for name, value in pairs:
        if name in options and options[name] != value:
            raise TorchrunConfigError(f"torchrun_args sets {name} twice: {options[name]!r} and {value!r}.")
        if value is None and name in _VALUED:
            raise TorchrunConfigError(f"torchrun_args {name} needs a value, but has none.")
        options[name] = value
    return options


def _option_name(word: Any) -> str:
    name = str(word).lstrip("-").replace("_", "-")
    return _SHORT.get(name, name)


def _mapping_pairs(given: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    for key, value in given.items():
        name = _option_name(key)
        if name in _FLAGS:
            if value not in (None, "", False, True):
                raise TorchrunConfigError(f"torchrun_args[{key!r}] is a flag without a value, but got {value!r}.")
            if value is not False:
                yield name, None
        else:
            yield name, None if value is None or value == "" else str(value)


def _sequence_pairs(given: Sequence[Any]) -> Iterator[tuple[str, str | None]]:
    words = [None if word is None else str(word) for word in given]
    while words:
        word = words.pop(0)
        if not word:
            raise TorchrunConfigError(f"torchrun_args {list(given)!r} has an empty word where an option is expected.")
        name, equals, value = word.partition("=")
        name = _option_name(name)
        if equals:
            yield name, value
        elif name in _FLAGS:
            if words and words[0] in ("", None):  # metaflow-torchrun 0.2 alternates option and value
                words.pop(0)
            yield name, None
        elif name not in _VALUED and words and str(words[0] or "").startswith("--"):
            yield name, None  # a flag that only a newer torch knows
        elif words:
            yield name, words.pop(0) or None
        else:
            raise TorchrunConfigError(f"torchrun_args {list(given)!r}: option {name} has no value.")


@dataclass
class Request:
    """What one `run` call asks for, before anything is decided.

    The fields are the arguments of `executor.TorchrunExecutor.run` of the same names; `flow_dir` is
    the folder of the flow file, `step_port` and `started_timeout_s` are the port and the
    ``all_nodes_started_timeout`` of ``@torchrun``.
    """

    entrypoint: Any = None
    entrypoint_args: Any = None
    torchrun_args: Any = None
    nproc_per_node: Any = None
    module: bool = False
    env: Mapping[str, Any] | None = None
    cwd: str | None = None
    master_port: Any = None
    max_restarts: Any = None
    step_port: int | None = None
    flow_dir: str | None = None
    started_timeout_s: float = 600.0
    options: dict[str, str | None] = field(init=False)

    def __post_init__(self) -> None:
        self.options = torchrun_options(self.torchrun_args)

    def nproc_settings(self) -> list[tuple[str, int | str | None]]:
        """Return this call's own settings of the processes per node, strongest first.

        Raises
        ------
        TorchrunConfigError
            If the argument and ``torchrun_args`` disagree.
        """
        argument = parse_nproc(self.nproc_per_node, "run(nproc_per_node)")
        option = parse_nproc(self.options.get("nproc-per-node"), "torchrun_args nproc-per-node")
        if argument is not None and option is not None and argument != option:
            raise TorchrunConfigError(
                f"run(nproc_per_node={argument!r}) and torchrun_args nproc-per-node={option!r} disagree; keep one of them."
            )
        return [("run(nproc_per_node)", argument), ("torchrun_args nproc-per-node", option)]


def build_spec(
    request: Request, *, nproc: int, num_nodes: int, node_index: int, python: str, main_addr: str | None = None
) -> LaunchSpec:
    """Check a request and return it as a launch.

    `main_addr` is the control node's address as this node reaches it; a user's ``master-addr`` may repeat it.

    Raises
    ------
    TorchrunConfigError
        If settings contradict each other or what the gang decides.
    EntrypointError
        If the entrypoint is missing or does not exist.
    """
    options = dict(request.options)
    options.pop("nproc-per-node", None)
    min_nodes = take_min_nodes(options, num_nodes)
    _refuse_what_the_gang_owns(options, num_nodes, node_index, main_addr)
    module = bool(request.module) | (options.pop("module", "absent") is None)
    return LaunchSpec(
        entrypoint=_find_entrypoint(request, module, options),
        args=entrypoint_arguments(request.entrypoint_args),
        module=module,
        nproc=nproc,
        num_nodes=num_nodes,
        node_index=node_index,
        python=python,
        master_port=_one_port(request, options.pop("master-port", None)),
        max_restarts=_one_restarts(request.max_restarts, options.pop("max-restarts", None)),
        shown_local_ranks=_local_ranks(options.pop("local-ranks-filter", None)),
        log_dir=_log_folder(options.pop("log-dir", None), request.cwd),
        env=_environment(request.env),
        cwd=_working_directory(request.cwd),
        min_nodes=min_nodes,
        elastic_timeout_s=int(request.started_timeout_s),
        options=tuple((name, value) for name, value in options.items() if name not in _OWN_LOGGING),
    )


def _refuse_what_the_gang_owns(
    options: dict[str, str | None], num_nodes: int, node_index: int, main_addr: str | None
) -> None:
    """Drop options that say what the gang does anyway; refuse those that contradict it."""
    host, colon, port = (options.get("rdzv-endpoint") or "").rpartition(":")
    addresses = () if main_addr is None else (main_addr, _bracketed(main_addr))
    if colon and host in addresses:  # it says what the gang does, and pins the port
        options.pop("rdzv-endpoint")
        options.setdefault("master-port", port)
    allowed: dict[str, tuple[str, ...]] = {
        "nnodes": (str(num_nodes), f"{num_nodes}:{num_nodes}"),
        "node-rank": (str(node_index),),
        "rdzv-backend": (_STATIC_BACKEND,),
        "master-addr": addresses,
        "rdzv-endpoint": addresses,
    }
    truth = {
        "nnodes": f"num_parallel={num_nodes}",
        "node-rank": f"current.parallel.node_index={node_index}",
        "rdzv-backend": "the gang's own rendezvous (static)",
        "master-addr": "the control node's address, which every node finds by itself",
        "rdzv-endpoint": "the control node's address, which every node finds by itself",
    }
    for name, values in allowed.items():
        if name in options:
            value = options.pop(name)
            if value not in values:
                raise TorchrunConfigError(f"torchrun_args {name}={value} contradicts {truth[name]}; remove it.")
    if "standalone" in options:
        options.pop("standalone")
        if num_nodes > 1:
            raise TorchrunConfigError(f"torchrun_args standalone contradicts num_parallel={num_nodes}; remove it.")


def _find_entrypoint(request: Request, module: bool, options: Mapping[str, str | None]) -> str:
    entrypoint = request.entrypoint
    if entrypoint is None or entrypoint == "":
        raise EntrypointError("run() got no entrypoint. Name the script to run: run(entrypoint='train.py').")
    if not isinstance(entrypoint, (str, os.PathLike)):
        raise EntrypointError(
            f"run(entrypoint=...) must be the path of a script, but is a {type(entrypoint).__name__}."
        )
    name = os.fspath(entrypoint)
    if not isinstance(name, str):
        raise EntrypointError(f"run(entrypoint={entrypoint!r}) must be text, not bytes.")
    if module or "no-python" in options:
        return name
    folders = [request.cwd or os.getcwd(), *([request.flow_dir] if request.flow_dir else [])]
    candidates = [os.path.abspath(os.path.join(folder, name)) for folder in folders]
    for candidate in candidates:
        if os.path.isfile(candidate):
            return candidate
    looked = " and ".join(dict.fromkeys(candidates))
    raise EntrypointError(
        f"The entrypoint {name!r} does not exist; looked for {looked}. Check the spelling; for a remote task, check that "
        "the file lies beside the flow, so that Metaflow packages it (see --package-suffixes)."
    )


def parse_port(value: Any, setting: str) -> int | None:
    """Return a port setting as an int; None and ``""`` leave the choice to the kernel.

    Raises
    ------
    TorchrunConfigError
        If it is no port number that an ordinary process may listen on (1 to 65535).
    """
    if value is None or value == "":
        return None
    number = parse_int(value)
    if number is None or not 1 <= number <= 65535:
        raise TorchrunConfigError(f"{setting} is {value!r}, but a port is a whole number from 1 to 65535.")
    return number


def _one_port(request: Request, option: str | None) -> int | None:
    argument = parse_port(request.master_port, "run(master_port)")
    from_options = parse_port(option, "torchrun_args master-port")
    if argument is not None and from_options is not None and argument != from_options:
        raise TorchrunConfigError(
            f"run(master_port={argument}) and torchrun_args master-port={from_options} disagree; keep one of them."
        )
    return argument or from_options or request.step_port


def _one_restarts(argument: Any, option: str | None) -> int:
    from_argument = parse_restarts(argument, "run(max_restarts)")
    from_options = parse_restarts(option, "torchrun_args max-restarts")
    if from_argument is not None and from_options is not None and from_argument != from_options:
        raise TorchrunConfigError(
            f"run(max_restarts={from_argument}) and torchrun_args max-restarts={from_options} disagree; keep one of them."
        )
    return from_argument or from_options or 0


def _local_ranks(value: str | None) -> frozenset[int] | None:
    if value is None:
        return None
    try:
        return frozenset(int(rank) for rank in value.split(","))
    except ValueError as error:
        raise TorchrunConfigError(
            f"torchrun_args local-ranks-filter is {value!r}, but it must be local ranks with commas between, as in '0,1'."
        ) from error


def _environment(env: Mapping[str, Any] | None) -> tuple[tuple[str, str], ...]:
    if env is None:
        return ()
    if not isinstance(env, Mapping):
        raise TorchrunConfigError(f"run(env=...) must be a dict of variables, but is a {type(env).__name__}.")
    for name, value in env.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in f"{name}{value}":
            raise TorchrunConfigError(f"run(env=...): {name!r}={value!r} can't be an environment variable.")
    return tuple((name, str(value)) for name, value in env.items())


def _working_directory(cwd: str | None) -> str | None:
    if cwd is None:
        return None
    folder = os.path.abspath(os.fspath(cwd))
    if not os.path.isdir(folder):
        raise TorchrunConfigError(f"run(cwd={cwd!r}): {folder} is not a folder on this node.")
    return folder


def _log_folder(name: str | None, cwd: str | None) -> str | None:
    """Return what torchrun, which runs in `cwd`, would take this name for; we run elsewhere and read there, too."""
    return None if name is None else os.path.abspath(os.path.join(cwd or "", name))
