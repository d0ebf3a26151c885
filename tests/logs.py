"""What agentsd logs while a block runs."""

import re
from contextlib import contextmanager

from agentsd_eval.log import captured as logged


@contextmanager
def warned(match):
    """At least one message matches."""
    with logged() as messages:
        yield messages
    assert any(re.search(match, message) for message in messages), (match, messages)


@contextmanager
def silent(*but):
    """There is none but those that match."""
    with logged() as messages:
        yield
    assert not [text for text in messages if not any(re.search(match, text) for match in but)]
