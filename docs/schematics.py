"""Write the schematic pictures in docs/pictures as SVG files.

usage: python docs/schematics.py [--check]

With --check, the program writes nothing. It then lists the stale files, and exits with status 1 if there are any.
"""

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from posy import figure_style as style

PICTURES = Path(__file__).resolve().parent / "pictures"
WIDTH = 960
"""Width of every picture in its own units."""
TEXT, SMALL, TINY, LINE = 14, 12.5, 11, 21
"""Font sizes, and the height of a line of text."""
SHARED, FRAME, WHITE = "#e2e2e2", "#f6f6f6", "#ffffff"
KINDS = {
    "shared": "the same for all clients",
    "mixed": "the server's mix for client i",
    "personal": "stays on client i",
}
"""Kinds of layers, with their meanings."""
SCRIPTS = re.compile(r"([_^])\{([^}]*)\}")


class Drawing:
    """The elements of an SVG picture."""

    def __init__(self, title: str, height: int) -> None:
        self.title, self.height, self.colours = title, height, dict[str, str]()
        self.elements: list[str] = []
        self.kinds: set[str] = set()
        """Kinds of layers in the picture."""

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str = WHITE,
        edge: str = style.AXIS,
        dashed: bool = False,
    ) -> None:
        """Draw a rectangle with rounded corners."""
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self.elements.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}" stroke="{edge}" '
            f'stroke-width="1.5"{dashes}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float = TEXT,
        anchor: str = "start",
        colour: str = style.INK,
        bold: bool = False,
    ) -> None:
        """Write text at a baseline; ``_{…}`` and ``^{…}`` are subscripts and superscripts."""
        weight = ' font-weight="bold"' if bold else ""
        self.elements.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}" fill="{colour}"{weight}>'
            f"{_scripts(text)}</text>"
        )

    def lines(
        self,
        x: float,
        y: float,
        lines: Sequence[str],
        size: float = TEXT,
        anchor: str = "start",
        colour: str = style.INK,
    ) -> None:
        """Write lines of text, the first at the baseline ``y``."""
        for index, line in enumerate(lines):
            self.text(x, y + LINE * size / TEXT * index, line, size, anchor, colour)

    def arrow(self, path: str, colour: str = style.INK, dashed: bool = False) -> None:
        """Draw a path that ends in an arrowhead."""
        marker = self.colours.setdefault(colour, f"tip{len(self.colours)}")
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self.elements.append(
            f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.8" marker-end="url(#{marker})"{dashes}/>'
        )

    def step(self, x: float, y: float, number: int, colour: str) -> None:
        """Draw the number of a step in a circle."""
        self.elements.append(f'<circle cx="{x:g}" cy="{y:g}" r="11" fill="{colour}"/>')
        self.text(x, y + 4.5, str(number), SMALL, "middle", WHITE, bold=True)

    def svg(self) -> str:
        """Return the picture."""
        markers = "".join(
            f'<marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0 L10 5 L0 10 z" fill="{colour}"/></marker>'
            for colour, name in self.colours.items()
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" '
                'font-family="Helvetica, Arial, sans-serif">',
                f"<title>{escape(self.title)}</title>",
                f"<defs>{markers}</defs>",
                f'<rect width="{WIDTH}" height="{self.height}" fill="{WHITE}"/>',
                *self.elements,
                "</svg>\n",
            ]
        )


def _scripts(text: str) -> str:
    """Return text as SVG, with subscripts and superscripts."""
    parts, level, end = [], 0.0, 0  # the level is the distance from the baseline, which grows downwards
    for match in SCRIPTS.finditer(text):
        target = 4.0 if match[1] == "_" else -5.0
        if between := text[end : match.start()]:
            parts.append(_shifted(between, -level))
            level = 0.0
        parts.append(_shifted(match[2], target - level, ' font-size="75%"'))
        level, end = target, match.end()
    return "".join([*parts, _shifted(text[end:], -level)])


def _shifted(text: str, shift: float, size: str = "") -> str:
    """Return text that is lower than the text before it by ``shift``."""
    return f'<tspan dy="{shift:g}"{size}>{escape(text)}</tspan>' if text and (shift or size) else escape(text)


# -- the methods -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loop:
    """A round of a method, in the order of its steps."""

    name: str
    idea: str
    sends: Sequence[str]
    trains: Sequence[str]
    returns: Sequence[str]
    computes: Sequence[str]
    scored: str
    layers: Callable[[Drawing, str, float], None]
    """Function that draws the layers of the model at a height, in the colour of the method."""
    height: int = 96
    """Height of the layers."""


