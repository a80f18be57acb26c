"""Per-FedAvg (FO) against the program of pFedMe's authors.

The constants are the numbers of CharlieDinh/pFedMe, commit caf24b1f954d4381bd9b4d104ee7eff389e1489b,
UserPerAvg.train, Server.send_parameters and aggregate_parameters. α = 0.05, β = 0.1. The program's mini-batches are
the halves of the mini-batches that Posy draws (`HALVES`). `CLIENTS` are the models that the clients send in the
second round.
"""

import numpy as np
import torch
from problem import SIZES, check, config

from posy.randomness import torch_generator

# fmt: off
SERVER = np.array([
    -0.26821578, -0.06812562, -0.40929559, 0.093859479, 0.30893576, 0.3374882, -0.15811211, -0.36715361,
    -0.10306995, 0.090228915, -0.23964377, 0.13921417, 0.38456607, -0.077095196, -0.022349754, 0.28938633,
    0.11378077, 0.24303067, 0.0095845219, 0.37957013, -0.34172675, 0.082680047, -0.41123569, 0.4351784,
    -0.067062184, -0.38332802, 0.36334002, 0.42819089, -0.25991017, -0.17774138, -0.31739795, -0.062471069,
    -0.02379553, -0.18532261, -0.18354344, -0.23229581, -0.39540327, -0.34717095, 0.45791498, -0.31647402,
    0.33046335, 0.42126769, 0.11112825,
])
CLIENTS = np.array([[
    -0.26804778, -0.069059007, -0.40690866, 0.093175136, 0.31823578, 0.34138349, -0.16010386, -0.33956578,
    -0.10119051, 0.091602683, -0.249827, 0.14411078, 0.37198243, -0.071728259, -0.00077096652, 0.28248119,
    0.11162679, 0.24616916, 0.0076786154, 0.38177654, -0.343265, 0.11085093, -0.40566897, 0.41009453,
    -0.065640949, -0.38290054, 0.34803721, 0.42887318, -0.22684321, -0.16989772, -0.31211591, -0.037426479,
    -0.023070224, -0.19256447, -0.1819028, -0.23800536, -0.40514502, -0.34857851, 0.43208992, -0.32595831,
    0.35069782, 0.44594663, 0.066214845,
], [
    -0.26629394, -0.068408258, -0.41508618, 0.096769743, 0.27945584, 0.31330857, -0.14623587, -0.39842442,
    -0.1087083, 0.086107604, -0.20909405, 0.12452434, 0.41811723, -0.050051335, -0.028044533, 0.32482442,
    0.10730584, 0.23507641, 0.0097301006, 0.37342861, -0.33875561, 0.039704002, -0.42793584, 0.4965733,
    -0.075902417, -0.39137509, 0.35361379, 0.42614409, -0.30259424, -0.19720353, -0.31699541, -0.072054997,
    -0.025971448, -0.21113272, -0.19713633, -0.22465131, -0.37609312, -0.34294823, 0.52640921, -0.28341898,
    0.25873405, 0.41425312, 0.18987215,
], [
    -0.26950333, -0.067209333, -0.40773076, 0.092660792, 0.31918371, 0.34887975, -0.16364448, -0.37046143,
    -0.10119051, 0.091602683, -0.249827, 0.14411078, 0.37450227, -0.097615078, -0.036195919, 0.27364755,
    0.11938892, 0.24529241, 0.011021899, 0.38148987, -0.34227884, 0.085928954, -0.40566897, 0.41840854,
    -0.062895037, -0.37884182, 0.38141802, 0.42887318, -0.26075324, -0.17233899, -0.32186514, -0.076756388,
    -0.023070224, -0.16404305, -0.17670023, -0.23231487, -0.39919597, -0.34857851, 0.43747854, -0.32871959,
    0.35731339, 0.40573326, 0.099812634,
]])
# fmt: on

# fmt: off
HALVES = [
    [[[1, 6, 4, 0, 5, 3, 2, 7], [0, 4, 5, 1, 2, 3, 6, 7]],
     [[0, 5, 3, 4, 1, 2], [3, 1, 5, 0, 4, 2]],
     [[5, 9, 2, 6, 4, 0, 3, 7, 8, 1], [5, 8, 2, 9, 3, 7, 1, 4, 6, 0]]],
    [[[5, 4, 7, 3, 2, 6, 1, 0], [1, 4, 6, 3, 5, 2, 0, 7]],
     [[5, 3, 0, 4, 1, 2], [1, 0, 2, 3, 5, 4]],
     [[8, 0, 7, 4, 2, 9, 1, 6, 3, 5], [3, 2, 9, 5, 6, 7, 0, 1, 8, 4]]],
]
# fmt: on
"""Order of the samples by round, client and step. The program adapts on the samples at even positions."""


def test_sample_order_matches_the_program():
    for number, clients in enumerate(HALVES, start=1):
        for client, orders in enumerate(clients):
            generator = torch_generator(42, "batches", number, client, 0)
            drawn = [torch.randperm(SIZES[client], generator=generator).tolist() for _ in range(2)]
            assert drawn == orders


def test_per_fedavg_matches_the_pfedme_program(tmp_path, federate):
    sent: list[np.ndarray] = []

    def capture(strategy):
        aggregate = strategy.aggregate

        def aggregate_and_record(server_round, updates):
            sent[:] = [update.arrays["model"] for update in updates]
            return aggregate(server_round, updates)

        strategy.aggregate = aggregate_and_record

    finished = federate(config("per-fedavg", tmp_path, per_fedavg_alpha=0.05), prepare=capture)
    check("per-fedavg", [(finished.strategy.model, SERVER), *zip(sent, CLIENTS, strict=True)])
