"""FedPer against PFLlib: its authors published no program.

Repository TsingZ0/PFLlib, commit d832e76f6a23b833038949ec1e4fdefe63a4d350, ``system/flcore``: ``FedPer.train`` in
``servers/serverper.py``, with ``clientPer.train``. Only data loading and scoring were replaced.
"""

from problem import SIZES, check, config

# fmt: off
BASE = [
    -0.26682812, -0.068984233, -0.40944177, 0.09374363, 0.29472518, 0.36677235, -0.14448427, -0.36423653, -0.10304876,
    0.090244412, -0.23975867, 0.13926943, 0.39706102, -0.087928981, -0.033910979, 0.27602789, 0.11223334, 0.24525042,
    0.011343565, 0.38158798, -0.34219539, 0.092093073, -0.41117293, 0.42923436, -0.064223178,
]
# fmt: on
"""The averaged base layer after two rounds: weight, then bias."""
# fmt: off
HEADS = [
    [
        -0.38043225, 0.34242585, 0.42887318, -0.22556573, -0.15184581, -0.3125096, -0.023902716, -0.023070224,
        -0.16604793, -0.1888454, -0.24007991, -0.41305748, -0.34857848, 0.40429595, -0.33706766, 0.38132817,
        0.47083095, 0.010700258,
    ],
    [
        -0.39379799, 0.35454476, 0.42603168, -0.32779339, -0.19984151, -0.30514729, -0.094957009, -0.026129397,
        -0.17423384, -0.19217685, -0.23407651, -0.3541221, -0.3426778, 0.51470947, -0.28574044, 0.19667667,
        0.46871793, 0.19746475,
    ],
    [
        -0.3792288, 0.41152504, 0.42887318, -0.27265576, -0.16388814, -0.32481572, -0.1107125, -0.023070224,
        -0.17437397, -0.18198302, -0.22897731, -0.39534694, -0.34857848, 0.459712, -0.33188763, 0.39263067,
        0.35256612, 0.11766254,
    ],
]
# fmt: on
"""Each client's head after two rounds: weight, then bias."""


def test_fedper_matches_pfllib(tmp_path, federate):
    finished = federate(config("fedper", tmp_path))
    heads = [finished.kept(client)["personal"] for client in range(len(SIZES))]
    check("fedper", [(finished.strategy.model, BASE), *zip(heads, HEADS, strict=True)])
