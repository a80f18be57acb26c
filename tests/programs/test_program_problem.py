"""The tiny problem: a run starts from its weights, and FedAvg equals plain gradient descent."""

import numpy as np
import torch
from problem import LR, ROUNDS, SIZES, STEPS, config, flat, samples, weights
from torch import nn


def test_fedavg_matches_plain_gradient_descent(tmp_path, federate):
    starts = []
    finished = federate(config("fedavg", tmp_path), prepare=lambda strategy: starts.append(strategy.model.copy()))
    np.testing.assert_array_equal(starts[0], flat(weights()))
    model = {name: torch.from_numpy(tensor) for name, tensor in weights().items()}
    for _ in range(ROUNDS):
        trained = []
        for x, y in samples():
            network = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
            network.load_state_dict(model)
            optimiser = torch.optim.SGD(network.parameters(), lr=LR)
            for _ in range(STEPS):
                optimiser.zero_grad()
                nn.functional.cross_entropy(network(torch.from_numpy(x)), torch.from_numpy(y)).backward()
                optimiser.step()
            trained.append(network.state_dict())
        model = {n: sum(s / sum(SIZES) * t[n] for s, t in zip(SIZES, trained, strict=True)) for n in model}
    np.testing.assert_allclose(finished.strategy.model, flat(model), atol=1e-6)
