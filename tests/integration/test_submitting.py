"""What can't work on Kubernetes or AWS Batch ends on the command line, before anything is started or asked for."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from flow_runs import FLOWS

GANG = {"torchrun": {}}
CAUGHT = {"catch": {"var": "failure"}, "torchrun": {}}
NOWHERE = "http://127.0.0.1:1"


@pytest.fixture
def clouds(tmp_path):
    """Return the environment of a process that would talk to AWS and Kubernetes, where nobody answers."""
    parts = {"cluster": {"server": NOWHERE}, "user": {"token": "fake"}, "context": {"cluster": "c", "user": "c"}}
    config = {f"{part}s": [{"name": "c", part: what}] for part, what in parts.items()}
    (tmp_path / "kubeconfig").write_text(json.dumps({"current-context": "c", **config}))
    return {
        "METAFLOW_DEFAULT_DATASTORE": "s3",
        "METAFLOW_DATASTORE_SYSROOT_S3": "s3://nowhere/x",
        "METAFLOW_S3_ENDPOINT_URL": NOWHERE,
        "METAFLOW_KUBERNETES_NAMESPACE": "nowhere",
        "KUBECONFIG": str(tmp_path / "kubeconfig"),
        "AWS_ENDPOINT_URL": NOWHERE,
        "AWS_ACCESS_KEY_ID": "fake",
        "AWS_SECRET_ACCESS_KEY": "fake",
        "AWS_DEFAULT_REGION": "us-east-1",
        "PYTHONPATH": str(site_of(tmp_path)),
    }


def site_of(folder: Path) -> Path:
    """Return a place with a package `kubernetes`: Metaflow only looks whether it is there, until it has something to say."""
    package = folder / "site" / "kubernetes"
    package.mkdir(parents=True, exist_ok=True)
    for module in ("__init__", "client", "config"):
        (package / f"{module}.py").touch()
    return package.parent


@pytest.fixture
def refused(run_flow, clouds):
    """Return a function that submits a flow, which must be refused, and looks for words in what it says."""

    def submit(*arguments, decorators=GANG, words=(), env=None, flow="submitted.py", **options):
        env = {"GANG_DECORATORS": json.dumps(decorators), **clouds, **(env or {})}
        text = run_flow(*arguments, flow=flow, expect=1, timeout_s=60, env=env, **options).text
        assert [word for word in (*words, "TorchrunConfigError: ") if word not in text] == [], text
        assert [word for word in ("Traceback", "Workflow starting", "Task is starting") if word in text] == [], text

    return submit


CATCH_WORDS = ["Step train has @catch, @torchrun and @kubernetes", "except TorchrunError", "@retry"]
BY_KUBERNETES = {"decorators": CAUGHT, "words": CATCH_WORDS}
METADATA_WORDS = [
    "Step train, a gang of 2 nodes with @batch, can't finish with --metadata=local",
    "--metadata=service",
]
BATCH = ("--with", "batch:queue=q")
REFUSED = {
    "@catch, in the source": ((), {**BY_KUBERNETES, "decorators": {**CAUGHT, "kubernetes": {}}}),
    "@catch, resumed": (("--with", "kubernetes"), {**BY_KUBERNETES, "command": "resume"}),
    # Metaflow adds @kubernetes to all steps there, after everything else was initialized.
    "@catch, on Argo": (("create", "--only-json"), {**BY_KUBERNETES, "command": "argo-workflows"}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name, refused):
    words, options = REFUSED[name]
    refused(*words, **options)


IN_A_FOREACH = """
from around import Around
from metaflow import step, torchrun
class Foreach(Around):
    @step
    def start(self):
        self.names = [1, 2]
        self.next(self.branch, foreach="names")
    @step
    def branch(self):
        self.next(self.train, num_parallel=2)
    @torchrun
    @step
    def train(self):
        self.next(self.join)
    @step
    def join(self, inputs):
        self.next(self.merge)
    @step
    def merge(self, inputs):
        self.next(self.end)
if __name__ == "__main__":
    Foreach()
"""


def test_a_foreach_on_batch(refused, tmp_path):
    shutil.copy(FLOWS / "around.py", tmp_path)
    (tmp_path / "flow.py").write_text(IN_A_FOREACH)
    words = ["Step train, a gang of 2 nodes with @batch, stands in the foreach of step start"]
    refused(*BATCH, flow="flow.py", folder=tmp_path, words=words)


# What Python on macOS lacks (its documentation, 3.11), and what it says of its system.
MACOS = """
import fcntl, os, platform, resource, select, signal, socket, sys, time
platform.system = lambda: "Darwin"
select.kqueue = object  # Metaflow uses it there
LACKS = {
    fcntl: "F_SETPIPE_SZ F_GETPIPE_SZ F_ADD_SEALS F_NOTIFY",
    os: "P_PIDFD copy_file_range eventfd fdatasync getrandom getresuid memfd_create pidfd_open pipe2 posix_fadvise "
    "posix_fallocate sched_getaffinity sched_setaffinity splice waitid O_DIRECT O_PATH O_TMPFILE",
    resource: "prlimit",
    select: "epoll",
    signal: "SIGCLD SIGPOLL SIGPWR SIGRTMAX SIGRTMIN SIGSTKFLT pidfd_send_signal sigtimedwait sigwaitinfo",
    socket: "AF_NETLINK AF_PACKET MSG_NOSIGNAL SOCK_CLOEXEC SOCK_NONBLOCK SO_PEERCRED TCP_KEEPIDLE TCP_USER_TIMEOUT",
    time: "CLOCK_BOOTTIME pthread_getcpuclockid",
}
for module, names in LACKS.items():
    for name in names.split():
        vars(module).pop(name, None)

def without_proc(event, args):
    if event in ("open", "os.listdir", "os.scandir") and str(args[0]).startswith("/proc"):
        raise FileNotFoundError(args[0])

sys.addaudithook(without_proc)
"""


@pytest.fixture
def macos(tmp_path):
    """Return the environment of a process that takes this machine for a Mac."""
    site = site_of(tmp_path)
    (site / "sitecustomize.py").write_text(MACOS)
    return {"PYTHONPATH": str(site)}


def test_a_local_run_on_macos(refused, macos):
    refused(env=macos, words=["Step train with @torchrun needs Linux, but this machine has Darwin"])


def test_from_macos_all_that_is_for_clusters_goes_on(refused, run_flow, macos, clouds, tmp_path):
    refused(*BATCH, env=macos, words=METADATA_WORDS)
    refused("create", "--only-json", command="argo-workflows", decorators=CAUGHT, env=macos, words=CATCH_WORDS)
    env = {**macos, "GANG_DECORATORS": json.dumps(GANG)}
    shown = run_flow("show", command="torchrun", flow="submitted.py", env=env, expect=None)
    assert "Traceback" not in shown.text
    package, options = str(tmp_path / "package.tgz"), {"flow": "submitted.py", "env": {**clouds, **env}}
    run_flow("save", package, before=("--with", "kubernetes"), command="package", **options)
    names = subprocess.check_output(["tar", "-tzf", package], text=True)
    for name in ("metaflow_torchrun/__init__.py", "plugins/torchrun/supervisor/process.py"):
        assert f"{name}\n" in names
