"""Nodes with individual configs that connect and leave. The real ClientApp answers for them in this process."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from flwr.app import Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from PIL import Image

from posy.client_app.app import app as client_app
from posy.data.policy import read_policy
from posy.server_app.grids import PosyGrid
from posy.server_app.in_process import InProcessGrid

LENIENT = Path(__file__).with_name("lenient-policy.yaml")
"""The policy of nodes with data whose config names no policy. It hardly limits rows, scores and code."""
POLICY = read_policy(LENIENT)


class NodeGrid(PosyGrid):
    """A grid of nodes by id, which a test connects and disconnects. Nodes in ``silent`` do not answer."""

    def __init__(self, *configs: Mapping[str, Any]) -> None:
        InProcessGrid(1)  # gives this process the identity that messages need
        self.nodes: dict[int, Context] = {}
        self.names: dict[int, str] = {}
        self.silent: set[int] = set()
        self.sent: list[tuple[str, int]] = []
        self.kept: list[Message] = []
        self.replies: dict[str, Message] = {}
        for number, config in enumerate(configs, start=1):
            self.connect(number, config)

    def connect(self, node: int, config: Mapping[str, Any], registered: str = "") -> None:
        node_config = {"policy": str(LENIENT), **config} if "data" in config else dict(config)
        self.nodes[node] = Context(run_id=0, node_id=node, node_config=node_config, state=RecordDict(), run_config={})
        self.names[node] = registered

    def leave(self, node: int) -> None:
        del self.nodes[node]

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=node, name=self.names[node]) for node in self.nodes]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid4())
            ids.append(message.metadata.message_id)
            self.kept.append(message)
            node = message.metadata.dst_node_id
            self.sent.append((message.metadata.message_type, node))
            if node not in self.silent:
                self.replies[ids[-1]] = self.answer(message)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.replies.pop(number) for number in message_ids if number in self.replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(list(messages)))

    def answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        if node not in self.nodes:
            return Message(Error(ErrorCode.NODE_UNAVAILABLE, "node unavailable"), reply_to=message)
        try:
            reply = client_app(message, self.nodes[node])
        except Exception as error:
            reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, repr(error)), reply_to=message)
        reply.metadata.__dict__["_message_id"] = str(uuid4())
        return reply


def class_folders(root: Path, x: np.ndarray, y: Iterable[Any]) -> Path:
    """Write grey images ``(n, H, W)`` as a folder of class folders."""
    for number, (image, label) in enumerate(zip(x, y, strict=True)):
        (root / str(label)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image, "L").save(root / str(label) / f"{number}.png")
    return root


def table(path: Path, x: np.ndarray, y: Iterable[Any]) -> Path:
    """Write features ``(n, F)`` as a .csv file with the column label."""
    header = ",".join([*(f"f{i}" for i in range(x.shape[1])), "label"])
    rows = (",".join([*map(repr, row.tolist()), str(label)]) for row, label in zip(x, y, strict=True))
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def pfllib(root: Path, x: np.ndarray, y: np.ndarray, tested: int) -> Path:
    """Write features as a PFLlib directory of one client, the last samples as its test set."""
    for split, part in (("train", slice(0, len(y) - tested)), ("test", slice(len(y) - tested, None))):
        (root / split).mkdir(parents=True)
        np.savez(root / split / "0.npz", data=np.array({"x": x[part], "y": y[part]}, dtype=object))
    return root
