"""The s local steps on pre-activations, after the large product that computes the pre-activations.

Where ReLU and linear layers follow the first, a step is written out by hand; else it is automatic differentiation;
on a GPU it is a kernel where that fits (`kernels`). The algebra is in `preactivation`.

Knows: pre-activations, X Xᵀ, the layers after the first.
Does not know: where start models come from, what the gradients are used for.
"""

import math
import threading
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn.functional import one_hot

from otafl.engine.fast import kernels
from otafl.engine.fast.head import Head
from otafl.engine.objective import Objective
from otafl.engine.rule import LocalRule
from otafl.engine.training import LocalWork, NotRecordable, Ruled


def head_of(objective: Objective) -> Head:
    """First layer of the objective's model; the engine has checked that it has one."""
    assert objective.head is not None
    return objective.head


_thread = threading.local()
Steps = TypeVar("Steps", bound=Callable[..., Any])


def scratch(name: str, shape: Sequence[int], like: Tensor) -> Tensor:
    """Memory for a temporary result; on a CPU each thread reuses its own, since new pages cost as much as the sums."""
    if like.device.type != "cpu":
        return like.new_empty(shape)
    kept: dict[str, Tensor] = _thread.__dict__.setdefault("kept", {})
    size, buffer = math.prod(shape), kept.get(name)
    if buffer is None or len(buffer) < size or buffer.dtype != like.dtype:
        buffer = kept[name] = like.new_empty(size)
    return buffer[:size].view(shape)


def images_of(work: LocalWork, index: Tensor) -> Tensor:
    """Images of some rows' batches, [R, r]."""
    batches = work.batches.flatten(2).flatten(0, 1)
    return batches if len(index) == len(batches) else batches.index_select(0, index)


def labels_of(work: LocalWork, index: Tensor) -> Tensor:
    """Labels of some rows' batches, [R, r]."""
    images = images_of(work, index)
    return work.objective.train.targets.index_select(0, images.flatten()).view(images.shape)


def _by_kernel(work: LocalWork) -> bool:
    """Whether the kernel can do the steps."""
    head, per_round = head_of(work.objective), work.batches.shape[2] == 1 and work.steps > 1
    return not per_round and head.bias and kernels.suits(work.objective, head, work.batches.shape[3], work.start)


def by_descend(work: LocalWork) -> bool:
    """Whether `descend` can do these steps: plain ones, also fewer for some rows where the kernel does them."""
    return work.plain or (work.rule.plain and work.correction is None and _by_kernel(work))


def _within_mask(steps: Steps) -> Steps:
    """Steps that leave rows outside the mask as they are, if there is a mask; what they return is 0 for these rows."""

    @wraps(steps)
    def masked(
        work: LocalWork,
        index: Tensor,
        inputs: Tensor,
        z: Tensor,
        bias: Tensor | None,
        rest: Tensor,
        slopes: Tensor,
        *more: Any,
        **options: Any,
    ) -> Any:
        if work.mask is None or (by_descend(work) and _by_kernel(work)):  # the kernel knows the mask
            return steps(work, index, inputs, z, bias, rest, slopes, *more, **options)
        trained = [part for part in (bias, rest) if part is not None]
        before = [part.clone() for part in trained]
        result = steps(work, index, inputs, z, bias, rest, slopes, *more, **options)
        silent = ~work.mask.flatten()[index]
        for part, was in zip(trained, before, strict=True):
            part.copy_(torch.where(silent.view(-1, *[1] * (part.dim() - 1)), was, part))
        slopes.masked_fill_(silent[:, None, None], 0.0)
        return result if result is None else result.masked_fill(silent, 0.0)

    return cast(Steps, masked)


