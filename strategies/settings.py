"""The settings of a run and the base class of a method's settings, from which server and clients build the network."""

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, dataclass_transform

from posy.data.settings import DataSettings
from posy.extensions import key_prefix
from posy.settings import Scalar, SettingsError, as_config, setting, settings_of
from posy.strategies.arrays import ALLOWED, RETURNED, Answer, Arrays, Refused, Returned, verdict
from posy.strategies.run_settings import CENTRAL, RunSettings, TrainSettings
from posy.strategies.targets import check_target

if TYPE_CHECKING:  # reading settings does not need PyTorch
    from collections.abc import Mapping

    import numpy as np
    import numpy.typing as npt
    from torch import Tensor, nn

    from posy.models.architecture import Architecture
    from posy.strategies.card import MethodCard


UNSAMPLED = "it does not declare that its clients' arrays depend only on the gradients of individual samples"
NOTHING_SENT = Refused("its clients do not send a model")
NO_MEAN = "it does not declare that its server step is a weighted mean of models"


def training_clients(settings: "Settings") -> int:
    """Return the number of clients that train in a run: all clients except the newcomers of ``holdout-clients``."""
    clients = settings.data.num_clients
    newcomers = max(1, round(settings.run.holdout_clients * clients)) if settings.run.holdout_clients else 0
    return clients - min(newcomers, clients - 1)


def cohort_size(settings: "Settings", *, last_round: bool = False) -> int:
    """Return the number of clients that train in a round, or with ``last_round`` in the last one."""
    clients, run = training_clients(settings), settings.run
    if last_round and run.full_last_round:
        return clients
    return min(clients, max(1, math.ceil(run.fraction_train * clients - 1e-9)))


