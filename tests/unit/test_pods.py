"""Where a missing node's pod is looked for; that the command finds it is tested in tests/remote/test_kubernetes.py."""

from metaflow_extensions.torchrun.plugins.torchrun.machine.pods import why_it_waits


def test_only_in_a_job_set_there_is_a_command():
    assert why_it_waits(1, {}) == ""
    assert why_it_waits(1, {"METAFLOW_KUBERNETES_POD_NAMESPACE": "ml"}) == ""
    pod = {"METAFLOW_KUBERNETES_JOBSET_NAME": "js-1a2b3c", "METAFLOW_KUBERNETES_POD_NAMESPACE": "ml"}
    assert why_it_waits(3, pod) == "kubectl -n ml describe pods -l job-name=js-1a2b3c-worker-2"
