"""Muon for the matrices of the layers, AdamW for everything else.

Muon replaces the momentum of a matrix by the nearest orthogonal one (five Newton-Schulz iterations in bfloat16), scaled
so that its elements have the size of an AdamW step: one learning rate serves both. Matrices of one shape are handled
together; a step is a few dozen launches.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

_MOMENTUM = 0.95
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ADAM_SIZE = 0.2  # root mean square of an AdamW step's elements, in learning rates


def orthogonalise(matrices: Tensor) -> Tensor:
    """[n, rows, columns] with all singular values near 1."""
    a, b, c = _COEFFICIENTS
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.transpose(1, 2)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.transpose(1, 2) if tall else x).to(matrices.dtype)


class Optimizer:
    """Both optimizers under one learning rate.

    Args:
        model: all its parameters are taken; those that have no gradient are left alone.
        index_rate: the indexer's learning rate, relative to the others'.
        decay: weight decay of matrices.
    """

    def __init__(self, model: nn.Module, index_rate: float = 1.0, decay: float = 0.1) -> None:
        self._decay = decay
        self._matrices: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        rest: dict[str, list[nn.Parameter]] = {"index": [], "matrix": [], "vector": []}
        for name, parameter in model.named_parameters():
            if "indexer" in name:
                rest["index"].append(parameter)
            elif parameter.dim() == 2 and "embed" not in name:
                self._matrices[parameter.shape].append(parameter)
            else:
                rest["matrix" if parameter.dim() == 2 else "vector"].append(parameter)
        self._momenta: dict[torch.Size, Tensor] = {}
        self._rates = [index_rate, 1.0, 1.0]
        groups = [{"params": parameters, "weight_decay": 0.0} for parameters in rest.values()]
        cuda = next(model.parameters()).is_cuda
        self._adam = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=cuda or None)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One step from the gradients, which are then dropped."""
        for shape, parameters in self._matrices.items():
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            if len(gradients) < len(parameters):
                continue
            gradient = torch.stack(gradients)
            momentum = self._momenta.setdefault(shape, torch.zeros_like(gradient))
            momentum.lerp_(gradient, 1 - _MOMENTUM)
            update = orthogonalise(gradient.lerp(momentum, _MOMENTUM)) * (rate * _ADAM_SIZE * max(shape) ** 0.5)
            torch._foreach_mul_(parameters, 1 - rate * self._decay)
            torch._foreach_sub_(parameters, list(update.unbind()))
        for group, relative in zip(self._adam.param_groups, self._rates, strict=True):
            group["lr"] = rate * relative
        self._adam.step()
        self.clear()

    def clear(self) -> None:
        """Drops the gradients."""
        for parameters in (*self._matrices.values(), *(group["params"] for group in self._adam.param_groups)):
            for parameter in parameters:
                parameter.grad = None
