"""A flow whose ``@torchrun`` step has the code of a test, as Metaflow's lint sees it when it is submitted."""

import importlib.util

from metaflow import lint
from unit_helpers import write

FLOW = """
from metaflow import FlowSpec, current, step, torchrun
{before}

class LintedFlow(FlowSpec):
    @step
    def start(self):
        self.next(self.train, num_parallel=2)

    {decorator}
    @step
    def train(self):
        {body}
        self.next(self.join)

    @step
    def join(self, inputs):
        self.next(self.end)

    @step
    def end(self):
        pass
"""


def told_of(path, body, before="", decorator="@torchrun"):
    """Return what the lint says of a flow in this file, and the line that it says it of; None if it says nothing."""
    text = FLOW.format(body=body.replace("\n", "\n" + " " * 8), before=before, decorator=decorator)
    spec = importlib.util.spec_from_file_location("linted_flow_of_a_test", write(path, text))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        lint.linter.run_checks(module.LintedFlow._graph)
    except lint.LintWarn as warning:
        return warning.message, text.splitlines()[warning.line_no - 1].strip()
    return None