def picture_of(method: str, loop: Loop) -> Drawing:
    """Return the picture of a method's round and of its layers."""
    colour = style.text_colour(style.METHOD_COLOURS[method])
    tall = LINE * max(len(loop.computes), len(loop.trains)) + 46
    top = 62
    bottom = top + tall
    drawing = Drawing(f"A round of {loop.name}: {loop.idea}", int(bottom + loop.height + 92))
    drawing.text(20, 34, loop.name, 20, colour=colour, bold=True)
    drawing.text(150, 34, loop.idea, colour=style.SOFT)
    for x, width, title, number, lines in (
        (20, 380, "Server", 4, loop.computes),
        (590, 350, "Client i", 2, loop.trains),
    ):
        drawing.box(x, top, width, tall, edge=colour)
        drawing.step(x + 22, top + 23, number, colour)
        drawing.text(x + 42, top + 28, title, bold=True)
        drawing.lines(x + 16, top + 54, lines)
    upper, lower = top + tall * 0.42, top + tall * 0.66
    drawing.arrow(f"M404 {upper:g} H584", colour)
    drawing.arrow(f"M586 {lower:g} H406", colour)
    _over(drawing, upper, loop.sends, 1, colour, above=True)
    _over(drawing, lower, loop.returns, 3, colour, above=False)
    _strip(drawing, bottom + 24, loop, colour)
    return drawing


def _over(drawing: Drawing, y: float, lines: Sequence[str], number: int, colour: str, *, above: bool) -> None:
    """Write the content of a message above or below its arrow."""
    first = y - 10 - 17 * (len(lines) - 1) if above else y + 24
    drawing.step(424, first - 4, number, colour)
    for index, line in enumerate(lines):
        drawing.text(508, first + 17 * index, line, SMALL, "middle")


def _strip(drawing: Drawing, top: float, loop: Loop, colour: str) -> None:
    """Draw the layers of the model, the legend, and the model that scores the method."""
    loop.layers(drawing, colour, top)
    x, y = 690, top + 14
    for kind, text in KINDS.items():
        if kind in drawing.kinds:
            _layer(drawing, x, y - 12, 22, "", kind, colour, 15)
            drawing.text(x + 32, y, text, SMALL)
            y += 23
    drawing.text(20, top + loop.height + 34, f"Scored: {loop.scored}", SMALL, colour=style.SOFT)


def _light(colour: str) -> str:
    """Return a light shade of a colour."""
    return style.mixed(colour, 0.75)


def _layer(
    drawing: Drawing, x: float, y: float, width: float, text: str, kind: str, colour: str, height: float = 32
) -> None:
    """Draw a layer: ``shared`` by all clients, ``mixed`` by the server for a client, or ``personal``."""
    drawing.kinds.add(kind)
    fill = {"shared": SHARED, "mixed": _light(colour), "personal": WHITE}[kind]
    drawing.box(x, y, width, height, fill, style.AXIS if kind == "shared" else colour, kind == "personal")
    drawing.text(x + width / 2, y + height / 2 + 4.5, text, SMALL, "middle")


def _chain(drawing: Drawing, x: float, y: float, layers: Sequence[tuple[str, str, float]], colour: str) -> float:
    """Draw layers from left to right, and return the right end."""
    for text, kind, width in layers:
        _layer(drawing, x, y, width, text, kind, colour)
        x += width + 8
    return x - 8


def _fedfew_layers(drawing: Drawing, colour: str, y: float) -> None:
    for index, name in enumerate(("θ_{1}", "θ_{2}", "θ_{3}")):
        _layer(drawing, 20, y + 34 * index, 260, f"all layers of {name}", "shared", colour, 28)
    drawing.arrow(f"M286 {y + 48:g} H366", colour)
    drawing.lines(376, y + 38, ["client i uses the model with the", "lowest loss, here k_{i} = 2"], SMALL)


def _cwfedavg_layers(drawing: Drawing, colour: str, y: float) -> None:
    layers = [("conv 1", "shared", 88.0), ("conv 2", "shared", 88.0), ("fully connected", "shared", 130.0)]
    end = _chain(drawing, 20, y, [*layers, ("output layer", "mixed", 120.0)], colour)
    drawing.lines(
        20,
        y + 58,
        ["Default: class-wise averaging of the output layer only.", "All other layers are averaged as in FedAvg."],
        SMALL,
    )
    drawing.text(end + 12, y + 20, "row j: class j", SMALL)


