"""Export the public names for writing a custom method; see docs/develop/method.md.

``from posy.method import MethodSettings, PersonalClient, Train`` also loads PyTorch.
"""

from posy.client_app.base import PersonalClient
from posy.client_app.training.work import Forward, Train
from posy.settings import SettingsError, setting
from posy.strategies.arrays import gradient, model, numbers
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.replies import BadReplyError, Update, mean_of, num_examples, stacked
from posy.strategies.settings import MethodSettings

__all__ = [
    "BadReplyError",
    "Forward",
    "MethodSettings",
    "PersonalClient",
    "PersonalisedStrategy",
    "SettingsError",
    "Train",
    "Update",
    "gradient",
    "mean_of",
    "model",
    "num_examples",
    "numbers",
    "setting",
    "stacked",
]
