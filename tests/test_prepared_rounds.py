"""Keys and shares for the next phase, which clients send with their answers in the current phase."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from test_secure_aggregation import ClientGroup, Federate, StageGrid, assert_close, five, key_of, reasons, run

from posy.client_app.secure_aggregation import ProtocolError, Secrets
from posy.strategies.masking import MaskingError
from posy.strategies.run_settings import RunSettings
from posy.strategies.secure_aggregation import REFUSAL, Prepared, SecureRound, View
from posy.strategies.server_state import state_of

__all__ = ["five"]  # a fixture
ALL = {"keys", "shares", "train", "survivors", "unmask"}


class CountingGrid(StageGrid):
    """Grid that counts the messages of each stage and round."""

    stages: Counter[tuple[str, int]]

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
        self.stages = getattr(self, "stages", Counter())
        self.stages.update(key_of(message)[:2] for message in messages)
        return super().send_and_receive(messages, timeout=timeout)


def stages_of(finished: Any, server_round: int) -> set[str]:
    return {stage for stage, number in finished.grid.stages if number == server_round}


def test_only_the_first_phase_has_messages_for_keys_and_shares(make_config: Any, federate: Federate, five: Any) -> None:
    config = make_config("fedavg", data=five, num_server_rounds=3) | {"secure-aggregation": True}
    finished = federate(config, grid=CountingGrid)
    evaluation = {"evaluate", "evaluation survivors", "evaluation unmask"}
    assert stages_of(finished, 1) == ALL | evaluation
    assert stages_of(finished, 2) == stages_of(finished, 3) == {"train", "survivors", "unmask"} | evaluation
    assert set(finished.grid.stages.values()) == {5}


def test_a_different_cohort_sends_new_keys(make_config: Any, federate: Federate, five: Any) -> None:
    """Four of five clients train, and all five are evaluated, so nothing can be prepared."""
    config = make_config("fedavg", data=five, fraction_train=0.8) | {"secure-aggregation": True}
    finished = federate(config, grid=CountingGrid)
    assert all(stages_of(finished, number) >= ALL for number in (1, 2, 3))


@pytest.mark.parametrize("stage", ["survivors", "unmask"])
def test_an_unprepared_client_costs_only_messages(make_config: Any, federate: Federate, five: Any, stage: str) -> None:
    """Client 1 does not answer in round 1, so all clients send keys and shares for the evaluation again."""
    config = make_config("fedavg", data=five, num_server_rounds=2) | {"secure-aggregation": True}
    finished = federate(config, grid=lambda clients: CountingGrid(clients, lost_messages=[(stage, 1, 1)]))
    assert {"evaluation keys", "evaluation shares"} <= stages_of(finished, 1)
    assert reasons(finished, 1) == {1: "no reply"} and reasons(finished, 2) == {}
    assert_close(state_of(finished.strategy), state_of(federate(config).strategy), 0)


def test_prepared_keys_remain_usable_if_a_client_drops_out(make_config: Any, federate: Federate, five: Any) -> None:
    """The keys and shares of round 2 are prepared for five clients. One of them disappears before it."""

    class LeavingGrid(CountingGrid):
        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
            replies = super().send_and_receive(messages, timeout=timeout)
            if any(key_of(message)[:2] == ("evaluation unmask", 1) for message in messages):
                self.lost_messages = [(stage, number, 4) for stage in ("train", "keys") for number in (2, 3)]
            return replies

    config = make_config("fedavg", data=five, num_server_rounds=3) | {"secure-aggregation": True}
    finished = federate(config, grid=LeavingGrid)
    assert "keys" not in stages_of(finished, 2)
    assert reasons(finished, 2) == {4: "no reply"}  # client 4 counts as a client that dropped out of the phase
    lost = [("train", number, 4) for number in (2, 3)]
    plain = federate(config | {"secure-aggregation": False}, grid=lambda clients: StageGrid(clients, lost))
    assert_close(state_of(finished.strategy), state_of(plain.strategy), 1e-6)


def test_prepared_keys_apply_only_to_their_round_and_cohort() -> None:
    stages: list[str] = []

    def ask(stage: str, requests: Any, check: Any) -> dict[int, list[bytes]]:
        stages.append(stage)
        return {}

    view = View((0, 1, 2), 0, 2, 2)
    sealed = {client: [bytes(60)] * 2 for client in range(3)}
    prepared = Prepared("0-2", view, {client: [bytes(32)] * 4 for client in range(3)}, sealed)
    for name, clients in (("0-3", (0, 1, 2)), ("0-2", (0, 1)), ("0-2", (0, 1, 2, 3))):
        SecureRound(name, RunSettings(), dict.fromkeys(clients, 1), ask, lambda *_: None, prepared=prepared).opened()
    assert stages == ["keys"] * 3
    right = SecureRound("0-2", RunSettings(), dict.fromkeys(range(3), 1), ask, lambda *_: None, prepared=prepared)
    assert right.opened()[1]["sources"] == [0, 2]
    assert stages == ["keys"] * 3


# -- the client ----------------------------------------------------------------------------------------------


def prepared_group() -> tuple[ClientGroup, list[list[bytes]]]:
    """Return clients that have signed a list of survivors, and their keys for the evaluation."""
    group = ClientGroup().mask_all()
    answers = [group.sign_survivors(client, group.roster, next_round="0-1-evaluation") for client in group.roster]
    return group, answers


def test_a_client_reveals_and_prepares_in_one_reply() -> None:
    group, answers = prepared_group()
    signed = {client: texts[:2] for client, texts in enumerate(answers)}
    keys = [text for texts in answers for text in texts[2:]]
    view = {"roster": group.roster, "public_keys": keys, "cohort": group.roster, "reach": 0}
    view |= {"cohort_threshold": 3, "threshold": 3, "next_round": "0-1-evaluation"}
    revealed = [group.unmask(client, signed, **view) for client in group.roster]
    assert [len(texts) for texts in revealed] == [4 + 3] * 4
    assert {len(share) for texts in revealed for share in texts[:4]} == {16}
    evaluation = Secrets(0, group.contexts[0], 0, "0-1-evaluation").load()
    assert evaluation.sealed == revealed[0][4:]
    assert group.secrets_of(0).revealed


def test_a_client_that_refuses_keys_still_reveals_its_shares() -> None:
    group, answers = prepared_group()
    signed = {client: texts[:2] for client, texts in enumerate(answers)}
    keys = [text for texts in answers for text in texts[2:]]
    keys[4 * 2 + 2] = bytes(64)  # the signature of client 2
    view = {"roster": group.roster, "public_keys": keys, "cohort": group.roster, "reach": 0}
    view |= {"cohort_threshold": 3, "threshold": 3, "next_round": "0-1-evaluation"}
    texts = group.unmask(0, signed, **view)
    assert texts[4:] == [REFUSAL, b"2 the signature is wrong"]
    view |= {"threshold": 1}
    assert len(group.unmask(1, signed, **view)) == 4 + 2
    keys[4 * 2 + 2] = answers[2][4]
    assert len(group.unmask(3, signed, **view)) == 4  # an unsafe threshold: no shares for the next round


def test_preparing_a_round_never_replaces_current_secrets() -> None:
    group = ClientGroup().mask_all()
    before = group.secrets_of(0)
    assert len(group.sign_survivors(0, group.roster, next_round="0-2")) == 2
    assert group.secrets_of(0).own_secret == before.own_secret
    assert len(group.sign_survivors(1, group.roster, next_round="no round")) == 2


def test_keys_are_renewed_only_before_the_masked_reply() -> None:
    group = ClientGroup().exchange_shares()
    first = group.request(0, "keys")
    assert group.request(0, "keys") == first, "a copy of the request has the same answer"
    again = group.request(0, "keys", again=True)
    assert not set(first) & set(again)
    assert group.request(0, "keys", again=True) == again, "nothing was shared under these keys"
    with pytest.raises(ProtocolError, match="is over"):
        group.mask(0)
    group = ClientGroup().mask_all()
    assert group.request(1, "keys", again=True) == group.request(1, "keys")
    assert group.secrets_of(1).masked


def test_prepared_keys_are_renewed_on_request() -> None:
    """A client that saw another client's early keys could send them too, so all other clients refused the round."""
    group, answers = prepared_group()
    first = [group.request(client, "keys", secure_round="0-1-evaluation", again=True) for client in group.roster]
    assert not {text for keys in first for text in keys[:2]} & {text for texts in answers for text in texts[2:4]}
    again = [group.request(client, "keys", secure_round="0-1-evaluation", again=True) for client in group.roster]
    assert again == first, "a copy of the request has the same answer"


def test_shares_for_void_keys_decrypt_nothing() -> None:
    """Client 0 shares again. Its earlier shares are for keys that no client accepts any more."""
    group = ClientGroup().exchange_shares()
    void = group.sealed
    group.public = [group.request(client, "keys", again=True) for client in group.roster]
    group.sealed = [group.shares(client) for client in group.roster]
    assert not {text for texts in void for text in texts} & {text for texts in group.sealed for text in texts}
    current, group.sealed = group.sealed, void
    with pytest.raises(MaskingError, match="cannot be decrypted"):
        group.mask(0)
    group.sealed = current
    assert group.mask(0).dtype == np.uint32


def test_repeated_messages_do_not_change_the_model(make_config: Any, federate: Federate, five: Any) -> None:
    config = make_config("fedrep", data=five, model="mlp", num_server_rounds=3)
    twice = run(federate, config, duplicate=True)
    assert_close(state_of(twice.strategy), state_of(run(federate, config).strategy), 0)
