"""The checks that every model makes of its arguments."""

from __future__ import annotations

from imagenet_fast.base.errors import UserError


def check_sizes(num_classes: int, input_shape: tuple[int | None, int | None, int]) -> None:
    """Checks what a model is asked to map from and to.

    Args:
        num_classes: number of logits.
        input_shape: (height, width, channels) of one image; None is an unknown height or width.

    Raises:
        UserError: if either cannot be the size of anything.
    """
    if num_classes < 1:
        raise UserError(f"num_classes={num_classes}: a model needs at least one class")
    sizes = tuple(input_shape)
    if len(sizes) != 3 or sizes[2] is None or any(s is not None and s < 1 for s in sizes):
        raise UserError(
            f"input_shape={sizes}: give the height, width and channels of one image, "
            "for example (224, 224, 3)"
        )
