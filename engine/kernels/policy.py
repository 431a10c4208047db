"""Whether kernels may choose their tiles by what else is in the step.

Fast kernels do: a product of one token, of a few and of many are cut in different ways, and so a sum of
floats comes out different in its last bits. Batch-invariant kernels cut by the weights' shape and the
token's own place alone: a token's result has the same bits, whatever is computed beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_is_batch_invariant: ContextVar[bool] = ContextVar("_is_batch_invariant", default=False)


def is_batch_invariant() -> bool:
    """Ops called now take the batch-invariant kernels."""
    return _is_batch_invariant.get()


@contextmanager
def batch_invariance(is_on: bool) -> Iterator[None]:
    """In this context, of this thread, ops take the batch-invariant kernels, or not."""
    token = _is_batch_invariant.set(is_on)
    try:
        yield
    finally:
        _is_batch_invariant.reset(token)