@dataclass_transform(frozen_default=True, field_specifiers=(setting,))
class MethodSettings:
    """Base of every method's settings: a subclass is a frozen dataclass whose fields are declared with ``setting``.

    A method declares each array in its messages once: ``sent`` names the arrays that a client receives, and
    ``returned`` declares the arrays in its reply. By default, both contain one model. With ``dp_sgd=True``, a subclass
    states that DP-SGD protects everything that clients send. With ``robust=True``, it states that its server combines
    whole models only with :meth:`~posy.strategies.base.PersonalisedStrategy.mean`. Server and clients both call the
    methods below.
    """

    sent: ClassVar[tuple[str, ...]]
    """Names of the arrays that a client receives; by default the arrays that the reply updates."""
    sent_once: ClassVar[str] = ""
    """Name of a strategy attribute that is a growing list of arrays. Each client receives every array in it once, and
    stores it in its state as ``<name>-<number>``, numbered from 1."""
    returned: ClassVar["Mapping[str, Returned]"] = RETURNED
    """The arrays in a client's reply, in order."""
    noise: ClassVar[Refused | None]
    """Why the method does not support noise on a client's update; :data:`ALLOWED` if all its arrays support it."""
    sums: ClassVar[Refused | None]
    """Why the method does not support secure aggregation; :data:`ALLOWED` if its server needs only the mean of each
    array. The server then sends the same arrays to all clients of a round."""
    routes: ClassVar[bool] = False
    """Whether :meth:`client_scores` chooses the client that answers a query; otherwise the clients' models vote."""
    dp_sgd: ClassVar[Refused | None]
    """Why the method does not support DP-SGD (``dp = sample``); :data:`ALLOWED` if it does. A client's arrays then
    depend on its data only through a single run of local training, whose objective is a mean over samples."""
    robust: ClassVar[Refused | None]
    """Why another rule cannot replace the server's mean (setting ``robust``); :data:`ALLOWED` if it can. In that case,
    all clients start from one model, and the server uses their models only in the rule."""
    point: ClassVar[str] = "local"
    """The model that clients predict with: ``served``, or ``local`` if a client first trains the served model."""

    needs_classes: ClassVar[str] = ""
    """Why the method supports only classification; empty if it also supports multi-label tasks and regression."""

    pools_data: ClassVar[bool] = False
    """Whether one client trains on the training samples of all clients, which must share a file system."""

    class_statistics: ClassVar[bool] = False
    """Whether clients send statistics of each class, such as mean features; a site with a rare class rejects the
    method."""
    card: "ClassVar[MethodCard | None]" = None
    """The facts for the method's documentation page; None for a custom method without a page."""

    def __init_subclass__(
        cls,
        *,
        dp_sgd: Answer = UNSAMPLED,
        robust: Answer = NO_MEAN,
        point: Literal["served", "local"] = "local",
    ) -> None:
        """Make the subclass a frozen dataclass, and derive from its arrays whether it supports noise and masking."""
        arrays = cls.returned.values()
        if "sent" not in vars(cls) and ("returned" in vars(cls) or not hasattr(cls, "sent")):
            cls.sent = tuple(dict.fromkeys(array.change_of for array in arrays if array.change_of))
        cls.noise = next((array.noise for array in arrays if array.noise), ALLOWED) if arrays else NOTHING_SENT
        cls.sums = next((array.sums for array in arrays if array.sums), ALLOWED) if arrays else NOTHING_SENT
        cls.dp_sgd, cls.robust, cls.point = verdict(dp_sgd), verdict(robust), point
        dataclass(frozen=True)(cls)

    @classmethod
    def refused_privacy(cls, mode: str) -> Refused | None:
        """Return why the method does not support a mode of the setting ``dp``, or :data:`ALLOWED` if it does.

        ``central`` has the requirements of local noise and of secure aggregation: an update that tolerates noise, and a
        server that needs only the mean of all updates.
        """
        verdicts = {"off": ALLOWED, "local": cls.noise, "central": cls.noise or cls.sums, "sample": cls.dp_sgd}
        return verdicts[mode]

    @property
    def follows_number_of_rounds(self) -> bool:
        """Whether the method's schedule depends on ``num-server-rounds``, which a resumed run then cannot change."""
        return False

    @property
    def sums_logarithms(self) -> bool:
        """Whether an ensemble sums log-probabilities instead of probabilities."""
        return False

    def refusals(self) -> "Mapping[str, str]":
        """Return the reason for each shared setting that must keep its default, keyed by setting.

        For example ``{"momentum": "c_i is a distance divided by the rate, which holds for plain SGD only"}``.
        """
        return {}

    def notices(self, settings: "Settings", network: "Architecture") -> "tuple[str, ...]":
        """Return warnings to log before round 1, for example that the settings reduce the method to another method."""
        return ()

    def network(self, plain: "Architecture", num_clients: int) -> "Architecture":
        """Return the network that clients train; by default the plain network of the run."""
        return plain

    def client_scores(self, outputs: "Tensor", weights: "npt.NDArray[np.float64]") -> "Tensor":
        """Return scores ``(n, M)``; with :attr:`routes`, the client with the highest score answers a query.

        Parameters
        ----------
        outputs : Tensor, (n, M)
            The second output of the network that all clients share.
        weights : numpy.ndarray, (M,)
            The weights of the clients in the server's mean.
        """
        raise NotImplementedError

    def query_embeddings(self, network: "nn.Module", x: "Tensor") -> "tuple[Tensor, Tensor]":
        """Return the inputs of the personal layers ``(B, D)``, and the network's second output ``(B, M)``.

        With :attr:`routes`, a service on the server computes both. The node of the chosen client computes the rest; see
        :meth:`query_logits`. By default, a method does not support such queries.

        Parameters
        ----------
        network : torch.nn.Module
            The network that all clients share.
        x : Tensor
            The samples ``(B, *input_shape)``.
        """
        raise NotImplementedError

    def query_logits(self, network: "nn.Module", embeddings: "Tensor") -> "Tensor":
        """Return the logits of the classes ``(B, C)``, given the result ``(B, D)`` of :meth:`query_embeddings`."""
        raise NotImplementedError

    def client_embeddings(self, network: "nn.Module", x: "Tensor") -> "tuple[Tensor, ...]":
        """Return the embeddings ``(B, D)`` of samples in which distances to the clients' data are measured.

        A query is far from the clients' data if it is far in any of the embeddings. By default there are none. A query
        then always fits some client.

        Parameters
        ----------
        network : torch.nn.Module
            The network that all clients share.
        x : Tensor
            The samples ``(B, *input_shape)``.
        """
        return ()

    def personal(self, network: "Architecture") -> tuple[str, ...]:
        """Return the names of the layers or individual tensors that stay on the client; by default none."""
        return ()

    def reference(self, network: "Architecture", sent: Arrays, reply: Arrays) -> Arrays:
        """Return the starting value of each array in the client's reply, as declared in ``returned``.

        The update is the difference between the arrays and these values. ``max-update-norm`` and ``max-norm-ratio``
        limit its norm, ``dp`` clips it and adds noise, and secure aggregation masks it. A method overrides this
        function if the client starts from a part or a mixture of the sent arrays.

        Parameters
        ----------
        network : Architecture
            The network that clients train.
        sent : dict
            The arrays of the server's message.
        reply : dict
            The arrays of the reply, with checked shapes.
        """
        return {name: self.returned[name].start(sent, array) for name, array in reply.items()}


