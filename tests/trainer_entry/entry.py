"""The trainer entry as a process of its own, with the daemon swapped; started by test_run.py.

``entry.py DAEMON_COMMAND OPTIONS COMMAND``, each JSON; OPTIONS are keyword arguments of ``run``.
"""

import json
import os
import signal
import sys

from trainer_entry import supervisor
from trainer_entry.run import run

supervisor.START_SLACK_S = supervisor.FOLLOWER_SLACK_S = 0.1  # type: ignore[misc]
# A test run in the background has it ignored, and what was ignored at the start stays so.
signal.signal(signal.SIGINT, signal.default_int_handler)
daemon_command, options, command = (json.loads(text) for text in sys.argv[1:])
sys.exit(
    run(
        ["--replica", "http://a:8000"],
        command,
        os.environ,
        daemon_command=daemon_command,
        **options,
    )
)
