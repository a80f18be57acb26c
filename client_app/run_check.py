"""Check a run against a site's policy and data, and check that the method supports the required noise and masks."""

from posy.client_app.policy import PolicyError, shareable, size_violations, too_many_parameters
from posy.client_app.privacy import check_network, check_privacy
from posy.client_app.workspace import Workspace
from posy.metrics import CLASSES
from posy.models.build import count_parameters


def check_run(workspace: Workspace) -> None:
    """Check a run against the policy and this site's data, and check that the method supports the noise and masks.

    A node runs this check before every training round and evaluation, because a server could skip the query by which a
    node joins a run.

    Raises
    ------
    PolicyError
        If the run violates a rule, given this site's data.
    SettingsError
        If the method or the network does not support the noise or masks that the settings require.
    """
    if workspace.checked:
        return
    settings, policy = workspace.settings, workspace.policy
    check_privacy(settings)
    if (count := count_parameters(settings.train.model, workspace.task)) > policy.max_parameters:
        raise PolicyError(too_many_parameters(count, policy))
    part, dataset = workspace.partition, workspace.dataset
    has_classes = workspace.task.target == CLASSES
    counts = part.counts(dataset.y, workspace.task.num_classes)[0].tolist() if has_classes else []
    parameters = workspace.architecture.layout.size
    for of_client in workspace.possible_settings():
        if violations := size_violations(policy, of_client, len(part.train[0]), counts, parameters):
            raise PolicyError(shareable(violations[0], policy, workspace.node_settings))
    check_network(settings, workspace.architecture)
    workspace.checked = True
