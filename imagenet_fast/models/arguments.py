"""Checks of the arguments that all models have."""

from __future__ import annotations

from imagenet_fast.base.errors import UserError


def check_sizes(
    model: str,
    num_classes: int,
    input_shape: tuple[int | None, int | None, int],
    smallest: int = 1,
) -> None:
    """Checks the number of classes and the size of the images.

    Args:
        model: its name, for messages.
        num_classes: number of logits.
        input_shape: (height, width, channels) of one image; None is an unknown height or width.
        smallest: minimum height and width for the network's strides and pools.

    Raises:
        UserError: if the model cannot have these sizes.
    """
    if num_classes < 1:
        raise UserError(f"num_classes={num_classes}: a model needs at least one class")
    sizes = tuple(input_shape)
    if len(sizes) != 3 or sizes[2] is None or any(s is not None and s < 1 for s in sizes):
        raise UserError(
            f"input_shape={sizes}: give the height, width and channels of one image, "
            "for example (224, 224, 3)"
        )
    if any(size is not None and size < smallest for size in sizes[:2]):
        raise UserError(
            f"{model}: images of {sizes[0]} x {sizes[1]} pixels are too small; use at least "
            f"{smallest} x {smallest}"
        )


def check_width(model: str, width: int) -> None:
    """Checks the number of channels of the first convolutions; 0 is the published one.

    Raises:
        UserError: if it is negative.
    """
    if width < 0:
        raise UserError(f"{model}: width={width} is negative; use 0 for the published width")