@_within_mask
def descend(
    work: LocalWork,
    index: Tensor,
    inputs: Tensor,
    z: Tensor,
    bias: Tensor | None,
    rest: Tensor,
    slopes: Tensor,
    squares: bool = False,
) -> Tensor | None:
    """Do the s steps of some rows, from z = X W₁ᵀ to G, each [R, r, H]; G is written to `slopes`.

    The first bias [R, 1, H] and the later layers [R, P_rest] are trained in place. Returns the updates' squared norms,
    float64 [R], if asked for or nearly free: with c_k = Σ_{j<k} K[k, j] G_j, which the steps compute anyway,
    ⟨K G, G⟩ = Σ_k ⟨2 c_k + K[k, k] G_k, G_k⟩.
    """
    head, batch, targets = head_of(work.objective), work.batches.shape[3], labels_of(work, index)
    if bias is not None and _by_kernel(work):
        (gram,) = gram_strips(inputs, inputs.shape[1], bias=False)
        scale = torch.as_tensor(work.lr / batch, dtype=torch.float32, device=z.device)
        mask = None if work.mask is None else work.mask.flatten()[index]
        tf32, squares = work.objective.tf32, squares or work.start.dim() == 2
        counts = None if work.counts is None else work.counts.flatten()[index]
        return kernels.descend(head, batch, gram, z, bias, targets, rest, slopes, scale, mask, counts, tf32, squares)
    rest_before = rest.clone() if squares else rest
    step, targets = _stepper(work, rest, targets, z)
    if work.batches.shape[2] == 1 and work.steps > 1:  # one batch for the whole round
        (strip,) = gram_strips(inputs, inputs.shape[1], bias is not None)
        if bias is not None:
            z += bias
        slopes.zero_()
        slope = scratch("slope", z.shape, z)
        for k in range(work.steps):
            step(z, targets, slope)
            slopes += slope
            if k + 1 < work.steps:
                z.baddbmm_(strip, slope, alpha=-1)
        if bias is not None:
            bias -= slopes.sum(1, keepdim=True)
        if not squares:
            return None
        first = torch.bmm(strip, slopes).mul_(slopes).sum((1, 2), dtype=torch.float64)
        return first + _squares(rest - rest_before)
    by_step = scratch("z by step", (work.steps, len(z), batch, head.outputs), z)  # each step contiguous
    turned = z.view(len(z), work.steps, batch, -1).transpose(0, 1)
    if bias is None:
        by_step.copy_(turned)
    else:
        torch.add(turned, bias[:, None].transpose(0, 1), out=by_step)
    strips = gram_strips(inputs, 2 * batch, bias is not None)
    squared = torch.zeros(len(z), dtype=torch.float64, device=z.device)
    past = scratch("past", by_step[0].shape, z) if squares else z
    for k in range(work.steps):
        now, before = slice(k * batch, (k + 1) * batch), slice(0, k * batch)
        rows = slice((k % 2) * batch, (k % 2 + 1) * batch)
        if k and squares:
            torch.bmm(strips[k // 2][:, rows, before], slopes[:, before], out=past)
            by_step[k] -= past
        elif k:
            by_step[k].baddbmm_(strips[k // 2][:, rows, before], slopes[:, before], alpha=-1)
        step(by_step[k], targets[:, now], slopes[:, now])
        if squares:
            past.baddbmm_(strips[k // 2][:, rows, now], slopes[:, now], beta=2 if k else 0)
            squared += past.mul_(slopes[:, now]).sum((1, 2), dtype=torch.float64)
    if bias is not None:
        bias -= slopes.sum(1, keepdim=True)
    return squared + _squares(rest - rest_before) if squares else None


def _squares(values: Tensor) -> Tensor:
    """Squared norms of rows [R, P], float64 [R]."""
    norms: Tensor = torch.linalg.vector_norm(values, dim=1, dtype=torch.float64)
    return norms.square()


def _stepper(work: LocalWork, rest: Tensor, targets: Tensor, like: Tensor) -> tuple["Step", Tensor]:
    """A function that does one step on a batch's pre-activations, and the labels in the form it needs."""
    head, batch = head_of(work.objective), work.batches.shape[3]
    if not _by_hand(work.objective):
        return _any_step(work, rest), targets
    wanted = one_hot(targets, work.objective.num_classes).to(like.dtype).mul_(-work.lr / batch)
    return _chain_step(work, rest, (len(like), batch, head.outputs)), wanted


@_within_mask
def descend_by_rule(
    work: LocalWork,
    index: Tensor,
    inputs: Tensor,
    z: Tensor,
    bias: Tensor | None,
    rest: Tensor,
    slopes: Tensor,
    pull: Tensor | None,
    corrections: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    """Like `descend`, for the steps of a rule (`otafl.engine.rule`); returns b of each row's last step, [R].

    `pull` is X (λ W₁ + c)ᵀ plus the first bias's part, [R, r, H], or None; `corrections` are those of the first bias
    [R, 1, H] and of the later layers. The caller must then change W₁ by −Gᵀ X − η b (λ W₁ + c).
    """
    rule, lr, batch = work.rule, work.lr, work.batches.shape[3]
    step, targets = _stepper(work, rest, labels_of(work, index), z)
    ruled = Ruled(work, rest, index, corrections[1])
    counts = None if work.counts is None else work.counts.flatten()[index]
    a, b, each_b = _coefficients(rule, work.steps, lr if rule.weight_decay + rule.proximal else 0.0, z.device, z.dtype)
    (gram,) = gram_strips(inputs, inputs.shape[1], bias is not None)
    first = None if bias is None else bias.clone()
    if first is not None:
        z += first
    per_round = work.batches.shape[2] == 1 and work.steps > 1
    if per_round:
        slopes.zero_()
        velocity, slope = torch.zeros_like(slopes), torch.empty_like(slopes)
    for k in range(work.steps):
        now, before = (
            (slice(None), slice(None)) if per_round else (slice(k * batch, (k + 1) * batch), slice(0, k * batch))
        )
        here = z[:, now].clone()
        if k:
            each = slopes if per_round else slopes[:, before] * a[k, :k].repeat_interleave(batch)[:, None]
            here.baddbmm_(gram[:, now, before], each, alpha=-1)
        if pull is not None:
            here.sub_(pull[:, now] * (lr * each_b[k]))
        goes_on = None if counts is None else (k < counts)[:, None, None]
        out = slope if per_round else slopes[:, now]
        step(here, targets[:, now], out)
        if per_round:
            velocity = rule.momentum * velocity - lr * (rule.weight_decay + rule.proximal) * slopes + slope
            slopes += velocity if goes_on is None else torch.where(goes_on, velocity, 0.0)
        elif goes_on is not None:
            out.copy_(torch.where(goes_on, out, 0.0))
        ruled.follow(k)
    ends = torch.full((len(z),), work.steps, device=z.device) if counts is None else counts
    if not per_round:
        slopes *= a[ends].repeat_interleave(batch, dim=1)[..., None]
    if bias is not None and first is not None:
        constant = rule.weight_decay * first + (0.0 if corrections[0] is None else corrections[0])
        bias.copy_(first - slopes.sum(1, keepdim=True) - lr * b[ends][:, None, None] * constant)
    return b[ends]


def _coefficients(
    rule: LocalRule, steps: int, lr: float | Tensor, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, list[float]]:
    """The coefficients a and b of a rule's steps on the compute device, and b on the host."""
    if isinstance(lr, Tensor):
        raise NotRecordable("weight decay and a proximal term need the learning rate on the host")
    if lr:
        a, b = rule.unrolled(steps, lr)
        return a.to(device, dtype), b.to(device, dtype), b.tolist()
    return _kept_coefficients(rule, steps, device, dtype)


@cache  # for good: a CUDA graph may read them
def _kept_coefficients(
    rule: LocalRule, steps: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, list[float]]:
    """The coefficients of a rule in which the learning rate has no part."""
    a, b = rule.unrolled(steps, 0.0)
    return a.to(device, dtype), b.to(device, dtype), b.tolist()


def gram_strips(inputs: Tensor, height: int, bias: bool) -> list[Tensor]:
    """K = X Xᵀ (+ 1 with a bias) in strips of `height` images, [R, height, ·], without the columns of later images."""
    strips = []
    for start in range(0, inputs.shape[1], height):
        stop = min(start + height, inputs.shape[1])
        strip = scratch(f"gram {start}", (len(inputs), stop - start, stop), inputs)
        torch.bmm(inputs[:, start:stop], inputs[:, :stop].transpose(1, 2), out=strip)
        strips.append(strip.add_(1) if bias else strip)
    return strips


Step = Callable[[Tensor, Tensor, Tensor], None]
"""From pre-activations [R, b, H] and labels [R, b] to η ∂loss/∂z [R, b, H]; the later layers are trained as well."""


def _by_hand(objective: Objective) -> bool:
    return head_of(objective).layers is not None and objective.classifies


def _chain_step(work: LocalWork, rest: Tensor, shape: tuple[int, int, int]) -> Step:
    """Steps of SGD written out by hand, if only ReLU and linear layers follow."""
    head = head_of(work.objective)
    assert head.layers is not None
    layers = [layer.split(rest) for layer in head.layers]
    forward = [(weight.transpose(1, 2), bias) for weight, bias in layers]
    widths = [head.outputs, *(layer.outputs for layer in head.layers)]
    actives = [scratch(f"active {i}", (*shape[:2], width), rest) for i, width in enumerate(widths[:-1])]
    earlier = [scratch(f"slope {i}", (*shape[:2], width), rest) for i, width in enumerate(widths[:-1])]
    ones = rest.new_ones(shape[0], 1, shape[1])
    scale = work.lr / shape[1]

    def step(z: Tensor, wanted: Tensor, out: Tensor) -> None:
        output = z
        for active, (transposed, bias) in zip(actives, forward, strict=True):
            torch.clamp_min(output, 0, out=active)
            output = torch.baddbmm(bias, active, transposed)
        share = output.softmax(-1)
        slope = wanted.addcmul(share, scale) if isinstance(scale, Tensor) else torch.add(wanted, share, alpha=scale)
        if not layers:
            out.copy_(slope)
        for i in reversed(range(len(layers))):
            (weight, bias), active = layers[i], actives[i]
            torch.bmm(slope, weight, out=earlier[i])
            weight.baddbmm_(slope.transpose(1, 2), active, alpha=-1)
            bias.baddbmm_(ones, slope, alpha=-1)
            into = earlier[i] if i else out
            slope = torch.ops.aten.threshold_backward.grad_input(earlier[i], active, 0, grad_input=into)

    return step


def _any_step(work: LocalWork, rest: Tensor) -> Step:
    """Steps of SGD for any later layers, by automatic differentiation."""
    objective, head = work.objective, head_of(work.objective)

    def loss(params: dict[str, Tensor], z: Tensor, targets: Tensor) -> Tensor:
        return objective.output_loss(head.rest(params, z.clone()), targets)  # a copy: the next layer may be in place

    gradient = vmap(grad(loss, argnums=(0, 1)))
    params = objective.unflatten(rest)

    def step(z: Tensor, targets: Tensor, out: Tensor) -> None:
        by_params, by_z = gradient(params, z, targets)
        for name, slope in by_params.items():
            params[name].sub_(slope * work.lr)
        torch.mul(by_z, work.lr, out=out)

    return step