def _fedacs_layers(drawing: Drawing, colour: str, y: float) -> None:
    layers = [(name, "mixed", 100.0) for name in ("conv 1", "conv 2", "fully connected", "output layer")]
    layers[2] = ("fully connected", "mixed", 130.0)
    _chain(drawing, 20, y, layers, colour)
    drawing.lines(
        20,
        y + 58,
        ["p = 0: all but the least similar pair. p = 1: local training only.", "Client i itself always takes part."],
        SMALL,
    )


def _feddrm_layers(drawing: Drawing, colour: str, y: float) -> None:
    _layer(drawing, 20, y + 26, 110, "body θ", "shared", colour)
    _chain(
        drawing,
        170,
        y,
        [("class branch", "shared", 130.0), ("class classifier α_{i}, β_{i}", "personal", 170.0)],
        colour,
    )
    _chain(drawing, 170, y + 52, [("client branch", "shared", 130.0), ("M client logits", "shared", 170.0)], colour)
    drawing.arrow(f"M132 {y + 38:g} C150 {y + 34:g} 150 {y + 18:g} 167 {y + 16:g}")
    drawing.arrow(f"M132 {y + 46:g} C150 {y + 50:g} 150 {y + 66:g} 167 {y + 68:g}")
    drawing.lines(490, y + 20, ["predicts the class"], SMALL)
    drawing.lines(490, y + 72, ["routes a query x to client", "argmax_{i} logit_{i}(x) − log(n_{i}/N)"], SMALL)


def _ppfe_layers(drawing: Drawing, colour: str, y: float) -> None:
    names = ("conv 1", "conv 2", "fc 1", "fc 2", "fc 3")
    for stage in range(4):
        kinds = ["shared"] * (5 - stage) + ["personal"] * stage
        top = y + 32 * stage
        drawing.text(20, top + 18, f"stage {stage + 1}", SMALL)
        for index, (name, kind) in enumerate(zip(names, kinds, strict=True)):
            _layer(drawing, 80 + 84 * index, top, 76, name, kind, colour, 26)
        drawing.text(510, top + 18, f"× β_{{i}}^{{({stage + 1})}}", SMALL)
    drawing.lines(580, y + 50, ["sum of the", "stages'", "probabilities"], SMALL)


METHODS = {
    "fedfew": Loop(
        "FedFew",
        "K server models for M clients, trained by smooth Tchebycheff scalarisation",
        ["all K models θ_{k}"],
        [
            "For each of the K models:",
            "train θ_{k} for E local epochs.",
            "L_{ik}: mean training loss of the last epoch",
            "Δ_{ik}: trained model minus θ_{k}",
        ],
        ["Δ_{ik} and L_{ik}", "for each k"],
        [
            "L_{ik} ← n_{i} / Σ_{j} n_{j} · L_{ik}",
            "S_{i} = Σ_{k} exp(−L_{ik} / μ)",
            "w_{ik} = exp(−L_{ik} / μ) / S_{i}, weight of model k",
            "α_{i} = S_{i}^{−1} / Σ_{j} S_{j}^{−1}, weight of client i",
            "θ_{k} ← θ_{k} + η_{s} Σ_{i} α_{i} w_{ik} Δ_{ik}",
        ],
        "the served model θ_{k} with the lowest loss on the client's training samples.",
        _fedfew_layers,
    ),
    "cwfedavg": Loop(
        "cwFedAvg",
        "a server model for each class, mixed for each client by its class distribution",
        ["averaged layers, and", "w_{i} = Σ_{j} p̃_{ij} w_{j}^{G}"],
        [
            "Minimise on each mini-batch",
            "cross-entropy + λ ‖p_{i} − p̃_{i}‖_{2}",
            "p_{i}: shares of the classes in the samples",
            "p̃_{i}: shares read off the output layer",
        ],
        ["trained model w_{i},", "no class counts"],
        [
            "p̃_{ij} = ‖w_{ij}‖_{2} / Σ_{k} ‖w_{ik}‖_{2}, row j of the output layer",
            "q_{ij} = n_{i} p̃_{ij} / Σ_{i} n_{i} p̃_{ij}",
            "class models w_{j}^{G} = Σ_{i} q_{ij} w_{i}",
            "other layers Σ_{i} n_{i}/N · w_{i}",
        ],
        "the served model.",
        _cwfedavg_layers,
        height=76,
    ),
    "fedacs": Loop(
        "FedACS",
        "each client receives a mean of the models that are similar to its own",
        ["mixed model u_{i}"],
        ["Start from u_{i}.", "Take local SGD steps,", "without a proximal term."],
        ["trained model w_{i}"],
        [
            "S_{ij} = cosine(w_{i}, w_{j}) over all parameters",
            "δ = p-quantile of all elements of S",
            "u_{i} = Σ_{j} a_{ij} w_{j} / Σ_{j} a_{ij}",
            "a_{ij} = S_{ij} if S_{ij} > δ, otherwise 0",
        ],
        "the local model w_{i}.",
        _fedacs_layers,
        height=76,
    ),
    "feddrm": Loop(
        "FedDRM",
        "a client branch estimates density ratios, which route each query to a client",
        ["shared layers"],
        [
            "Minimise on each mini-batch",
            "λ CE(class) + (1 − λ) CE(client = i)",
            "over shared layers and its class classifier",
        ],
        ["trained shared layers"],
        ["Shared layers ← Σ_{i} n_{i}/N · (layers of client i)", "The class classifiers never leave the clients."],
        "the served model: shared layers and the client's classifier. System accuracy: all test samples, routed.",
        _feddrm_layers,
        height=112,
    ),
    "ppfe": Loop(
        "PPFE",
        "an ensemble of stages with more and more personal layers",
        ["shared layers ψ", "of stage t"],
        [
            "Minimise Σ_{s} (ω_{s} / n_{i}) ℓ_{s} over all layers.",
            "After a stage, on the ensemble so far:",
            "ε = Σ_{s} ω_{s} ℓ_{s} / Σ_{s} ω_{s}, with ℓ = 0/1 loss",
            "β_{i}^{(t)} = ½ log((1 − ε) / ε), as in the paper",
            "ω_{s} ← ω_{s} exp(β_{i}^{(t)} ℓ_{s}), rescaled",
        ],
        ["trained shared", "layers ψ_{i}"],
        [
            "Stage 1 (FedAvg): ψ ← Σ_{i} n_{i}/N ψ_{i}",
            "Later stages: ψ ← uniform mean of ψ_{i}",
            "over the clients of the round",
        ],
        "the served ensemble, Σ_{t} β_{i}^{(t)} softmax(model_{t}(x)). Personal layers have a low rank.",
        _ppfe_layers,
        height=128,
    ),
}


