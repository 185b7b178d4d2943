"""The pieces of a trust-region step: Fisher-vector products, conjugate gradient, line search.

Schulman et al. 2015 (arXiv 1502.05477), appendix C. Everything works on flat vectors.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def fisher_vector_product(kl: Tensor, parameters: Iterable[Tensor], damping: float) -> Callable[[Tensor], Tensor]:
    """v -> (H + damping·I) v, with H the Hessian of the scalar ``kl`` in the parameters.   [n] -> [n]

    ``kl`` must be a differentiable mean KL between the policy and a detached copy of itself, whose Hessian is the Fisher
    information. The graph of the gradient is built once and used for every product.
    """
    parameters = list(parameters)
    gradient = torch.autograd.grad(kl, parameters, create_graph=True, allow_unused=True, materialize_grads=True)
    flat = torch.cat([g.reshape(-1) for g in gradient])

    def matvec(v: Tensor) -> Tensor:
        if not flat.requires_grad:  # a KL that is linear in the parameters has no curvature
            return damping * v
        product = torch.autograd.grad(
            flat, parameters, grad_outputs=v, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return torch.cat([p.reshape(-1) for p in product]).detach() + damping * v

    return matvec


def conjugate_gradient(matvec: Callable[[Tensor], Tensor], b: Tensor, iterations: int = 10, tolerance: float = 1e-10) -> Tensor:
    """x with A x ≈ b for a symmetric positive A, from x = 0.   [n] -> [n]

    Stops after ``iterations`` or when the squared residual is below ``tolerance``. Hestenes and Stiefel (1952).
    """
    x = torch.zeros_like(b)
    residual, direction = b.clone(), b.clone()
    squared = residual @ residual
    for _ in range(iterations):
        if squared <= tolerance:
            break
        image = matvec(direction)
        step = squared / (direction @ image)
        x = x + step * direction
        residual = residual - step * image
        following = residual @ residual
        direction = residual + (following / squared) * direction
        squared = following
    return x


def line_search(
    evaluate: Callable[[Tensor], tuple[float | Tensor, float | Tensor]],
    full_step: Tensor,
    max_kl: float,
    shrink: float = 0.8,
    tries: int = 10,
) -> Tensor | None:
    """The longest of full_step · shrink^j, j = 0 … tries − 1, that improves the surrogate within the trust region.   [n]

    ``evaluate(step)`` gives (improvement of the surrogate, mean KL) at θ_old + step. Accepted are KL ≤ max_kl and an
    improvement above 0; None where no step is, and then θ_old must be restored.
    """
    for power in range(tries):
        step = full_step * shrink**power
        improvement, kl = evaluate(step)
        if kl <= max_kl and improvement > 0:
            return step
    return None
