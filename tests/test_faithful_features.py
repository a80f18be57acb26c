"""FedPAC, FedProto, FedNH, FedUV, MOON and FedAS: details of the papers and programs, and limits on updates."""

import numpy as np
import pytest
import torch

LR = 0.1
CONFIG = {"server-round": 1, "lr": LR}


def module_of(client, flat):
    """Return the client's network as a module in double precision."""
    model = client.architecture.build().double()
    model.load_state_dict({name: t.double() for name, t in client.layout.views(torch.as_tensor(flat)).items()})
    return model


def flat_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()


def descend(loss, parameters, lr=LR):
    gradients = torch.autograd.grad(loss, parameters)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.sub_(lr * gradient)


# -- FedPAC ------------------------------------------------------------------------------------------------


def test_fedpacs_limit_measures_body_and_head_alone(make_config, federate):
    """The class means and 21 samples have norms of about 12; body and head move by less than 1."""
    finished = federate(make_config("fedpac", max_update_norm=1.0))
    assert not any(record.dropped for record in finished.records)
    strict = federate(make_config("fedpac", max_update_norm=1e-3, num_server_rounds=1))
    assert [client for client, _ in strict.records[0].dropped] == [0, 1, 2, 3]


@pytest.mark.parametrize(("head_lr", "rate"), [(0.3, 0.3), (0.0, LR)])
def test_fedpac_trains_the_head_at_its_own_rate(head_lr, rate, make_client):
    client = make_client("fedpac", batch_size=100, fedpac_head_lr=head_lr, fedpac_strength=0.0)
    x, y = client.data.x_train.double(), client.data.y_train
    start = client.initial()
    body, head = client.layout.without(["head"]), client.layout.part(["head"])
    received = [body.take(start).numpy(), head.take(start).numpy(), np.zeros((3, 64), np.float32), np.zeros(3)]
    sent, _, _ = client.fit(received, CONFIG)
    model = module_of(client, start)
    descend(torch.nn.functional.cross_entropy(model(x), y), list(model.head.parameters()), rate)
    descend(torch.nn.functional.cross_entropy(model(x), y), list(model.blocks.parameters()))
    np.testing.assert_allclose(sent[0], body.take(flat_of(model)), atol=1e-5)
    np.testing.assert_allclose(sent[1], head.take(flat_of(model)), atol=1e-5)


def test_a_single_client_a_round_has_no_heads_to_combine(make_config, federate, warnings):
    federate(make_config("fedpac", fraction_train=0.25, num_server_rounds=1))
    assert "fedpac: one client trains in a round, so no heads are combined" in warnings.text
    warnings.clear()
    federate(make_config("fedpac", num_server_rounds=1))
    assert "no heads are combined" not in warnings.text
