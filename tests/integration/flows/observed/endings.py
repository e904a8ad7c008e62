"""Ends in one of many ways, by the local rank; with ``names`` as its argument it tells them.

Workers wait for each other and are deaf to SIGTERM, since torchrun and the gang stop all as soon as one has failed.
"""

import atexit
import gc
import os
import resource
import signal
import sys
import threading
import time
import warnings

DEADLINE_S = 60.0
ENDINGS = []


def ending(how):
    """Let a rank end so."""
    ENDINGS.append(how)
    return how


@ending
def returns():
    print("at its end", end="")


@ending
def exit_3():
    sys.exit(3)


@ending
def exit_text():
    sys.exit("a text, lösung \udcff")


@ending
def exit_none():
    sys.exit(None)


@ending
def exit_true():
    sys.exit(True)


@ending
def exit_261():
    sys.exit(261)


@ending
def exit_minus_1():
    sys.exit(-1)


@ending
def exit_object():
    sys.exit(["a", "list"])


@ending
def exit_of_site():
    exit(4)


@ending
def exit_at_once():
    sys.stdout.write("written")
    os._exit(5)


@ending
def raises_chained():
    try:
        {}["a key"]
    except KeyError as error:
        raise RuntimeError("chained\nsecond line, lösung \udcff") from error


@ending
def raises_in_context():
    try:
        [][1]
    finally:
        undefined_name  # noqa: B018, F821


class OwnError(Exception):
    def __str__(self):
        raise ValueError("no text")


@ending
def raises_its_own():
    raise OwnError("hidden")


@ending
def raises_base():
    raise BaseException("the base")


@ending
def raises_many():
    deep(3000)


def deep(count):
    return deep(count - 1) + 1


@ending
def raises_keyboard_interrupt():
    raise KeyboardInterrupt


@ending
def interrupted():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(DEADLINE_S)


@ending
def raises_syntax_error():
    exec(compile("a = (1,\nb c", "<made>", "exec"))


@ending
def raises_in_exit_handler():
    atexit.register(lambda: 1 / 0)
    atexit.register(print, "the later one is first")
    print("main is done")


@ending
def exits_in_exit_handler():
    atexit.register(sys.exit, 6)


@ending
def raises_in_thread():
    thread = threading.Thread(target=lambda: {}["of a thread"], name="a thread")
    thread.start()
    thread.join()
    print("goes on")


@ending
def exits_in_thread():
    thread = threading.Thread(target=sys.exit, args=(7,))
    thread.start()
    thread.join()
    print("goes on")


@ending
def ends_before_its_thread():
    def work():
        time.sleep(0.3)
        print("the thread is last, but for", threading.main_thread().is_alive())

    threading.Thread(target=work).start()
    atexit.register(print, "the exit handler")
    print("main is done")


@ending
def ends_with_daemon():
    threading.Thread(target=time.sleep, args=(DEADLINE_S,), daemon=True).start()
    print("main is done")


@ending
def has_own_hook():
    sys.excepthook = lambda kind, error, trace: print("own hook:", kind.__name__, error)
    raise ValueError("for the own hook")


@ending
def has_failing_hook():
    def hook(kind, error, trace):
        raise LookupError("in the hook")

    sys.excepthook = hook
    raise ValueError("for a hook that fails")


@ending
def has_hook_that_calls_the_default():
    def hook(kind, error, trace):
        print("first the own")
        sys.__excepthook__(kind, error, trace)

    sys.excepthook = hook
    raise ValueError("for both hooks")


@ending
def raises_with_no_stderr():
    sys.stderr = None
    raise ValueError("nobody sees it")


@ending
def raises_with_closed_stderr():
    os.close(2)
    raise ValueError("nobody can see it")


@ending
def ends_with_closed_stdout():
    sys.stdout.write("before")
    sys.stdout.close()


@ending
def ends_with_lost_stdout():
    print("before")
    os.close(1)
    sys.stdout.write("after")


@ending
def writes_in_pieces():
    sys.stdout.write("one ")
    os.write(1, b"two \xff ")
    sys.stdout.buffer.write(b"three ")
    sys.stderr.write("err ")
    print("four", end="")


class Loud:
    def __init__(self, name):
        self.name = name
        self.itself = self

    def __del__(self):
        print("gone:", self.name, sys.is_finalizing())