@dataclass(frozen=True)
class Settings:
    """All settings of a run."""

    run: RunSettings
    data: DataSettings
    train: TrainSettings
    method: MethodSettings

    def __post_init__(self) -> None:
        """Check the settings that depend on settings of another group."""
        check_target(self.run, self.data, self.train, self.method.needs_classes)
        shared = {**settings_of(RunSettings), **settings_of(DataSettings), **settings_of(TrainSettings)}
        config = {**as_config(self.run), **as_config(self.data), **as_config(self.train)}
        for key, reason in self.method.refusals().items():
            if config[key] != (default := shared[key].default):
                raise SettingsError(
                    f"{key} = {config[key]!r} with method = {self.run.method!r}: {reason}; set {key} = {default!r}"
                )
        if self.run.robust != "mean" and self.train.dp == CENTRAL:
            raise SettingsError(
                f"robust = {self.run.robust!r} with dp = {CENTRAL!r}: the noise is calibrated for a mean of clipped "
                "updates; set robust = 'mean'"
            )
        if self.run.robust != "mean" and self.method.robust:
            raise SettingsError(
                f"robust = {self.run.robust!r} with method = {self.run.method!r}: {self.method.robust.why}; set "
                "robust = 'mean'"
            )
        if self.run.patience and (reason := self._fixed_end()):
            raise SettingsError(f"patience = {self.run.patience} cannot be combined with {reason}; set patience = 0")
        if self.run.min_clients > self.data.num_clients:
            raise SettingsError(
                f"min-clients = {self.run.min_clients}: it must be 0 to num-clients = {self.data.num_clients}"
            )

    def _fixed_end(self) -> str:
        """Return why the run cannot stop early, or an empty string."""
        if self.method.follows_number_of_rounds:
            return f"method = {self.run.method!r}, whose schedule depends on num-server-rounds"
        if self.train.lr_schedule == "cosine":
            return "lr-schedule = 'cosine', which depends on num-server-rounds"
        if self.train.withholds_scores:
            return f"dp-scores = {self.train.dp_scores!r}, because clients send no validation scores"
        return ""

    @property
    def scored_splits(self) -> dict[str, Literal["test", "validation", "train"]]:
        """The splits on which the run scores models, keyed by the suffix in score names; empty for the test split."""
        splits: dict[str, Literal["test", "validation", "train"]] = {"": "test"}
        if self.data.validation_fraction:
            splits["validation"] = "validation"
        if self.run.evaluate_training:
            splits["training"] = "train"
        return splits

    @property
    def split_seed(self) -> int:
        """The seed for the partition and the splits of the data."""
        return self.run.seed if self.data.split_seed < 0 else self.data.split_seed

    def as_config(self) -> dict[str, Scalar]:
        """Return the settings as a flat mapping; the method's settings are prefixed with the method's name."""
        method_config = as_config(self.method, key_prefix(self.run.method))
        return {**as_config(self.run), **as_config(self.data), **as_config(self.train), **method_config}

    def to_json(self) -> str:
        """Return the settings as one line of JSON, to be sent to the clients."""
        return json.dumps(self.as_config())


def folder_name(settings: Settings, suffix: str) -> str:
    """Return the name of a new run's folder: ``run-name``, or method, data set, ``suffix`` and time."""
    dataset, timestamp = Path(settings.data.dataset).name, time.strftime("%Y%m%d-%H%M%S")
    return settings.run.run_name or f"{key_prefix(settings.run.method)}-{dataset}-{suffix}-{timestamp}"