# -- the round and the ports -----------------------------------------------------------------------------


def served_and_local() -> Drawing:
    """Return the timeline of a round: which model a client holds, and when it is scored."""
    drawing = Drawing("A round: the local model is scored before aggregation, and the served model after it", 330)
    blue, red = style.PALETTE[0], style.text_colour(style.PALETTE[1])
    drawing.text(20, 30, "Which model is scored, and when", 18, bold=True)
    for y, name in ((88, "server"), (218, "client i")):
        drawing.text(20, y + 5, name, bold=True)
        drawing.arrow(f"M90 {y} H944", style.AXIS)
    drawing.text(940, 112, "time", SMALL, "end", style.SOFT)
    for x, width, text in ((110, 120, "sample the cohort"), (470, 150, "aggregate the updates")):
        drawing.box(x, 70, width, 36, SHARED)
        drawing.text(x + width / 2, 93, text, SMALL, "middle")
    drawing.arrow("M210 108 L250 196", style.INK)
    drawing.text(240, 150, "served model of round r − 1", SMALL)
    drawing.box(240, 198, 130, 40, _light(red), red)
    drawing.text(305, 223, "local training", SMALL, "middle")
    drawing.arrow("M400 200 L480 110", style.INK)
    drawing.text(452, 172, "update", SMALL)
    drawing.arrow("M600 108 L680 196", style.INK)
    drawing.text(656, 150, "served model of round r", SMALL)
    for x, colour, name, lines in (
        (392, red, "local model of round r", ["scored on the test split,", "by the cohort"]),
        (690, blue, "served model of round r", ["scored on the test split,", "by all clients"]),
    ):
        drawing.elements.append(f'<circle cx="{x}" cy="218" r="8" fill="{colour}"/>')
        drawing.text(x, 256, name, anchor="middle", colour=colour, bold=True)
        drawing.lines(x, 276, lines, SMALL, "middle")
    drawing.box(720, 198, 150, 40, _light(red), red, dashed=True)
    drawing.text(795, 223, "training in round r + 1", SMALL, "middle")
    drawing.text(
        20, 320, "Messages: training (the first two arrows) and evaluation (the third).", SMALL, colour=style.SOFT
    )
    return drawing


