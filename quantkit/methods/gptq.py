"""GPTQ: quantize a weight column by column, spreading each rounding error over the columns still to come.

Source: Frantar et al. 2022, "GPTQ", algorithm 1. What differs from it, each measured in docs of the option:
the factor comes from one Cholesky of the reversed Hessian and a triangular inverse, in float64; a group's scale is
taken from the updated weights at the moment the group is reached, and chosen by the loss that the column loop itself
has inside the group; columns are ordered inside groups, and groups among themselves, without a g_idx; codes are
kept as chosen, never derived again from rounded scales.

The column loop's PyTorch reference is `columns_reference`; backends hold faster twins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.backends import Backend
from quantkit.codecs.affine import Affine
from quantkit.methods._options import GptqOptions
from quantkit.methods._rounding import Search, candidates, keep_best, make_search, round_reference, round_weight
from quantkit.tensors import Grid, LayerStats, Note, QuantTensor

SPAN = 128
DOUBLE_LIMIT = 2048  # wider inputs are factored in float32, in half the memory
INVERSE_BLOCK = 256
NOISE = 3e-7  # a pivot smaller than this share of its diagonal is a rounding error
DAMP_STEPS = (1.0, 10.0, 100.0)
SAFE_DAMP = 1e-3  # below it, or with few tokens, the result is compared with plain rounding


@dataclass(frozen=True)
class Factor:
    """What one input's statistics give to every weight that reads it.

    upper: float32 [in, in], U with UT U = inverse of the damped Hessian, columns in `order`; None when rounding is all
    that can be done. hessian: float32 [in, in], natural order; ridge: float32 [in], what damping adds to its diagonal.
    drift: float32 [in, in], mean of (f - x) xT, columns in `order`, or None. order: int64 [in]. importance: float32 [in],
    the Hessian's diagonal in `order`. damp: the share that worked. reason: why there is no factor.
    """

    upper: Tensor | None
    hessian: Tensor
    ridge: Tensor
    drift: Tensor | None
    order: Tensor
    importance: Tensor
    damp: float
    tokens: int
    dead: int
    reason: str = ""


def column_order(kind: str, diagonal: Tensor, width: int) -> Tensor:
    """Return the order, int64 [in], in which columns are quantized; groups of `width` columns stay whole for "group"."""
    if kind == "none":
        return torch.arange(len(diagonal), device=diagonal.device)
    if kind == "full" or width >= len(diagonal):
        return torch.argsort(diagonal, descending=True, stable=True)
    groups = diagonal.view(-1, width)
    inside = torch.argsort(groups, dim=1, descending=True, stable=True)
    among = torch.argsort(groups.amax(1), descending=True, stable=True)
    return (inside + torch.arange(len(groups), device=diagonal.device)[:, None] * width)[among].reshape(-1)


def factorize(hessian: Tensor, ridge: Tensor, order: Tensor) -> Tensor | None:
    """Return U, float32 upper triangular with UT U = (H + ridge)^-1, rows and columns taken in `order`.

    H reversed = L LT gives H = R RT with R = L reversed, upper; then U = R^-1. None when H is not positive definite,
    or only by the rounding of the float32 sums it was made from.
    """
    double = len(hessian) <= DOUBLE_LIMIT and hessian.device.type != "mps"
    back = order.flip(0)
    work = hessian[back].index_select(1, back).to(torch.float64 if double else torch.float32)
    work.diagonal().add_(ridge[back])
    diagonal = work.diagonal().clone()
    lower, info = torch.linalg.cholesky_ex(work)
    del work
    if int(info) or bool((lower.diagonal().square() < NOISE * diagonal).any()):
        return None
    size = len(hessian)
    upper = torch.zeros(size, size, device=hessian.device)
    for start in range(0, size, INVERSE_BLOCK):  # columns of L^-1 are 0 above the diagonal: less work, less memory
        stop = min(start + INVERSE_BLOCK, size)
        eye = torch.zeros(size - start, stop - start, dtype=lower.dtype, device=lower.device).fill_diagonal_(1.0)
        part = torch.linalg.solve_triangular(lower[start:, start:], eye, upper=False)
        upper[: size - start, size - stop : size - start] = part.flip(0, 1)
    return upper if bool(torch.isfinite(upper).all()) else None


def columns_reference(
    weight: Tensor, factor: Tensor, importance: Tensor, codec: Affine, group: int, search: Search, grid: Grid | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Solve one span of columns in PyTorch.

    weight: float32 [out, n], the updated weights (not changed); factor: float32 [n, n], the span's part of U;
    importance: float32 [n]; group: columns that share a grid, dividing n; grid: scale and offset [out, n/group], or
    None to search. Returns codes uint8 [out, n], errors float32 [out, n] ((w - q) / U_cc), scale and zero.
    """
    work = weight.clone()
    rows, columns = work.shape
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=work.device)
    errors = torch.empty_like(work)
    scales, zeros = [], []
    for start in range(0, columns, group):
        stop = start + group
        if grid is None:
            inner = factor[start:stop, start:stop]
            scale, zero = _search_group(work[:, start:stop], inner, importance[start:stop], codec, search)
        else:
            scale, zero = grid.scale[:, start // group], grid.offset[:, start // group]
        for c in range(start, stop):
            codes[:, c] = codec.encode(work[:, c, None], scale[:, None], zero[:, None])[:, 0]
            errors[:, c] = (work[:, c] - scale * (codes[:, c] - zero)) / factor[c, c]
            work[:, c + 1 :] -= errors[:, c, None] * factor[c, c + 1 :]
        scales.append(scale)
        zeros.append(zero)
    return codes, errors, torch.stack(scales, 1), torch.stack(zeros, 1)


def _search_group(weight: Tensor, factor: Tensor, importance: Tensor, codec: Affine, search: Search) -> tuple[Tensor, Tensor]:
    scale, zero = keep_best(weight, importance, codec, candidates(weight, codec, search), search.kept)
    if scale.shape[1] > 1:
        best = _simulate(weight, factor, codec, scale, zero).argmin(1, keepdim=True)
        scale, zero = scale.gather(1, best), zero.gather(1, best)
    return scale[:, 0], zero[:, 0]


def _simulate(weight: Tensor, factor: Tensor, codec: Affine, scale: Tensor, zero: Tensor) -> Tensor:
    """Return the loss, float32 [out, candidates], that the column loop has inside one group."""
    work = weight[:, :, None].expand(-1, -1, scale.shape[1]).clone()
    loss, inverse = torch.zeros_like(scale), 1.0 / scale
    for c in range(weight.shape[1]):
        code = ((work[:, c] * inverse).round() + zero).clamp(0, codec.high)
        error = (work[:, c] - scale * (code - zero)) / factor[c, c]
        loss += error * error
        work[:, c + 1 :] -= error[:, None] * factor[c, c + 1 :, None]
    return loss


class GPTQ:
    """The solver, for one run's options and backend."""

    def __init__(self, options: GptqOptions, backend: Backend) -> None:
        self.options = options
        self.columns = backend.op("gptq_columns", columns_reference)
        self.round = backend.op("round_affine", round_reference)

    def prepare(self, stats: LayerStats, codec: Affine) -> Factor:
        """Return the factor of an input for weights on this codec; damping escalates until one exists."""
        hessian = stats.mean()
        diagonal = hessian.diagonal().clone()
        dead = diagonal <= 0
        order = column_order(self.options.order, diagonal, codec.width(stats.width))
        upper, damp, reason, ridge = None, 0.0, "", torch.zeros_like(diagonal)
        if stats.nonfinite:
            reason = f"{stats.nonfinite} of {stats.tokens} inputs were NaN or Inf"
        elif not stats.tokens or bool(dead.all()):
            reason = "no token reached it" if not stats.tokens else "its inputs were all zero"
        else:
            mean = float(diagonal.mean())
            dead_ridge = dead * mean  # a dead column is rounded: nothing is correlated with it
            for damp in self._damps():
                ridge = dead_ridge + damp * mean
                upper = factorize(hessian, ridge, order)
                if upper is not None:
                    break
            reason = "" if upper is not None else f"the Hessian would not factor with damping up to {damp:g}"
        drift = stats.drift[:, order] / stats.paired if stats.drift is not None and stats.paired else None
        return Factor(upper, hessian, ridge, drift, order, diagonal[order], damp, stats.tokens, int(dead.sum()), reason)

    def _damps(self) -> list[float]:
        start = self.options.damp
        tries = {start, *(max(start, 0.001) * step for step in DAMP_STEPS), 1.0}
        return sorted(t for t in tries if t <= 1.0)

    def share(self, weights: list[Tensor], codec: Affine) -> None:
        """Nothing is shared between weights."""

    def solve(self, weight: Tensor, factor: Factor, codec: Affine, shared: Any = None) -> tuple[QuantTensor, Note]:
        """Return codes for a weight, float32 [out, in], and how it went."""
        rounded = None
        if factor.upper is None or factor.tokens < weight.shape[1] or factor.damp < SAFE_DAMP:
            rounded = self._round(weight, factor, codec)
        if factor.upper is None:
            assert rounded is not None
            return rounded, Note(_relative(weight, rounded, factor), factor.damp, factor.tokens, factor.dead, factor.reason)
        result, loss = self._solve_columns(weight, factor, codec)
        error = loss / max(_energy(weight, factor), 1e-30)
        if rounded is not None and (plain := _relative(weight, rounded, factor)) < error:
            return rounded, Note(plain, factor.damp, factor.tokens, factor.dead, "plain rounding had the lower error")
        if bool((result.params["scale"].abs() >= codec.max_scale).any()):
            clipped = f"weights too large for {codec.scale_dtype} scales were clipped"
            return result, Note(error, factor.damp, factor.tokens, factor.dead, clipped)
        return result, Note(error, factor.damp, factor.tokens, factor.dead)

    def _round(self, weight: Tensor, factor: Factor, codec: Affine) -> QuantTensor:
        """Return the weight rounded to nearest on searched grids, in the natural column order."""
        return round_weight(weight, codec, make_search(codec.symmetric, self.options.scale_search, self.options.signed), None, self.round)

    def _solve_columns(self, weight: Tensor, factor: Factor, codec: Affine) -> tuple[QuantTensor, float]:
        assert factor.upper is not None
        work = weight[:, factor.order].contiguous()
        if factor.drift is not None and self.options.correct:
            # The weight whose output on the inputs as they are comes closest to the old output on exact inputs.
            work += self.options.correct * ((weight @ factor.drift) @ factor.upper.T) @ factor.upper
        columns, width = work.shape[1], codec.width(work.shape[1])
        search = make_search(codec.symmetric, self.options.scale_search, self.options.signed)
        whole = width > SPAN
        fixed = codec.fit(work, factor.importance, search.shrinks if self.options.scale_search else None) if whole else None
        codes = torch.empty(work.shape, dtype=torch.uint8, device=work.device)
        grids: list[tuple[Tensor, Tensor]] = []
        loss = 0.0
        step = SPAN if whole else SPAN // width * width
        for start in range(0, columns, step):
            stop = min(start + step, columns)
            span, upper = work[:, start:stop].contiguous(), factor.upper[start:stop, start:stop].contiguous()
            group, grid = width, None
            if fixed is not None:
                group, grid = stop - start, codec.grid(fixed[0][:, None], fixed[1][:, None])
            importance = factor.importance[start:stop].contiguous()
            codes[:, start:stop], errors, scale, zero = self.columns(span, upper, importance, codec, group, search, grid)
            if stop < columns:
                work[:, stop:].addmm_(errors, factor.upper[start:stop, stop:], alpha=-1)
            loss += float(errors.square().sum())
            grids.append((scale, zero))
        if fixed is not None:
            grids = [(fixed[0][:, None], fixed[1][:, None])]
        return self._natural_order(codes, grids, factor, codec, width), loss

    def _natural_order(self, codes: Tensor, grids: list[tuple[Tensor, Tensor]], factor: Factor, codec: Affine, width: int) -> QuantTensor:
        """Put codes back in the model's column order; groups too, or say each column's group when they are scattered."""
        scale, zero = (torch.cat(parts, 1) for parts in zip(*grids, strict=True))
        back = torch.argsort(factor.order)
        position = torch.arange(codes.shape[1], device=codes.device) // width
        index = position[back]
        params = {"scale": scale, "zero": zero.to(torch.uint8)}
        if self.options.order != "full" or scale.shape[1] == 1:
            place = factor.order[::width] // width
            params = {"scale": torch.empty_like(scale), "zero": torch.empty_like(params["zero"])}
            params["scale"][:, place], params["zero"][:, place] = scale, zero.to(torch.uint8)
            return QuantTensor(codes[:, back], params, codec)
        return QuantTensor(codes[:, back], params, codec, index.to(torch.int32))


def _energy(weight: Tensor, factor: Factor) -> float:
    """Return tr(W (H + ridge) WT): the output's energy, or an error's."""
    return float(((weight @ factor.hessian) * weight).sum() + (weight.square() @ factor.ridge).sum())


def _relative(weight: Tensor, result: QuantTensor, factor: Factor) -> float:
    return _energy(result.dequantize() - weight, factor) / max(_energy(weight, factor), 1e-30)
