"""Records in a node's audit log the messages that the node itself answers with an error."""

import contextlib
from collections.abc import Mapping
from typing import Any

from flwr.app import Context, Message, RecordDict

from posy.client_app import audit


def record_error(message: Message, node_config: Mapping[str, Any], error: Exception | str) -> None:
    """Record that the node itself answers a message with an error.

    ``error`` is the exception, or the name of the rule that the message violates. The reply contains no data, so the
    node sends it even if it cannot write the log.
    """
    audit_log = audit.log_of(node_config)
    if audit_log is None:
        return
    metadata = message.metadata
    context = Context(metadata.run_id, metadata.dst_node_id, dict(node_config), RecordDict(), {})
    with contextlib.suppress(audit.AuditError):  # the node's log contains the reason
        audit.record(audit_log, message, context, error)
