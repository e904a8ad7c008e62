"""All time limits of a gang, in seconds. What a user can set is in `policy`."""

# --- joining and waiting
QUIET_S, REMIND_S = 10.0, 30.0
"""A node that waits for another logs that after the first time, then each second one."""
ATTEMPT_S = 5.0
"""One address, until it answers, and once more until it has proven that it knows the token."""
NEXT_ADDRESS_S, ALL_ADDRESSES_S = 0.25, 2.0
"""After how long the next address is tried beside the one before (RFC 8305), and within what time all are: a host can
have many, and packets to the wrong ones may vanish without an answer."""

# --- the end of a generation
STOP_MARGIN_S = 15.0
"""What a node needs beyond the workers' grace to kill, reap and read the last bytes."""
ALIKE_ENDS, ALIKE_S = 3, 120.0
"""After so many failures of the user's code in a row in the same way, each so soon after the start, no restart helps."""
SAVE_S, INDEX_S = 120.0, 15.0
"""How long storing what a failed launch has left may take, and then its index. All nodes wait, and the user pays."""
LATE_S = 10.0
"""So long after its launch or generation has ended, a line may still be captured."""

# --- what the ranks do
START_S = 600.0
"""How long workers may take until the first sign of life: to be started, and to import PyTorch."""
FIRST_OUTPUT_S = 60.0
"""When a line tells of a launch that has written nothing."""
WORKERS_S, NODES_MARGIN_S, PROFILE_S = 6.0, 4.0, 300.0
"""How long the workers of a node may take to say what they do, what the node has besides, and how long a profile takes."""
FIRST_LINE_S, LINES_EVERY_S = 10.0, 60.0
"""When the log tells of progress: after the first report, when the speed is known, and then at most so often."""
LOOKS_EVERY_S, STALE_S, SLOW_S = 5.0, 20.0, 60.0
"""How often ranks are compared; after how long without a report not any more; after how long one is called slow."""
