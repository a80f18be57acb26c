"""Messages that a node answers with an error before the worker has run the app, in the node's audit log."""

import contextlib
from collections.abc import Mapping
from typing import Any

from flwr.app import Context, Message, RecordDict

from posy.client_app import audit


def record_error(message: Message, node_config: Mapping[str, Any], error: Exception | str) -> None:
    """Record that the node itself answers a message with an error, or refuses the message by the rule in a text.

    The reply contains no data, so it leaves the node even if the log cannot be written.
    """
    audit_log = audit.log_of(node_config)
    if audit_log is None:
        return
    about = message.metadata
    context = Context(about.run_id, about.dst_node_id, dict(node_config), RecordDict(), {})
    with contextlib.suppress(audit.AuditError):  # the node's log names the reason
        audit.record(audit_log, message, context, error)
