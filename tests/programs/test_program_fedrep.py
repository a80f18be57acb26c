"""FedRep against its authors' program.

Repository lgcollins/FedRep, commit d82e62982e107bb3322541604f059c0ff28bd289: ``main_fedrep.py --alg fedrep``, with
``LocalUpdate.train`` in ``models/Update.py``: three epochs on the head, two on the body. Data loading, the network and
scoring were replaced. The program fixes momentum 0.5 and weight decay 1e-4. It does not decay biases, but Posy does.
This explains the difference and the rate of 0.01.
"""

from problem import SIZES, check, config

# fmt: off
BODY = [
    -0.26442176, -0.07064224, -0.40799749, 0.09277153, 0.28444135, 0.36654934, -0.16967981, -0.38655448, -0.1015139,
    0.091365479, -0.24807076, 0.14326619, 0.40200171, -0.10517504, -0.021966046, 0.26866683, 0.11107546, 0.24368048,
    0.0073098056, 0.38271317, -0.34408629, 0.095907755, -0.40662837, 0.46106902, -0.065586247,
]
# fmt: on
"""The averaged body after two rounds: weight, then bias."""
# fmt: off
HEADS = [
    [
        -0.378916, 0.38839388, 0.42886955, -0.25612655, -0.1741951, -0.31597176, -0.090228833, -0.023070026,
        -0.1958877, -0.17603822, -0.2381261, -0.39269862, -0.3485755, 0.46469644, -0.32751974, 0.33893803, 0.41887906,
        0.10504223,
    ],
    [
        -0.38198408, 0.39096561, 0.42811897, -0.27942315, -0.18481262, -0.31435987, -0.10651871, -0.023799529,
        -0.19813874, -0.17675194, -0.23666994, -0.3789804, -0.34709543, 0.49024406, -0.31618854, 0.29743695,
        0.4180201, 0.14740235,
    ],
    [
        -0.37863788, 0.40435508, 0.42886955, -0.26596135, -0.17676289, -0.31860718, -0.11020976, -0.023070026,
        -0.19907969, -0.17468315, -0.23576881, -0.38867888, -0.3485755, 0.47772315, -0.32630703, 0.34162456,
        0.3923246, 0.12891023,
    ],
]
# fmt: on
"""Each client's head after two rounds: weight, then bias."""


def test_fedrep_matches_the_authors_program(tmp_path, federate):
    settings = {"fedrep_head_epochs": 3, "lr": 0.01, "momentum": 0.5, "weight_decay": 1e-4}
    finished = federate(config("fedrep", tmp_path, client_weights="uniform", **settings))
    heads = [finished.kept(client)["personal"] for client in range(len(SIZES))]
    check("fedrep", [(finished.strategy.model, BODY), *zip(heads, HEADS, strict=True)])