@ending
def keeps_objects():
    global kept
    kept = Loud("of the module")
    lost = Loud("in a cycle")
    gc.collect()
    del lost
    raise ValueError("with objects")


@ending
def fails_in_del():
    class Fails:
        def __del__(self):
            raise ValueError("in del")

    Fails()
    print("goes on")


@ending
def warns():
    warnings.warn("a warning", stacklevel=1)
    warnings.warn("deprecated", DeprecationWarning, stacklevel=1)
    open(os.devnull)  # noqa: SIM115
    gc.collect()


@ending
def logs():
    import logging

    logging.warning("by the root")
    logging.getLogger("own").error("by its own")
    logging.getLogger("own").info("not shown")


@ending
def reads_stdin():
    print(repr(sys.stdin.read()), sys.stdin.isatty())
    input()


@ending
def begins_to_debug():
    breakpoint()


@ending
def forks():
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        raise ValueError("in the child")
    print("child ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


@ending
def forks_and_exits():
    child = os.fork()
    if child == 0:
        sys.exit(8)
    print("child ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


@ending
def becomes_another():
    os.execvp("sh", ["sh", "-c", "echo from $0; exit 9", "another"])


@ending
def becomes_itself():
    if os.environ.get("AGAIN"):
        print("again", sys.argv, sys.orig_argv[1:])
        sys.exit(10)
    os.environ["AGAIN"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


@ending
def runs_others():
    import subprocess

    words = [sys.executable, "-c", "import sys; print(sys.flags.unbuffered, __name__); sys.exit(11)"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    print(done.returncode, done.stdout, done.stderr)
    subprocess.run(["sh", "-c", "kill -9 $$"], check=True)


@ending
def runs_loop():
    import asyncio

    async def main():
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print, "handled")
        os.kill(os.getpid(), signal.SIGUSR1)
        child = await asyncio.create_subprocess_exec("sh", "-c", "exit 12")
        print(await child.wait())
        raise OSError(13, "of the loop")

    asyncio.run(main())


@ending
def handles_signals():
    signal.signal(signal.SIGALRM, lambda number, frame: print("alarm", number, frame.f_code.co_name))
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    signal.pause()
    signal.raise_signal(signal.SIGALRM)


@ending
def writes_where_nobody_reads():
    reader, writer = os.pipe()
    os.close(reader)
    os.write(writer, b"x")


@ending
def dies_by_sigpipe():
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    writes_where_nobody_reads()


@ending
def aborts():
    os.abort()


@ending
def aborts_and_tells():
    import faulthandler

    faulthandler.enable()
    os.abort()


@ending
def tells_where_it_is():
    import faulthandler

    faulthandler.dump_traceback(all_threads=True)


@ending
def has_no_files_left():
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    open("/dev/null")  # noqa: SIM115


@ending
def imports_what_is_not_there():
    import no_such_module  # noqa: F401


def killed_by(number):
    def dies():
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    dies.__name__ = f"killed_by_{number:d}"
    return dies


# Those that stop a process, or that it does not even notice.
_HARMLESS = {signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGCONT}
_HARMLESS |= {signal.SIGCHLD, signal.SIGURG, signal.SIGWINCH}
ENDINGS += map(killed_by, [*sorted(set(signal.Signals) - _HARMLESS), signal.SIGRTMIN + 3])


def await_others():
    folder = os.path.join(os.environ["GANG_OUT"], os.environ["TORCHELASTIC_RUN_ID"])
    count = int(os.environ["LOCAL_WORLD_SIZE"])
    os.makedirs(folder, exist_ok=True)
    os.close(os.open(os.path.join(folder, os.environ["LOCAL_RANK"]), os.O_CREAT))
    deadline = time.monotonic() + DEADLINE_S
    while len(os.listdir(folder)) < count and time.monotonic() < deadline:
        time.sleep(0.01)


def main():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if "TORCHELASTIC_RUN_ID" in os.environ and "AGAIN" not in os.environ:
        await_others()
    ENDINGS[int(os.environ["LOCAL_RANK"])]()


if __name__ == "__main__":
    if sys.argv[1:] == ["names"]:
        print("\n".join(each.__name__ for each in ENDINGS))
    else:
        main()
