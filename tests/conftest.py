"""What the tests need whatever started them."""

from __future__ import annotations

import signal

# A shell starts a command in the background with SIGINT ignored, and children inherit that: those
# to which a test sends it would not notice.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
