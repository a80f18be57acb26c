"""The table of networks. Importing this module does not import PyTorch."""

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from posy.data.task import Task
from posy.metrics import CLASSES

if TYPE_CHECKING:
    from posy.models.chain import ChainModel

SHARING = ("none", "shallow", "mid", "deep")
"""How much of the body two branches share, from no blocks to all blocks but the last (FedDRM, Section 3.1)."""


@dataclass(frozen=True)
class Network:
    """A network whose builder, ``module:function``, takes the task and the ranks of fully connected layers."""

    about: str
    kinds: tuple[str, ...]  # kinds of samples that the network accepts: image, features, series, text
    builder: str
    minimum_size: int = 1  # minimum height and width of images, or length of texts, features and time series
    num_classes: int = 0  # the only number of classes; 0: any

    def suits(self, task: Task) -> bool:
        """Return whether the network can be built for a task."""
        sizes = task.input_shape[1:] if task.kind == "image" else task.input_shape[:1]
        if self.num_classes and (task.target != CLASSES or task.num_classes != self.num_classes):
            return False
        return task.kind in self.kinds and min(sizes) >= self.minimum_size

    def build(self, task: Task, ranks: Mapping[str, int]) -> "ChainModel":
        """Build the network with initial weights from the global generator; layers without a rank are dense."""
        return pkgutil.resolve_name(f"{__package__}.{self.builder}")(task, ranks)


PRETRAINED = "torchvision"
"""Value of the setting ``weights`` that selects torchvision's weights."""
MODELS = {
    "linear": Network("linear model of the flattened input", ("image", "features", "series"), "small:linear_model"),
    "logistic": Network(
        "logistic regression with a single logit, for two classes (FLamby's Fed-Heart-Disease)",
        ("image", "features"),
        "small:logistic_model",
        num_classes=2,
    ),
    "mlp": Network("perceptron with hidden layers of 128 and 64 units", ("image", "features", "series"), "small:mlp"),
    "cnn": Network(
        "two 5x5 convolutions with 32 and 64 channels, 512 units (FedAvg, cwFedAvg, FedFew)",
        ("image",),
        "small:cnn",
        16,
    ),
    "cnn-3fc": Network(
        "two 5x5 convolutions with 64 channels, layers of 120 and 64 units (FedRep and PPFE for CIFAR-10)",
        ("image",),
        "small:cnn_3fc",
        16,
    ),
    "cnn-3fc-wide": Network(
        "two 5x5 convolutions with 64 and 128 channels, 256 and 128 units, dropout 0.6 (FedRep and PPFE for CIFAR-100)",
        ("image",),
        "small:cnn_3fc_wide",
        16,
    ),
    "resnet18-gn": Network("ResNet-18 with GroupNorm (He et al., 2016; FedDRM)", ("image",), "resnet:resnet18_gn"),
    "resnet18-bn": Network("ResNet-18 with BatchNorm (He et al., 2016)", ("image",), "resnet:resnet18_bn"),
    "lenet-gn": Network(
        "LeNet with GroupNorm, three fully connected layers with LayerNorm (FedDRM's sharing levels)",
        ("image",),
        "small:lenet_gn",
        16,
    ),
    "fasttext": Network("fastText with one hidden layer (Joulin et al., 2017; cwFedAvg)", ("text",), "text:fasttext"),
    "textcnn": Network("TextCNN (Kim, 2014; FedFew)", ("text",), "text:textcnn", 5),
    "lstm": Network(
        "word vectors of length 300, an LSTM of 128 units, layers of 64 and 32 units (PPFE for Sent140)",
        ("text",),
        "text:lstm",
    ),
    "gru": Network(
        "a GRU of 64 units (Cho et al., 2014) and a fully connected layer of 32 units", ("series",), "series:gru"
    ),
    "cnn1d": Network(
        "two convolutions over time, with 32 and 64 channels, and a fully connected layer of 64 units",
        ("series",),
        "series:cnn1d",
    ),
}
