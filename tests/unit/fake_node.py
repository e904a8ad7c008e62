"""One node without processes and without a network: its agent says what the test wants, its gang is the test itself."""

import queue
import signal
import tempfile
from pathlib import Path
from types import SimpleNamespace

from limits import limit_s
from loops import InLoop, Loop
from unit_helpers import HANG_S

from metaflow_extensions.torchrun.plugins.torchrun.errors import LaunchFailed
from metaflow_extensions.torchrun.plugins.torchrun.gang import messages
from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause
from metaflow_extensions.torchrun.plugins.torchrun.supervisor import agent as agent_events
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.call import Call
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.launch import NodeLaunch
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.side import Side

DEADLINE_S = limit_s(HANG_S)
NOBODY = 2**22 + 1  # more than the kernel gives as a pid
ERROR = LaunchFailed("Rank 1 failed.", Cause("exit", 0, "host", 1, 1, 3).as_dict())


class FakeAgent:
    """An agent that only notes what it is told, and says what the test has it say."""

    def __init__(self, loop, on_event, command, env, options, warm=None):
        self.command, self.env, self.options = command, env, options
        self.say = lambda event: loop.call(on_event, event)
        self.orders = []
        self.pid = None

    def start(self):
        self.orders.append("start")

    def stop(self, grace_s, first_signal=None, spared=()):
        self.orders.append(("stop", grace_s) if first_signal is None else ("preempt", grace_s, first_signal))

    async def close(self, grace_s):
        self.orders.append(("close", grace_s))


class FakeNode:
    """A node of a gang of two, each with two ranks, and what its supervisor sends, says and returns.

    Its temporary files go to `folder`. The node's index is `number`; its ranks begin at twice that. `fields` are those
    of `Call` that matter to the test.
    """

    def __init__(self, folder, number=0, spares=None, write=None, **fields):
        tempfile.tempdir = str(folder)  # until the test's end, see `nothing_leaks`
        self.number = number
        self.said, self.output = [], []
        self.stored = []  # what the task was asked to store; None: to give that up
        self._sent, self._agents, self._came = queue.Queue(), queue.Queue(), queue.Queue()
        self.loop = Loop()
        log = SimpleNamespace(show=lambda event: self.said.append((event.kind, event.text)))
        self.side = InLoop(self.loop, lambda: Side(number, 2, self._be_asked, log))
        self.side.itself.send = self._sent.put
        own = {"nproc": 2, "num_nodes": 2, "node_index": number, "python": "python3"}
        self.call = Call("/flow/train.py", (), False, **{**own, **fields})
        self.spares, self.write = spares, write or self._write
        self.new_agent = self._new_agent

    def _write(self, stream, lines):
        self.output += [lines.decode()] if lines else []  # none: that was all for now
        return True

    def _new_agent(self, *args):
        agent = FakeAgent(self.loop, *args)
        self._agents.put(agent)
        return agent

    def _begin(self):
        def begin():
            self._task = self.loop.loop.create_task(self._run())

        self.loop.call(begin)

    async def _run(self):
        launch = NodeLaunch(self.call, self.side.itself, 0, self.write, self.spares, self.new_agent)
        try:
            outcome = await launch.run()
            if outcome.verdict.error is not None:
                raise outcome.verdict.error
            self._came.put(outcome)
        except BaseException as error:
            self._came.put(error)

    # What the task does for the launch.
    def _be_asked(self, what, *rest):
        if what == "complete":
            self.side.itself.inbox.put_nowait(self.call)
        elif what == "store":
            self.stored.extend(rest)

    # --- what the test does ----------------------------------------------------------------------

    def launch(self):
        """Have the step's code call `run`, in a thread; return the node's *ready*."""
        self._begin()
        return self.expect(messages.Ready)

    def prepare(self):
        """Have the step's code call `run` with commands before."""
        self._begin()
        self.report("before_run")

    def go(self, generation=0, **more):
        """Have the control node say *go*; return the agent that is made."""
        self.say_go(generation, **more)
        return self._agents.get(timeout=DEADLINE_S)

    def say_go(self, generation=0, **more):
        more = {"port": 29500, "gang": "gang", "max_restarts": 3, **more}
        self.side.deliver(messages.Go(0, generation, **more))

    def running(self):
        """Launch and start two workers; return their agent."""
        self.launch()
        agent = self.go()
        for local_rank in (0, 1):
            agent.say(agent_events.WorkerStarted(self.rank(local_rank), local_rank, NOBODY + local_rank))
        self.report("started")
        return agent

    def verdict(self, error=None, **more):
        """Have the control node decide; return what `run` returns or raises."""
        self.side.deliver(messages.Verdict(0, error, **more))
        return self.outcome()

    def interrupt(self, news):
        """Put something into the launch's inbox, as another thread or a signal handler does."""
        self.loop.post(lambda: self.side.itself.inbox.put_nowait(news))

    def ends(self, agent, *end):
        """Have the agent be gone and the control node decide on an error; return the node's *ended*."""
        agent.say(agent_events.End(*(end or (-signal.SIGKILL,))))
        ended = self.expect(messages.Ended)
        assert self.verdict(ERROR) is ERROR
        return ended

    def rank(self, local_rank):
        return 2 * self.number + local_rank

    def worker_ended(self, agent, local_rank, status, stopped=False, at=0.0):
        agent.say(agent_events.WorkerEnded(self.rank(local_rank), local_rank, NOBODY + local_rank, status, stopped, at))

    def all_end_well(self, agent):
        for local_rank in (0, 1):
            self.worker_ended(agent, local_rank, 0)
        agent.say(agent_events.AgentEnded(0, 0.0))
        agent.say(agent_events.End(0))

    def worker_writes(self, agent, stream, text, local_rank=1):
        """Have a worker write; return its folder."""
        if text:
            Path(Path(agent.options.stderr).parent / f"{local_rank}.{stream}").write_text(text)
        folder = Path(agent.options.stderr).parent.parent / "run_x" / "attempt_0" / str(local_rank)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    # --- what the test looks at ------------------------------------------------------------------

    def expect(self, kind):
        """Return the next message, which must be of that kind."""
        message = self.next_message()
        assert isinstance(message, kind), message
        return message

    def report(self, kind):
        """Return the data of the next message, which must be a report of that kind."""
        report = self.expect(messages.Report)
        assert report.kind == kind, report
        return report.data

    def next_message(self):
        return self._sent.get(timeout=DEADLINE_S)

    def outcome(self):
        """Return what `run` has returned or raised."""
        return self._came.get(timeout=DEADLINE_S)

    def texts(self, kind):
        """Return what was said of that kind of event."""
        return [text for said, text in self.said if said == kind]