def ports() -> Drawing:
    """Return the processes of a federation, their ports, and the directions of their connections."""
    drawing = Drawing("Processes, ports and connections of a federation", 520)
    blue, green = style.PALETTE[0], style.text_colour(style.METHOD_COLOURS["fedacs"])
    drawing.text(20, 30, "Ports of a federation", 18, bold=True)
    note = "An arrow points from the side that opens a connection. Data flows both ways."
    drawing.text(260, 30, note, SMALL, colour=style.SOFT)
    drawing.box(20, 50, 580, 450, FRAME)
    drawing.text(34, 74, "Server", bold=True)
    drawing.box(390, 100, 190, 190, edge=blue)
    drawing.text(485, 126, "SuperLink", anchor="middle", bold=True)
    drawing.lines(485, 148, ["runs, messages, nodes", "database in superlink/"], SMALL, "middle")
    _port(drawing, 400, 186, "9092: Fleet", "gRPC, TLS, all interfaces", blue)
    _port(drawing, 400, 240, "8000: Control, runtime", "HTTPS, only 127.0.0.1", blue)
    for y, height, name, lines in (
        (100, 60, "posy run, posy status", ["submit and watch runs"]),
        (180, 60, "flower-superexec", ["takes runs, starts ServerApps"]),
        (260, 76, "ServerApp of a run", ["strategy; sends and collects", "messages; results in runs/"]),
        (370, 112, "posy serve", ["predictions for other programs"]),
    ):
        drawing.box(40, y, 220, height)
        drawing.text(150, y + 24, name, anchor="middle", bold=True)
        drawing.lines(150, y + 44, lines, SMALL, "middle")
    _port(drawing, 65, 426, "8080 REST, 8081 gRPC", "only 127.0.0.1 by default", green)
    for start, end in ((130, 249), (210, 257), (290, 265), (390, 273)):
        drawing.arrow(f"M262 {start} C330 {start} 330 {end} 397 {end}")
    drawing.arrow("M110 240 V257", style.AXIS, dashed=True)
    drawing.text(120, 254, "starts", TINY, colour=style.SOFT)
    drawing.arrow("M110 336 V367")
    drawing.text(120, 357, "Unix socket, for queries", TINY, colour=style.SOFT)
    drawing.box(390, 424, 190, 48)
    drawing.lines(485, 444, ["programs with curl,", "tritonclient, KServe"], SMALL, "middle")
    drawing.arrow("M388 447 H239", green)
    for top, name in ((50, "Site A"), (240, "Site B")):
        drawing.box(680, top, 260, 170, FRAME)
        drawing.text(694, top + 24, name, bold=True)
        drawing.box(700, top + 38, 110, 62, WHITE, blue)
        drawing.text(755, top + 62, "SuperNode", SMALL, "middle", bold=True)
        drawing.text(755, top + 82, "no port", SMALL, "middle")
        drawing.box(830, top + 38, 96, 62, WHITE)
        drawing.lines(878, top + 62, ["worker with", "ClientApp"], SMALL, "middle")
        drawing.arrow(f"M812 {top + 69} H828", style.AXIS, dashed=True)
        drawing.text(700, top + 126, "The key, data, state and policy", SMALL)
        drawing.text(700, top + 146, "of the site stay here.", SMALL)
        drawing.arrow(f"M698 {top + 69} C640 {top + 69} 640 207 573 {203 if top == 50 else 213}", blue)
    drawing.box(680, 430, 260, 70, FRAME)
    drawing.text(694, 454, "Another machine", bold=True)
    drawing.text(694, 476, "ssh -L 8000:127.0.0.1:8000 server", SMALL)
    drawing.arrow("M678 465 C625 465 640 262 573 262", style.INK, dashed=True)
    drawing.text(612, 400, "ssh", TINY, colour=style.SOFT)
    return drawing


def _port(drawing: Drawing, x: float, y: float, name: str, note: str, colour: str) -> None:
    """Draw a port of a process."""
    drawing.box(x, y, 170, 42, _light(colour), colour)
    drawing.text(x + 85, y + 18, name, SMALL, "middle", bold=True)
    drawing.text(x + 85, y + 34, note, TINY, "middle")


def pictures() -> dict[Path, str]:
    """Return the content of each picture."""
    drawings = {method: picture_of(method, loop) for method, loop in METHODS.items()}
    drawings |= {"served-local": served_and_local(), "ports": ports()}
    return {PICTURES / f"{name}.svg": drawing.svg() for name, drawing in drawings.items()}


def stale() -> list[Path]:
    """Return the pictures whose files differ from the code."""
    return [path for path, text in pictures().items() if not path.is_file() or path.read_text(encoding="utf-8") != text]


if __name__ == "__main__":
    old = stale()
    for path in old:
        if "--check" in sys.argv:
            print(f"{path.name} is stale: run python docs/schematics.py")
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(pictures()[path], encoding="utf-8")
    sys.exit(1 if old and "--check" in sys.argv else 0)
