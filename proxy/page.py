"""The live page at ``/proxy/``: one file with nothing in it of this run, and its headers.

Everything shown comes from ``/proxy/status``, which the page asks for with the operator's key where
there is one. So the file itself may be served to anybody. The policy lets the page's own script and
style run, by their hashes, and nothing else: a replica's text that came to be markup would be dead.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Final

PATH: Final = "/proxy/"
HTML: Final = (Path(__file__).parent / "page.html").read_bytes()


def hash_of(tag: str, html: bytes = HTML) -> str:
    """The source expression of the one inline ``tag``; CSP level 3, 2.3.1."""
    (content,) = re.findall(rb"<%b>(.*?)</%b>" % (tag.encode(), tag.encode()), html, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"


HEADERS: Final = {
    "content-type": "text/html; charset=utf-8",
    "content-security-policy": (
        f"default-src 'none'; script-src {hash_of('script')}; style-src {hash_of('style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
