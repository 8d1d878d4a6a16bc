"""Device functions that the attention kernels share.

A score is log2(exp(s_ij)) / POST: with a positive scale PRE is 1 and POST the scale in units of log2, so that
scaling costs nothing beside the subtraction of the maximum. p_ij = w_ij 2 ** (score_ij POST - shift_i), where shift
is the maximum over the keys of positive weight: weights multiply in fp32, and no key of weight 0 can overflow.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def locate(cu_seqlens, num_rows, batch_size, num_tiles, H: tl.constexpr):
    """Return (tile, head, is_dead, start, length) of a program; the tiles of one head are neighbours.

    The rows beyond the last image form one more segment, which comes first: zeroing it is never the tail.
    """
    program = tl.program_id(0)
    image = batch_size - program // (num_tiles * H)
    is_dead = image == batch_size
    start = tl.load(cu_seqlens + image)
    stop = tl.load(cu_seqlens + image + 1, mask=image < batch_size, other=num_rows)
    return program % num_tiles, program // num_tiles % H, is_dead, start.to(tl.int64), stop - start


@triton.jit
def load_tile(
    rows, first, length, ROW: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Load rows [first, first + BLOCK) of an image, with zeros beyond D and, if MASKED, beyond its length."""
    row = tl.arange(0, BLOCK)
    lane = tl.arange(0, BLOCK_D)
    pointer = rows + tl.cast(first, tl.int64) * ROW + row[:, None] * ROW + lane[None, :]
    if MASKED:
        mask = (first + row < length)[:, None]
        if D < BLOCK_D:
            mask = mask & (lane < D)[None, :]
        tile = tl.load(pointer, mask=mask, other=0.0)
    elif D < BLOCK_D:
        tile = tl.load(pointer, mask=(lane < D)[None, :], other=0.0)
    else:
        tile = tl.load(pointer)
    return tile


@triton.jit
def store_tile(
    rows, tile, first, length, ROW: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Store rows [first, first + BLOCK) as far as the image has them."""
    row = tl.arange(0, BLOCK)
    lane = tl.arange(0, BLOCK_D)
    pointer = rows + tl.cast(first, tl.int64) * ROW + row[:, None] * ROW + lane[None, :]
    mask = (first + row < length)[:, None] & (lane < D)[None, :]
    tl.store(pointer, tile.to(rows.dtype.element_ty), mask=mask)


@triton.jit
def dot_rows(a, b):
    """Return the products [M, N] of the rows of a [M, D] with those of b [N, D].

    On plain cores (fp32) a sum over D is one chain of additions, whose error grows with its length: parts of 32
    are summed apart.
    """
    if a.dtype == tl.float32 and a.shape[1] > 32:
        a = tl.permute(tl.reshape(a, [a.shape[0], a.shape[1] // 32, 32]), [1, 0, 2])
        b = tl.permute(tl.reshape(b, [b.shape[0], b.shape[1] // 32, 32]), [1, 2, 0])
        product = tl.sum(tl.dot(a, b, input_precision="ieee"), 0)
    else:
        product = tl.dot(a, tl.trans(b), input_precision="ieee")
    return product


@triton.jit
def load_weights(key_weight, soft, first, length, BLOCK: tl.constexpr):
    """Return what a tile of keys weighs for themselves (without `soft`) and for others, in fp32; 0 beyond the image.

    Nobody reads them where there are none.
    """
    key = first + tl.arange(0, BLOCK)
    own = tl.full([BLOCK], 1.0, tl.float32)
    if key_weight is not None:
        own = tl.load(key_weight + key, mask=key < length, other=0.0).to(tl.float32)
    weight = own
    if soft is not None:
        weight = own * tl.load(soft + key, mask=key < length, other=0.0).to(tl.float32)
    return own, weight


@triton.jit
def mask_scores(
    product, own, weight, first_query, first_key, length, PRE: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
    EXEMPT_SELF: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Turn a tile of q.k into scores, -inf where a key does not count; return them and the weights."""
    key = first_key + tl.arange(0, BLOCK_N)
    score = product * PRE
    if MASKED:
        score = tl.where((key < length)[None, :], score, float("-inf"))
    weights = weight[None, :]
    if HAS_WEIGHTS:
        if EXEMPT_SELF:
            query = first_query + tl.arange(0, BLOCK_M)
            weights = tl.where(query[:, None] == key[None, :], own[None, :], weights)
        score = tl.where(weights > 0.0, score, float("-inf"))
    return score, weights


@triton.jit
def exponentiate(score, weights, shift, POST: tl.constexpr, HAS_WEIGHTS: tl.constexpr):
    """Return p."""
    p = tl.exp2(score * POST - shift[:, None])
    if HAS_WEIGHTS:
        p *= weights
    return p


@triton.jit
def sum_as_used(p, dtype: tl.constexpr):
    """Sum rows of p as the product with v sees them.

    fp16 rounds p: with the same rounding in the denominator the weights add up to 1, and the error along the
    mean of v cancels. In bf16 the output's own rounding is far larger, and the conversion back would be slow.
    """
    if dtype == tl.float16:
        p = p.to(tl.float16).to(tl.float32)
    return tl.sum(p, 1)


@triton.jit
def exact_log2(x):
    """Return log2, mended by one Newton step where the GPU's own is off by 1e-6."""
    y = tl.log2(x)
    return y + (x * tl.exp2(-y) - 1.0) * 1.4426950408889634


@triton.jit
def finite(maximum, MAY_BE_EMPTY: tl.constexpr):
    """Replace the maximum of no key, where there can be one, by 0."""
    if MAY_BE_EMPTY:
        maximum = tl.where(maximum == float("-inf"), 0.0, maximum)
    return maximum
