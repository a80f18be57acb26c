"""DP-SGD (Abadi et al., 2016, Algorithm 1): per-sample gradients are clipped, and noise is added to their sum.

Each step includes each sample with probability q, using random numbers from the operating system. The server knows the
run's seed, so a seeded draw would reveal the batch and cancel the amplification by subsampling. Each sample's gradient
is clipped to the norm C over all trained tensors. Gaussian noise with a standard deviation of zC is added to the sum of
the clipped gradients, which is then divided by the expected batch size. Momentum, Adam, weight decay and proximal terms
act on the result.

Rounding can make float32 sums exceed their bound, and :func:`posy.noise.perturb` rounds the sum to a grid. The standard
deviation of the noise exceeds zC by the fraction :data:`SLACK`, which covers both effects for networks of up to 10⁹
parameters.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from posy.client_app.training.batches import Batch
from posy.client_app.training.networks import Network, trainable_names
from posy.client_app.training.work import Job, Net
from posy.noise import SecureGenerator, perturb
from posy.strategies.privacy import Sampling

SLACK = 2.0**-8
"""Fraction by which the standard deviation of the noise exceeds zC."""
CHUNK_NUMBERS = 1 << 26
"""Maximum number of per-sample gradient elements in memory at a time."""


def check_job(job: Job) -> None:
    """Raise ``ValueError`` for a job whose result depends on more than the per-sample gradients."""
    work = job.work
    unsupported = {
        "a step rule": work.rule is not None,
        "sample weights": work.sample_weight is not None,
        "resampling": work.resample,
        "class weights": job.class_weight is not None,
        "several models": bool(job.models) or work.start.dim() > 1,
    }
    if names := [name for name, present in unsupported.items() if present]:
        raise ValueError(f"dp = 'sample' does not support local training with {' and '.join(names)}")


def steps(
    job: Job, sampling: Sampling, network: Network, parameters: Sequence[Tensor], step: Callable[[list[Tensor]], None]
) -> Tensor:
    """Run the steps of a job, and return the mean loss ``()`` of the samples in the last 1/q steps.

    Parameters
    ----------
    job : Job
        The job.
    sampling : Sampling
        The number of DP-SGD steps, their sampling probability q and their noise.
    network : Network
        The network, with the client's model loaded into its first copy.
    parameters : sequence of Tensor
        The trained tensors of this copy, in layout order.
    step : callable
        Updates the parameters from gradients with the same shapes.
    """
    generator = SecureGenerator()
    per_sample = gradients_of_samples(job, network)
    samples, count = job.samples, len(job.samples.y)
    deviation = sampling.noise_multiplier * sampling.clip * (1 + SLACK)
    last_steps = round(1 / sampling.probability)
    loss, sample_count = torch.zeros((), device=samples.y.device), 0
    for number in range(sampling.steps):
        index = torch.from_numpy(generator.chosen(count, sampling.probability)).to(samples.y.device)
        sums, losses = clipped_sum(job, per_sample, index, parameters, sampling.clip)
        flat = torch.cat([total.flatten() for total in sums])
        noisy = perturb(flat.double().cpu().numpy(), deviation, generator)
        mean = torch.from_numpy(noisy / sampling.batch_size).to(flat)
        pieces = torch.split(mean, [parameter.numel() for parameter in parameters])
        step([piece.view_as(parameter) for piece, parameter in zip(pieces, parameters, strict=True)])
        if number >= sampling.steps - last_steps:
            loss, sample_count = loss + losses.sum(), sample_count + len(losses)
    return loss / max(sample_count, 1)


def gradients_of_samples(job: Job, network: Network) -> Callable[..., tuple[list[Tensor], Tensor]]:
    """Return a function that computes each sample's gradient and loss ``(B,)`` from the parameters and a batch."""
    work, net = job.work, network.nets[0]
    names = trainable_names(network.layout, work.rates)
    columns = network.dropouts

    def loss(trained: list[Tensor], fixed: dict[str, Tensor], sample: Batch) -> Tensor:
        batch = Batch(*(None if part is None else part.unsqueeze(0) for part in sample))  # type: ignore[arg-type]
        numbers = {} if batch.numbers is None else {name: batch.numbers[:, part] for name, part in columns.items()}
        tensors = {**fixed, **dict(zip(names, trained, strict=True))}
        single = Net(net.module, tensors, numbers=numbers, criterion=network.criterion)
        return work.objective(single, batch, work.context)

    def compute(parameters: Sequence[Tensor], batch: Batch) -> tuple[list[Tensor], Tensor]:
        trained = [parameter.detach() for parameter in parameters]
        fixed = {name: tensor.detach() for name, tensor in net.tensors.items() if name not in names}
        axes = Batch(*(None if part is None else 0 for part in batch))  # type: ignore[arg-type]
        gradients, losses = vmap(grad_and_value(loss), in_dims=(None, None, axes))(trained, fixed, batch)
        return list(gradients), losses

    return compute


def clipped_sum(
    job: Job,
    per_sample: Callable[..., tuple[list[Tensor], Tensor]],
    index: Tensor,
    parameters: Sequence[Tensor],
    clip: float,
) -> tuple[list[Tensor], Tensor]:
    """Return the sum of the clipped gradients of the samples in ``index``, and their losses ``(B,)``.

    A non-finite gradient counts as 0.
    """
    sums = [torch.zeros_like(parameter) for parameter in parameters]
    size = sum(parameter.numel() for parameter in parameters)
    losses = []
    for chunk in torch.split(index, max(1, CHUNK_NUMBERS // size)):
        if not len(chunk):
            continue
        gradients, loss = per_sample(parameters, _batch(job, chunk))
        norms = torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients]).sum(0).sqrt()
        factors = (clip / norms.clamp_min(torch.finfo(norms.dtype).tiny)).clamp(max=1.0)
        factors = torch.where(norms.isfinite(), factors, 0.0)
        finite = (gradient.nan_to_num(0.0, 0.0, 0.0) for gradient in gradients)
        sums = [total + torch.einsum("b,b...->...", factors, each) for total, each in zip(sums, finite, strict=True)]
        losses.append(loss.detach())
    return sums, torch.cat(losses) if losses else torch.zeros(0, device=index.device)


def _batch(job: Job, index: Tensor) -> Batch:
    """Return the augmented samples of a step, with random numbers for dropout."""
    x, y = job.samples.x[index], job.samples.y[index]
    if job.augment is not None:
        x = job.augment.change(x, job.augment.numbers([len(index)]).to(x.device))
    notes = None if job.work.notes is None else job.work.notes[index]
    numbers = None if job.dropout is None else job.dropout.numbers([len(index)]).to(x.device)
    return Batch(x, y, None, notes, numbers)
